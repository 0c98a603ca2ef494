"""Which uses of a step the runtime looks at."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hzplan.core.schedule import Use
from hzplan.models.hooks import Phase
from hzplan.runtime.apply import apply
from hzplan.runtime.backends.threads import Post, ThreadWorld
from hzplan.runtime.optimizer import ShardedOptimizer
from hzplan.runtime.turns import turns
from tests.unit.test_abandoned_steps import LARGE, LARGEST, SMALL, Net, choice_of, end_step, fresh, on_ranks

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
USES = st.builds(
    lambda forward, backward: (
        *(Use(name, "forward") for name in forward),
        *(Use(name, "backward") for name in backward),
    ),
    st.lists(NAMES, min_size=1, max_size=6),
    st.lists(NAMES, min_size=1, max_size=6),
)


@given(USES, st.integers(1, 3), st.data())
def test_whatever_happens_happens_in_time(
    uses: tuple[Use, ...], accumulation: int, data: st.DataObject
) -> None:
    """What is done at a begin or an end has a turn, an end is seen at once, and nobody guesses."""
    count = len(uses) * accumulation
    some = st.sets(st.integers(0, count - 1), max_size=3)
    begins, ends = data.draw(some), data.draw(some)
    found = turns(uses, accumulation, begins, ends, all_of_them=False)
    having = [0]
    while (following := found.following[having[-1]]) < count:
        having.append(following)
    first_backward = next(number for number, use in enumerate(uses) if use.phase == "backward")
    for micro_batch in range(accumulation):
        start = micro_batch * len(uses)
        assert {start, start + first_backward, start + len(uses) - 1} <= {*having}
        mine = [place for place in having if start <= place < start + len(uses)]
        told = {(uses[place - start].unit, uses[place - start].phase) for place in mine}
        for place, use in enumerate(uses, start):
            assert (place in mine) == ((use.unit, use.phase) in told)
            assert (place in mine) != ((use.unit, use.phase) in found.passed_over[micro_batch])
    assert begins | ends | {place + 1 for place in ends if place + 1 < count} <= {*having}
    for place in range(count):
        assert found.following[place] == min((one for one in having if one > place), default=count)


def test_all_uses_may_have_one() -> None:
    uses = (Use("a", "forward"), Use("b", "forward"), Use("b", "backward"), Use("a", "backward"))
    found = turns(uses, 2, (), (), all_of_them=True)
    assert found.following == (*range(1, 8), 8)
    assert not any(found.passed_over)


def _told(
    accumulation: int, place: tuple[str, tuple[int, int, int]], *, all_uses: bool = False, width: int = SMALL
) -> list[int]:
    """By micro-batch of a second step the calls that the engine was told of, of eight."""
    told: list[int] = []

    def loop(model: Net, optimizer: object, batch: Callable[[int], Tensor]) -> None:
        if not isinstance(optimizer, ShardedOptimizer) or optimizer.engine.world.rank > 0:
            counted: list[int] = []
        else:
            counted, engine = told, optimizer.engine
            if all_uses:
                engine.follow_every_use()
            enter = engine.enter

            def counting(unit: str, phase: Phase) -> None:
                counted[-1] += 1
                enter(unit, phase)

            engine.enter = counting  # type: ignore[method-assign]
        for step in range(2):
            counted.clear()
            for number in range(accumulation):
                counted.append(0)
                model(batch(10 * step + number)).square().mean().backward()
            end_step(optimizer)  # type: ignore[arg-type]

    on_ranks(loop, choice_of(*place, clip=True, accumulation=accumulation), width)
    return told


@pytest.mark.parametrize("width", [SMALL, LARGE, LARGEST])
def test_replicas_are_told_of_what_they_send_alone(width: int) -> None:
    """Of a micro-batch that is not the last one where it begins, and where backward does and ends; of the
    last one of each message, and of the use after it."""
    whole = ("2", (0, 0, 0))
    assert _told(1, ("1", (0, 0, 0)), width=width) == [3]
    *others, last = _told(3, whole, width=width)
    assert others == [3, 3] and last < 8
    assert _told(3, whole, all_uses=True) == [8, 8, 8]
    assert _told(3, ("2", (1, 1, 1))) == [8, 8, 8]


def test_a_use_that_is_passed_over_is_not_looked_at_by_autograd() -> None:
    """Hooks of outputs are what costs most."""
    choice = choice_of("1", (0, 0, 0), clip=True, accumulation=2)
    model, optimizer = apply(fresh(SMALL), choice, torch.optim.SGD, world=ThreadWorld(Post(1), 0), lr=0.1)
    assert isinstance(model, Net)
    seen: list[bool] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: seen.append(hasattr(out, "_hzplan_begins")))
    x = torch.ones(3, SMALL, dtype=torch.float64)
    for _ in range(2):
        model(x).mean().backward()
    optimizer.step()
    optimizer.engine.close()
    assert seen == [True, False, False, True] * 2
