"""The replay: by hand on tiny schedules, and against an independent answer on any."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hzplan.core.schedule import COMPUTE_STREAM, Kind, Schedule, Use
from hzplan.cost.events import event_graph
from hzplan.cost.interference import Interference
from hzplan.cost.lateness import Late, late_in
from hzplan.cost.simulate import critical, objective_ns, replay, replay_shared, tier_loads_ns
from tests.unit.steps import Step, chain, steps


def durations(schedule: Schedule, by_name: Mapping[str, int]) -> list[int]:
    """Nanoseconds by a task's text, or by its first word; else 0."""
    known = {str(task) for task in schedule.tasks} | {
        str(task).split(maxsplit=1)[0] for task in schedule.tasks
    }
    known |= {task.kind.value for task in schedule.tasks}
    assert set(by_name) <= known
    return [
        next(
            (by_name[key] for key in (str(t), str(t).split(maxsplit=1)[0], t.kind.value) if key in by_name), 0
        )
        for t in schedule.tasks
    ]


def starts(schedule: Schedule, start_ns: Sequence[float]) -> dict[str, float]:
    return {str(task): start_ns[task.index] for task in schedule.tasks}


# ---- by hand -----------------------------------------------------------------------------------------------


def test_compute_alone() -> None:
    schedule = chain(2).build()
    timeline = replay(schedule, durations(schedule, {"compute": 10}))
    assert timeline.period_ns == 40
    assert timeline.exposed_ns == {"tier 0": 0, "optim": 0}
    assert [timeline.start_ns[task.index] for task in schedule.compute] == [0, 10, 20, 30]


def test_the_first_unshard_waits_for_the_last_steps_parameters() -> None:
    """F u0, F u1, B u1, B u0; u1 stays whole at the turn.

    The last reduce ends 8 after compute; then u0 is gathered in 5, and only then its forward begins.
    """
    schedule = chain(2).build()
    timeline = replay(schedule, durations(schedule, {"compute": 10, "unshard": 5, "final-reduce": 8}))
    assert timeline.period_ns == 40 + 8 + 5
    assert timeline.exposed_ns == {"tier 0": 13, "optim": 0}
    at = starts(schedule, timeline.start_ns)
    assert (at["unshard.0@0 u0"], at["compute@0 u0"], at["unshard.0@1 u1"]) == (8, 13, 13)
    assert (at["compute@1 u1"], at["unshard.0@3 u0"]) == (23, 33)  # the window opens when compute@1 ends
    assert (at["compute@2 u1"], at["final-reduce.0@2 u1"]) == (33, 43)
    assert (at["compute@3 u0"], at["final-reduce.0@3 u0"]) == (43, 53)
    assert timeline.end_ns[schedule.tasks[-1].index] == 61


def test_streams_share_a_tier() -> None:
    """Gathering u0 for backward takes 20 from 25 on; reducing u1 takes 8 from 35 on.

    Alone they end at 45 and 43. Sharing the link from 35 on: the reduce at 51, then 2 are left of the other.
    """
    schedule = chain(2).build()
    lengths = durations(schedule, {"compute": 10, "unshard": 5, "unshard.0@3": 20, "final-reduce": 8})
    alone, shared = replay(schedule, lengths), replay_shared(schedule, lengths)
    compute = schedule.compute[3].index
    assert alone.start_ns[compute] - alone.start_ns[schedule.compute[0].index] == 45 - 5
    assert shared.start_ns[compute] - shared.start_ns[schedule.compute[0].index] == pytest.approx(53 - 5)
    assert alone.period_ns == 5 + 10 + 10 + 20 + 10 + 8
    assert shared.period_ns == pytest.approx(5 + 10 + 10 + 28 + 10 + 8)
    assert shared.exposed_ns == {"tier 0": pytest.approx(13 + 18), "optim": 0}
    assert tier_loads_ns(schedule, lengths) == [5 + 5 + 20 + 8 + 8]
    assert objective_ns(schedule, lengths) == alone.period_ns


def test_the_slowest_rank_is_waited_for_where_ranks_meet() -> None:
    """Never longer than if every use took as long as on its slowest rank; who is early waits."""
    schedule = chain(1, clip=True).build()
    lengths = durations(schedule, {"compute": 90, "unshard": 10, "final-reduce": 10})
    late = [Late(30, 90) if task.kind is Kind.COMPUTE else Late() for task in schedule.tasks]
    alone, late_too = replay_shared(schedule, lengths), replay_shared(schedule, lengths, None, late)
    uses = len(schedule.compute)
    assert alone.period_ns < late_too.period_ns <= alone.period_ns + uses * 30
    assert sum(late_too.exposed_ns.values()) > sum(alone.exposed_ns.values())


