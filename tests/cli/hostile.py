"""A plan and its profile whose names are what others might write into them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.cli.command import ROOT

NAMES = {
    "layers.0": "</script><script>window.hacked=1</script>.0",
    "layers.1": "<img src=x onerror=window.hacked=1>.1",
    "layers.2": "<!--<script>.2",
    "embed": "$$\\\\frac{1}{2}$$",
    "network": '"><b onmouseover=window.hacked=1>&amp;',
    "gpt:tiny": "</title><script>window.hacked=1</script>",
}
"""What is renamed. No name of a unit begins another's."""


def write(folder: Path) -> Path:
    """The plan's path; the profile lies where it says."""
    source = ROOT / "plans" / "gpt-tiny-2x2.json"
    profile = json.loads(source.read_text())["source"]["profile"]
    (folder / profile).parent.mkdir(parents=True, exist_ok=True)
    for one, other in ((source, folder / "plan.json"), (source.parent / profile, folder / profile)):
        shutil.copy(one, other)
        text = other.read_text()
        for name, hostile in NAMES.items():
            text = _renamed(text, name, json.dumps(hostile)[1:-1])
        other.write_text(text)
    return folder / "plan.json"


def _renamed(text: str, name: str, hostile: str) -> str:
    """Where a JSON string is the name, begins with it and a dot, or ends with it after a blank (a use)."""
    for before in ('"', "F ", "B ", "b "):
        for after in ('"', "."):
            text = text.replace(f"{before}{name}{after}", f"{before}{hostile}{after}")
    return text
