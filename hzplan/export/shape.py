"""The part that all targets share: sharding per wrapped module, the nearest single scheme, and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hzplan.core.hierarchy import Levels
from hzplan.core.layout import TensorSpec
from hzplan.core.recompute import HOST, Way
from hzplan.core.units import beside_each_other
from hzplan.formats.plan import BucketEntry, Plan, PlanUnit
from hzplan.show import readable

GRADIENTS = "the gradients"
MESSAGES = "messages"
TOGETHER = "units reduced together"
WIRE = "the wire"
GROUPS = "other groups"
SUMS = "sums of gradients"
OPTIMIZER = "the optimizer"
"""``Lost.where`` of a loss that concerns all units."""

ROOT = ""
"""The whole model, as modules are named."""


CONTEXTS = '''@cache
def _ending(mode: Any) -> Any:
    """torch's mode of a forward, which lets go what the one in backward, which stops early, does not need."""

    class Ending(mode):  # type: ignore[misc]
        supports_higher_order_operators = True

        def __exit__(self, *error: Any) -> Any:
            found = super().__exit__(*error)
            kept = getattr(self, "storage", {}).get(self.last[0])
            if isinstance(kept, dict) and kept and get_proxy_mode() is None:
                kept[max(kept)] = SECOND_RUN
            return found

    return Ending


