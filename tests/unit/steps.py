"""Hypothesis strategies for what a step is made from: sequences of unit uses, and how they are scheduled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hypothesis import strategies as st

from hzplan.core.order import in_order
from hzplan.core.schedule import MessageOrder, Schedule, Use, build


@dataclass(frozen=True)
class Step:
    """The arguments of ``build``."""

    uses: tuple[Use, ...]
    requires: Mapping[str, tuple[str, ...]]
    trainable: tuple[str, ...]
    tiers: int = 1
    prefetch: int = 1
    accumulation: int = 1
    clip: bool = False
    gradient_buffers: int | None = None
    offload: bool = False
    order: MessageOrder | None = None
    message_bytes: int = 0
    saved: bool = False

    def build(self) -> Schedule:
        schedule = build(
            self.uses,
            self.requires,
            self.trainable,
            tiers=self.tiers,
            prefetch=self.prefetch,
            accumulation=self.accumulation,
            clip=self.clip,
            gradient_buffers=self.gradient_buffers,
            offload=self.offload,
            message_bytes=self.message_bytes,
            gradient_bytes=dict.fromkeys(self.requires, 1),
            saved=tuple(self.requires) if self.saved else (),
        )
        return in_order(schedule, self.order)


def chain(
    units: int, *, tiers: int = 1, prefetch: int = 1, accumulation: int = 1, clip: bool = False
) -> Step:
    """One unit after the other, all trained."""
    names = tuple(f"u{i}" for i in range(units))
    uses = [Use(name, "forward") for name in names] + [Use(name, "backward") for name in reversed(names)]
    return Step(tuple(uses), {n: (n,) for n in names}, names, tiers, prefetch, accumulation, clip)


@st.composite
def steps(
    draw: st.DrawFn,
    max_units: int = 5,
    max_tiers: int = 3,
    max_accumulation: int = 4,
    *,
    ordered: bool = False,
) -> Step:
    """Chains, tied and nested units, modules called twice, recomputation, frozen units, parts of no gradient.

    Some backwards read no parameter; optimizer state and activations may lie in the host's memory.
    ``ordered``: half of the steps have a message order. A unit's gradients have a byte.

    As in any training step the first use of a unit is a forward before the first backward.
    """
    names = [f"u{i}" for i in range(draw(st.integers(1, max_units)))]
    requires = {}
    for name in names:
        others = draw(st.lists(st.sampled_from(names), max_size=2)) if draw(st.integers(0, 3)) == 0 else []
        requires[name] = tuple(dict.fromkeys([name, *others]))
    forward = names if draw(st.booleans()) else draw(st.lists(st.sampled_from(names), min_size=1, max_size=8))
    uses = [Use(name, "forward") for name in forward]
    recompute = draw(st.booleans())
    for name in reversed(forward):
        if draw(st.integers(0, 5)) == 0:
            continue  # no gradient comes by here
        uses.append(Use(name, "backward", reads=draw(st.integers(0, 3)) > 0))
        if recompute and draw(st.booleans()):  # its backward begins, finds nothing saved, and computes again
            uses.append(Use(name, "forward"))
    trainable = tuple(name for name in names if draw(st.integers(0, 4)))
    tiers, prefetch = draw(st.integers(1, max_tiers)), draw(st.integers(1, 3))
    numbers = st.lists(st.integers(0, prefetch + 1), min_size=tiers, max_size=tiers)
    order = None
    if ordered and draw(st.booleans()):
        some = [name for name in names if draw(st.integers(0, 3))]  # units without numbers have zeros
        ahead = tuple((name, tuple(sorted(draw(numbers)))) for name in some)
        order = MessageOrder(ahead, draw(st.integers(0, 2 * prefetch)))
    return Step(
        tuple(uses),
        requires,
        trainable,
        tiers,
        prefetch,
        draw(st.integers(1, max_accumulation)),
        draw(st.booleans()),
        draw(st.none() | st.integers(1, 8)),
        draw(st.booleans()),
        order,
        draw(st.sampled_from((0, 0, 0, 2, 3))),
        draw(st.booleans()),
    )