def test_two_tasks_of_a_tier_at_once_collide() -> None:
    """As in the test before the last: 8 of each are beside each other, and now take half as long again."""
    schedule = chain(2).build()
    lengths = durations(schedule, {"compute": 10, "unshard": 5, "unshard.0@3": 20, "final-reduce": 8})
    collide = replay_shared(schedule, lengths, Interference((0.0,), (1.0,), (1.5,)))
    gone = replay_shared(schedule, lengths)
    assert collide.period_ns == pytest.approx(gone.period_ns + 0.5 * 16)


def test_waiting_is_booked_to_what_ended_last() -> None:
    schedule = chain(1, tiers=2).build()
    slow_network = durations(schedule, {"compute": 10, "unshard.1@0": 9})
    assert replay(schedule, slow_network).exposed_ns == {"tier 0": 0, "tier 1": 9, "optim": 0}
    both = durations(schedule, {"compute": 10, "unshard.1@0": 9, "unshard.0@0": 1})
    assert replay(schedule, both).exposed_ns == {"tier 0": 10, "tier 1": 0, "optim": 0}
    # What the step before did last on that stream ended long ago, although later in its own step.
    longer = chain(2, tiers=2).build()
    early = durations(longer, {"compute": 10, "unshard.1@0": 9, "unshard.0@3": 5})
    assert replay(longer, early).exposed_ns == {"tier 0": 0, "tier 1": 9, "optim": 0}
    optimizer = durations(schedule, {"compute": 10, "update": 7})
    assert replay(schedule, optimizer).exposed_ns == {"tier 0": 0, "tier 1": 0, "optim": 7}
    assert replay_shared(schedule, optimizer).exposed_ns == {"tier 0": 0, "tier 1": 0, "optim": 7}


def test_tiers_pipeline() -> None:
    """Three units to reduce over two tiers, 10 each, take 40 and not 60."""
    schedule = chain(3, tiers=2, prefetch=3).build()
    lengths = durations(schedule, {"final-reduce": 10})
    assert replay(schedule, lengths).period_ns == 40
    assert tier_loads_ns(schedule, lengths) == [30, 30]


def test_clipping_keeps_the_update_behind_all_gradients() -> None:
    lengths = {"compute": 10, "final-reduce": 8, "update": 6}
    free, clipped = chain(2).build(), chain(2, clip=True).build()
    # u1's gradient is there before compute ends: its update goes during u0's reduce.
    assert replay(free, durations(free, lengths)).period_ns == 40 + 8 + 6
    # Both wait for u0's gradient; u0, which is used first, is updated first, and u1 while u0 computes.
    assert replay(clipped, durations(clipped, lengths)).period_ns == 40 + 8 + 6
    timeline = replay(clipped, durations(clipped, lengths))
    gradients = max(timeline.end_ns[t.index] for t in clipped.tasks if t.kind is Kind.FINAL_REDUCE)
    assert all(timeline.start_ns[t.index] >= gradients for t in clipped.tasks if t.kind is Kind.UPDATE)


def test_a_tier_cannot_carry_more_than_its_load() -> None:
    """Gathering for one micro-batch while reducing another: each stream alone is faster than the link."""
    schedule = chain(6, prefetch=2, accumulation=4).build()
    lengths = durations(schedule, {"unshard": 10, "reduce": 10, "compute": 10})
    period = replay(schedule, lengths).period_ns
    (load,) = tier_loads_ns(schedule, lengths)
    assert (
        period < load == objective_ns(schedule, lengths) <= replay_shared(schedule, lengths).period_ns + 1e-6
    )


def test_durations_must_be_of_this_schedule() -> None:
    with pytest.raises(ValueError, match="durations needed, not 3"):
        replay(chain(2).build(), [1, 2, 3])


# ---- any schedule ------------------------------------------------------------------------------------------


