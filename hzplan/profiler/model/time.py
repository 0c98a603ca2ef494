"""What each use of a unit costs at each micro-batch size: seconds, FLOPs, memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from hzplan.core.schedule import Use
from hzplan.errors import UserError, one_line
from hzplan.formats.profile import UseEntry
from hzplan.models.recompute import Switch, leaves, switched
from hzplan.models.units import Unit
from hzplan.profiler.model.calls import Turns
from hzplan.profiler.model.costs import kinds, use_costs
from hzplan.profiler.model.entries import unit_entry
from hzplan.profiler.model.fake import FakeTurn
from hzplan.profiler.model.flops import FlopProbe
from hzplan.profiler.model.memory import Segment, memory_trace
from hzplan.profiler.model.reads import unread_uses
from hzplan.profiler.model.recompute import Again, by_forwards, differences, with_again
from hzplan.profiler.model.shapes import Shapes
from hzplan.profiler.session.clock import clock
from hzplan.profiler.session.ranks import Ranks
from hzplan.profiler.session.rounds import rounds
from hzplan.profiler.session.statistics import spread

WARM_UPS = 2
BLOCK = 3
"""Passes of one size in a row, before it is another's turn: the allocator is used to a size."""
MIN_BLOCKS = 2
MAX_BLOCKS = 5
STEADY_SPREAD = 0.03
"""Repeats end early when the spread of a rank's whole passes is below this, at the median rank."""
TIME_LIMIT_S = 6.0
"""Per micro-batch size, once there are enough repeats."""

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Pass:
    """One forward and backward at a micro-batch size, as far as it is the same every time."""

    micro_batch: int
    step: Step
    uses: tuple[Use, ...]
    memory: tuple[Segment, ...]
    flops: tuple[int, ...]


def measure_uses(
    ranks: Ranks,
    turns: Turns,
    units: Sequence[Unit],
    steps: Mapping[int, Step],
    *,
    label: str,
    progress: Callable[[float], None],
    shapes: Shapes | None = None,
) -> tuple[tuple[UseEntry, ...], float]:
    """Measure a forward and backward at every micro-batch size; the same uses on every rank.

    Also this rank's own median seconds of the largest.

    ``steps``: by size, smallest first, what computes a micro-batch's loss; ``label`` names the model in
    messages. All ranks run at the same time. ``shapes``: what is known of memory and FLOPs, where the model
    that runs is a folded one.

    Raises UserError when the model cannot run, or does not use its units in the same order every time.
    """
    passes: list[Pass] = []
    for size, step in steps.items():
        passes.append(_prepare(ranks, turns, size, step, label, shapes))
        progress(0.2 * len(passes) / len(steps))
    if len({each.uses for each in passes}) > 1:
        raise UserError(f"{label}: the order in which modules are used {_NOT_FIXED} the micro-batch size")
    with switched(units) as switch:
        more = [] if shapes is not None else _recomputing(ranks, turns, passes, switch)
        all_passes = [*passes, *more]
        repeats = _times(ranks, turns, all_passes, progress=lambda done: progress(0.2 + 0.8 * done))
    if not all(repeats[: len(passes)]):
        raise UserError(f"{label}: the order in which modules are used {_NOT_FIXED} chance or earlier calls")
    if not all(repeats[len(passes) :]):  # what was right a few times may not be always
        more = []
    entries = [unit_entry(unit) for unit in units]
    measured = [
        use_costs(each.micro_batch, kinds(entries, each.uses, each.flops), each.flops, each.memory, mine)
        for each, mine in zip([*passes, *more], repeats, strict=False)
    ]
    costs, with_more = measured[: len(passes)], measured[len(passes) :]
    if shapes is not None:
        again: Again = {
            each.micro_batch: by_forwards(each.uses, mine, _bytes(shapes.again[each.micro_batch]))
            for each, mine in zip(passes, costs, strict=True)
            if shapes.again
        }
    else:
        again = {
            each.micro_batch: differences(mine, then)
            for each, mine, then in zip(more, costs, with_more, strict=False)
        }
    first = next(iter(steps.values()))
    if shapes is None:
        unread = frozenset.intersection(*ranks.gather(unread_uses(turns, units, first)))
    else:
        unread = frozenset(i for i, use in enumerate(passes[0].uses) if not shapes.reads(use))
    mine = statistics.median(sum(by_rank[ranks.rank]) for by_rank in repeats[len(passes) - 1])
    found = [
        UseEntry(
            unit=use.unit,
            phase=use.phase,
            reads_parameters=index not in unread,
            costs=tuple(by_use[index] for by_use in costs),
        )
        for index, use in enumerate(passes[0].uses)
    ]
    return with_again(found, again, leaves(units)), mine


def _bytes(turns: Sequence[FakeTurn]) -> list[tuple[int, int]]:
    return [(turn.retained_bytes, turn.peak_bytes) for turn in turns]


