"""The schedule: executed in order it computes the right thing, and whatever may overlap does not collide."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hzplan.core.buffers import Slots, assign_slots
from hzplan.core.layout import TensorSpec
from hzplan.core.order import CircularOrder, in_order, is_ahead
from hzplan.core.schedule import COMPUTE_STREAM, OPTIM_STREAM, Kind, MessageOrder, Schedule, Task, Use, build
from tests.unit.hazards import (
    Detector,
    edges,
    implied,
    in_lanes,
    other_tenants,
    reduced_together,
    reduced_units,
    without,
)
from tests.unit.steps import Step, chain, steps

# ---- structure ---------------------------------------------------------------------------------------------


@given(steps(ordered=True))
def test_the_launch_order_is_a_topological_order(step: Step) -> None:
    schedule = step.build()
    graph = schedule.graph()
    assert nx.is_directed_acyclic_graph(graph)
    assert [task.index for task in schedule.tasks] == list(range(len(schedule.tasks)))
    assert sorted(graph.nodes) == list(range(len(schedule.tasks)))
    assert all(before < after for before, after in graph.edges)
    unrolled = nx.DiGraph(
        [((s, a), (s, b)) for s in (0, 1) for a, b in graph.edges]
        + [((0, a), (1, b)) for a, b in graph.graph["previous"]]
    )
    assert nx.is_directed_acyclic_graph(unrolled)


@given(steps(ordered=True))
def test_streams_are_first_in_first_out_from_step_to_step(step: Step) -> None:
    schedule = step.build()
    for tasks in schedule.streams.values():
        assert all(left.index in right.after for left, right in itertools.pairwise(tasks))
        assert tasks[-1].index in tasks[0].after_previous
    assert sorted(t.index for tasks in schedule.streams.values() for t in tasks) == list(
        range(len(schedule.tasks))
    )
    for task in schedule.tasks:
        match task.kind:
            case Kind.BEGIN | Kind.COMPUTE | Kind.STEP:
                assert (task.stream, task.tier) == (COMPUTE_STREAM, -1)
            case Kind.UPDATE:
                assert (task.stream, task.tier) == (OPTIM_STREAM, -1)
            case Kind.FETCH | Kind.STORE | Kind.SAVE | Kind.LOAD:
                assert (task.stream, task.tier) == (task.kind.value, -1)
            case Kind.UNSHARD:
                assert task.stream == f"{'unshard' if step.order is None else 'link'}.{task.tier}"
            case Kind.REDUCE | Kind.FINAL_REDUCE:
                assert task.stream == f"{'reduce' if step.order is None else 'link'}.{task.tier}"
            case Kind.GRAD_GATHER | Kind.PARAM_GATHER:
                assert task.stream == f"{'gather' if step.order is None else 'link'}.{task.tier}"


@given(steps(ordered=True))
def test_an_order_says_which_message_of_a_tier_goes_first(step: Step) -> None:
    """By all of them in pairs; and nothing else differs from the same step without an order."""
    schedule, plain = step.build(), replace(step, order=None).build()
    assert Counter(map(str, schedule.tasks)) == Counter(map(str, plain.tasks))
    if step.order is None:
        assert schedule.tasks == plain.tasks
        return
    assert _needed(schedule) == {
        (before, after, later != (before.startswith("param_gather") != after.startswith("param_gather")))
        for before, after, later in _needed(plain)
        if before != "step" or not after.startswith("param_gather")
    } | {("begin", str(task), False) for task in _gathered_first(schedule)}
    numbers, zeros = dict(step.order.ahead), (0,) * step.tiers
    for tier in range(step.tiers):
        lane = [task for task in schedule.tasks if task.stream == f"link.{tier}"]
        sent = [task for task in lane if task.kind not in (Kind.PARAM_GATHER, Kind.GRAD_GATHER)]
        gathered = [task.position for task in lane if task.kind is Kind.GRAD_GATHER]
        assert gathered == sorted(gathered)
        reduces = [task for task in sent if task.kind is not Kind.UNSHARD]
        for place, gather in enumerate(lane):
            if gather.kind is Kind.PARAM_GATHER:
                needed = min(runs(step, unit)[0] for unit in gather.units) - step.order.sync
                unshards = [(at, task) for at, task in enumerate(lane) if task.kind is Kind.UNSHARD]
                assert all((task.position < needed) == (at < place) for at, task in unshards)
        ahead = {task: max(numbers.get(unit, zeros)[tier] for unit in task.units) for task in reduces}

        def reached(task: Task, reduces: list[Task] = reduces, ahead: dict[Task, int] = ahead) -> int:
            return max(one.position + ahead[one] for one in reduces if one.position <= task.position)

        for first, second in itertools.combinations(sent, 2):
            if first.kind is Kind.UNSHARD and second.kind is not Kind.UNSHARD:
                assert first.position <= reached(second)
            elif first.kind is not Kind.UNSHARD and second.kind is Kind.UNSHARD:
                assert reached(first) < second.position
            else:
                assert first.position <= second.position


def _needed(schedule: Schedule) -> set[tuple[str, str, bool]]:
    """Data dependencies: who needs whom, and whether of the step before."""
    text = [str(task) for task in schedule.tasks]
    now = {(text[u], str(task), False) for task in schedule.tasks for u in task.needs}
    return now | {(text[u], str(task), True) for task in schedule.tasks for u in task.needs_previous}


def _gathered_first(schedule: Schedule) -> list[Task]:
    """The gathers of updated parameters on the slowest tier, which the step's begin launches."""
    gathers = (task for task in schedule.tasks if task.kind is Kind.PARAM_GATHER)
    return [task for task in gathers if task.tier == schedule.tiers - 1]