@st.composite
def timed(draw: st.DrawFn) -> tuple[Schedule, list[int]]:
    """Durations by kind and tier, by unit too, or each its own; many of them zero, some far longer."""
    schedule = draw(st.one_of(steps(max_accumulation=3), chains())).build()
    rng = random.Random(draw(st.integers(0, 10**9)))
    key = draw(
        st.sampled_from(
            [lambda t: (t.kind, t.tier), lambda t: (t.kind, t.tier, t.units), lambda t: t.index],
        )
    )
    zeros = draw(st.sampled_from([0.0, 0.3, 0.6]))
    length: dict[object, int] = {}
    for task in schedule.tasks:
        length.setdefault(key(task), 0 if rng.random() < zeros else int(10 ** rng.uniform(0, 3)))
    nothing = (Kind.BEGIN, Kind.STEP)
    return schedule, [0 if task.kind in nothing else length[key(task)] for task in schedule.tasks]


def chains() -> st.SearchStrategy[Step]:
    return st.builds(
        chain,
        st.integers(1, 6),
        tiers=st.integers(1, 3),
        prefetch=st.integers(1, 3),
        accumulation=st.integers(1, 3),
        clip=st.booleans(),
    )


def can_repeat_every(period: Fraction, schedule: Schedule, lengths: Sequence[int]) -> bool:
    """Whether start times exist that repeat at this period: no cycle is longer (Bellman-Ford)."""
    start = [Fraction(0)] * len(lengths)
    for _ in range(len(lengths) + 1):
        changed = False
        for task in schedule.tasks:
            earliest = max(
                [start[task.index]]
                + [start[u] + lengths[u] for u in task.after]
                + [start[u] + lengths[u] - period for u in task.after_previous]
            )
            changed |= earliest > start[task.index]
            start[task.index] = earliest
        if not changed:
            return True
        if start[0] > 4 * sum(lengths):
            return False
    return False


@given(timed())
@settings(max_examples=60)
def test_the_period_is_the_least_that_the_dag_allows(drawn: tuple[Schedule, list[int]]) -> None:
    schedule, lengths = drawn
    period = Fraction(replay(schedule, lengths).period_ns).limit_denominator(24)
    assert can_repeat_every(period, schedule, lengths)
    assert period == 0 or not can_repeat_every(period * Fraction(99, 100), schedule, lengths)


@given(timed())
def test_no_stream_and_no_tier_carries_more_than_a_period(drawn: tuple[Schedule, list[int]]) -> None:
    schedule, lengths = drawn
    alone, shared = replay(schedule, lengths), replay_shared(schedule, lengths)
    for tasks in schedule.streams.values():
        assert sum(lengths[task.index] for task in tasks) <= alone.period_ns
    loads = tier_loads_ns(schedule, lengths)
    assert loads == [
        sum(length for task, length in zip(schedule.tasks, lengths, strict=True) if task.tier == tier)
        for tier in range(schedule.tiers)
    ]
    assert objective_ns(schedule, lengths) == max(alone.period_ns, *loads)
    assert shared.period_ns >= objective_ns(schedule, lengths) - 1e-6


@st.composite
def disturbed(draw: st.DrawFn) -> tuple[Schedule, list[int], Interference]:
    """A timed schedule, and what its tiers cost compute and the reverse."""
    schedule, lengths = draw(timed())
    shares = st.floats(0, 0.9)
    lost = tuple(draw(shares) for _ in range(schedule.tiers))
    return (
        schedule,
        lengths,
        Interference(
            lost,
            *(tuple(draw(st.floats(1, 4)) for _ in lost) for _ in range(2)),
            wakeup_ns=draw(st.sampled_from([0.0, 3.5])),
        ),
    )


@given(disturbed())
def test_interference_makes_nothing_faster_and_keeps_the_bound(
    drawn: tuple[Schedule, list[int], Interference],
) -> None:
    schedule, lengths, cost = drawn
    assert objective_ns(schedule, lengths, cost) >= objective_ns(schedule, lengths)
    shared = replay_shared(schedule, lengths, cost)
    assert shared.period_ns >= objective_ns(schedule, lengths, cost) * (1 - 1e-9) - 1e-6
    none = replay_shared(schedule, lengths, Interference.none(schedule.tiers))
    assert none == replay_shared(schedule, lengths)


