"""FSDP2, FSDP, DDP or ZeRO-1 code as a setting. The code is parsed, never run.

What calls mean: torch's documentation of ``fully_shard``, ``FullyShardedDataParallel``,
``DistributedDataParallel`` and ``ZeroRedundancyOptimizer``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from hzplan.core.hierarchy import Mesh
from hzplan.errors import UserError
from hzplan.review.setting import Setting, shards_of

CHECKPOINTS = (
    "checkpoint_wrapper",
    "apply_activation_checkpointing",
    "gradient_checkpointing_enable",
    "checkpoint",
)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD")
MOST_BYTES = 1 << 20
"""Of a file of code: more is none that a person wrote."""


def read(where: str, text: str, mesh: Mesh) -> Setting:
    """UserError of one line where the code is none, or shards nothing. ``where``: the file's name."""
    if len(text) > MOST_BYTES:
        raise UserError(f"{where}: {len(text)} characters; give the file that shards the model")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{where}: not Python: {error}") from None
    code = _Code(where, tree, mesh)
    if calls := code.calls("fully_shard"):
        found = _fully_shard(code, calls)
    elif calls := code.calls("FullyShardedDataParallel", "FSDP"):
        found = _fsdp1(code, calls)
    elif code.calls("DistributedDataParallel", "DDP"):
        zero1 = bool(code.calls("ZeroRedundancyOptimizer"))
        said = "DDP with ZeroRedundancyOptimizer (ZeRO-1)" if zero1 else "DDP"
        found = Setting((1, 1, mesh.world if zero1 else 1), said=(said,))
    else:
        raise UserError(
            f"{where}: no call of fully_shard, FullyShardedDataParallel or DistributedDataParallel is in it; "
            "give the file that shards the model, a DeepSpeed configuration, or a setting as in zero3"
        )
    return code.completed(found)


@dataclass(frozen=True)
class _Code:
    where: str
    tree: ast.Module
    mesh: Mesh

    def calls(self, *names: str) -> list[ast.Call]:
        """The calls of functions with one of these last names, in the order of the file."""
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        found = [call for call in calls if _last_name(call.func) in names]
        return sorted(found, key=lambda call: (call.lineno, call.col_offset))

    def keywords(self, calls: Sequence[ast.Call], name: str) -> list[ast.expr]:
        """What a keyword is given in calls, or in dictionaries of keywords anywhere in the file."""
        found = [one.value for call in calls for one in call.keywords if one.arg == name]
        if found or not any(one.arg is None for call in calls for one in call.keywords):
            return found
        return [*self._in_dictionaries(name)]

    def _in_dictionaries(self, name: str) -> Iterator[ast.expr]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name:
                        yield value
            elif isinstance(node, ast.Call) and _last_name(node.func) == "dict":
                yield from (one.value for one in node.keywords if one.arg == name)

    def constant(self, node: ast.expr) -> object:
        """A literal, also through one assignment in the file; None where it is computed."""
        node = self.assigned(node)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None

    def assigned(self, node: ast.expr) -> ast.expr:
        """What a name is assigned, where that is in the file and once; else the node."""
        if not isinstance(node, ast.Name):
            return node
        found = [
            one.value
            for one in ast.walk(self.tree)
            if isinstance(one, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == node.id for target in one.targets)
        ]
        return found[0] if len(found) == 1 else node

    def mesh_sizes(self, node: ast.expr) -> tuple[int, ...] | None:
        """The sizes of a device mesh, or of the dimensions of one that are picked by name; None where they
        are computed."""
        node = self.assigned(node)
        picked: object = None
        if isinstance(node, ast.Subscript):
            picked = self.constant(node.slice)
            if picked is None:
                return None
            node = self.assigned(node.value)
        if not isinstance(node, ast.Call) or _last_name(node.func) != "init_device_mesh":
            return None
        given = [one.value for one in node.keywords if one.arg == "mesh_shape"] or node.args[1:2]
        sizes = self.constant(given[0]) if given else None
        if not isinstance(sizes, tuple) or not all(type(size) is int and size > 0 for size in sizes):
            return None
        if picked is None:
            return sizes
        listed = [one.value for one in node.keywords if one.arg == "mesh_dim_names"] or node.args[2:3]
        names = self.constant(listed[0]) if listed else None
        wanted = (picked,) if isinstance(picked, str) else picked
        if not isinstance(names, tuple | list) or not isinstance(wanted, tuple | list):
            return None
        places = [[*names].index(name) for name in wanted if name in names]
        if len(places) != len(wanted) or len(names) != len(sizes):
            return None
        return tuple(sizes[place] for place in places)

    def looped(self) -> set[str]:
        """Names that loops give values to."""
        targets = [one.target for one in ast.walk(self.tree) if isinstance(one, ast.For | ast.comprehension)]
        return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}

    def _dtype(self, keyword: str) -> str | None:
        """A dtype of the mixed precision, where all its calls say the same."""
        policies = self.calls("MixedPrecisionPolicy", "MixedPrecision")
        found = {_last_name(one) for one in self.keywords(policies, keyword)}
        (name,) = found if len(found) == 1 else (None,)
        return name if name in ("bfloat16", "float16", "float32") else None

    def completed(self, found: Setting) -> Setting:
        """With what is the same for all of them: dtype, clipping, recomputation."""
        said, left = [*found.said], [*found.open]
        recompute = found.recompute
        if self.calls(*CHECKPOINTS):
            recompute = "all"
            said.append("activation checkpointing, taken as of every block")
        if self.calls("CPUOffloadPolicy", "CPUOffload"):
            left.append("CPU offload: taken as on the device; --host-memory lets the plan offload, too")
        if self.calls("parallelize_module"):
            left.append("tensor parallelism: give it as --model-parallel to hzplan solve")
        if not found.open and recompute is None:
            recompute = "none"
        dtype = self._dtype("param_dtype")
        return Setting(
            found.shards,
            prefetch=found.prefetch,
            recompute=recompute,
            clip=bool(self.calls("clip_grad_norm_")) or None,
            dtype=dtype,
            reduce_dtype=self._dtype("reduce_dtype") or dtype,  # torch's default is what is computed in
            said=tuple(said),
            open=tuple(left),
        )


