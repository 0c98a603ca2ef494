"""The scripts for machines with GPUs, on one that has none."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import api
from benchmarks.gpu.run import unit_seconds
from hzplan.show.trace import Span, document
from tests.cli.command import ROOT


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("script", ["run", "multi"])
def test_without_a_gpu_the_reason_is_said_and_written(script: str, tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    command = [sys.executable, "-m", f"benchmarks.gpu.{script}", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("skipped: ") and "CUDA device" in done.stdout
    assert json.loads(output.read_text())["skipped"] in done.stdout


def test_units_times_are_read_from_a_runs_trace() -> None:
    def step(start: float, seconds: float) -> list[Span]:
        return [
            Span("compute", "f layers.0", start, start + seconds),
            Span("unshard node", "u layers.1", start, start + 9.0),
        ]

    text = document(
        {"rank 0": step(0.0, 1.0) + step(10.0, 3.0) + step(20.0, 2.0), "predicted": step(0.0, 1.5)}
    )
    predicted, measured = unit_seconds(json.loads(text))
    assert (predicted, measured) == ({"f layers.0": 1.5}, {"f layers.0": 2.0})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("torch.cuda.Strem()", "no attribute 'Strem'"),
        ("dist.all_gather_into_tensor(whole, part, grup=None)", "grup"),
        ("dist.all_gather_into_tensor(whole, part, group=None)", ""),
        ("dist.new_group(*ranks, backend=None)", ""),
        ("with torch.cuda.stream(one): pass", ""),
    ],
)
def test_names_of_torch_are_looked_up_with_their_arguments(source: str, said: str) -> None:
    found = [api.problem(dotted, call) for dotted, call in api.names(ast.parse(source))]
    assert found and all(said in one if said else not one for one in found), found