@given(disturbed())
def test_no_window_is_longer_than_the_time_between_its_ends(
    drawn: tuple[Schedule, list[int], Interference],
) -> None:
    """Of every window that lies in a step, in the replay."""
    schedule, lengths, cost = drawn
    graph, found = event_graph(schedule, cost), replay_shared(schedule, lengths, cost)
    if not len(graph.windows.end):
        return
    which, taken, _ = graph.long_windows(np.array(lengths, dtype=float))
    for window, least in zip(which, taken, strict=True):
        begin, end = int(graph.windows.begin[window]), int(graph.windows.end[window])
        if begin >= 0:
            assert found.start_ns[end] - found.end_ns[begin] >= least * (1 - 1e-9) - 1e-3


@given(disturbed(), st.data())
def test_no_more_is_done_than_processors_do(
    drawn: tuple[Schedule, list[int], Interference], data: st.DataObject
) -> None:
    """Whatever share of them each task asks for, and however late ranks are."""
    schedule, lengths, cost = drawn
    shares = [data.draw(st.floats(0, 1.3)) for _ in lengths]
    busy = [share * length for share, length in zip(shares, lengths, strict=True)]
    late = [
        Late(5.0, float(length)) if task.stream == COMPUTE_STREAM else Late()
        for task, length in zip(schedule.tasks, lengths, strict=True)
    ]
    alone = objective_ns(schedule, lengths, cost)
    assert objective_ns(schedule, lengths, cost, processor_ns=busy) == pytest.approx(max(alone, sum(busy)))
    for ranks in (None, late):
        found = replay_shared(schedule, lengths, cost, ranks, busy)
        assert found.period_ns >= max(alone, sum(busy)) * (1 - 1e-9) - 1e-6
        assert replay_shared(schedule, lengths, cost, ranks, [0.0] * len(busy)) == replay_shared(
            schedule, lengths, cost, ranks
        )


def test_who_sends_nothing_waits_for_nobody() -> None:
    """Without gathers ranks meet once a step, where gradients are summed, and not before every use."""
    schedule = replace(chain(4), accumulation=2).build()
    late = [Late(3.0, 10.0) if task.kind is Kind.COMPUTE else Late() for task in schedule.tasks]
    sums = durations(schedule, {"compute": 10, "final-reduce": 1})
    gathers = durations(schedule, {"compute": 10, "final-reduce": 1, "unshard": 1})
    computed = sum(length for t, length in zip(schedule.tasks, sums, strict=True) if t.kind is Kind.COMPUTE)
    of_ranks = late_in(
        2,
        [
            (*reversed(divmod(t.position, 8)), Late(3.0, 10.0))
            for t in schedule.tasks
            if t.kind is Kind.COMPUTE
        ],
    )
    # After the last rank's last use comes u0's gradient alone.
    alone = replay_shared(schedule, sums, late=late).period_ns
    assert alone == pytest.approx(computed + 1 + sum(max(ranks) for ranks in of_ranks) / len(of_ranks))
    assert replay_shared(schedule, gathers, late=late).period_ns > alone
    graph = event_graph(schedule, Interference.none(schedule.tiers), late)
    assert graph.period(np.array(sums, dtype=float)) == pytest.approx(alone)
    assert graph.period(np.array(gathers, dtype=float)) > alone


def test_where_nothing_is_sent_the_slowest_rank_says_how_long_steps_are() -> None:
    """Of ranks that never meet the first one may be faster than the mean, which bounds are of."""
    schedule = chain(2).build()
    lengths = durations(schedule, {"compute": 10})
    late = [Late(3.0, 10.0) if task.kind is Kind.COMPUTE else Late() for task in schedule.tasks]
    of_ranks = late_in(
        1, [(t.position, 0, Late(3.0, 10.0)) for t in schedule.tasks if t.kind is Kind.COMPUTE]
    )
    longest = 40 + max(sum(steps) for steps in zip(*of_ranks, strict=True)) / len(of_ranks)
    assert longest > 40
    assert replay_shared(schedule, lengths, late=late).period_ns == pytest.approx(longest)
    cost = Interference.none(schedule.tiers)
    assert objective_ns(schedule, lengths, cost, event_graph(schedule, cost, late)) == pytest.approx(longest)


def test_a_step_that_only_waits_for_late_ranks_ends() -> None:
    """Its tasks take no time, so what compute waited for is none of them: its gather waited for itself."""
    schedule = Step((Use("u0", "forward"),), {"u0": ("u0",)}, trainable=()).build()
    late = [Late(5.0, 0.0) if task.stream == COMPUTE_STREAM else Late() for task in schedule.tasks]
    assert replay_shared(schedule, [0] * len(schedule.tasks), late=late).period_ns > 0


