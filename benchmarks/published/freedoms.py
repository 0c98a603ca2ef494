"""What the planner would have chosen instead of what was run, and what that gains, split by cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.published.parameters import Values
from benchmarks.published.predict import Traces, evaluated, step_of
from benchmarks.published.scored import Question
from benchmarks.published.settings import Recompute, Scheme, Setting
from hzplan.cost.memory import budget_bytes

MOST_ROWS = 10
"""Runs that are asked about: those that wait longest for communication, or recompute all, one for each
source, model and device."""
GAIN = 0.1
"""Least gain, as a share of the step, that is told of."""
SCHEMES: tuple[tuple[Scheme, bool], ...] = (
    ("zero3", False),
    ("zero3", True),
    ("zero2", False),
    ("zero1", False),
    ("zero1", True),
    ("ddp", False),
)
RECOMPUTE: tuple[tuple[Recompute, int], ...] = (("none", 1), ("full", 2), ("full", 1))
PREFETCH = (1, 2)
FREEDOMS = ("levels", "recompute", "micro-batch", "depth")


@dataclass(frozen=True)
class Choice:
    """A run's settings that a planner may change. ``recompute``: what, and of every how many blocks."""

    levels: tuple[Scheme, bool]
    recompute: tuple[Recompute, int]
    micro_batch: int
    prefetch: int

    def with_freedom(self, freedom: str, other: Choice) -> Choice:
        """This choice with one freedom as in another."""
        field = {"micro-batch": "micro_batch", "depth": "prefetch"}.get(freedom, freedom)
        return replace(self, **{field: getattr(other, field)})

    def __str__(self) -> str:
        scheme, inside = self.levels
        kind, every = self.recompute
        again = kind if every == 1 else f"every {every}nd"
        return f"{scheme}{' in node' * inside}, recompute {again}, micro-batch {self.micro_batch}"


def instead(asked: Sequence[Question], traces: Traces, values: Values) -> str:
    """Markdown: runs whose best choice is predicted to gain more than ``GAIN``."""
    lines = []
    some = list(_some(asked, traces, values))
    for question in some:
        line = _line(question.options[0], traces, values)
        if line is not None:
            lines.append(line)
    head = (
        f"Of {len(some)} runs, one for each source, model and device, that wait most for communication or "
        f"recompute all: where the same model predicts a step shorter by more than {GAIN:.0%} within the "
        "device's budget. *Without* a freedom: how much longer the step is when it alone is as it was run."
    )
    if not lines:
        return f"{head}\n\nNone."
    table = "| row | as run | instead | gain | " + " | ".join(f"without {one}" for one in FREEDOMS) + " |"
    return "\n".join([head, "", table, "|---" * (4 + len(FREEDOMS)) + "|", *lines])


def _some(asked: Sequence[Question], traces: Traces, values: Values) -> Iterator[Question]:
    best: dict[tuple[object, ...], tuple[float, Question]] = {}
    for one in asked:
        setting = one.options[0]
        step, waits = step_of(evaluated(setting, traces.of(setting), values))
        kept = waits / step + 0.25 * (setting.recompute == "full")
        key = (one.row.family, one.row.model, setting.device)
        if key not in best or kept > best[key][0]:
            best[key] = kept, one
    ranked = sorted(best.values(), key=lambda item: -item[0])
    yield from (one for _, one in ranked[:MOST_ROWS])


def _line(setting: Setting, traces: Traces, values: Values) -> str | None:
    own = Choice((setting.scheme, setting.inside), (setting.recompute, setting.every), setting.micro_batch, 1)
    total = setting.micro_batch * setting.accumulation
    sizes = [
        size
        for size in {setting.micro_batch // 2, setting.micro_batch, setting.micro_batch * 2}
        if size and total % size == 0
    ]

    @cache
    def step_s(choice: Choice) -> float:
        """Seconds; infinite where it does not fit."""
        scheme, inside = choice.levels
        kind, every = choice.recompute
        one = replace(
            setting,
            scheme=scheme,
            inside=inside,
            recompute=kind,
            every=every,
            micro_batch=choice.micro_batch,
            accumulation=total // choice.micro_batch,
        )
        found = evaluated(one, traces.of(one), values, prefetch=choice.prefetch)
        if choice != own and found.memory.peak > budget_bytes(found.model.profile.cluster):
            return float("inf")
        return step_of(found)[0]

    best = min(
        (
            Choice(levels, recompute, size, prefetch)
            for levels in SCHEMES
            if setting.nodes > 1 or not levels[1]
            for recompute in RECOMPUTE
            for size in sizes
            for prefetch in PREFETCH
        ),
        key=step_s,
    )
    gain = step_s(own) / step_s(best) - 1
    if gain <= GAIN:
        return None
    parts = []
    for freedom in FREEDOMS:
        without = step_s(best.with_freedom(freedom, own)) / step_s(best) - 1
        parts.append("needed to fit" if without == float("inf") else f"{without:.1%}")
    return f"| {setting.row.id} | {own} | {best} | {gain:.0%} | " + " | ".join(parts) + " |"
