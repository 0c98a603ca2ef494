"""Interference of compute and communication while both run: tier by tier, all ranks at once."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hzplan.core.buffers import MAX_IN_FLIGHT, scratch_bytes
from hzplan.core.hierarchy import Mesh, Stage
from hzplan.formats.profile import InterferenceEntry, NarrowInterference
from hzplan.profiler.network import queued
from hzplan.profiler.network.links import collective
from hzplan.profiler.session.ranks import Ranks
from hzplan.profiler.session.rounds import THOROUGH, Effort, no_garbage_collection
from hzplan.runtime import cuda
from hzplan.runtime.backends.packing import Form, form_of
from hzplan.runtime.launcher import Device
from hzplan.runtime.world import ProcessWorld

TOGETHER_S, LONG_TOGETHER_S = 0.4, 3.0
"""Least seconds of both at once; those after which one call of compute is enough."""
BATCH_S = 0.2
"""Seconds of communication, beside compute, until ranks agree whether that was enough."""
MAX_BYTES = 4 << 20
"""Size of the buffers gathered and reduced: enough to be bound by the link, small enough to be repeated."""
ALONE_CALLS, ALONE_S = 3, 0.15
"""First calls of communication alone, and its least seconds then."""
LEAST_ROUNDS, ENOUGH_S = 2, 6.0
"""Rounds after which no other is begun that many seconds after the first: long ones are means themselves."""
PAIRS_S, MIN_PAIRS = 0.2, 3
"""Least seconds, and least number, of gathers beside reductions: the longer of both."""


@dataclass(frozen=True)
class _Sample:
    """Seconds of a call of each, alone and together, on this rank.

    ``contention``: communication's gather and reduction at once, over one after the other.
    """

    compute: float
    compute_together: float
    communication: float
    communication_together: float
    contention: float


def measure_interference(
    ranks: Ranks,
    mesh: Mesh,
    dtype: torch.dtype,
    largest_bytes: int,
    compute: Callable[[], None],
    progress: Callable[[float], None],
    effort: Effort = THOROUGH,
) -> tuple[InterferenceEntry, ...]:
    """For every tier: the slowdown of ``compute`` while its collectives run, and of these while compute does.

    Gathers and reductions alternate over the whole tier, as the runtime issues them, on buffers of
    ``largest_bytes`` of a model, at most 4 MiB. The same on every rank.
    """
    tiers = range(len(mesh.tiers)) if ranks.size > 1 else range(0)
    entries = []
    for tier in tiers:
        stage = Stage(*mesh.tier_bounds[tier])
        if mesh.group_size(stage) == 1:  # nobody to communicate with
            entries.append(InterferenceEntry(compute_loss=0.0, communication_slowdown=1.0))
            continue
        found = []
        forms = (None, form_of("int8", dithered=True)) if effort.narrow else (None,)
        for part, form in enumerate(forms):
            gather, reduce = _communication(ranks, mesh, stage, dtype, largest_bytes, form)
            rounds, began = [], time.perf_counter()
            with no_garbage_collection():
                for number in range(effort.rounds):
                    rounds.append(ranks.gather(_sample(ranks, compute, gather, reduce, effort)))
                    done = tier + (part + (number + 1) / effort.rounds) / len(forms)
                    progress(done / len(mesh.tiers))
                    elapsed = max(ranks.gather(time.perf_counter() - began))
                    if number + 1 >= LEAST_ROUNDS and elapsed > ENOUGH_S:
                        break
            found.append(_entry(rounds))
        exact, *narrow = found
        entries.append(exact.model_copy(update={"narrow": _narrow(narrow[0])}) if narrow else exact)
    return tuple(entries)


MOST_SLOWDOWN = 1000.0
"""What a profile may say; a rank that a busy machine did not let run at all measures more."""


def _narrow(entry: InterferenceEntry) -> NarrowInterference:
    return NarrowInterference(
        compute_loss=entry.compute_loss, communication_slowdown=entry.communication_slowdown
    )


def _entry(rounds: Sequence[Sequence[_Sample]]) -> InterferenceEntry:
    """From samples by round and rank: ratios of means over all of them, as a round is too short to say how
    fast a machine is that ranks share."""

    def mean(seconds: Callable[[_Sample], float]) -> float:
        return statistics.fmean(seconds(sample) for by_rank in rounds for sample in by_rank)

    loss = 1 - mean(lambda s: s.compute) / mean(lambda s: s.compute_together)
    slowdown = mean(lambda s: s.communication_together) / mean(lambda s: s.communication)
    return InterferenceEntry(
        compute_loss=round(min(1.0, max(0.0, loss)), 4),
        communication_slowdown=round(min(MOST_SLOWDOWN, max(1.0, slowdown)), 4),
        contention=round(
            max(1.0, statistics.median(max(s.contention for s in by_rank) for by_rank in rounds)), 4
        ),
    )


def _communication(
    ranks: Ranks,
    mesh: Mesh,
    stage: Stage,
    dtype: torch.dtype,
    largest_bytes: int,
    form: Form | None = None,
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A gather and a reduction over a stage, of what travels in a form."""
    size = mesh.group_size(stage)
    multiple = size * (1 if form is None else form.grain)
    elements = max(multiple, min(largest_bytes, MAX_BYTES) // mesh.shards[stage.low] // dtype.itemsize)
    whole = torch.zeros(elements // multiple * multiple, dtype=dtype, device=ranks.device)
    scratch = torch.zeros(
        scratch_bytes(whole.nbytes // size) // MAX_IN_FLIGHT // dtype.itemsize,
        dtype=dtype,
        device=ranks.device,
    )
    world = ProcessWorld()
    unshard, sums = (world.new_group(mesh, kind, stage, ranks.device) for kind in ("unshard", "reduce"))
    gather = collective("all_gather", unshard, whole, scratch, form)
    reduce = collective("reduce_scatter", sums, whole, scratch, form)
    if form is not None:  # what was packed where it lies are no values any more
        values = torch.empty_like(whole).uniform_(-1, 1)
        gather, reduce = (partial(_on_values, whole, values, call) for call in (gather, reduce))
    gather()
    reduce()
    return gather, reduce


def _on_values(whole: torch.Tensor, values: torch.Tensor, call: Callable[[], object]) -> None:
    whole.copy_(values)
    call()


def _sample(
    ranks: Ranks,
    compute: Callable[[], None],
    gather: Callable[[], object],
    reduce: Callable[[], object],
    effort: Effort,
) -> _Sample:
    """Means over many calls, not medians: the time that one call loses to another is the other's gain."""
    if ranks.device.type == "cuda":
        return _sample_of_queues(ranks, cuda.Device(ranks.device), compute, gather, reduce, effort)

    def communicate() -> None:
        gather()
        reduce()
        ranks.finish_device()

    alone = _seconds(ranks, compute, effort.alone)
    communication = max(ranks.gather(_seconds(ranks, communicate, ALONE_CALLS)))
    calls = math.ceil(ALONE_S / communication)
    communication = max(ranks.gather(_seconds(ranks, communicate, calls)))
    computed, communicated = _together(ranks, compute, communicate, math.ceil(calls / 10), effort)
    contention = _contention(ranks, gather, reduce, max(MIN_PAIRS, math.ceil(PAIRS_S / communication)))
    return _Sample(alone, computed, communication, communicated, contention)


def _sample_of_queues(
    ranks: Ranks,
    device: Device,
    compute: Callable[[], None],
    gather: Callable[[], object],
    reduce: Callable[[], object],
    effort: Effort,
) -> _Sample:
    """The same where a device queues work; how much of it, all ranks agree on."""

    def communicate() -> None:
        gather()
        reduce()

    ranks.barrier()
    own = queued.alone(device, compute, effort.alone)
    alone = max(ranks.gather(own))
    communication = max(ranks.gather(queued.alone(device, communicate, ALONE_CALLS)))
    calls = math.ceil(ALONE_S / communication)
    communication = max(ranks.gather(queued.alone(device, communicate, calls)))
    ranks.barrier()
    computed, communicated = queued.together(
        *(device, compute, communicate, (alone, communication), TOGETHER_S, effort.beside)
    )
    ranks.barrier()
    pairs = max(MIN_PAIRS, math.ceil(PAIRS_S / communication))
    contention = queued.contention(device, gather, reduce, pairs)
    return _Sample(own, computed, communication, communicated, contention)


def _contention(
    ranks: Ranks, gather: Callable[[], object], reduce: Callable[[], object], calls: int
) -> float:
    """Seconds of gathers beside as many reductions, over seconds of all of them one after the other."""

    def seconds(first: Callable[[], object], second: Callable[[], object]) -> float:
        ranks.barrier()
        began = time.perf_counter()
        beside = _Beside(partial(_mean_seconds, first, calls))
        for _ in range(calls):
            second()
        beside.join()
        ranks.finish_device()
        return time.perf_counter() - began

    def nothing() -> None:
        pass

    apart = seconds(gather, nothing) + seconds(nothing, reduce)
    return seconds(gather, reduce) / apart


def _seconds(ranks: Ranks, call: Callable[[], None], calls: int) -> float:
    """Mean seconds of so many calls in a row, which all ranks begin together."""
    ranks.barrier()
    return _mean_seconds(call, calls)


class _Beside:
    """Work on a thread of its own."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: Exception | None = None
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the work is over, or has failed."""
        return self._ended.is_set()

    def join(self) -> None:
        """Wait for its end; raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()


def _together(
    ranks: Ranks, compute: Callable[[], None], communicate: Callable[[], object], calls: int, effort: Effort
) -> tuple[float, float]:
    """Mean seconds of a call of compute and of one of communication, while both run.

    Communication goes on until every rank has computed enough, first ``calls`` and then as many as take a
    while: how much slower each makes the other is not known before. A call of compute that outlasts
    communication does not count.
    """
    computed: list[float] = []
    communicated: list[tuple[int, float]] = []
    over = False
    ranks.barrier()
    began = time.perf_counter()

    def enough() -> bool:
        elapsed = time.perf_counter() - began
        return over or (
            elapsed >= TOGETHER_S
            and (len(computed) >= effort.beside or (len(computed) >= 1 and elapsed >= LONG_TOGETHER_S))
        )

    def work() -> None:
        batch = calls
        while True:
            communicated.append((batch, _mean_seconds(communicate, batch)))
            said = ranks.gather((enough(), communicated[-1][1]))
            if all(one for one, _ in said):
                break
            batch = math.ceil(BATCH_S / max(seconds for _, seconds in said))

    beside = _Beside(work)
    try:
        while True:
            seconds = _mean_seconds(compute, 1)
            if beside.ended:
                break
            computed.append(seconds)
    finally:  # where compute fails here, others shall not wait for it
        over = True
    beside.join()
    return statistics.fmean(computed), _weighted(communicated)


def _weighted(batches: Sequence[tuple[int, float]]) -> float:
    """The mean of a call, from batches of calls and their means."""
    return sum(calls * mean for calls, mean in batches) / sum(calls for calls, _ in batches)


def _mean_seconds(call: Callable[[], object], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls
