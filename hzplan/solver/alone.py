"""Whether one group of the slowest tier, a site or a node, trains faster by itself than all of them together.

Where the link between them is slow enough no plan helps: the others' gradients cost more than they bring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from hzplan.cost.collectives import with_ranks
from hzplan.errors import UserError
from hzplan.formats.profile import Profile
from hzplan.solver.search import Request
from hzplan.solver.solve import Outcome, Solved

TIME_SHARE = 0.5
"""Of the time limit, for the question of one group."""


@dataclass(frozen=True)
class Alone:
    """One of ``groups`` groups by itself: its profile, question and answer, and how many times as many
    sequences a second it trains as all together."""

    groups: int
    tier: str
    profile: Profile
    request: Request
    solved: Solved
    times: float


def one_group(
    profile: Profile,
    request: Request,
    together: Solved,
    solve: Callable[[Profile, Request], Outcome],
) -> Alone | None:
    """The plan of one group of the slowest tier, with its share of the batch, where that trains more
    sequences a second than the plan of all; else None.

    Not asked where it cannot be: a group takes at least as long as its computation. Nor under pins or for
    other runtimes, which are about all ranks, nor for a rank's share of a model.
    """
    groups = prod(profile.mesh.tiers[-1])
    best = together.best
    if groups == 1 or request.pins or request.target is not None or profile.parallel is not None:
        return None
    uses = range(len(profile.uses))
    computes = sum(best.model.compute_ns(use, best.micro_batch) for use in uses) * best.schedule.accumulation
    if computes * groups >= best.predicted.period_ns:
        return None
    try:
        alone = with_ranks(profile, profile.mesh.world // groups)
    except UserError:  # of a cluster of the user's own, whose file is not at hand
        return None
    wire = None if request.wire is None else request.wire.on_tiers(len(alone.mesh.tiers))
    asked = replace(
        request,
        global_batch=request.global_batch // groups,
        time_limit_s=TIME_SHARE * request.time_limit_s,
        wire=wire,
    )
    outcome = solve(alone, asked)
    if not isinstance(outcome, Solved):
        return None
    times = best.step_s / (groups * outcome.best.step_s)
    tier = profile.cluster.tier_names[-1]
    return Alone(groups, tier, alone, asked, outcome, times) if times > 1 else None
