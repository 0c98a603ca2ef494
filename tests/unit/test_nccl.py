"""What communicators of NCCL are asked for, without NCCL: its options are recorded."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from hzplan.core.buffers import MAX_IN_FLIGHT
from hzplan.core.hierarchy import Mesh, Stage
from hzplan.core.order import LINK_STREAM
from hzplan.formats.profile import CollectiveCurve, CollectivePoint, InterferenceEntry
from hzplan.profiler.session.progress import Progress
from hzplan.profiler.session.ranks import Ranks
from hzplan.runtime.backends import groups, nccl
from hzplan.runtime.buffers import CommunicationBuffers

measuring = importlib.import_module("hzplan.profiler.measure")  # its package has a function of that name

SMS = 132


class Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self.config = is_high_priority_stream, SimpleNamespace(max_ctas=None)


class Group:
    """One of torch's groups, as far as it is only kept."""


class Job:
    """torch.distributed as far as groups are made with it; ``made``: what each was made with."""

    def __init__(self, backend: str) -> None:
        self.made: list[dict[str, Any]] = []
        one = SimpleNamespace(name=lambda: backend, options=SimpleNamespace(_timeout=timedelta(seconds=100)))
        self._get_backend, self._device_types = lambda device: one, ["cuda"]
        self.bound_device_id: torch.device | None = None
        self.destroyed: list[object] = []
        self.group = SimpleNamespace(WORLD=self)
        self.ProcessGroupNCCL = SimpleNamespace(Options=Options)

    def new_group(self, members: list[int], **arguments: Any) -> object:
        self.made.append({"members": members, **arguments})
        return Group()

    def destroy_process_group(self, group: object) -> None:
        self.destroyed.append(group)


