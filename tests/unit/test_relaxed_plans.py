"""Timetables that hide transfers behind steps, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

import pytest

from hzplan.core.hierarchy import Mesh
from hzplan.core.layout import TensorSpec
from hzplan.core.relaxed import Rule
from hzplan.errors import UserError
from hzplan.formats.cluster import find_cluster
from hzplan.formats.profile import CopyPoint, HostEntry, InterferenceEntry, Profile
from hzplan.models.workload import load
from hzplan.profiler.analytic import analyse
from hzplan.solver.relaxed import LEAST_INTERVAL, STEPS_OF_DELAY, Allowed, Relaxed, relax
from hzplan.solver.search import Request
from hzplan.solver.solve import Infeasible, Solved, solve
from tests.unit.test_wire import profile_with

BATCH = 16
SLOW = 2e7


def relaxed(text: str, profile: Profile, **options: object) -> Relaxed:
    found = relax(Allowed.parse(text), profile, request(**options), solve)
    assert isinstance(found, Relaxed)
    return found


def request(**options: object) -> Request:
    return replace(Request(1 << 40, BATCH, time_limit_s=20), **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_with((1e12, SLOW), 0.0)


@pytest.mark.parametrize("rule", ["periodic", "plain", "delta", "ema"])
def test_transfers_hide_and_do_not_pile_up(profile: Profile, rule: Rule) -> None:
    found = relaxed(rule, profile)
    tier = found.tier
    assert tier.transfer_s <= tier.delay * tier.step_s * (1 + 1e-9)
    assert tier.transfer_s <= tier.every * tier.step_s * (1 + 1e-9)
    assert tier.delay == max(1, ceil(tier.transfer_s / tier.step_s - 1e-9))
    if rule == "periodic":
        assert tier.every == max(tier.delay + 1, ceil(LEAST_INTERVAL / tier.parts))
    else:
        assert tier.every == tier.delay
    assert tier.groups == 2 and tier.tier == profile.cluster.tier_names[-1]
    rates = found.sequences_per_s
    assert rates["all, relaxed"] == pytest.approx(2 * rates["one group"])  # nothing disturbs compute here
    assert found.pays


@pytest.mark.long
def test_of_all_numbers_of_fragments_the_least_out_of_date(profile: Profile) -> None:
    def age(found: Relaxed) -> float:
        return found.tier.policy.interval / 2 + STEPS_OF_DELAY * found.tier.delay

    chosen = relaxed("periodic", profile)
    units = sum(bool(unit.tensors) for unit in profile.units)
    others = [relaxed(f"periodic,fragments={parts}", profile) for parts in range(1, units + 1)]
    assert {one.tier.parts for one in others} == {*range(1, units + 1)}
    assert age(chosen) == min(map(age, others))


def test_outer_momentum_does_not_add_up_the_same_steps() -> None:
    """However fast the link is; a user may say otherwise, and without momentum nothing adds up."""
    fast = profile_with((1e12, 1e11), 0.0)
    chosen = relaxed("periodic", fast).tier
    assert chosen.policy.interval == LEAST_INTERVAL and chosen.delay == 1
    assert relaxed("periodic,interval=4", fast).tier.policy.interval == 4
    assert relaxed("periodic,momentum=0", fast).tier.policy.interval < LEAST_INTERVAL


def test_what_travels_narrow_comes_sooner(profile: Profile) -> None:
    exact, narrow = relaxed("periodic", profile).tier, relaxed("periodic,wire=int8", profile).tier
    assert narrow.delay < exact.delay and narrow.policy.interval <= exact.policy.interval
    assert narrow.wire == "int8"


def test_compute_that_transfers_disturb_takes_longer(profile: Profile) -> None:
    disturbed = profile.replaced(
        interference=tuple(
            InterferenceEntry(compute_loss=0.2, communication_slowdown=1.5, contention=1.0)
            for _ in profile.mesh.tiers
        )
    )
    found = relaxed("periodic", disturbed)
    alone = found.solved.best.step_s
    assert alone < found.tier.step_s < alone / (1 - 0.2) + 1e-9
    assert found.tier.transfer_s <= found.tier.delay * alone / (1 - 0.2) * (1 + 1e-9)


def test_a_fast_link_is_waited_for() -> None:
    found = relaxed("periodic", profile_with((1e12, 1e12), 0.0))
    assert isinstance(found.together, Solved)
    assert not found.pays


def test_outer_state_is_in_the_memory_of_the_plan(profile: Profile) -> None:
    """Three tensors of the parameters' size, cut like the optimizer's: one group's plan has them in its peak,
    and a budget that does not is refused."""
    found = relaxed("periodic", profile)
    before = found.profile.optimizer.state_per_element - 3
    assert before == profile.optimizer.state_per_element
    peak = found.solved.best.memory.peak
    tight = relax(Allowed.parse("periodic"), profile, request(memory_bytes=peak // 4), solve)
    assert isinstance(tight, Infeasible)


def shards(found: Relaxed) -> Iterator[tuple[TensorSpec, int]]:
    """Tensors of one group's plan, and how many shards their optimizer state has."""
    best = found.solved.best
    for unit, levels in best.levels.items():
        for spec, of in zip(best.model.tensors[unit], levels, strict=True):
            yield spec, found.profile.mesh.shards[of.optim]


def on_cpus(profile: Profile) -> Profile:
    """On GPUs slices are not shared by ranks: how long that gather takes has not been measured there."""
    return profile.replaced(cluster=profile.cluster.model_copy(update={"device": "cpu"}))