def test_messages_get_processors_first() -> None:
    """u1's gradient travels while u0 computes backward, u0's afterwards, alone."""
    schedule = chain(2).build()
    lengths = durations(schedule, {"compute": 10, "final-reduce": 5})
    busy = [
        (1.0 if task.stream == COMPUTE_STREAM else 0.4) * length
        for task, length in zip(schedule.tasks, lengths, strict=True)
    ]
    assert replay_shared(schedule, lengths, processor_ns=busy).period_ns == pytest.approx(40 + 0.4 * 5 + 5)


def test_compute_and_communication_slow_each_other() -> None:
    """u1's gradient travels while u0 computes backward, u0's afterwards, alone."""
    schedule = chain(2).build()
    lengths = durations(schedule, {"compute": 10, "final-reduce": 5})
    assert replay_shared(schedule, lengths).period_ns == 40 + 5
    cost = Interference((0.5,), (1.2,), (1.0,))
    # Of 5 the link takes 6 beside compute, which gets 3 done meanwhile, and needs 7 more.
    assert replay_shared(schedule, lengths, cost).period_ns == pytest.approx(30 + 6 + 7 + 5)
    # One window from u1's gradient to u0's: 10 of compute beside 5 of the link, then those 5 again.
    assert objective_ns(schedule, lengths, cost) == pytest.approx(30 + 10 + 0.5 * 1.2 * 5 + 5)
    cost = Interference((0.8,), (1.0,), (1.0,))
    assert objective_ns(schedule, lengths, cost) == pytest.approx(30 + 10 + 0.8 * 5 + 5)
    assert replay_shared(schedule, lengths, cost).period_ns == pytest.approx(30 + 5 + 9 + 5)


def time_in_modes(cost: Interference, compute: float, loads: list[float]) -> float:
    """The least time in which compute and loads are done, by a linear program over the modes."""
    problem, spent = pulp.LpProblem(), []
    for computing, *at_work in itertools.product((0, 1), repeat=len(loads) + 1):
        speed = float(computing)
        for lost, busy in zip(cost.compute_loss, at_work, strict=True):
            speed *= 1 - lost * busy
        slow = cost.communication_slowdown
        rates = [busy / (s if computing else 1) for busy, s in zip(at_work, slow, strict=True)]
        spent.append((pulp.LpVariable(f"t{len(spent)}", lowBound=0), speed, rates))
    problem += pulp.lpSum(time for time, _, _ in spent)
    problem += pulp.lpSum(time * speed for time, speed, _ in spent) >= compute
    for tier, load in enumerate(loads):
        problem += pulp.lpSum(time * rates[tier] for time, _, rates in spent) >= load
    problem.solve(pulp.HiGHS(msg=False))
    return float(pulp.value(problem.objective))


