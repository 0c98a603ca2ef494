"""Costs that were measured before: a use of the same work on the same shapes is not measured again."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hzplan.errors import UserError
from hzplan.formats.profile import OptimizerEntry, Profile, UseCost, UseEntry
from hzplan.profiler.model.costs import kinds
from hzplan.profiler.model.fake import FakeTurn
from hzplan.profiler.model.shapes import Shapes

ALIKE, FEW_BYTES = 0.1, 4096
"""By how much what a use keeps may differ from what it is counted to keep in shapes."""


@dataclass(frozen=True)
class Known:
    """``costs``: by kind of use and micro-batch size, in the order of the uses; ``reads``: by kind."""

    costs: Mapping[tuple[Hashable, int], Sequence[UseCost]] = field(default_factory=dict)
    reads: Mapping[Hashable, bool] = field(default_factory=dict)
    optimizers: tuple[OptimizerEntry, ...] = ()

    @classmethod
    def of(
        cls, profiles: Mapping[str, Profile], device: torch.device, dtype: str, ranks_per_host: int
    ) -> Known:
        """``profiles``: by what messages call them. UserError for one that was made otherwise than one would
        be here, where so many ranks share a machine."""
        costs: dict[tuple[Hashable, int], list[UseCost]] = defaultdict(list)
        reads: dict[Hashable, bool] = {}
        for name, profile in profiles.items():
            _check(name, profile, device, dtype, ranks_per_host)
            uses = [use.use for use in profile.uses]
            for size in profile.micro_batches:
                here: dict[Hashable, list[UseCost]] = defaultdict(list)
                by_use = [next(c for c in use.costs if c.micro_batch == size) for use in profile.uses]
                for kind, use, cost in zip(
                    kinds(profile.units, uses, [c.flops for c in by_use]), uses, by_use, strict=True
                ):
                    here[kind].append(cost)
                    reads[kind] = use.reads
                for kind, found in here.items():
                    costs.setdefault((kind, size), found)
        return cls(dict(costs), reads, tuple(profile.optimizer for profile in profiles.values()))

    def taken(self, shapes: Shapes) -> dict[int, list[UseCost]]:
        """The costs of a model's uses at the micro-batch sizes at which all of them are known.

        Of several uses of a kind each takes its own. Where there are now more or fewer of them their times
        are the same, but what they keep depends on their neighbours: that is then counted in shapes.
        """
        found: dict[int, list[UseCost]] = {}
        for size, turns in shapes.turns.items():
            of_uses = kinds(shapes.entries, shapes.uses, [turn.flops for turn in turns])
            if all((kind, size) in self.costs for kind in of_uses) and self._alike(of_uses, size, turns):
                left = {kind: [*self.costs[kind, size]] for kind in of_uses}
                as_many = all(of_uses.count(kind) == len(costs) for kind, costs in left.items())
                found[size] = [
                    left[kind].pop(0) if as_many else _in_shapes(left[kind][0], shapes, size, index)
                    for index, kind in enumerate(of_uses)
                ]
        return found

    def _alike(self, of_uses: Sequence[Hashable], size: int, turns: Sequence[FakeTurn]) -> bool:
        """Whether uses keep what those that are known kept: dropout, for one, shows nowhere else."""
        for kind, costs in ((kind, self.costs[kind, size]) for kind in dict.fromkeys(of_uses)):
            kept = [turn.retained_bytes for turn, of in zip(turns, of_uses, strict=True) if of == kind]
            before = [cost.retained_bytes for cost in costs]
            most = max(map(abs, before))
            if abs(max(kept, key=abs) - max(before, key=abs)) > ALIKE * most + FEW_BYTES:
                return False
        return True

    def entries(self, shapes: Shapes, taken: Mapping[int, Sequence[UseCost]]) -> tuple[UseEntry, ...]:
        """The uses of a model at sizes that are all known."""
        turns = shapes.turns[min(taken)]
        of_uses = kinds(shapes.entries, shapes.uses, [turn.flops for turn in turns])
        return tuple(
            UseEntry(
                unit=use.unit,
                phase=use.phase,
                reads_parameters=self.reads[kind],
                costs=tuple(costs[index] for _, costs in sorted(taken.items())),
            )
            for index, (use, kind) in enumerate(zip(shapes.uses, of_uses, strict=True))
        )

    def optimizer(self, name: str, elements: int) -> OptimizerEntry | None:
        """Of this name, as far as so many elements, with clipping's norm."""
        able = (o for o in self.optimizers if o.name == name and o.points[-1].elements >= elements and o.norm)
        return next(able, None)


def _in_shapes(cost: UseCost, shapes: Shapes, size: int, index: int) -> UseCost:
    """A use's times, with the memory of another place in a model."""
    turn, again = shapes.turns[size][index], cost.recompute
    if again is not None and shapes.again:
        then = shapes.again[size][index]
        again = again.model_copy(
            update={"retained_bytes": then.retained_bytes, "peak_bytes": then.peak_bytes}
        )
    memory = {"retained_bytes": turn.retained_bytes, "peak_bytes": turn.peak_bytes}
    return cost.model_copy(update=memory | {"recompute": again if shapes.again else None})


def merged(entries: Iterable[UseEntry], taken: Mapping[int, Sequence[UseCost]]) -> tuple[UseEntry, ...]:
    """Uses that were measured at some sizes, with what is known at others."""
    return tuple(
        entry.model_copy(
            update={
                "costs": tuple(
                    sorted(
                        (*entry.costs, *(costs[index] for costs in taken.values())),
                        key=lambda cost: cost.micro_batch,
                    )
                )
            }
        )
        for index, entry in enumerate(entries)
    )


def _check(name: str, profile: Profile, device: torch.device, dtype: str, ranks_per_host: int) -> None:
    said = f"--known {name}: "
    modelled = profile.modelled is not None and profile.modelled.device is not None
    if modelled or profile.calibrated is not None or profile.parallel is not None:
        raise UserError(f"{said}not what was measured of a whole model; give the profile that it is from")
    pairs = {
        "torch": (profile.provenance.torch, torch.__version__),
        "device": (profile.cluster.device, device.type),
        "dtype": (profile.model.dtype, dtype),
    }
    if device.type == "cpu":  # whose processors the ranks of a host share
        pairs["processors"] = str(profile.provenance.cpus), str(os.cpu_count() or 1)
        before = profile.provenance.ranks_per_host
        pairs["ranks per host"] = str(before or "(not noted)"), str(ranks_per_host)
    for what, (theirs, ours) in pairs.items():
        if theirs != ours:
            raise UserError(f"{said}made with {what} {theirs}, and here that is {ours}; leave it out")
