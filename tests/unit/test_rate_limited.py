"""Rate-limited links: what is under way shares them, and what arrives has its shape and size."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from hzplan.core.hierarchy import Mesh, Stage
from hzplan.runtime.backends import rate_limited
from hzplan.runtime.backends.base import Buffers
from hzplan.runtime.backends.device_link import MOST_STREAMS, SOURCE
from hzplan.runtime.backends.rate_limited import Link, RateLimitedGroup, RateLimitedWorld

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which passes when somebody waits on a condition and at no other."""
    now = [0.0]

    def wait(self: threading.Condition, timeout: float | None = None) -> bool:
        assert timeout is not None
        now[0] += timeout
        return False

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(threading.Condition, "wait", wait)
    monkeypatch.setattr(rate_limited, "_lateness_s", lambda: 0.0)
    return now


def test_what_is_alone_takes_its_time(clock: list[float]) -> None:
    link = Link()
    link.wait(link.start(2.0))
    assert clock[0] == pytest.approx(2.0)


def test_a_wait_ends_not_early_and_is_not_slept_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real clock; a sleep would end late."""
    monkeypatch.setattr(rate_limited, "_lateness_s", lambda: 2e-3)
    link, slept = Link(), []
    sleep = link._changed.wait

    def noted(timeout: float) -> bool:
        slept.append(timeout)
        return sleep(timeout)

    monkeypatch.setattr(link._changed, "wait", noted)
    began = time.perf_counter()
    link.wait(link.start(0.02))
    assert time.perf_counter() - began > 0.02 - 1e-4
    assert slept and max(slept) <= 0.018


def test_what_is_under_way_at_once_shares(clock: list[float]) -> None:
    link = Link(contention=1.5)
    first, second = link.start(1.0, "unshard"), link.start(3.0, "reduce")
    link.wait(first)
    assert clock[0] == pytest.approx(1.0 * 2 * 1.5)
    link.wait(second)  # of which 1.0 had gone beside the first
    assert clock[0] == pytest.approx(3.0 + 2.0)


def test_what_a_stream_has_under_way_goes_in_order(clock: list[float]) -> None:
    link = Link(contention=1.5)
    first, second = link.start(1.0, "reduce"), link.start(3.0, "reduce")
    link.wait(first)
    assert clock[0] == pytest.approx(1.0)
    link.wait(second)
    assert clock[0] == pytest.approx(4.0)


def test_what_came_while_nobody_looked_has_come(clock: list[float]) -> None:
    link = Link()
    first, second = link.start(1.0, "unshard"), link.start(3.0, "reduce")
    clock[0] = 3.0  # the first came at 2, after which the second had the link to itself
    link.wait(first)
    assert clock[0] == 3.0
    link.wait(second)
    assert clock[0] == pytest.approx(4.0)


def _world(rank: int = 1, *, exchanged: bool = True) -> RateLimitedWorld:
    def seconds(operation: str, stage: Stage, nbytes: int) -> float:
        return 1.0 + nbytes / 1000

    return RateLimitedWorld(Mesh.parse("2,2"), rank, seconds, exchanges=exchanged, contention=[1.5])


def _group(world: RateLimitedWorld, stage: Stage) -> RateLimitedGroup:
    return world.new_group(Mesh.parse("2,2"), "unshard", stage, CPU)


@pytest.mark.parametrize("exchanged", [True, False])
def test_gathers_of_a_task_cost_what_the_model_says(clock: list[float], exchanged: bool) -> None:
    """Two of one stage are one of both sizes; another stage's adds its bytes, and its latency on NCCL."""
    world = _world(exchanged=exchanged)
    inner, outer = _group(world, Stage(1, 2)), _group(world, Stage(0, 2))
    whole, wide = torch.zeros(2, 25), torch.zeros(4, 25)  # 200 and 400 bytes
    gathers = [
        inner.all_gather([Buffers(whole.view(-1), whole[inner.place])] * 2),
        outer.all_gather([Buffers(wide.view(-1), wide[outer.place])]),
    ]
    for gather in gathers:
        gather.begin()
    for gather in gathers:
        gather.end()
    assert clock[0] == pytest.approx(1.0 + 0.4 + 0.4 + (0.0 if exchanged else 1.0))
    gathers[0].run()  # the next task's wait for a latency of their own
    assert clock[0] == pytest.approx(1.8 + (0.0 if exchanged else 1.0) + 1.4)


def test_what_arrives_is_made_of_what_is_here(clock: list[float]) -> None:
    group = _group(_world(rank=2), Stage(0, 2))
    assert (group.ranks[group.place], group.size) == (2, 4)
    whole = torch.zeros(4, 3)
    own = whole[group.place]
    own.copy_(torch.tensor([1.0, 2.0, 3.0]))
    group.all_gather([Buffers(whole.view(-1), own)]).run()
    assert torch.equal(whole, torch.tensor([1.0, 2.0, 3.0]).expand(4, 3))
    part, room = torch.zeros(3), torch.zeros(3)
    reduction = group.reduce_scatter([Buffers(whole.view(-1), part)], room)
    reduction.run()
    assert torch.equal(part, torch.tensor([4.0, 8.0, 12.0]))
    reduction.run(accumulate=True)
    assert torch.equal(part, torch.tensor([8.0, 16.0, 24.0]))


def test_memory_is_that_of_the_cluster() -> None:
    for exchanged in (True, False):
        group = _group(_world(exchanged=exchanged), Stage(0, 2))
        assert group.needs_scratch == exchanged
        assert not group.concurrent


TICK_NS = 100
ON_THE_HOST = f"""
#define __global__
#define MOST_STREAMS {MOST_STREAMS}
static unsigned long long ticks;
static unsigned long long NOW(void) {{ return {TICK_NS} * ticks++; }}
extern unsigned long long passed(void) {{ return {TICK_NS} * (ticks - 1); }}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler of C")
def test_a_gpus_streams_share_as_those_of_the_host(tmp_path: Path) -> None:
    """The kernel itself, in a process, with a clock that passes when it is read."""
    source, library = tmp_path / "hold.c", tmp_path / "hold.so"
    source.write_text(ON_THE_HOST + SOURCE.replace('extern "C" ', ""))
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    for others, slowdown in ((0, 1.0), (1, 2 * 1.5), (2, 3 * 1.5)):
        kernel = ctypes.CDLL(
            str(shutil.copy(library, tmp_path / f"hold{others}.so"))
        )  # with a clock of its own
        kernel.passed.restype = ctypes.c_ulonglong
        under_way = (ctypes.c_int * MOST_STREAMS)(*[1] * others)
        kernel.hold(under_way, 3, ctypes.c_double(1e6), ctypes.c_double(1.5))
        assert kernel.passed() == pytest.approx(1e6 * slowdown, abs=2 * TICK_NS)
        assert list(under_way) == [1] * others + [0] * (MOST_STREAMS - others)
