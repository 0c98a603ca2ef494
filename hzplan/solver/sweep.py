"""Sweeps: one question solved at several memory budgets, node counts or network speeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from hzplan.formats.profile import Profile
from hzplan.solver.solve import Outcome, Request, SearchState, Solved, solve


@dataclass(frozen=True)
class Point:
    """One question and its answer. ``label``: what was changed, and to what."""

    label: str
    profile: Profile
    request: Request
    outcome: Outcome


def sweep(
    points: Sequence[tuple[str, Profile, Request]], watch: Callable[[int, str, SearchState], None]
) -> list[Point]:
    """Solve every point; ``watch`` gets the number, label and search state of the one under way."""
    return [
        Point(label, profile, request, solve(profile, request, partial(watch, number, label)))
        for number, (label, profile, request) in enumerate(points)
    ]


def on_front(points: Sequence[Point]) -> list[bool]:
    """Whether no other point's plan is as fast in less memory, or faster in as much (the Pareto front)."""
    costs = [_cost(point) for point in points]
    return [
        mine is not None
        and not any(
            other is not None and other != mine and other[0] <= mine[0] and other[1] <= mine[1]
            for other in costs
        )
        for mine in costs
    ]


def _cost(point: Point) -> tuple[float, int] | None:
    if not isinstance(point.outcome, Solved):
        return None
    best = point.outcome.best
    return best.predicted.period_ns, best.memory.peak


def with_network(profile: Profile, factor: float) -> Profile:
    """The profile with collectives of the slowest tier ``factor`` times as fast, latency included."""
    low = profile.mesh.tier_bounds[-1][0]
    curves = []
    for curve in profile.collectives:
        if curve.high > low:
            points = [p.model_copy(update={"seconds": p.seconds / factor}) for p in curve.points]
            curve = curve.model_copy(update={"points": type(curve.points)(points)})
        curves.append(curve)
    return profile.model_copy(update={"collectives": type(profile.collectives)(curves)})