def _recomputing(ranks: Ranks, turns: Turns, passes: Sequence[Pass], switch: Switch) -> list[Pass]:
    """The same passes with every unit's forward computed again; none where the model does not allow it."""
    found = []
    for each in passes:
        step, segments, as_before = switch.around(each.step), list[Segment](), False
        try:
            turns.run(step)
            with memory_trace(ranks.device) as trace:
                as_before = turns.run(step, trace) == each.uses
            segments = trace.segments()
        except Exception:  # the user's model, which may not bear to be run twice
            as_before = False
        if not all(ranks.gather(as_before)):
            return []
        found.append(Pass(each.micro_batch, step, each.uses, _middle(ranks.gather(segments)), each.flops))
    return found


_NOT_FIXED = "must be fixed for a plan; take branches out that depend on"


def _prepare(
    ranks: Ranks, turns: Turns, micro_batch: int, step: Step, label: str, shapes: Shapes | None
) -> Pass:
    """Everything but time."""
    uses = _warm_up(ranks, turns, step, micro_batch, label)
    if shapes is not None:
        if {shapes.uses} != {*ranks.gather(uses)}:
            raise UserError(f"{label}: the order in which modules are used {_NOT_FIXED} values")
        known = shapes.turns[micro_batch]
        segments = tuple(Segment(turn.retained_bytes, turn.peak_bytes) for turn in known)
        return Pass(micro_batch, step, uses, segments, tuple(turn.flops for turn in known))
    with memory_trace(ranks.device) as trace:
        again = turns.run(step, trace)
    by_rank = ranks.gather(trace.segments())
    if {uses} != {*ranks.gather(uses), *ranks.gather(again)}:
        raise UserError(f"{label}: the order in which modules are used {_NOT_FIXED} rank, data or chance")
    # Counting has no noise, but costs seconds of imports: one rank does it.
    flops = ranks.share(_flops(turns, step) if ranks.rank == 0 else [])
    return Pass(micro_batch, step, uses, _middle(by_rank), tuple(flops))


def _warm_up(ranks: Ranks, turns: Turns, step: Step, micro_batch: int, label: str) -> tuple[Use, ...]:
    """The uses; where a rank fails, all do."""
    uses: tuple[Use, ...] = ()
    failure = ""
    try:
        for _ in range(WARM_UPS):
            uses = turns.run(step)
        if not uses:
            failure = "its loss uses no module that has parameters"
    except Exception as error:  # the user's model, which may raise anything
        failure = one_line(error)
    for rank, text in enumerate(ranks.gather(failure)):
        if text:
            where = f" on rank {rank}" if ranks.size > 1 else ""
            raise UserError(
                f"{label}: a forward and backward with micro-batch {micro_batch} failed{where}: {text}"
            )
    return uses


def _middle(by_rank: Sequence[Sequence[Segment]]) -> tuple[Segment, ...]:
    """The middle rank's memory; ranks differ only where the model looks at its data."""
    return tuple(
        Segment(
            statistics.median_high(segment.retained_bytes for segment in segments),
            statistics.median_high(segment.peak_bytes for segment in segments),
        )
        for segments in zip(*by_rank, strict=True)
    )


def _flops(turns: Turns, step: Step) -> list[int]:
    probe = FlopProbe()
    with probe.counter:
        turns.run(step, probe)
    return probe.flops()


def _times(
    ranks: Ranks, turns: Turns, passes: Sequence[Pass], *, progress: Callable[[float], None]
) -> list[list[list[list[float]]]]:
    """Seconds of each use, by pass, repeat and rank; nothing of a pass whose uses were others, or that
    failed, once."""
    results = rounds(
        ranks,
        [partial(_block, ranks, turns, each) for each in passes],
        at_least=MIN_BLOCKS,
        at_most=MAX_BLOCKS,
        budget_s=TIME_LIMIT_S * len(passes),
        progress=progress,
        enough=lambda so_far: all(map(_steady, so_far)),
    )
    return [
        [[*rows] for by_rank in result for rows in zip(*by_rank, strict=True)]  # blocks' passes, side by side
        if all(block for by_rank in result for block in by_rank)
        else []
        for result in results
    ]


def _block(ranks: Ranks, turns: Turns, each: Pass) -> list[list[float]]:
    """A few passes' seconds of each use; nothing when the uses were others, or one of many failed, which on
    one rank alone must not keep the others waiting."""
    rows: list[list[float]] = []
    as_recorded = True
    for _ in range(BLOCK):
        ranks.barrier()
        timer = clock(ranks.device)
        try:
            as_recorded &= turns.run(each.step, timer) == each.uses
        except Exception:  # the user's model, which has run before
            as_recorded = False
        rows.append(timer.seconds())
    return rows if as_recorded else []


def _steady(blocks: Sequence[Sequence[Sequence[Sequence[float]]]]) -> bool:
    """Whether whole passes scatter little; ``blocks`` by round, then rank."""
    by_rank = [
        [sum(row) for block in mine for row in block] for mine in zip(*blocks, strict=True) if all(mine)
    ]
    return bool(by_rank) and statistics.median(map(spread, by_rank)) < STEADY_SPREAD