def test_shares_of_the_same_slices_are_gathered_in_the_group(profile: Profile) -> None:
    """What ranks with the same slices send takes as long as where slices are their own; then they gather."""
    profile = on_cpus(profile)
    free = relaxed("periodic", profile)
    sharded = relaxed("periodic", profile, pins=(f"*=*,*,{free.profile.mesh.world}",))
    replicated = relaxed("periodic", profile, pins=("*=1,1,1",))
    assert sharded.tier.transfer_s == pytest.approx(replicated.tier.transfer_s)
    kept = sharded.tier.kept_bytes, replicated.tier.kept_bytes
    assert kept[1] == pytest.approx(kept[0] * free.profile.mesh.world, rel=0.02)
    assert sharded.tier.step_s - sharded.solved.best.step_s < 1e-12
    assert replicated.tier.step_s > replicated.solved.best.step_s
    assert free.tier.step_s <= min(sharded.tier.step_s, replicated.tier.step_s) * 1.01


def test_inside_of_a_group_levels_are_those_of_its_own_mesh() -> None:
    """A group of eight is split otherwise than eight of them are."""
    cluster = "h100-8x400g"
    profile = analyse(
        *(load("gpt:tiny"), *find_cluster(cluster)),
        mesh=Mesh.of_tiers(8, 8),
        micro_batches=(1,),
        dtype="float32",
        optimizer="adamw",
    )
    asked = {"global_batch": 64, "pins": ("*=1,1,1",), "memory_bytes": 1 << 36}
    one = relaxed("periodic", on_cpus(profile), **asked)
    assert str(one.profile.mesh) != str(profile.mesh)


def with_host(profile: Profile, bytes_per_s: float) -> Profile:
    sizes = (1 << 10, 1 << 20, 1 << 30)
    points = tuple(CopyPoint(bytes=n, seconds=n / bytes_per_s, spread=0.0) for n in sizes)
    return profile.replaced(host=HostEntry(points=points))


@pytest.mark.long
def test_copies_are_on_the_host_where_that_is_faster_and_allowed(profile: Profile) -> None:
    """A budget that copies on the device leave too little of, or hardly any."""
    fast = with_host(profile, 1e10)
    least = relaxed("periodic,copies=host", fast)
    peak, kept = least.solved.best.memory.peak, least.tier.kept_bytes
    assert least.tier.copies == "host" and kept > 0
    values = sum(3 * 4 * -(-s.numel // n) for s, n in shards(least) if s.trainable)
    assert values <= kept < 1.1 * values  # and what aligns them
    tight = {"memory_bytes": peak + kept // 2, "time_limit_s": 8}
    chosen = relaxed("periodic", fast, **tight, host_bytes=kept)
    device = relax(Allowed.parse("periodic"), fast, request(**tight, host_bytes=kept - 1), solve)
    assert chosen.tier.copies == "host"
    assert not isinstance(device, Relaxed) or device.tier.step_s > chosen.tier.step_s
    with pytest.raises(UserError, match=f"a rank keeps {kept} bytes of other groups"):
        relaxed("periodic,copies=host", fast, host_bytes=kept - 1)
    with pytest.raises(UserError, match="knows no link to the host's memory"):
        relaxed("periodic,copies=host", profile.replaced(host=None))


def test_copies_stay_where_there_is_room(profile: Profile) -> None:
    assert relaxed("periodic", with_host(profile, 1e10), host_bytes=1 << 40).tier.copies == "device"


def test_copies_between_device_and_host_take_their_time(profile: Profile) -> None:
    fast, slow = (relaxed("periodic,copies=host", with_host(profile, rate)).tier for rate in (1e12, 1e8))
    assert slow.step_s > fast.step_s and slow.transfer_s == fast.transfer_s


def test_one_group_is_compared_without_what_groups_keep(profile: Profile) -> None:
    """What a budget is short of for copies, one group by itself is not."""
    free = relaxed("periodic", profile)
    assert free.alone is not None
    tight = relaxed("periodic", profile, memory_bytes=free.solved.best.memory.peak - 1)
    assert tight.alone is not None
    assert tight.step_s["one group"] <= tight.solved.best.step_s
    assert tight.alone.best.memory.peak <= free.solved.best.memory.peak - 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sometimes", "begin with periodic"),
        ("periodic,interval=soon", "no number"),
        ("periodic,interval=0", "at least 1"),
        ("periodic,wire=int3", "wire is exact"),
        ("periodic,every=3", "write interval"),
        ("periodic,copies=disk", "copies is device, host"),
        ("periodic,interval=2,fragments=1", "the shortest interval that hides is"),
        ("periodic,delay=1,fragments=1", "the shortest delay that hides it is"),
        ("periodic,fragments=4000", "at most"),
        ("periodic,mixing=2", "mixing"),
    ],
)
def test_what_makes_no_sense_or_does_not_hide(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        relaxed(text, profile_with((1e12, SLOW / 20), 0.0))
    assert "\n" not in str(caught.value)


def test_one_group_has_nobody_to_be_late_for(profile: Profile) -> None:
    found = relaxed("periodic", profile)
    with pytest.raises(UserError, match=r"--allow-stale.*one group"):
        relaxed(
            "periodic",
            found.profile.replaced(
                cluster=found.profile.cluster.model_copy(
                    update={"mesh": "2|1", "tier_names": profile.cluster.tier_names}
                )
            ),
        )