def _contexts(way: str) -> Any:
    """What is kept of one forward."""
    products = [0, 0]  # of forward, and of the one in backward
    last: list[Any] = [None]  # the last operation, a product, where it is kept and what follows saves nothing

    def policy(context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        name = str(getattr(operation, "overloadpacket", operation)).rpartition(".")[2]
        attends = "scaled_dot_product" in name or "flash_attention" in name or name == "flex_attention"
        schema = getattr(operation, "_schema", None)
        names = [one.name for one in schema.arguments] if attends and schema is not None else []
        # With dropout it draws random numbers, and what comes after it would draw others the second time.
        draws = dict(zip(names, arguments)).get("dropout_p") or keywords.get("dropout_p")
        keeps = attends and way != "attention" and not draws
        if name in PRODUCTS:
            products[context.is_recompute] += 1
            every = 2 if way == "operations" else 1
            keeps = way != "products" and products[context.is_recompute] % every == 1 % every
        if keeps:
            last[0] = operation if name in PRODUCTS else None
        elif not (name in SAVES_NOTHING or getattr(operation, "is_view", False)):
            last[0] = None
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    first, second = create_selective_checkpoint_contexts(policy)
    if SECOND_RUN is None:
        warnings.warn("a product that nobody asks for is kept, in more memory: torch 2.13 lets it go")
    else:
        first.__class__, first.last = _ending(type(first)), last
    return first, second'''
"""Of exported Python that recomputes in part, by PRODUCTS, SAVES_NOTHING, SECOND_RUN and Wrap.recompute."""


@dataclass(frozen=True)
class WrappedModule:
    """A module that the target unshards as one, and the levels of its tensors.

    ``units``: the plan's units in it. The root's group has what no other module's has.
    """

    module: str
    units: tuple[str, ...]
    levels: Levels
    recompute: Way | None


@dataclass(frozen=True)
class Lost:
    """A choice of the plan that the target cannot express, and its substitute, in ``what``.

    ``keeps_all``: whether what the plan's unit computes again is kept instead. ``step_s``, ``peak_bytes``:
    the predicted cost of the substitute; None without the plan's profile.
    """

    where: str
    what: str
    keeps_all: bool = False
    step_s: float | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Exported:
    """A target's file. ``levels``: by unit, the levels that the target uses, where it has such;
    ``gradient_buffers``: the target's own number of them, None where it has the plan's or none; ``offloads``:
    whether optimizer state lies in the host's memory as in the plan; ``beside``: what the user has to do
    beside the file."""

    text: str
    lost: tuple[Lost, ...]
    levels: dict[str, Levels]
    gradient_buffers: int | None = None
    offloads: bool = False
    beside: tuple[str, ...] = ()


IN_THE_MODEL = (
    "turn on activation checkpointing of every layer in the model, as by its gradient_checkpointing_enable()"
)


IN_CODE = "wrap its forward in torch.utils.checkpoint"


def all_again(plan: Plan) -> tuple[str, ...]:
    """What a user has to do for a target without recomputation of its own, whose plan recomputes all."""
    return (IN_THE_MODEL,) if plan.source.recompute == "all" and plan.recomputed else ()


def groups_of(
    plan: Plan, sizes: Callable[[str], int], *, recomputes: bool = True
) -> tuple[list[WrappedModule], list[Lost]]:
    """The modules to wrap, in forward order with the root last, and the tensors with other levels than
    theirs.

    Units that share a tensor without one being inside the other meet in the root, which is the only module
    that has both. ``sizes``: a tensor's elements, to tell which bucket of a unit weighs most. ``recomputes``:
    whether recomputation is the target's to say.
    """
    units = {unit.name: unit for unit in plan.units}
    tied = beside_each_other({unit.name: unit.requires for unit in plan.units})
    order = [name for name in dict.fromkeys(use.partition(" ")[2] for use in plan.uses) if name in units]
    alone = [name for name in order if name != ROOT and name not in tied]
    together = [name for name in order if name == ROOT or name in tied]
    found: list[WrappedModule] = []
    lost: list[Lost] = []
    level = plan.mesh.levels
    finest = Levels(level, level, level)  # of a root without tensors: what fully_shard does by itself
    for module, names in [*((name, [name]) for name in alone), (ROOT, together)]:
        members = [units[name] for name in names]
        levels = _heaviest(plan, members, sizes)
        ways = {plan.recomputed.get(name) for name in names} if module != ROOT else {None}
        recompute = ways.pop() if len(ways) == 1 and not ways & {"chunks", HOST} else None
        lost += _others(plan, module, members, levels)
        lost += [
            Lost(
                unit.name, f"{readable.way(plan.recomputed[unit.name])} in the plan, not in the target", True
            )
            for unit in members
            if unit.recompute and not recompute and recomputes
        ]
        lost += [
            Lost(unit.name, f"{readable.way(plan.recomputed[unit.name])} in the plan; {IN_CODE}")
            for unit in members
            if unit.recompute and not recomputes and not all_again(plan)
        ]
        if levels is not None or module == ROOT:
            found.append(WrappedModule(module, tuple(names), levels or finest, recompute))
    if plan.message_order is not None:
        what = "sent one at a time on each tier in the plan; those of the target share its links"
        lost.append(Lost(MESSAGES, what))
    if plan.message_bytes is not None:
        what = f"units reduced together in the plan, up to {plan.message_bytes:,} bytes; here each by itself"
        lost.append(Lost(TOGETHER, what))
    if not isinstance(plan.replica_sync, str):
        lost.append(Lost(GROUPS, f"{readable.relaxed(plan.replica_sync)}; the target has one group alone"))
    if plan.wire is not None:
        lost.append(Lost(WIRE, f"{plan.wire.formats.text} in the plan; here everything travels exactly"))
    return found, lost


def summed_narrow(plan: Plan, target: str) -> list[Lost]:
    """What a target makes of gradients that travel in 16 bits and are summed in 32."""
    if plan.reduce_dtype != "bfloat16" or plan.narrow_sums:
        return []
    return [Lost(SUMS, f"gradients are summed in float32 in the plan, in what they travel in by {target}")]


def kept_on_device(plan: Plan, target: str) -> list[Lost]:
    """What a target makes of units whose optimizer state the plan has in the host's memory."""
    if not plan.offloaded:
        return []
    what = (
        f"optimizer state of {len(plan.offloaded)} units lies in the host's memory in the plan; {target} "
        "keeps it on the device"
    )
    return [Lost(OPTIMIZER, what)]


def one_scheme(
    plan: Plan,
    groups: Sequence[WrappedModule],
    known: Iterable[Levels],
    sizes: Callable[[str], int],
    target: str,
) -> tuple[Levels, list[Lost]]:
    """For a target with one scheme per model: the scheme nearest to most elements, and the units that
    differ."""
    tensors = {unit.name: [t for bucket in unit.buckets for t in bucket.tensors] for unit in plan.units}
    candidates = list(known)
    weight: dict[Levels, int] = {}
    for group in groups:
        nearest = min(candidates, key=lambda other: _apart(plan, group.levels, other))
        held = sum(sizes(tensor) for unit in group.units for tensor in tensors[unit])
        weight[nearest] = weight.get(nearest, 0) + held
    chosen = max(weight, key=lambda levels: weight[levels])
    return chosen, [
        Lost(
            group.module or "the root",
            f"{shards(plan, group.levels)} shards in the plan; {target} has one scheme for all, "
            f"{shards(plan, chosen)}",
        )
        for group in groups
        # Of one node alone two levels have the same shards.
        if shards(plan, group.levels) != shards(plan, chosen) and any(tensors[unit] for unit in group.units)
    ]


def _apart(plan: Plan, mine: Levels, theirs: Levels) -> float:
    """Distance of two triples: the summed differences of the shares of the model that a rank holds."""
    counts, pairs = plan.mesh.shards, zip(mine.three, theirs.three, strict=True)
    return sum(abs(1 / counts[one] - 1 / counts[other]) for one, other in pairs)


def _cut(plan: Plan, bucket: BucketEntry) -> Levels:
    """A bucket's levels; how it is summed is the target's to say."""
    return plan.levels(bucket)._replace(flat=False)


def _heaviest(plan: Plan, units: Iterable[PlanUnit], sizes: Callable[[str], int]) -> Levels | None:
    """The levels of most elements; None where there is no tensor."""
    weight: dict[Levels, int] = {}
    for bucket in (bucket for unit in units for bucket in unit.buckets):
        levels = _cut(plan, bucket)
        weight[levels] = weight.get(levels, 0) + sum(map(sizes, bucket.tensors))
    return max(weight, key=lambda levels: weight[levels]) if weight else None


def _others(plan: Plan, module: str, units: Sequence[PlanUnit], levels: Levels | None) -> list[Lost]:
    """Buckets that do not have their module's levels."""
    return [
        Lost(
            unit.name,
            f"{len(bucket.tensors)} tensor{'s' * (len(bucket.tensors) > 1)} ({bucket.tensors[0]}"
            f"{', …' * (len(bucket.tensors) > 1)}) have {shards(plan, plan.levels(bucket))} shards; "
            f"{module or 'the root'} is one group, with {shards(plan, levels)}",
        )
        for unit in units
        for bucket in unit.buckets
        if levels is not None and _cut(plan, bucket) != levels
    ]


def shards(plan: Plan, levels: Levels) -> str:
    """``4/1/4``: of parameter, gradient and optimizer state."""
    return "/".join(map(str, levels.shards(plan.mesh)))


def elements(tensors: Iterable[TensorSpec]) -> Callable[[str], int]:
    """How many elements a tensor has, by its name; 1 for those that are not known."""
    known = {tensor.name: tensor.numel for tensor in tensors}
    return lambda name: known.get(name, 1)


def about(path: Path, plan: Plan) -> str:
    """A line for an exported file on its origin."""
    text = f"{plan.model.name} on {plan.cluster.mesh}, {path.name}, made by hzplan export"
    return "".join(character if character.isprintable() else "?" for character in text)