def test_an_order_that_waits_for_itself_is_refused() -> None:
    """u6's gradients would wait for parameters that are launched when u5's are reduced, after them."""
    step = replace(chain(8, tiers=1, prefetch=1), gradient_buffers=1)
    assert in_order(step.build(), MessageOrder((("u6", (2,)),), 1)).order is not None
    with pytest.raises(CircularOrder, match="gathered after the gradients"):
        in_order(step.build(), MessageOrder((("u6", (9,)),), 1))
    assert is_ahead((0, 2, 2), 3)
    for wrong in ((1,), (2, 1), (-1, 0), (0, 1, 1)):
        assert not is_ahead(wrong, 2)


def runs(step: Step, unit: str) -> list[int]:
    """The positions for which a unit has to be unsharded, by walking through the step."""
    found, last = [], None
    for position, use in enumerate(step.uses * step.accumulation):
        if use.reads and unit in step.requires[use.unit]:
            # Kept while its next use is among the prefetch + 1 that follow.
            if last is None or position - last > step.prefetch + 1:
                found.append(position)
            last = position
    return found


def saved_units(step: Step) -> list[str]:
    """The units whose activations have time to go to the host and to come back."""
    found = []
    for unit in step.requires if step.saved else ():
        own = [(at, use.phase) for at, use in enumerate(step.uses) if use.unit == unit]
        if [phase for _, phase in own] == ["forward", "backward"]:
            (forward, _), (backward, _) = own
            found += [unit] * (backward - forward >= 2 * (step.prefetch + 1))
    return found


