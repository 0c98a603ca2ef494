"""What other runtimes can be told, as limits of the search (``solve --for``): a plan within them loses
nothing when it is exported (``export``).

All of them cut a unit's tensors alike, send messages as they come, and reduce each unit's gradients by
itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.recompute import Way
from hzplan.core.units import beside_each_other
from hzplan.formats.plan import Target
from hzplan.formats.profile import Profile
from hzplan.solver.evaluate import Evaluation

TARGETS: tuple[Target, ...] = get_args(Target)

SELECTIVE: tuple[Way, ...] = ("elementwise", "operations", "attention", "full")


@dataclass(frozen=True)
class Grammar:
    """``triples``: of all trained tensors of a unit; ``for_all``: of all units the same; ``ways``: what a
    unit may recompute, but those in ``root``, which the target wraps together, with one triple;
    ``least_buffers``: of gradients."""

    triples: tuple[Levels, ...]
    for_all: bool
    ways: tuple[Way, ...]
    least_buffers: int
    root: frozenset[str]

    def allowed(self, *, trainable: bool) -> frozenset[Levels]:
        """The triples of a tensor; a frozen one has a parameter only."""
        return frozenset(triple.of(trainable=trainable) for triple in self.triples)

    def cuts(self, levels: Sequence[Levels], trained: Sequence[bool]) -> bool:
        """Whether a unit's tensors are cut as the target can."""
        return any(
            all(of == triple.of(trainable=one) for of, one in zip(levels, trained, strict=True))
            for triple in self.triples
        )

    def says(self, one: Evaluation) -> bool:
        """Whether all of a plan but its levels, which pins look at, is within the limits."""
        schedule = one.schedule
        return (
            schedule.order is None
            and not schedule.message_bytes
            and not one.modes.offload
            and schedule.gradient_buffers >= min(self.least_buffers, len(schedule.completed_at))
            and all(self.may(unit, way) for unit, way in one.modes.recompute.items())
        )

    def may(self, unit: str, way: Way | None) -> bool:
        """Whether a unit may be recomputed in a way."""
        return way is None or (way in self.ways and unit not in self.root)


def grammar_of(target: str | None, profile: Profile, *, accumulates: bool) -> Grammar | None:
    """The limits of a target; None without one. ``accumulates``: whether each step has several
    micro-batches."""
    if target is None:
        return None
    mesh, requires = profile.mesh, {unit.name: unit.requires for unit in profile.units}
    if target == "fsdp2":
        root = beside_each_other(requires) | {""}
        return Grammar(tuple(_fsdp2(mesh, accumulates=accumulates)), False, SELECTIVE, 2, frozenset(root))
    triples = _deepspeed(mesh) if target == "deepspeed" else _megatron_fsdp(mesh)
    return Grammar(tuple(dict.fromkeys(triples)), True, (), 1, frozenset())


def _fsdp2(mesh: Mesh, *, accumulates: bool) -> Iterable[Levels]:
    """Shards of a group, kept whole after forward or not; of gradients that add up, whole until the last
    micro-batch."""
    for level in range(1, mesh.levels + 1):
        yield Levels(level, level, level)
        yield Levels(0, level, level)
        if accumulates:
            yield Levels(0, 0, level)
            yield Levels(level, 0, level)


def _deepspeed(mesh: Mesh) -> Iterable[Levels]:
    """ZeRO stages 0 to 3, and hpZ."""
    finest = mesh.levels
    yield from (Levels(0, 0, 0), Levels(0, 0, finest), Levels(0, finest, finest))
    yield from (Levels(level, finest, finest) for level in range(1, finest + 1))


def _megatron_fsdp(mesh: Mesh) -> Iterable[Levels]:
    """Its strategies over an inner group, and the optimizer state over all."""
    for level in range(1, mesh.levels + 1):
        yield from (
            Levels(0, 0, 0),
            Levels(0, 0, level),
            Levels(0, level, level),
            Levels(level, level, level),
        )
        yield Levels(level, level, mesh.levels)


def keeps(
    grammar: Grammar | None, trained: Mapping[str, Sequence[bool]], levels: Mapping[str, Sequence[Levels]]
) -> bool:
    """Whether levels by unit are within the limits."""
    if grammar is None:
        return True
    apart = [replace(grammar, triples=(triple,)) for triple in grammar.triples]
    together = [unit for unit in levels if grammar.for_all or unit in grammar.root]
    return all(grammar.cuts(of, trained[unit]) for unit, of in levels.items()) and any(
        all(one.cuts(levels[unit], trained[unit]) for unit in together) for one in apart
    )


def joined(
    grammar: Grammar, one: Evaluation, trained: Mapping[str, Sequence[bool]]
) -> Iterator[dict[str, tuple[Levels, ...]]]:
    """A plan's levels, with each of the triples for the units that the target wraps together."""
    together = [unit for unit in one.levels if unit in grammar.root]
    for triple in grammar.triples if together else ():
        same = {unit: tuple(triple.of(trainable=of) for of in trained[unit]) for unit in together}
        yield {**one.levels, **same}