def job(monkeypatch: pytest.MonkeyPatch, backend: str) -> Job:
    found = Job(backend)
    monkeypatch.setattr(groups, "dist", found)
    monkeypatch.setattr(nccl, "dist", found)
    monkeypatch.setattr(groups, "_made", WeakKeyDictionary())
    properties = SimpleNamespace(multi_processor_count=SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    return found


@pytest.mark.parametrize(
    ("mesh", "kinds", "ctas", "most"),
    [
        ("8|16", ("unshard", "reduce", "gather"), (24, 8), (24, 8)),  # as the plan says: 96 in sum
        ("8|16", ("unshard", "reduce", "gather"), (48, 16), (32, 10)),  # 192 are too many
        ("8|16", ("unshard", "reduce", "gather"), None, (21, 21)),
        ("8|16", (LINK_STREAM,), (48, 16), (48, 16)),
        ("8|4|4", ("unshard", "reduce", "gather"), None, (14, 14, 14)),
    ],
)
def test_kernels_of_all_streams_find_room_together(
    mesh: str,
    kinds: tuple[str, ...],
    ctas: tuple[int, ...] | None,
    most: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = job(monkeypatch, "nccl").made
    of = Mesh.parse(mesh)
    for kind in kinds:
        for bounds in of.tier_bounds:
            groups.process_group(of, kind, Stage(*bounds), 0, range(of.world), torch.device("cuda"), ctas)
    given = [one["pg_options"] for one in made]
    assert [one.config.max_ctas for one in given] == [*most] * len(kinds)
    assert sum(one.config.max_ctas for one in given) < SMS
    assert all(one.is_high_priority_stream for one in given)
    assert [one._timeout for one in given] == [one["timeout"] for one in made]  # else torch warns


def test_other_backends_have_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    made = job(monkeypatch, "gloo").made
    mesh = Mesh.parse("2|2")
    groups.process_group(mesh, "unshard", Stage(0, 1), 0, range(4), torch.device("cpu"), (24, 8))
    assert made[0]["pg_options"] is None


@pytest.mark.parametrize("asked", ["0", "1"])
def test_buffers_are_registered_with_every_communicator_where_asked(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's unshard and gradient buffers are made inside, one registration for each communicator."""
    monkeypatch.setenv("HZPLAN_NCCL_REGISTER", asked)
    did: list[object] = []

    @contextmanager
    def use_mem_pool(pool: object, device: torch.device) -> Iterator[None]:
        did.append("begin")
        yield
        did.append("end")

    def group(number: int) -> nccl.NcclGroup:
        backend = SimpleNamespace(
            mem_allocator=f"NCCL's {number}", register_mem_pool=lambda pool: did.append((number, pool))
        )
        found = object.__new__(nccl.NcclGroup)
        found.handle = type("Handle", (), {"_get_backend": lambda self, device: backend})()
        return found

    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, **how: (did.append("buffer"), zeros(size, **how))[1])
    first, second = group(1), group(2)
    groups = {
        (kind, Stage(0, 1)): one for kind, one in (("unshard", first), ("reduce", second), ("gather", first))
    }
    unit: Any = SimpleNamespace(
        unshard_bytes=64, gradient_buffer_bytes=128, buckets=(), assign_buffers=lambda *buffers: None
    )
    made = CommunicationBuffers({"a": unit}, groups, 1, {"a": 0}, {"a": 0}, torch.device("cpu"))
    scratch = ["buffer"] * MAX_IN_FLIGHT
    if asked == "0":
        assert did == ["buffer", "buffer", *scratch]
    else:
        pool = "pool of NCCL's 1"
        assert did == ["begin", "buffer", "buffer", "end", (1, pool), (2, pool), *scratch]
        assert made._pool == pool


def test_groups_that_were_split_from_the_jobs_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    of, mesh = job(monkeypatch, "nccl"), Mesh.parse("2|2")

    def group() -> object:
        return groups.process_group(mesh, "unshard", Stage(0, 1), 0, range(4), torch.device("cuda"))

    first = group()
    groups.release()  # of a job that was begun without a device: the store would have what they left
    assert group() is first and not of.destroyed
    of.bound_device_id = torch.device("cuda", 0)
    groups.release()
    assert of.destroyed == [first] and group() is not first and len(of.made) == 2


def test_a_profile_keeps_no_communicator_and_says_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which the job begins with 900 bytes, and every communicator takes 200."""
    alive, most = [1], [1]

    def links(ranks: Ranks, mesh: Mesh, *_: object) -> tuple[CollectiveCurve, ...]:
        alive[0] += len(mesh.stages()) + 1  # one over both tiers
        most[0] = max(most[0], alive[0])
        point = CollectivePoint(bytes=1024, seconds=1e-3, spread=0.0)
        return tuple(
            CollectiveCurve(operation=operation, low=stage.low, high=stage.high, points=(point,))
            for stage in mesh.stages()
            for operation in ("all_gather", "reduce_scatter")
        )

    entry = InterferenceEntry(compute_loss=0.0, communication_slowdown=1.0)
    for name, found in {
        "measure_links": links,
        "release": lambda: alive.__setitem__(0, 1),
        "peak_flops": lambda *_: 1e12,
        "measure_norm": lambda *_: 1e-4,
        "measure_interference": lambda *_: (entry, entry),
        "measure_host": lambda *_: None,
        "measure_rounding": lambda *_: (),
        "slow_links": lambda *_: (),
        "_by_exchange": lambda *_: False,
    }.items():
        monkeypatch.setattr(measuring, name, found)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: (10_000 - 900 - 200 * (alive[0] - 1), 10_000)
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    ranks = Ranks(0, 1, "nccl", torch.device("cuda"))
    progress = Progress(lambda text, fraction: None, 1.0)
    mesh = Mesh.parse("2,2|2,2")
    measured = measuring._measure_links(
        *(ranks, mesh, ("node", "network"), "float32", 1024, 1024, lambda: None, progress, 2**30)
    )
    assert (measured.cluster.context_bytes, measured.cluster.communicator_bytes) == (900 - 300 - 200, 200)
    assert measured.cluster.compute_processor_share is None
    assert (most[0], alive[0]) == (1 + 7, 1)
