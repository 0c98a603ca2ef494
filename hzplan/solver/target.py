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
from hzplan.core.layout import Dtype
from hzplan.core.recompute import Way
from hzplan.core.schedule import Pace
from hzplan.core.units import beside_each_other
from hzplan.errors import UserError
from hzplan.formats.plan import Target
from hzplan.formats.profile import Profile
from hzplan.solver.evaluate import Evaluation

TARGETS: tuple[Target, ...] = get_args(Target)

SELECTIVE: tuple[Way, ...] = ("elementwise", "operations", "attention", "products", "full")


@dataclass(frozen=True)
class Grammar:
    """``triples``: of all trained tensors of a unit; ``for_all``: of all units the same, and in the
    model itself all that can are recomputed in full, or none; ``ways``: what a unit may recompute, but those
    in ``root``, which the target wraps together, with one triple; ``least_buffers``, ``most_buffers``: of
    gradients (``core.schedule``), None: as many as there are reduces."""

    triples: tuple[Levels, ...]
    for_all: bool
    ways: tuple[Way, ...]
    least_buffers: int
    root: frozenset[str]
    most_buffers: int | None = None

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
            and (self.most_buffers is None or schedule.gradient_buffers <= self.most_buffers)
            and all(self.may(unit, way) for unit, way in one.modes.recompute.items())
            and (not self.for_all or {*one.modes.recompute} in ({*()}, {*one.model.recomputable}))
        )

    def paces(self, paces: Iterable[Pace], reduces: int) -> list[Pace]:
        """Paces of a search, those that have more gradient buffers than the target cut to what it has, and
        those without that it cannot keep to. ``reduces``: how many a micro-batch has."""
        least, most = min(self.least_buffers, reduces), min(self.most_buffers or reduces, reduces)
        cut = [pace._replace(gradient_buffers=min(pace.gradient_buffers, most)) for pace in paces]
        kept = [pace for pace in cut if pace.gradient_buffers >= least and not pace.message_bytes]
        return list(dict.fromkeys(kept))

    def may(self, unit: str, way: Way | None) -> bool:
        """Whether a unit may be recomputed in a way."""
        return way is None or (way in self.ways and unit not in self.root)


def grammar_of(
    target: str | None, profile: Profile, *, accumulates: bool, reduce_dtype: Dtype | None = None
) -> Grammar | None:
    """The limits of a target; None without one. ``accumulates``: whether each step has several
    micro-batches, of the largest size; ``reduce_dtype``: what gradients travel in; None: as they are kept."""
    if target is None:
        return None
    if profile.optimizer.matrix is not None:
        raise UserError(f"--for {target}: {no_matrices(target, profile.optimizer.name)}")
    mesh, requires = profile.mesh, {unit.name: unit.requires for unit in profile.units}
    root = frozenset(beside_each_other(requires) | {""})
    if target == "fsdp2":
        return Grammar(tuple(_fsdp2(mesh, accumulates=accumulates)), False, SELECTIVE, 2, root)
    if target == "megatron-fsdp-v2":
        several = accumulates or len(profile.micro_batches) > 1
        narrow = several and reduce_dtype == "bfloat16" and profile.model.dtype == "bfloat16"
        found = [one for one in megatron_fsdp_v2(mesh) if not narrow or reduced_at_once(mesh, one)]
        return Grammar(tuple(found), False, SELECTIVE, GRADIENT_BUFFERS, root, GRADIENT_BUFFERS)
    triples = _deepspeed(mesh) if target == "deepspeed" else _megatron_fsdp(mesh)
    return Grammar(tuple(dict.fromkeys(triples)), True, ("full",), 1, frozenset())


_OWN_DIVISION: Mapping[str, str] = {
    "fsdp2": "torch.optim.Muon takes whole matrices, and FSDP2's parameters are in shards",
    "deepspeed": "DeepSpeed's Muon computes a matrix on every rank that has a part of it",
    "megatron-fsdp": "Megatron's layer-wise optimizer chooses owners by itself",
    "megatron-fsdp-v2": "Megatron's layer-wise optimizer chooses owners by itself",
}


def no_matrices(target: str, optimizer: str) -> str:
    """Why a plan of a matrix optimizer is for no other runtime, and what to do."""
    reason = _OWN_DIVISION[target.removesuffix("-mics")]
    return (
        f"{target} cannot be told who updates which matrix under {optimizer}: {reason}; train with hzplan "
        "run or hzplan.parallelize, or profile with --optimizer adamw"
    )


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


GRADIENT_BUFFERS = 2
"""Of Megatron-FSDP v2, by ``module.py`` at d98e8a64: a unit's gradients are computed beside the reduction
before theirs, and packed for their own when that is over."""


def megatron_fsdp_v2(mesh: Mesh) -> list[Levels]:
    """The triples that Megatron-FSDP v2 can be given by ``Placements``, for each unit its own.

    By its source at d98e8a64 (2026-08-22; ``dbuffer.py`` and ``parameter_group.py``) the sharded axes of a
    unit's mesh are the last ones, and a transition changes one axis at most. There are four: after a step
    from the optimizer state's shards to the parameter's; from those to the whole parameter; from a rank's own
    gradient to the gradient's shards; after the last micro-batch from those to the optimizer state's, which
    reduces all other axes, too. These triples are left with a mesh of as few axes as tell the three levels
    apart (``tests.unit.test_target`` derives them). Its design document also has (0, level, finest), ZeRO-1
    over the slow links and ZeRO-2 over the fast ones, which changes two axes after a step and is refused.
    """
    finest = mesh.levels
    by_level = [
        triple
        for level in range(1, finest + 1)
        for triple in (Levels(0, level, level), Levels(level, level, level), Levels(level, level, finest))
    ]
    whole = [Levels(0, 0, 0), Levels(0, 0, finest), Levels(finest, 0, finest)]
    return list(dict.fromkeys([*whole, *by_level]))


def reduced_at_once(mesh: Mesh, levels: Levels) -> bool:
    """Whether every micro-batch's gradients are reduced over all ranks. What is left until after the last
    one, Megatron-FSDP v2 reduces in the dtype in which gradients add up, float32."""
    return levels.grad == mesh.levels


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
