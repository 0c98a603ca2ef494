"""The commands of docs/quickstart.md run in order, for a smaller model of its kind; docs/faq.md's too."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.cli.command import ROOT, hzplan


@pytest.mark.long
@pytest.mark.parametrize("model", ["gpt:tiny", "hf:llama3-8b"])
def test_the_quickstart_is_as_written(model: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    lines = [line[2:] for line in text.splitlines() if line.startswith("$ hzplan ")]
    assert len(lines) > 4
    for line in lines:
        words = shlex.split(line.replace("hf:llama3-70b", model).replace("64GiB,76GiB", "32GiB,64GiB"))
        done = hzplan(*words[1:], cwd=tmp_path, timeout_s=180)
        assert done.code == 0, (line, done.stderr)
    assert (tmp_path / "sharding.py").exists()


@pytest.mark.long
def test_the_answers_are_as_written(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    lines = [line[2:] for line in text.splitlines() if line.startswith("$ hzplan ")]
    assert len(lines) > 10
    for line in lines:
        smaller = line.replace("gpt:tiny", "gpt:nano").replace("1MiB", "64KiB")
        command, _, remark = smaller.partition("  # exits with ")
        done = hzplan(*shlex.split(command)[1:], cwd=tmp_path, timeout_s=180)
        assert done.code == int(remark or 0), (line, done.stderr)


def test_shells_complete_commands(tmp_path: Path) -> None:
    asked = {"_HZPLAN_COMPLETE": "complete_bash", "COMP_WORDS": "hzplan so", "COMP_CWORD": "1"}
    done = hzplan(cwd=tmp_path, **asked)
    assert (done.code, done.stdout.split()) == (0, ["solve"])