@given(steps(ordered=True))
def test_there_are_as_many_tasks_of_each_kind_as_the_step_needs(step: Step) -> None:
    schedule = step.build()
    complete = reduced_units(schedule, step.trainable)
    reduced = {
        some[-1]: [unit for use in some for unit in complete[use]]
        for some in reduced_together(schedule, complete)
    }
    trained = sum(map(len, reduced.values()))
    travelling = {runs(step, unit)[0] for units in reduced.values() for unit in units}
    unshards = {position for unit in step.requires for position in runs(step, unit)}
    expected = {
        Kind.BEGIN: 1,
        Kind.COMPUTE: len(step.uses) * step.accumulation,
        Kind.STEP: 1,
        Kind.UNSHARD: len(unshards) * step.tiers,
        Kind.REDUCE: len(reduced) * (step.accumulation - 1) * step.tiers,
        Kind.FINAL_REDUCE: len(reduced) * step.tiers,
        Kind.GRAD_GATHER: len(reduced) * step.tiers,
        Kind.UPDATE: trained,
        Kind.FETCH: trained * step.offload,
        Kind.STORE: trained * step.offload,
        Kind.SAVE: len(saved_units(step)) * step.accumulation,
        Kind.LOAD: len(saved_units(step)) * step.accumulation,
        Kind.PARAM_GATHER: len(travelling) * step.tiers,
    }
    assert Counter(task.kind for task in schedule.tasks) == {k: n for k, n in expected.items() if n}
    for task in schedule.tasks:
        if task.kind is Kind.UNSHARD:
            assert set(task.units) == {unit for unit in step.requires if task.position in runs(step, unit)}
        elif task.kind in (Kind.REDUCE, Kind.FINAL_REDUCE, Kind.GRAD_GATHER):
            assert list(task.units) == reduced[task.position % len(step.uses)]
        if task.kind is Kind.FINAL_REDUCE:
            assert schedule.micro_batch(task) == step.accumulation - 1
        elif task.kind is Kind.REDUCE:
            assert schedule.micro_batch(task) < step.accumulation - 1


@given(steps())
def test_the_text_of_a_task_names_it(step: Step) -> None:
    schedule = step.build()
    assert len({str(task) for task in schedule.tasks}) == len(schedule.tasks)
    assert [str(schedule.use(task)) for task in schedule.compute] == [
        str(use) for use in step.uses * step.accumulation
    ]


@given(steps())
def test_what_a_use_waits_for_is_launched_when_its_window_opens(step: Step) -> None:
    """By the end of the use prefetch + 1 before, and of no earlier one."""
    current = None
    for task in step.build().tasks:
        if task.stream == COMPUTE_STREAM:
            current = task
        elif task.kind in (Kind.UNSHARD, Kind.LOAD):
            assert current is not None
            opens = task.position - step.prefetch - 1
            assert (current.kind, current.position) == (
                (Kind.COMPUTE, opens) if opens >= 0 else (Kind.BEGIN, -1)
            )
        else:
            assert current is not None
            assert current.kind is Kind.STEP or current.position == task.position


@given(steps())
def test_updates_and_parameters_go_in_forward_order_but_unclipped_updates_as_gradients_arrive(
    step: Step,
) -> None:
    schedule = step.build()
    reduced = reduced_units(schedule, step.trainable)
    arrival = [unit for index in sorted(reduced) for unit in reduced[index]]

    def units(kind: Kind, tier: int) -> list[str]:
        found = [task for task in schedule.tasks if (task.kind, task.tier) == (kind, tier)]
        return [unit for task in found for unit in task.units]

    updated = units(Kind.UPDATE, -1)
    if step.clip:
        assert sorted(updated) == sorted(arrival)
        assert (first := [runs(step, unit)[0] for unit in updated]) == sorted(first)
    else:
        assert updated == arrival
    for tier in range(step.tiers):
        travelled = units(Kind.PARAM_GATHER, tier)
        assert sorted(travelled) == sorted(arrival)
        first_uses = [runs(step, unit)[0] for unit in travelled]
        assert first_uses == sorted(first_uses)


@given(st.integers(1, 8), st.integers(1, 3), st.integers(1, 3))
def test_a_chain_needs_a_buffer_for_each_unit_in_the_window(
    units: int, prefetch: int, accumulation: int
) -> None:
    step = chain(units, prefetch=prefetch, accumulation=accumulation)
    slots = slots_of(step, step.build(), [1] * units)
    assert len(set(slots.unshard.values())) == min(units, prefetch + 1)
    if accumulation == 1:  # else the last units of a micro-batch and the first of the next are neighbours
        assert len(set(slots.gradient.values())) == min(units, prefetch + 1)


@given(steps(), st.lists(st.integers(1, 1000), min_size=5, max_size=5))
def test_a_unit_that_the_step_does_not_use_has_buffers_of_its_own(step: Step, sizes: list[int]) -> None:
    """An evaluation may use it, beside any other."""
    slots = slots_of(step, step.build(), sizes)
    used = {unit for use in step.uses for unit in step.requires[use.unit]}
    assert set(slots.unshard) == set(step.requires)
    assert set(slots.gradient) == set(step.trainable)
    for assigned in (slots.unshard, slots.gradient):
        for unit in assigned:
            assert unit in used or list(assigned.values()).count(assigned[unit]) == 1


