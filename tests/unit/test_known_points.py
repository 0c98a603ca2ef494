"""Where the answer is known: schemes that should come out, and what can never make a plan slower."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from hzplan.cost.model import tensors_of
from hzplan.formats.profile import Profile
from hzplan.solver.solve import Request, Solved, solve
from hzplan.solver.sweep import with_network
from tests.cli.command import ROOT
from tests.instances import random_profile

GIB = 2**30


def _mostly(profile: Profile, request: Request) -> tuple[int, ...]:
    """The shards of parameter, gradient and optimizer state that most bytes have."""
    outcome = solve(profile, request)
    assert isinstance(outcome, Solved)
    count: Counter[tuple[int, ...]] = Counter()
    for unit, tensors in tensors_of(profile).items():
        for tensor, triple in zip(tensors, outcome.best.levels.get(unit, ()), strict=True):
            count[triple.shards(profile.mesh)] += tensor.nbytes
    (shards, nbytes), *_ = count.most_common()
    assert nbytes > 0.8 * sum(count.values())
    return shards


@pytest.mark.long
@pytest.mark.parametrize(
    ("memory", "network", "shards"),
    [
        (1000, 0.05, (1, 1, 64)),  # loose memory, a slow network: ZeRO-1
        # Tight, a fast inner tier: shards in the node, optimizer state everywhere.
        (30, 0.05, (8, 8, 64)),
    ],
)
def test_known_schemes_come_out(memory: int, network: float, shards: tuple[int, ...]) -> None:
    """Llama-3 8B on 8 nodes of 8."""
    profile = Profile.load(ROOT / "plans" / "profiles" / "llama3-8b-h100-8.json")
    assert _mostly(with_network(profile, network), Request(memory * GIB, 512, gap=0.01)) == shards


@pytest.mark.parametrize("seed", range(6000, 6012))
def test_a_faster_link_and_more_choices_are_never_slower(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, micro_batches=(1,))
    request = Request(
        rng.choice((80_000, GIB)), profile.mesh.world * 2, gap=0.0, depths=(1,), time_limit_s=600
    )
    found = solve(profile, request)
    if not isinstance(found, Solved):
        return
    for other, asked in (
        (with_network(profile, 2.0), request),
        (profile, replace(request, depths=(1, 2))),
        (profile, replace(request, memory_bytes=2 * request.memory_bytes)),
    ):
        better = solve(other, asked)
        assert isinstance(better, Solved)
        assert better.bound_ns <= found.bound_ns * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(6000, 6006))
def test_the_order_in_which_units_are_listed_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, micro_batches=(1,))
    request = Request(GIB, profile.mesh.world * 2, gap=0.0, depths=(1, 2), time_limit_s=600)
    turned = profile.model_copy(update={"units": type(profile.units)(reversed(profile.units))})
    one, other = solve(profile, request), solve(turned, request)
    assert isinstance(one, Solved) and isinstance(other, Solved)
    assert one.bound_ns == pytest.approx(other.bound_ns, rel=1e-6)
    assert one.best.predicted.period_ns == pytest.approx(other.best.predicted.period_ns, rel=1e-6)