def _fully_shard(code: _Code, calls: list[ast.Call]) -> Setting:
    world, left = code.mesh.world, list[str]()
    shards, said = world, "FSDP2 over all ranks"
    meshes = code.keywords(calls, "mesh")
    sizes = code.mesh_sizes(meshes[0]) if meshes else None
    if meshes and sizes is None:
        left.append("the mesh is computed: taken as one over all ranks; say it as a setting, as in hsdp")
    sizes = tuple(size for size in sizes or () if size > 1)
    if sizes and prod(sizes) < world:
        left.append(
            f"the mesh has {prod(sizes)} of {world} ranks: give what the others do as --model-parallel"
        )
    if len(sizes) > 1 and sizes[-1] < world:
        shards = shards_of(f"{code.where}: init_device_mesh", sizes[-1], code.mesh)
        said = f"FSDP2 over groups of {shards} ranks, replicas across (HSDP)"
    given = {repr(value): value for value in _reshards(code, calls)}
    param = shards
    if len(given) > 1:
        left.append("reshard_after_forward differs between modules: taken as True")
    elif given:
        (value,) = given.values()
        if value is False:
            param, said = 1, f"{said}; parameters stay whole after forward (reshard_after_forward=False)"
        elif type(value) is int and value > 1:
            param = shards_of(f"{code.where}: reshard_after_forward", value, code.mesh)
            said = f"{said}; resharded over {value} ranks after forward"
        elif value is None:
            left.append("reshard_after_forward is computed: taken as True")
    if code.calls("set_modules_to_forward_prefetch"):
        left.append("explicit prefetch: the best depth is taken")
    return Setting((param, shards, shards), said=(said,), open=tuple(left))


def _reshards(code: _Code, calls: list[ast.Call]) -> Iterator[object]:
    """What ``reshard_after_forward`` is in each call but that of the root, which torch does not reshard; True
    where nothing is said, as 1 is False."""
    roots = [call for call in calls if _is_root(call)]
    if not roots:  # by another name, and not one of many
        looped = code.looped()
        named = [call for call in calls if call.args and isinstance(call.args[0], ast.Name)]
        roots = [call for call in named if call.args[0].id not in looped][-1:]  # type: ignore[attr-defined]
    for call in [call for call in calls if call not in roots] or calls:
        said = code.keywords([call], "reshard_after_forward")
        values = [code.constant(one) for one in said] or [True]
        yield from (False if type(value) is int and value == 1 else value for value in values)


def _fsdp1(code: _Code, calls: list[ast.Call]) -> Setting:
    world = code.mesh.world
    given = {_last_name(one) for one in code.keywords(calls, "sharding_strategy")}
    named = [strategy for strategy in STRATEGIES if strategy in given]
    strategy = named[0] if len(named) == 1 else "FULL_SHARD"
    left = () if named else ("the sharding strategy is not named: FULL_SHARD is FSDP's default",)
    if len(named) > 1:
        left = ("several sharding strategies: taken as FULL_SHARD",)
    tiers = code.mesh.tier_bounds
    inner = code.mesh.shards[tiers[0][1]] if len(tiers) > 1 else world
    shards = {
        "FULL_SHARD": (world, world, world),
        "SHARD_GRAD_OP": (1, world, world),
        "HYBRID_SHARD": (inner, inner, inner),
        "_HYBRID_SHARD_ZERO2": (1, inner, inner),
        "NO_SHARD": (1, 1, 1),
    }[strategy]
    return Setting(shards, said=(f"FSDP, {strategy}",), open=left)


def _is_root(call: ast.Call) -> bool:
    """Whether a call shards the whole model, as far as its argument's name tells."""
    return (
        bool(call.args)
        and isinstance(call.args[0], ast.Name)
        and call.args[0].id in ("model", "module", "self")
    )


def _last_name(node: ast.expr) -> str | None:
    """``c`` of ``a.b.c``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None
