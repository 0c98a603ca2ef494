"""Contenders in turns: rounds in which each trains a few steps, so that all see the same machine."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite

from hzplan.errors import is_out_of_memory, one_line
from hzplan.peers.contender import WARM_UP_STEPS, Contender, NotHere
from hzplan.peers.paired import Ratio, paired_ratio
from hzplan.peers.traffic import sent_bytes
from hzplan.profiler.session.ranks import Ranks

TRAINED = WARM_UP_STEPS + 1
"""Steps that a contender has behind it when the first round begins."""

AGREE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 2e-2}
"""Losses agree when they differ by no more than this share at each of the first ten steps, by dtype: rounding
to bfloat16 turns a last digit of a sum into noise, and replicas compute in it by autocast, not throughout."""
AGREEING_STEPS = 10
SMALL_CHANGE = 1e-3
"""By how much of it a budget may be exceeded: a batch and a few scalars are in no plan."""
PLAN = "hzplan"
REFERENCES = ("ddp", PLAN)
"""Whose losses the others' are compared with: the first one's that took part."""


@dataclass(frozen=True)
class ComparedPeer:
    """One contender's figures; seconds are of a step, the slowest rank's, by round.

    ``peak_memory_bytes``: of the rank that needs most; ``sent_bytes``: per step, the node that sends most:
    (over loopback, over other interfaces); ``loss_error``: the largest relative difference to DDP's losses in
    the first ten steps (the plan's, where DDP took no part), infinite where one is not finite, None for who
    does not train together; ``waits_s``: how long compute stood still in a step, by what for, the mean of all
    ranks; empty where it is not known; ``processor_s``: processor time of a step by what threads are for,
    likewise.
    """

    name: str
    round_s: tuple[float, ...]
    peak_memory_bytes: int
    sent_bytes: tuple[int, int]
    losses: tuple[float, ...]
    loss_error: float | None
    waits_s: Mapping[str, float]
    processor_s: Mapping[str, float]

    def fits(self, budget_bytes: int) -> bool:
        """Whether it needs no more than the budget."""
        return within(self.peak_memory_bytes, budget_bytes)

    @property
    def step_s(self) -> float:
        """The median round's."""
        return statistics.median(self.round_s)

    @property
    def spread(self) -> tuple[float, float]:
        """The fastest and the slowest round's seconds of a step."""
        return min(self.round_s), max(self.round_s)


def within(peak_bytes: int, budget_bytes: int) -> bool:
    """Whether a peak is within a budget, small change aside."""
    return peak_bytes <= budget_bytes * (1 + SMALL_CHANGE)


@dataclass(frozen=True)
class Comparison:
    """All figures of one comparison. ``absent``: who could not take part, and why."""

    entries: Mapping[str, ComparedPeer]
    absent: Mapping[str, str]
    rounds: int
    steps_per_round: int

    def ratio(self, slower: str, faster: str) -> Ratio:
        """How many times the first one's step is as long as the second one's, paired by round."""
        return paired_ratio(self.entries[slower].round_s, self.entries[faster].round_s)


def compare(
    makers: Mapping[str, Callable[[], Contender]],
    *,
    rounds: int,
    steps_per_round: int,
    alone: Sequence[str] = (),
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda text, fraction: None,
) -> Comparison:
    """Make all contenders, then let them take turns in an order that is drawn anew each round.

    Every rank calls it with the same arguments. A turn is a lead-in and ``steps_per_round`` steps,
    timed on the slowest rank. ``alone``: contenders whose losses are their own business.
    """
    ranks = Ranks.here()
    contenders: dict[str, Contender] = {}
    absent: dict[str, str] = {}
    for number, (name, make) in enumerate(makers.items()):
        progress(f"preparing {name}", 0.2 * number / len(makers))
        made, why = _made(name, make)
        reasons = [reason for reason in ranks.gather(why) if reason]
        if made is not None and not reasons:
            contenders[name] = made
        else:
            absent[name] = reasons[0]
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, list[float]] = {name: [] for name in contenders}
    sent: dict[str, list[tuple[int, int]]] = {name: [] for name in contenders}
    waits: dict[str, list[Mapping[str, float]]] = {name: [] for name in contenders}
    spent: dict[str, list[Mapping[str, float]]] = {name: [] for name in contenders}
    order = random.Random(seed)
    trained = steps_per_round + 1
    for number in range(rounds):
        for name in order.sample(list(contenders), len(contenders)):
            progress(f"round {number + 1} of {rounds}: {name}", 0.2 + 0.8 * number / rounds)
            ranks.barrier()
            before = sent_bytes()
            turn = contenders[name].turn(TRAINED + number * trained, steps_per_round)
            ranks.barrier()  # what a node sends counts all of its ranks
            after = sent_bytes()
            everyone = ranks.gather((turn, (after[0] - before[0], after[1] - before[1])))
            seconds[name].append(max(turn.seconds for turn, _ in everyone) / steps_per_round)
            waits[name].append(_mean([turn.waits_s for turn, _ in everyone], steps_per_round))
            spent[name].append(_mean([turn.processor_s for turn, _ in everyone], steps_per_round))
            by_step = zip(*(turn.losses for turn, _ in everyone), strict=True)
            losses[name] += [statistics.fmean(step) for step in by_step]
            busiest = max((counted for _, counted in everyone), key=lambda pair: (pair[1], pair[0]))
            sent[name].append((busiest[0] // trained, busiest[1] // trained))
    for contender in contenders.values():  # not after an error: it would wait for ranks that may be gone
        contender.close()
    peaks = {name: max(ranks.gather(contender.peak_memory_bytes)) for name, contender in contenders.items()}
    reference = next((losses[name] for name in REFERENCES if name in losses), [])
    entries = {
        name: ComparedPeer(
            name,
            tuple(seconds[name]),
            peaks[name],
            (_middle([s[0] for s in sent[name]]), _middle([s[1] for s in sent[name]])),
            tuple(losses[name]),
            None if name in alone else _deviation(losses[name], reference),
            _medians(waits[name]),
            _medians(spent[name]),
        )
        for name in contenders
    }
    progress("measured", 1.0)
    return Comparison(entries, absent, rounds, steps_per_round)


def _made(name: str, make: Callable[[], Contender]) -> tuple[Contender | None, str]:
    """A contender, or why there is none: one system's error must not cost the others' figures. That of the
    plan is raised, without which there is nothing to compare."""
    try:
        return make(), ""
    except NotHere as reason:
        return None, str(reason)
    except Exception as error:
        if name == PLAN:
            raise
        room = "out of memory beside the others: " if is_out_of_memory(error) else ""
        return None, room + one_line(error)


def _middle(counts: Sequence[int]) -> int:
    return round(statistics.median(counts))


def _mean(waits_s: Sequence[Mapping[str, float]], steps: int) -> dict[str, float]:
    """Over ranks and steps, by cause."""
    causes = dict.fromkeys(cause for waits in waits_s for cause in waits)
    return {cause: statistics.fmean(w.get(cause, 0.0) for w in waits_s) / steps for cause in causes}


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    causes = dict.fromkeys(cause for waits in rounds for cause in waits)
    return {cause: statistics.median(w.get(cause, 0.0) for w in rounds) for cause in causes}


def _deviation(losses: Sequence[float], reference: Sequence[float]) -> float:
    if not all(map(isfinite, (*losses, *reference))):
        return inf
    pairs = list(zip(losses, reference, strict=True))[:AGREEING_STEPS]
    return max(abs(mine - theirs) / max(abs(theirs), 1e-12) for mine, theirs in pairs)
