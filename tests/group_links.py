"""``python -m tests.group_links``: a link between two sites that is lost for minutes, again and again.

Two network namespaces whose only way to each other is a bridge in a third. A site is taken off the bridge,
so that packets are lost and nobody is told, and is put back. Both sites have to train meanwhile, and exchange
again afterwards. Needs root.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.commands import write_section
from tests.group_faults import Group, make_plan, start_meeting

TITLE = "## A link that is lost for minutes"
MIDDLE, SITES, NETWORK = f"hz{os.getpid()}m", [f"hz{os.getpid()}{site}" for site in "ab"], "10.77.41"
PATIENCE_S = 30
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    lost_s: Annotated[str, typer.Option(help="Seconds of each loss.")] = "20,90,150",
    steps: Annotated[int, typer.Option(help="Steps of a run.")] = 12000,
    docs: Annotated[Path | None, typer.Option(help="A page whose section of this is written anew.")] = None,
) -> None:
    """Lose the link, and watch.

    Example: python -m tests.group_links --docs docs/relaxed.md
    """
    with tempfile.TemporaryDirectory() as name, _network():
        text = _campaign(Path(name), [float(one) for one in lost_s.split(",")], steps)
    print(text) if docs is None else write_section(docs, TITLE, text)


def _campaign(folder: Path, lost_s: list[float], steps: int) -> str:
    make_plan(folder)
    meet, where = start_meeting(folder, f"{NETWORK}.1", _inside(0))
    groups = [
        Group(folder, one, where, steps, 0, "lost", _inside(one), GLOO_SOCKET_IFNAME="eth")
        for one in range(2)
    ]
    rows = []
    try:
        for seconds in lost_s:
            _after(groups, 60)
            before = [group.step() for group in groups]
            _ip("-n", MIDDLE, "link", "set", "port1", "nomaster")
            time.sleep(seconds)
            apart = [group.step() - step for group, step in zip(groups, before, strict=True)]
            _ip("-n", MIDDLE, "link", "set", "port1", "master", "bridge")
            began = time.monotonic()
            _together(groups, where)
            rows.append((seconds, apart, time.monotonic() - began))
            print(f"lost for {seconds:.0f} s: {apart} steps, together after {rows[-1][2]:.0f} s", flush=True)
        for group in groups:
            group.wait(timeout=900)
    finally:
        for group in groups:
            if group.poll() is None:
                group.kill()
        meet.terminate()
        meet.wait()
    codes = [group.returncode for group in groups]
    said = [group.said() for group in groups]
    losses = ", ".join(f"{one['heldout_loss']:.4f}" for one in said)
    return "\n".join(
        [
            TITLE,
            "",
            f"By `python -m tests.group_links`: two sites of two ranks (gpt:nano, {steps} steps, `--patience "
            f"{PATIENCE_S}`), `hzplan meet` at the first. Exit codes {codes}; rounds applied "
            f"{[one['groups']['applied'] for one in said]}, held-out losses in the end {losses}.",
            "",
            "| link lost for | steps of the sites meanwhile | exchange again after |",
            "| --- | --- | --- |",
            *(f"| {lost:.0f} s | {apart[0]} and {apart[1]} | {again:.0f} s |" for lost, apart, again in rows),
            "",
        ]
    )


def _inside(site: int) -> list[str]:
    return ["ip", "netns", "exec", SITES[site]]


def _after(groups: list[Group], steps: int) -> None:
    """Return when both have done some more steps."""
    begun = [max(0, group.step()) for group in groups]
    while any(group.step() < first + steps for group, first in zip(groups, begun, strict=True)):
        assert all(group.poll() is None for group in groups), [g.files[1].read_text() for g in groups]
        time.sleep(0.2)


LOOK = """
import sys
from hzplan.runtime.relaxed.meeting import connected
from hzplan.runtime.relaxed.roll import PREFIX, Record
host, _, port = sys.argv[1].rpartition(":")
store = connected(host, int(port))
epoch = int(store.get(PREFIX + "/epoch")) if store.check([PREFIX + "/epoch"]) else 0
head = int(store.get(f"{PREFIX}/{epoch}/head"))
record = Record.of(store.get(f"{PREFIX}/{epoch}/outcome/{head}").decode())
print(int(record.applied and len(record.members) == 2))
"""
"""Whether the newest round was of both sites, and was applied."""


def _together(groups: list[Group], where: str) -> None:
    """Return when sites exchange again, several times in a row."""
    found: list[bool] = []
    until = time.monotonic() + 600
    while found[-5:] != [True] * 5:
        assert all(group.poll() is None for group in groups), [g.files[1].read_text() for g in groups]
        assert time.monotonic() < until, [g.files[1].read_text() for g in groups]
        command = [*_inside(0), sys.executable, "-c", LOOK, where]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found.append(done.stdout.strip() == "1")
        time.sleep(0.5)


@contextmanager
def _network() -> Iterator[None]:
    """Two sites, each with an address on ``eth``, and a bridge between."""
    try:
        for name in (MIDDLE, *SITES):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", MIDDLE, "link", "add", "bridge", "type", "bridge")
        _ip("-n", MIDDLE, "link", "set", "bridge", "up")
        for index, site in enumerate(SITES):
            port = f"port{index}"
            peer = ["type", "veth", "peer", "name", "eth", "netns", site]
            _ip("-n", MIDDLE, "link", "add", port, *peer)
            _ip("-n", MIDDLE, "link", "set", port, "master", "bridge", "up")
            _ip("-n", site, "address", "add", f"{NETWORK}.{index + 1}/24", "dev", "eth")
            _ip("-n", site, "link", "set", "eth", "up")
        yield
    finally:
        for name in (MIDDLE, *SITES):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


if __name__ == "__main__":
    app()