@pytest.mark.parametrize("tiers", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
def test_energies_are_the_least_time_of_all_mixtures(tiers: int, seed: int) -> None:
    rng = random.Random(seed)
    losses = tuple(rng.choice([0.0, rng.uniform(0, 0.95)]) for _ in range(tiers))
    slow = tuple(rng.choice([1.0, rng.uniform(1, 3)]) for _ in range(tiers))
    cost = Interference(losses, slow, (1.0,) * tiers)
    for _ in range(6):
        compute, loads = rng.uniform(0, 10), [rng.uniform(0, 10) for _ in range(tiers)]
        bound, least = (
            max(one.at(compute, loads) for one in cost.energies),
            time_in_modes(cost, compute, loads),
        )
        assert bound <= least * (1 + 1e-6)
        if tiers <= 3:
            assert bound == pytest.approx(least, rel=1e-6)


def test_what_waited_for_another_stream_begins_when_it_has_heard_of_it() -> None:
    """Two units forward and backward: gathers before, reductions after, and the updates that those end in."""
    schedule = chain(2).build()
    lengths = durations(schedule, {"compute": 10, "final-reduce": 5})
    cost = replace(Interference.none(schedule.tiers), wakeup_ns=2.0)
    found = replay_shared(schedule, lengths, cost)
    # u1's reduction begins 2 late beside compute; u0's 2 after the last compute, and step 2 after its end.
    assert found.period_ns == replay_shared(schedule, lengths).period_ns + 2 + 2
    assert sum(found.exposed_ns.values()) == 5 + 2 + 2
    lengths = durations(schedule, {"compute": 10})
    assert replay_shared(schedule, lengths, cost).period_ns == 40  # nothing is handed to anybody


@given(disturbed(), st.data())
def test_stragglers_and_wakeups_together_keep_the_bound(
    drawn: tuple[Schedule, list[int], Interference], data: st.DataObject
) -> None:
    schedule, lengths, cost = drawn
    late = [
        Late(data.draw(st.integers(0, 2 * n)), n) if t.kind is Kind.COMPUTE else Late()
        for t, n in zip(schedule.tasks, lengths, strict=True)
    ]
    found = replay_shared(schedule, lengths, replace(cost, wakeup_ns=3.5), late)
    alone = replay_shared(schedule, lengths, replace(cost, wakeup_ns=3.5))
    assert found.period_ns > 0 or not any(lengths)
    bound = objective_ns(schedule, lengths, cost)
    assert alone.period_ns >= bound * (1 - 1e-9) - 1e-6
    with_late = objective_ns(schedule, lengths, cost, event_graph(schedule, cost, late))
    assert found.period_ns >= with_late * (1 - 1e-9) - 1e-6
    assert all(end >= start for start, end in zip(found.start_ns, found.end_ns, strict=True))


@given(timed(), st.data())
def test_nothing_gets_faster_when_a_task_gets_longer(
    drawn: tuple[Schedule, list[int]], data: st.DataObject
) -> None:
    schedule, lengths = drawn
    longer = list(lengths)
    longer[data.draw(st.integers(0, len(lengths) - 1))] += data.draw(st.integers(1, 1000))
    assert replay(schedule, longer).period_ns >= replay(schedule, lengths).period_ns
    assert objective_ns(schedule, longer) >= objective_ns(schedule, lengths)


@given(timed())
def test_a_timeline_keeps_the_order_of_the_dag(drawn: tuple[Schedule, list[int]]) -> None:
    schedule, lengths = drawn
    for timeline in (replay(schedule, lengths), replay_shared(schedule, lengths)):
        start, end, period = timeline.start_ns, timeline.end_ns, timeline.period_ns
        assert start[0] == 0
        for task, length in zip(schedule.tasks, lengths, strict=True):
            assert end[task.index] - start[task.index] >= length - 1e-3
            assert all(start[task.index] >= end[u] - 1e-3 for u in task.after)
            assert all(start[task.index] >= end[u] - period - 1e-3 for u in task.after_previous)
    alone = replay(schedule, lengths)
    assert all(
        alone.end_ns[i] - alone.start_ns[i] == pytest.approx(length) for i, length in enumerate(lengths)
    )


@given(timed())
def test_a_period_is_compute_and_exposed_time(drawn: tuple[Schedule, list[int]]) -> None:
    schedule, lengths = drawn
    compute = sum(lengths[task.index] for task in schedule.streams[COMPUTE_STREAM])
    for timeline in (replay(schedule, lengths), replay_shared(schedule, lengths)):
        assert set(timeline.exposed_ns) == {f"tier {t}" for t in range(schedule.tiers)} | {"optim"}
        assert all(seconds >= 0 for seconds in timeline.exposed_ns.values())
        assert compute + sum(timeline.exposed_ns.values()) == pytest.approx(timeline.period_ns, abs=1e-3)


@given(timed(), st.integers(2, 9))
def test_time_has_no_unit(drawn: tuple[Schedule, list[int]], factor: int) -> None:
    schedule, lengths = drawn
    scaled = [length * factor for length in lengths]
    assert replay(schedule, scaled).period_ns == factor * replay(schedule, lengths).period_ns
    assert replay_shared(schedule, scaled).period_ns == pytest.approx(
        factor * replay_shared(schedule, lengths).period_ns, abs=1e-2
    )


@given(steps(), st.integers(0, 2**16))
def test_what_a_steps_end_waits_for_is_one_chain(step: Step, seed: int) -> None:
    schedule, rng = step.build(), random.Random(seed)
    timeline = replay(schedule, [rng.randint(0, 50) for _ in schedule.tasks])
    chain_ = sorted(critical(schedule, timeline))
    assert chain_[-1] == schedule.streams[COMPUTE_STREAM][-1].index
    for before, index in itertools.pairwise(chain_):
        task = schedule.tasks[index]
        assert before in task.after and timeline.end_ns[before] == timeline.start_ns[index]
