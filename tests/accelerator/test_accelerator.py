"""The runtime on a simulated accelerator: no order that the device's rules allow gives another result."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from hzplan.runtime.apply import apply
from hzplan.runtime.backends.rate_limited import RateLimitedWorld
from tests.accelerator.cases import CASES, STEPS, Case, recorded
from tests.accelerator.interleavings import Found, Machine, Rules
from tests.accelerator.program import Operation, Place, Program, View
from tests.accelerator.races import races

INTERLEAVINGS = 2_000 // len(CASES) + 1
"""For each plan, in the long test; ``python -m tests.accelerator`` runs as many as it is asked to."""


@cache
def programs(case: Case) -> list[Program]:
    return recorded(case)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_operations_on_the_same_memory_are_ordered(case: Case) -> None:
    """Recording compares the parameters with plain torch's."""
    for program in programs(case):
        assert races(program) == []
    Machine(programs(case)).run(0)


@pytest.mark.long
def test_a_clipped_step_reads_nothing_back() -> None:
    """The factor, and whether a step is left out, stay on the device; where a kernel does not take them, the
    host reads the norm, once."""
    reads = {
        case.name: [program.host_reads for program in programs(case)]
        for case in CASES
        if case.clip and not case.experts and not case.schedules_rate
    }
    assert reads.pop("a step left out by the host") == [STEPS] * 4  # float64 has no fused factor
    assert len(reads) > 10 and not any(any(of_case) for of_case in reads.values())


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("an order of messages", "link 0-1, link 1-2, world"),
        (
            "slices of a node, two micro-batches",
            "gather 1-2, reduce 0-1, reduce 1-2, unshard 0-1, world",
        ),
    ],
)
def test_in_a_message_order_a_stage_has_one_communicator(name: str, groups: str) -> None:
    (case,) = [case for case in CASES if case.name == name]
    for program in programs(case):
        taken = {one.collective.group for one in program.launched if one.collective is not None}
        assert ", ".join(sorted(taken)) == groups


def test_buckets_begin_aligned_in_their_units_buffers() -> None:
    """Also behind one whose length is no multiple of 256 bytes."""
    case = Case("", "3,2", ((1, 1, 1), (1, 1, 2)), dtype="float32")
    choice = case.choice()
    world = RateLimitedWorld(choice.mesh, 0, lambda *_: 0.0, exchanges=False)
    _, optimizer = apply(case.model(), choice, torch.optim.AdamW, world=world)
    for unit in optimizer.engine.units.values():
        first, second = unit.buckets
        assert first.layout.nbytes % 256 and first.unsharded.storage_offset() == 0
        assert second.unsharded.storage_offset() * second.unsharded.itemsize % 256 == 0
    optimizer.engine.close()


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_interleaving_gives_the_same_values(case: Case) -> None:
    machine = Machine(programs(case))
    for seed in range(INTERLEAVINGS):
        machine.run(seed)


def test_without_an_order_of_launches_collectives_wait_for_each_other_in_a_circle() -> None:
    """What NCCL_LAUNCH_ORDER_IMPLICIT is set for: each rank's device holds another communicator's kernel."""
    machine = Machine(programs(CASES[0]), Rules(shares=1, implicit_order=False))
    with pytest.raises(Found, match="deadlock"):
        for seed in range(200):
            machine.run(seed)


# The readers themselves, on programs of a few operations.


def program(*launched: tuple[str, tuple[Place, ...], str, int]) -> Program:
    """``launched``: stream, events waited for, "reads" or "writes", and the first byte of four."""
    made = Program(0, blocks=[8], begin={0: torch.zeros(8, dtype=torch.uint8)})
    for order, (stream, waits, touches, offset) in enumerate(launched):
        view = (View(0, offset, (4,), (1,), torch.uint8),)
        is_write = touches == "writes"
        made.add(
            Operation(
                *(stream, f"operation {order}", order, waits),
                reads=() if is_write else view,
                writes=view if is_write else (),
                function=torch.Tensor.fill_ if is_write else torch.Tensor.sum,
                arguments=((view[0], order) if is_write else view, {}),
            )
        )
    made.end = {0: torch.tensor([0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.uint8)}
    return made


def test_an_event_orders_two_streams() -> None:
    reads = ("a", (), "reads", 4)
    assert races(program(reads, ("b", (Place("a", 1),), "writes", 4))) == []
    assert races(program(reads, ("b", (), "writes", 0))) == []
    assert races(program(reads, ("b", (), "reads", 4))) == []
    (found,) = races(program(reads, ("b", (), "writes", 4)))
    assert found == ("operation 0 in a", "operation 1 in b", 0)


def test_events_are_transitive_and_of_a_place_in_their_stream() -> None:
    launched = [("a", (), "writes", 0), ("b", (Place("a", 1),), "reads", 4), ("a", (), "writes", 4)]
    assert len(races(program(*launched))) == 1  # the second of stream a comes after the event
    assert races(program(*launched[:2], ("c", (Place("b", 1),), "writes", 0))) == []


def test_interleavings_find_other_values_and_circles() -> None:
    one, two = ("a", (), "writes", 4), ("b", (), "writes", 4)
    machine = Machine([program(one, two)])
    with pytest.raises(Found, match="other values"):
        for seed in range(20):
            machine.run(seed)
    ordered = Machine([program(one, ("b", (Place("a", 1),), "writes", 4))])
    for seed in range(20):
        ordered.run(seed)
    with pytest.raises(Found, match="deadlock"):
        Machine([program(("a", (Place("b", 1),), "writes", 4), ("b", (Place("a", 1),), "writes", 4))]).run(0)
