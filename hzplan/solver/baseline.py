"""The option ``--baseline``: a user's own setting, as a candidate of the search and a row of its table."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hzplan.core.hierarchy import Levels
from hzplan.core.recompute import NOTHING, Recomputed
from hzplan.cost.model import CostModel
from hzplan.errors import UserError
from hzplan.solver.evaluate import Evaluation
from hzplan.solver.schemes import RecomputeOptions, Row, Settings, schemes_of
from hzplan.solver.search import Search

BASELINE = "write a plan file, or as in zero3,recompute=none|every-2|operations|all,micro_batch=1,prefetch=2"


@dataclass(frozen=True)
class Baseline:
    """A user's own setting: a whole ``plan``, or else a triple and further settings, None where left open."""

    name: str
    plan: Evaluation | None = None
    triple: Levels | None = None
    micro_batch: int | None = None
    prefetch: int | None = None
    recompute: Recomputed | None = None

    @classmethod
    def parse(cls, text: str, model: CostModel) -> Baseline:
        """Read ``zero3,recompute=selective,micro_batch=1,prefetch=2``; UserError of one line.

        The scheme is a name or shards of parameter, gradient and optimizer state, as in ``8/64/64``.
        """
        name, *rest = (part.strip().lower() for part in text.split(","))
        made = cls("yours", triple=_triple(name, model))
        for part in rest:
            key, _, value = part.partition("=")
            number = int(value) if value.isdecimal() and len(value) < 10 else 0
            if key == "micro_batch" and number:
                made = replace(made, micro_batch=number)
            elif key == "prefetch" and number:
                made = replace(made, prefetch=number)
            elif key == "recompute":
                made = replace(made, recompute=_recompute(value, RecomputeOptions.of(model)))
            else:
                raise UserError(f"--baseline: {part[:40]} is not known; {BASELINE}")
        return made

    def row(self, settings: Settings) -> Row:
        """The setting at its fastest. UserError where the profile or the batch has none like it."""
        if self.plan is not None:
            request = settings.request
            return Row(self.name, self.plan, self.plan.fits(request.memory_bytes, request.host_bytes), ())
        assert self.triple is not None, "a plan or a triple"
        recompute_choices = None if self.recompute is None else [self.recompute]
        flat = settings.model.flat_sums and self.triple.three == (0, 0, 0)  # as this question's plans
        triple = self.triple._replace(flat=flat)
        some = [one for one in settings.of(triple, recompute_choices) if self._allows(one.search)]
        if not some:
            sizes = sorted({search.question.micro_batch for search in settings.searches})
            raise UserError(
                f"--baseline: no such setting; the profile and --global-batch allow micro_batch="
                f"{'|'.join(map(str, sizes))} and prefetch={'|'.join(map(str, settings.request.depths))}"
            )
        return settings.row(self.name, some)

    def _allows(self, search: Search) -> bool:
        return self.micro_batch in (None, search.question.micro_batch) and self.prefetch in (
            None,
            search.question.schedule.prefetch,
        )


def _triple(name: str, model: CostModel) -> Levels:
    """A scheme by its name, or by shards."""
    mesh = model.mesh
    by_name = {known.lower().replace("-", ""): triple for known, triple in schemes_of(model).items()}
    by_name |= dict.fromkeys(("fsdp", "fsdp2"), by_name["zero3"])
    if "hsdp" in by_name:
        by_name["mics"] = by_name["hsdp"]
    plain = name.replace("-", "").replace("_", "")
    if plain in by_name:
        return by_name[plain]
    shards = name.split("/")
    if len(shards) == 3 and all(part.isdecimal() and len(part) < 10 for part in shards):
        if unknown := [part for part in shards if int(part) not in mesh.shards]:
            raise UserError(
                f"--baseline {name}: mesh {mesh} has no level with {unknown[0]} shards; it has "
                f"{', '.join(map(str, dict.fromkeys(mesh.shards)))}"
            )
        param, grad, optim = (mesh.level_of(int(part)) for part in shards)
        if (triple := Levels(param, grad, optim, flat=model.flat_sums and optim == 0)).legal:
            return triple
        raise UserError(
            f"--baseline {name}: the optimizer state needs at least the shards of parameter and gradient"
        )
    known = ", ".join(by_name)
    raise UserError(f"--baseline: {name[:40]} is no plan file and no scheme ({known}); {BASELINE}")


def _recompute(value: str, offered: RecomputeOptions) -> Recomputed:
    """What none, selective (every second layer), every-K, a part of each layer, full or all stand for."""
    named = {"none": NOTHING, "full": Recomputed.of(offered.blocks), "all": Recomputed.of(offered.blocks)}
    named |= {way: Recomputed.of(offered.blocks, way) for way in offered.partial}
    named["selective"] = offered.every(2)
    every, _, k = value.partition("-")
    if every == "every" and k.isdecimal() and 0 < len(k) < 10 and 0 < int(k) <= len(offered.blocks):
        return offered.every(int(k))
    if not offered.all and value != "none":
        raise UserError("--baseline: the profile knows no unit that can be recomputed; profile again")
    if value not in named:
        most = len(offered.blocks)
        raise UserError(f"--baseline: recompute={value[:40]} is not known, of {most} layers; {BASELINE}")
    return named[value]
