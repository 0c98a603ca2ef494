"""Reuse of earlier profiles: a use of the same work on the same shapes is not measured again."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hzplan.errors import UserError
from hzplan.formats.profile import OptimizerEntry, Profile, UseCost, UseEntry
from hzplan.profiler.model.recompute import use_entries
from hzplan.profiler.model.shapes import Shapes
from hzplan.profiler.model.time import use_kinds

MAX_DIFFERENCE, MAX_DIFFERENCE_BYTES = 0.1, 4096
"""By how much the bytes that a use retained before may differ from those counted in shapes: a
share, and bytes beside it for allocators that round up."""

CostsBySize = dict[int, Sequence[UseCost]]
"""By micro-batch size: the cost of every use of a model, in order."""


@dataclass(frozen=True)
class EarlierCosts:
    """Costs in earlier profiles: ``costs`` by kind of use and micro-batch size, in the order of the uses;
    ``reads``, by kind: whether it reads parameters."""

    costs: Mapping[tuple[Hashable, int], Sequence[UseCost]]
    reads: Mapping[Hashable, bool]
    optimizers: tuple[OptimizerEntry, ...]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.costs)

    @classmethod
    def of_profiles(
        cls, profiles: Mapping[str, Profile], device: torch.device, dtype: str, ranks_per_host: int
    ) -> EarlierCosts:
        """``profiles``: by their names in messages. UserError for one that was made otherwise than one would
        be here, where ``ranks_per_host`` ranks share a machine."""
        costs: dict[tuple[Hashable, int], list[UseCost]] = {}
        reads: dict[Hashable, bool] = {}
        for name, profile in profiles.items():
            _check(name, profile, device, dtype, ranks_per_host)
            uses = [entry.use for entry in profile.uses]
            for size in profile.micro_batches:
                of_profile: dict[Hashable, list[UseCost]] = defaultdict(list)
                by_use = [next(c for c in entry.costs if c.micro_batch == size) for entry in profile.uses]
                kinds = use_kinds(profile.units, uses, [cost.flops for cost in by_use])
                for kind, use, cost in zip(kinds, uses, by_use, strict=True):
                    of_profile[kind].append(cost)
                    reads[kind] = use.reads
                for kind, listed in of_profile.items():
                    costs.setdefault((kind, size), listed)
        return cls(costs, reads, tuple(profile.optimizer for profile in profiles.values()))

    def costs_of(self, shapes: Shapes) -> CostsBySize:
        """The costs of a model's uses at the micro-batch sizes at which all of them are known.

        Of several uses of a kind each takes its own. Where there are now more or fewer of them their times
        are the same, but the bytes that they retain depend on their neighbours: those are then the shapes'.
        """
        found: CostsBySize = {}
        for size, modelled in shapes.costs.items():
            kinds = use_kinds(shapes.units, shapes.uses, [cost.flops for cost in modelled])
            if all((kind, size) in self.costs for kind in kinds) and self._retain_alike(
                kinds, size, modelled
            ):
                left = {kind: [*self.costs[kind, size]] for kind in kinds}
                as_many = all(kinds.count(kind) == len(costs) for kind, costs in left.items())
                found[size] = [
                    left[kind].pop(0) if as_many else _with_memory_of(left[kind][0], shapes, size, index)
                    for index, kind in enumerate(kinds)
                ]
        return found

    def _retain_alike(self, kinds: Sequence[Hashable], size: int, modelled: Sequence[UseCost]) -> bool:
        """Whether uses retain as many bytes as before; dropout, for one, shows nowhere else."""
        for kind in dict.fromkeys(kinds):
            now = [cost.retained_bytes for cost, of in zip(modelled, kinds, strict=True) if of == kind]
            before = [cost.retained_bytes for cost in self.costs[kind, size]]
            allowed = MAX_DIFFERENCE * max(map(abs, before)) + MAX_DIFFERENCE_BYTES
            if abs(max(now, key=abs) - max(before, key=abs)) > allowed:
                return False
        return True

    def use_entries(self, shapes: Shapes, reused: CostsBySize) -> tuple[UseEntry, ...]:
        """The uses of a model at sizes that are all reused."""
        modelled = shapes.costs[min(reused)]
        kinds = use_kinds(shapes.units, shapes.uses, [cost.flops for cost in modelled])
        reads = [
            self.reads[kind] or use.unit in shapes.outside
            for kind, use in zip(kinds, shapes.uses, strict=True)
        ]
        return use_entries(shapes.uses, reads, [costs for _, costs in sorted(reused.items())], {}, ())

    def optimizer(self, name: str, elements: int) -> OptimizerEntry | None:
        """An optimizer of this name, measured with clipping's norm up to so many elements."""
        able = (o for o in self.optimizers if o.name == name and o.points[-1].elements >= elements and o.norm)
        return next(able, None)


def _with_memory_of(cost: UseCost, shapes: Shapes, size: int, index: int) -> UseCost:
    """A use's times, with the memory of the use at ``index`` in a model."""

    def memory(modelled: UseCost) -> dict[str, object]:
        return {"retained_bytes": modelled.retained_bytes, "peak_bytes": modelled.peak_bytes}

    again = {
        way: of_way.model_copy(update=memory(shapes.recompute[way][size][index]))
        for way, of_way in cost.again.items()
        if way in shapes.recompute
    }
    ways = {"recompute": again.pop("full", None), "partial": again or None}
    return cost.model_copy(update=memory(shapes.costs[size][index]) | ways)


def with_reused(entries: Sequence[UseEntry], reused: CostsBySize) -> tuple[UseEntry, ...]:
    """Uses that were measured at some sizes, with reused costs at others."""
    return tuple(
        entry.model_copy(
            update={
                "costs": tuple(
                    sorted(
                        (*entry.costs, *(costs[index] for costs in reused.values())),
                        key=lambda cost: cost.micro_batch,
                    )
                )
            }
        )
        for index, entry in enumerate(entries)
    )


def _check(name: str, profile: Profile, device: torch.device, dtype: str, ranks_per_host: int) -> None:
    modelled = profile.modelled is not None and profile.modelled.device is not None
    if modelled or profile.calibrated is not None or profile.parallel is not None:
        raise UserError(
            f"--known {name}: not what was measured of a whole model; give the profile that it is from"
        )
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
            raise UserError(
                f"--known {name}: made with {what} {theirs}, and here that is {ours}; leave it out"
            )