@given(st.text(alphabet="abc.019_ ", min_size=1), st.sampled_from(["forward", "backward"]))
def test_a_use_and_its_text_are_inverse(unit: str, phase: str) -> None:
    use = Use(unit, phase)  # type: ignore[arg-type]
    assert Use.parse(str(use)) == use


@pytest.mark.parametrize(("prefetch", "accumulation"), [(0, 1), (1, 0), (-1, 1)])
def test_there_is_no_step_without_prefetch_or_micro_batch(prefetch: int, accumulation: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        build([], {}, [], tiers=1, prefetch=prefetch, accumulation=accumulation, clip=False)


# ---- executed one task after the other ---------------------------------------------------------------------


def slots_of(step: Step, schedule: Schedule, sizes: Sequence[int]) -> Slots:
    tensors = {
        unit: [TensorSpec(unit, (size,), "float32")]
        for unit, size in zip(step.requires, itertools.cycle(sizes), strict=False)
    }
    return assign_slots(schedule, tensors)


class Machine:
    """Executes a schedule's tasks in launch order on what buffers hold: whose values, of which version."""

    def __init__(self, step: Step, sizes: Sequence[int]) -> None:
        self.step, self.schedule = step, step.build()
        self.slots = slots_of(step, self.schedule, sizes)
        self.reduced = reduced_units(self.schedule, step.trainable)
        self.trained = [unit for units in self.reduced.values() for unit in units]
        self.param = dict.fromkeys(step.requires, 0)  # the version of the slice that unshards read
        self.master = dict.fromkeys(step.requires, 0)
        self.whole: dict[int, tuple[str, int]] = {}  # slot -> unit and version
        self.staged: dict[int, tuple[str, int]] = {}  # slot -> unit and micro-batch
        self.grad: dict[str, list[int]] = {}  # micro-batches summed
        self.synced: set[str] = set()  # units whose gradient is there to be used
        self.next_tier: dict[tuple[Kind, str], int] = {}
        self.host = dict.fromkeys(step.requires, 0)  # the version of the optimizer state that is there
        self.fetched: dict[int, tuple[str, int]] = {}  # host slot -> unit and version
        self.kept: dict[str, int] = {}  # unit -> micro-batch whose activations are on the device
        self.saved: dict[str, int] = {}  # likewise on the host

    def run(self, steps: int) -> None:
        for number in range(steps):
            self.grad = {unit: [] for unit in self.trained}
            self.synced = set()
            for task in self.schedule.tasks:
                self.task(task, number)
            # In an order the next step gathers what this one has updated.
            gathered = number + (self.step.order is None)
            for unit in self.step.requires:
                assert self.param[unit] == (gathered if unit in self.trained else 0)

    def task(self, task: Task, number: int) -> None:
        if task.kind is Kind.COMPUTE:
            index = task.position % len(self.step.uses)
            for unit in self.schedule.reads(self.step.uses[index]):
                version = number if unit in self.trained else 0
                assert self.whole.get(self.slots.unshard[unit]) == (unit, version), (
                    f"{task}: {unit} is not whole"
                )
            for unit, (first, last) in self.schedule.saved.items():
                if index == first - self.step.prefetch - 1:
                    self.kept[unit] = self.schedule.micro_batch(task)
                if index == first:
                    assert self.saved[unit] == self.kept.pop(unit), f"{task}: {unit} is not saved"
                if index == last + self.step.prefetch + 1:
                    assert self.kept.pop(unit) == self.schedule.micro_batch(task), f"{task}: nothing kept"
            for unit in self.reduced.get(index, ()):
                self.staged[self.slots.gradient[unit]] = (unit, self.schedule.micro_batch(task))
        elif task.kind is Kind.STEP:
            assert not self.step.clip or self.synced == set(self.trained)
        for unit in task.units if task.kind is not Kind.COMPUTE else ():
            self.part(task, unit)

    def part(self, task: Task, unit: str) -> None:
        """One unit's part of a task that is not compute."""
        if task.tier >= 0:
            inwards = task.kind in (Kind.UNSHARD, Kind.GRAD_GATHER, Kind.PARAM_GATHER)
            order = list(range(self.step.tiers))[:: -1 if inwards else 1]
            place = self.next_tier.get((task.kind, unit), 0)
            assert task.tier == order[place], f"{task}: tiers out of order"
            self.next_tier[task.kind, unit] = (place + 1) % self.step.tiers
            last = place + 1 == self.step.tiers
        else:
            last = True
        match task.kind:
            case Kind.UNSHARD:
                self.whole.pop(self.slots.unshard[unit], None)
                if last:
                    self.whole[self.slots.unshard[unit]] = (unit, self.param[unit])
            case Kind.REDUCE | Kind.FINAL_REDUCE:
                assert self.staged[self.slots.gradient[unit]] == (unit, self.schedule.micro_batch(task))
                if last:
                    self.grad[unit].append(self.schedule.micro_batch(task))
            case Kind.GRAD_GATHER:
                assert self.grad[unit] == list(range(self.step.accumulation))
                if last:
                    self.synced.add(unit)
            case Kind.UPDATE:
                assert unit in self.synced
                if self.step.offload:
                    slot = self.schedule.offload_slots[unit]
                    assert self.fetched[slot] == (unit, self.master[unit]), f"{task}: no state"
                    self.fetched[slot] = (unit, self.master[unit] + 1)
                self.master[unit] += 1
            case Kind.FETCH:
                self.fetched[self.schedule.offload_slots[unit]] = (unit, self.host[unit])
            case Kind.STORE:
                stored, self.host[unit] = self.fetched[self.schedule.offload_slots[unit]]
                assert stored == unit
            case Kind.SAVE:
                assert self.kept[unit] == self.schedule.micro_batch(task)
                self.saved[unit] = self.kept[unit]
            case Kind.LOAD:
                assert unit not in self.kept and self.saved[unit] == self.schedule.micro_batch(task)
                self.kept[unit] = self.saved[unit]
            case Kind.PARAM_GATHER:
                if last:
                    self.param[unit] = self.master[unit]


@given(steps(ordered=True), st.lists(st.integers(1, 1000), min_size=5, max_size=5))
def test_executed_in_launch_order_every_task_finds_what_it_needs(step: Step, sizes: list[int]) -> None:
    """Units whole at each use, with this step's values; every gradient reduced once; every unit updated."""
    Machine(step, sizes).run(3)


# ---- what may run at the same time -------------------------------------------------------------------------


@given(steps(ordered=True))
@settings(max_examples=300)
def test_tasks_that_may_overlap_touch_nothing_in_common(step: Step) -> None:
    schedule = step.build()
    hazards = list(Detector(schedule, step.trainable).hazards())
    assert not hazards, f"{len(hazards)} hazards, for instance {hazards[0]}"


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("tiers", [1, 2, 3])
def test_chains_of_any_length_have_no_hazard(tiers: int, clip: bool) -> None:
    """Short ones too, in which a unit's next gradient comes within the window of its last."""
    for units, prefetch, accumulation in itertools.product(range(1, 8), (1, 2, 3), (1, 2, 3, 4)):
        step = chain(units, tiers=tiers, prefetch=prefetch, accumulation=accumulation, clip=clip)
        assert not Detector(step.build(), step.trainable).racy(), step


LOAD_BEARING = {
    "compute waits for its unshard": (Kind.COMPUTE, {Kind.UNSHARD}, False),
    "unshard waits for the window": (Kind.UNSHARD, {Kind.COMPUTE}, False),
    "unshard goes inwards": (Kind.UNSHARD, {Kind.UNSHARD}, False),
    "unshard waits for the last step's sync": (Kind.UNSHARD, {Kind.PARAM_GATHER}, True),
    "reduce waits for compute": (Kind.REDUCE, {Kind.COMPUTE}, False),
    "final reduce waits for compute": (Kind.FINAL_REDUCE, {Kind.COMPUTE}, False),
    "reduce goes outwards": (Kind.REDUCE, {Kind.REDUCE}, False),
    "final reduce goes outwards": (Kind.FINAL_REDUCE, {Kind.FINAL_REDUCE}, False),
    "compute waits for a gradient slot": (Kind.COMPUTE, {Kind.REDUCE, Kind.FINAL_REDUCE}, False),
    "grad_gather waits for the reduce": (Kind.GRAD_GATHER, {Kind.FINAL_REDUCE}, False),
    "grad_gather goes inwards": (Kind.GRAD_GATHER, {Kind.GRAD_GATHER}, False),
    "clipping waits for all gradients": (Kind.STEP, {Kind.GRAD_GATHER}, False),
    "update waits for its gradient": (Kind.UPDATE, {Kind.GRAD_GATHER}, False),
    "update waits for the step": (Kind.UPDATE, {Kind.STEP}, False),
    "clipping waits for the last step's updates": (Kind.STEP, {Kind.UPDATE}, True),
    "learning rates wait for the last step's updates": (Kind.COMPUTE, {Kind.UPDATE}, True),
    "update waits for its state": (Kind.UPDATE, {Kind.FETCH}, False),
    "state is stored after the update": (Kind.STORE, {Kind.UPDATE}, False),
    "a state is fetched where another was stored": (Kind.FETCH, {Kind.STORE}, False),
    "a state is fetched after it was stored": (Kind.FETCH, {Kind.STORE}, True),
    "fetches wait for the last step's": (Kind.COMPUTE, {Kind.UPDATE}, True),
    "stores wait for the last step's": (Kind.STEP, {Kind.STORE}, True),
    "stores in backward wait for the last step's": (Kind.COMPUTE, {Kind.STORE}, True),
    "activations are saved after the forward": (Kind.SAVE, {Kind.COMPUTE}, False),
    "activations are let go when they are saved": (Kind.COMPUTE, {Kind.SAVE}, False),
    "activations are loaded when there is room": (Kind.LOAD, {Kind.COMPUTE}, False),
    "backward waits for its activations": (Kind.COMPUTE, {Kind.LOAD}, False),
    "sync waits for the update": (Kind.PARAM_GATHER, {Kind.UPDATE}, False),
    "sync goes inwards": (Kind.PARAM_GATHER, {Kind.PARAM_GATHER}, False),
}
"""Between streams: (what waits, for what, of the step before)."""

LAUNCHES = {(Kind.FETCH, COMPUTE_STREAM), (Kind.PARAM_GATHER, COMPUTE_STREAM)}
"""What is launched at the end of a compute task whose data it does not need."""

MUTATED = {
    "plain": chain(8, tiers=2, prefetch=1, accumulation=2),
    "clipped": chain(8, tiers=2, prefetch=1, accumulation=2, clip=True),
    "deep": chain(12, tiers=3, prefetch=3, accumulation=3),
    "one micro-batch": chain(9, tiers=1, prefetch=2, accumulation=1),
    "offloaded": replace(chain(8, tiers=2, prefetch=1, accumulation=2, clip=True), offload=True),
    "two units reduced together": replace(chain(9, tiers=2, prefetch=1, accumulation=2), message_bytes=2),
    "activations on the host": replace(chain(9, tiers=2, prefetch=1, accumulation=2), saved=True),
    "all on the host": replace(chain(7, prefetch=2, accumulation=2, clip=True), saved=True, offload=True),
    "offloaded, updated in backward": replace(chain(8, prefetch=2, accumulation=2), offload=True),
}


@pytest.mark.parametrize("name", MUTATED)
@pytest.mark.parametrize("rule", LOAD_BEARING)
def test_an_edge_less_is_a_hazard(rule: str, name: str) -> None:
    """Each edge between streams that the others do not imply, dropped alone, must be missed."""
    step = MUTATED[name]
    schedule = step.build()
    detector = Detector(schedule, step.trainable)
    assert not detector.racy()
    after_kind, before_kinds, from_previous = LOAD_BEARING[rule]
    tenants = other_tenants(schedule)
    dropped = 0
    for edge in edges(in_lanes(schedule)):
        before, after = schedule.tasks[edge[0]], schedule.tasks[edge[1]]
        if (
            before.stream == after.stream
            or (after.kind, edge[2]) != (after_kind, from_previous)
            or before.kind not in before_kinds
            or implied(in_lanes(schedule), edge)
        ):
            continue
        if (after.kind, before.kind) == (Kind.UNSHARD, Kind.COMPUTE) and not any(
            unit in tenants[before.position] for unit in after.units
        ):
            continue  # at the turn from forward to backward nobody else can have the slot
        dropped += 1
        assert detector.racy(without(in_lanes(schedule), edge)), f"{after} without {before}"
    absent = (
        (" goes " in rule and step.tiers == 1)
        or (after_kind is Kind.REDUCE and step.accumulation == 1)
        or (rule == "clipping waits for all gradients" and not step.clip)
        or (rule == "update waits for its gradient" and step.clip)  # the step's barrier implies it
        or (rule == "update waits for the step" and not step.clip)
        or ("state" in rule and not step.offload)
        or ("activations" in rule and not step.saved)
        or (rule == "a state is fetched after it was stored" and not step.clip)  # learning rates come first
        or (
            rule == "a state is fetched after it was stored" and step.saved
        )  # saves come after the last store
        or "the last step's" in rule  # implied where all units are used before the first gradient
    )
    assert absent or dropped


@given(steps(max_accumulation=3))
@settings(max_examples=40)
def test_an_edge_less_is_a_hazard_in_any_step(step: Step) -> None:
    """All edges but those of the two windows: with too few units to share a slot they protect nothing."""
    schedule = step.build()
    detector = Detector(schedule, step.trainable)
    windows = [
        LOAD_BEARING[rule] for rule in ("unshard waits for the window", "compute waits for a gradient slot")
    ]
    for edge in edges(in_lanes(schedule)):
        before, after = schedule.tasks[edge[0]], schedule.tasks[edge[1]]
        if before.stream == after.stream or before.kind is Kind.BEGIN:
            continue
        if any(after.kind is kind and before.kind in kinds for kind, kinds, _ in windows):
            continue
        if (after.kind, before.stream) in LAUNCHES:
            continue
        if not implied(in_lanes(schedule), edge):
            assert detector.racy(without(in_lanes(schedule), edge)), f"{after} without {before}"


@pytest.mark.parametrize("clip", [False, True])
def test_in_order_a_gather_less_awaited_is_a_hazard(clip: bool) -> None:
    """Gathers of updated parameters wait for the updates of the step before, and unshards for them."""
    ahead = tuple((f"u{unit}", (0, 2)) for unit in range(8))
    step = replace(MUTATED["clipped" if clip else "plain"], order=MessageOrder(ahead, 1))
    schedule = step.build()
    detector = Detector(schedule, step.trainable)
    assert not detector.racy()
    rules = {
        (Kind.PARAM_GATHER, Kind.UPDATE, True),
        (Kind.PARAM_GATHER, Kind.PARAM_GATHER, False),
        (Kind.UNSHARD, Kind.PARAM_GATHER, False),
    }
    dropped = set()
    for edge in edges(in_lanes(schedule)):
        rule = (schedule.tasks[edge[1]].kind, schedule.tasks[edge[0]].kind, edge[2])
        if rule in rules:
            dropped.add(rule)
            assert detector.racy(without(in_lanes(schedule), edge)), rule
    assert dropped == rules


def test_the_detector_knows_every_kind_of_edge() -> None:
    """No edge between streams is left out of the rules above, but those from the step's begin."""
    rules = {(kind, before, previous) for kind, kinds, previous in LOAD_BEARING.values() for before in kinds}
    for step in MUTATED.values():
        tasks = in_lanes(step.build())
        found = {
            (tasks[after].kind, tasks[before].kind, previous)
            for before, after, previous in edges(tasks)
            if tasks[before].stream != tasks[after].stream and tasks[before].kind is not Kind.BEGIN
        }
        found -= {(Kind.FETCH, Kind.COMPUTE, False), (Kind.PARAM_GATHER, Kind.STEP, False)}
        assert found <= rules
