"""``hzplan weights``: a checkpoint's weights as safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hzplan.errors import UserError

FORMS = ("safetensors", "dcp")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def command(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A folder of checkpoints, or one of those in it.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write to.")],
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; by default as trained.")] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="safetensors; or dcp: weights, optimizer state and groups, as programs with "
            "torch.distributed.checkpoint load them.",
        ),
    ] = "safetensors",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Write a checkpoint's weights as safetensors, in Hugging Face's layout; or all of it for FSDP2.

    Of several checkpoints the newest whole one is taken. hzplan run --weights begins with such weights, and
    hzplan run --from-dcp goes on from what --format dcp writes.

    Example: hzplan weights checkpoints -o my-model --dtype bf16
    Example: hzplan weights checkpoints -o dcp --format dcp
    """
    import json

    from hzplan.checkpoint.folder import NAME, Found, newest_whole, whole_at
    from hzplan.cli import console

    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: one of {', '.join(DTYPES)}")
    if form not in FORMS:
        raise UserError(f"--format {form}: one of {', '.join(FORMS)}")
    if form == "dcp" and dtype is not None:
        raise UserError("--dtype: with --format dcp everything is as trained; leave it out")
    if output.resolve() == checkpoint.resolve():
        raise UserError(f"{output}: is what is read; name another folder to write")

    def alone(mine: object) -> list[object]:
        return [mine]

    found: Found | None
    if NAME.fullmatch(checkpoint.resolve().name):
        found = whole_at(checkpoint)
    else:
        found = newest_whole(checkpoint, 0, 1, alone)
    if found is None:
        raise UserError(
            f"{checkpoint}: no checkpoint there; give the folder that hzplan run --checkpoint wrote to"
        )
    for line in found.passed_over:
        console.remark(f"passed over: {line}")

    import torch

    from hzplan.checkpoint import to_dcp, weights

    with console.Bar("weights", shown=True) as bar:
        if form == "dcp":
            nbytes = to_dcp.export(found.path, found.index, output, progress=bar.update)
        else:
            wanted = None if dtype is None else getattr(torch, DTYPES[dtype])
            nbytes = weights.export(found.path, found.index, output, dtype=wanted, progress=bar.update)
            _config(found.index.model, output)
    if as_json:
        print(
            json.dumps(
                {
                    "checkpoint": str(found.path),
                    "step": found.index.step,
                    "bytes": nbytes,
                    "folder": str(output),
                }
            )
        )
    else:
        what = "weights and optimizer state" if form == "dcp" else "weights"
        print(f"Wrote {console.size(nbytes)} of {what}, after {found.index.step} steps, to {output}.")


def _config(model: str, folder: Path) -> None:
    """What transformers needs beside the weights, where the model is one of its."""
    from hzplan.formats.base import write_text
    from hzplan.models.hf import load_config

    if model.startswith("hf:"):
        try:
            config = load_config(model, model.removeprefix("hf:"))
        except UserError:  # a file that is not here any more, or no transformers
            return
        write_text(folder / "config.json", config.to_json_string())
