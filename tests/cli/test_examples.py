"""The example loops: a few lines apart, and the same training."""

from __future__ import annotations

import difflib
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.command import ROOT, Done, hzplan, torchrun

EXAMPLES = ROOT / "examples"


def code_of(path: Path) -> list[str]:
    """The lines after the docstring."""
    return path.read_text(encoding="utf-8").split('"""', 2)[2].splitlines()


def test_the_loops_are_four_lines_apart() -> None:
    difference = difflib.ndiff(code_of(EXAMPLES / "train_fsdp2.py"), code_of(EXAMPLES / "train.py"))
    ours = [line for line in difference if line.startswith("+ ") and line.strip() != "+"]
    assert 1 <= len(ours) <= 4, ours


def losses(done: Done) -> list[float]:
    """What a script prints."""
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples, with a plan for two ranks."""
    folder = shutil.copytree(EXAMPLES, tmp_path_factory.mktemp("user") / "examples")
    model = ("mymodel:Transformer", "--nproc", 2, "--micro-batch", 4, "-o", "profile.json")
    assert hzplan("profile", *model, cwd=folder).code == 0
    # Less than replicas of everything need.
    budget = ("--memory", "18MiB", "--global-batch", 16, "-o", "plan.json")
    assert hzplan("solve", "profile.json", *budget, cwd=folder).code == 0
    return folder


@pytest.mark.distributed
@pytest.mark.slow
def test_both_loops_train_alike(folder: Path) -> None:
    done = torchrun(2, "train.py", cwd=folder)
    assert done.code == 0, done.stderr
    # How FSDP2's ends is not ours to say: now and then torch aborts when Python is taken apart.
    planned, fsdp2 = losses(done), losses(torchrun(2, "train_fsdp2.py", cwd=folder))
    assert len(planned) == len(fsdp2) == 6
    assert planned == pytest.approx(fsdp2, rel=1e-3)
    assert planned[-1] < planned[0] - 1


@pytest.mark.distributed
def test_an_error_in_the_loop_stays_what_it_is(folder: Path) -> None:
    """Collectives are under way in threads when the interpreter ends, which must not abort it."""
    raising = "    if step == 3 and dist.get_rank() == 1:\n        raise ValueError('mine')\n"
    text = (folder / "train.py").read_text(encoding="utf-8")
    broken = text.replace("    scheduler.step()\n", f"    scheduler.step()\n{raising}")
    (folder / "broken.py").write_text(broken, encoding="utf-8")
    done = torchrun(2, "broken.py", cwd=folder)
    assert "ValueError: mine" in done.stderr
    assert "terminate called" not in done.stderr
    assert re.search(r"exitcode +: 1 ", done.stderr), done.stderr
