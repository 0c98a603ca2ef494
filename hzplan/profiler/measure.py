"""A whole profile: units at every micro-batch size, optimizer, machine, links."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hzplan.core.hierarchy import Mesh
from hzplan.errors import UserError
from hzplan.formats.base import Strict, fingerprint
from hzplan.formats.links import Links
from hzplan.formats.profile import (
    ClusterEntry,
    ModelEntry,
    OptimizerEntry,
    Profile,
    StragglerEntry,
    UnitEntry,
    UseCost,
    UseEntry,
    signature,
)
from hzplan.models.units import Unit, master_dtype_of
from hzplan.models.workload import Workload
from hzplan.profiler.model.calls import Turns
from hzplan.profiler.model.entries import as_dtype, joined_units, model_entry, unit_entry
from hzplan.profiler.model.fake import Rates
from hzplan.profiler.model.optimizer import LAST_ELEMENTS, OPTIMIZERS, measure_optimizer
from hzplan.profiler.model.shapes import Shapes, in_shapes
from hzplan.profiler.model.shared_weights import fold, is_too_large
from hzplan.profiler.model.time import measure_uses
from hzplan.profiler.network.host import measure_host
from hzplan.profiler.network.interference import measure_interference
from hzplan.profiler.network.links import LAST_BYTES, measure_links, measure_norm
from hzplan.profiler.network.stragglers import slow_compute, slow_links
from hzplan.profiler.network.wakeup import measure_wakeup
from hzplan.profiler.session.machine import peak_flops, provenance, rank_memory_bytes
from hzplan.profiler.session.progress import Progress
from hzplan.profiler.session.ranks import Ranks, local_ranks
from hzplan.profiler.session.resume import Kept
from hzplan.profiler.session.reuse import Known, merged
from hzplan.runtime.backends.groups import on_device

# About how many seconds each part takes at most, for the progress shown.
PASS_S = 12.0  # without recomputation and with it
OPTIMIZER_S = 2.0
MACHINE_S = 1.0
STAGE_S = 4.0
TOGETHER_S = 2.0
HOST_S = 2.0

NO_RATES = Rates(1.0, 1.0, 0.0)
"""Where shapes are asked for memory and FLOPs only."""

PRODUCT_SIZE, PRODUCTS = 512, 8
"""Of the matrices that stand for a model where there is none, and how many are multiplied at once."""


class _Model(Strict):
    """What was measured of a model. ``largest_bytes``: of the largest unit's gradients, which travel."""

    entry: ModelEntry
    units: tuple[UnitEntry, ...]
    uses: tuple[UseEntry, ...]
    optimizer: OptimizerEntry
    largest_bytes: int
    stragglers: tuple[StragglerEntry, ...]
    ranks_per_host: int

    def profile(self, links: Links) -> Profile:
        """With the links of a cluster."""
        return Profile(
            provenance=provenance(self.ranks_per_host),
            model=self.entry,
            cluster=links.cluster,
            optimizer=self.optimizer,
            units=self.units,
            uses=self.uses,
            collectives=links.collectives,
            interference=links.interference,
            host=links.host,
            stragglers=(*self.stragglers, *links.stragglers),
        )


def measure(
    workload: Workload,
    *,
    mesh: Mesh,
    tier_names: tuple[str, ...],
    micro_batches: Sequence[int],
    dtype: str,
    optimizer: str,
    progress: Callable[[str, float], None],
    seed: int = 0,
    memory_bytes: int | None = None,
    known: Mapping[str, Profile] | None = None,
    keep: Path | None = None,
    said: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Measure a model and the links between ranks; the same profile on every rank.

    Every rank of an initialised torch.distributed job calls it with the same arguments, or one process
    without a ranks. ``micro_batches``: sequences per forward and backward; ``dtype``: what the model computes
    in, torch's name (bfloat16 is trained with float32 master weights, gradients and optimizer state);
    ``optimizer``: one of ``OPTIMIZERS``; ``progress`` gets what is being measured and the fraction done;
    ``memory_bytes``: what a rank may use (default: its device's memory, or its share of the host's); of a
    model whose weights take most of it only distinct units are made. ``known``: profiles, by what messages
    call them, whose units need not be measured again where shapes and micro-batches are the same. ``keep``:
    a file for parts that are done, to be removed when the profile is written; the same call goes on where one
    before was cut short. ``said`` hears of both.

    Raises UserError when arguments do not fit the job, or the model cannot be run or planned for.
    """
    ranks = Ranks.here()
    _check_mesh(ranks, mesh, tier_names)
    batches = _checked(micro_batches, dtype, optimizer)
    parts = Progress(progress, _model_s(batches) + _links_s(mesh))
    memory = memory_bytes or rank_memory_bytes(ranks)
    before = Known.of(known or {}, ranks.device, dtype, local_ranks(ranks))
    running = _run(ranks, workload, batches, dtype, seed, memory)
    tensors = [tensor for unit in running.units for tensor in unit.tensors]
    question = (
        *(
            workload.name,
            signature(tensors),
            [unit.name for unit in running.units],
            batches,
            dtype,
            optimizer,
        ),
        *(str(mesh), tier_names, seed, memory, torch.__version__, ranks.gather(platform.node())),
        [fingerprint(profile) for profile in (known or {}).values()],
    )
    kept = Kept.open(ranks, keep, question, said)
    model = kept.part(
        "model",
        _Model,
        lambda: _measure_model(ranks, workload, running, batches, dtype, optimizer, parts, before, said),
    )
    links = kept.part(
        "links",
        Links,
        lambda: _measure_links(
            *(ranks, mesh, tier_names, dtype, model.largest_bytes, running.once, parts, memory)
        ),
    )
    profile = model.profile(links)
    parts.finish("measured")
    return profile


def measure_with(
    links: Links,
    workload: Workload,
    *,
    micro_batches: Sequence[int],
    dtype: str,
    optimizer: str,
    progress: Callable[[str, float], None],
    seed: int = 0,
    memory_bytes: int | None = None,
    known: Mapping[str, Profile] | None = None,
    said: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Measure a model in one process, for a cluster whose links were measured before.

    Arguments and errors as for ``measure``. Nobody else computes meanwhile: where the ranks of a node share
    processors or memory, times are those of a rank that has them to itself.
    """
    batches = _checked(micro_batches, dtype, optimizer)
    ranks = Ranks.here()
    parts = Progress(progress, _model_s(batches) + MACHINE_S)
    memory = memory_bytes or rank_memory_bytes(ranks)
    before = Known.of(known or {}, ranks.device, dtype, local_ranks(ranks))
    running = _run(ranks, workload, batches, dtype, seed, memory)
    model = _measure_model(ranks, workload, running, batches, dtype, optimizer, parts, before, said)
    parts.part("matrix products", MACHINE_S)
    peak = peak_flops(ranks, getattr(torch, dtype))  # links may have been measured for another dtype
    wakeup = measure_wakeup(ranks) if links.cluster.device == ranks.device.type == "cpu" else None
    parts.finish("measured")
    cluster = links.cluster.model_copy(update={"peak_flops": peak, "wakeup_seconds": wakeup})
    return model.profile(links.model_copy(update={"cluster": cluster}))


def measure_links_alone(
    *,
    mesh: Mesh,
    tier_names: tuple[str, ...],
    dtype: str,
    progress: Callable[[str, float], None],
) -> Links:
    """Measure a cluster without a model: large buffers travel, and matrix products are what is disturbed.

    Every rank calls it with the same arguments; the same on every rank.
    """
    ranks = Ranks.here()
    _check_mesh(ranks, mesh, tier_names)
    matrix = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, dtype=getattr(torch, dtype), device=ranks.device)
    out = matrix @ matrix

    def compute() -> None:
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix, out=out)

    parts = Progress(progress, _links_s(mesh))
    memory = rank_memory_bytes(ranks)
    links = _measure_links(ranks, mesh, tier_names, dtype, LAST_BYTES, compute, parts, memory)
    parts.finish("measured")
    return ranks.share(links)


def _model_s(batches: Sequence[int]) -> float:
    return PASS_S * len(batches) + OPTIMIZER_S


def _links_s(mesh: Mesh) -> float:
    return MACHINE_S + STAGE_S * len(mesh.stages()) + TOGETHER_S * len(mesh.tiers) + HOST_S


@dataclass(frozen=True)
class _Running:
    """A model that can be run. ``shapes``: what is known of it where it is folded."""

    model: nn.Module
    units: tuple[Unit, ...]
    turns: Turns
    steps: Mapping[int, Callable[[], Tensor]]
    shapes: Shapes | None

    def once(self) -> None:
        """A forward and backward of the smallest micro-batch."""
        self.turns.run(self.steps[min(self.steps)])


def _run(
    ranks: Ranks, workload: Workload, batches: Sequence[int], dtype: str, seed: int, memory_bytes: int
) -> _Running:
    """A model, ready to be measured; folded where its weights alone would take most of the memory."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    if any(ranks.gather(is_too_large(workload, torch_dtype, memory_bytes))):
        shapes = in_shapes(workload, dtype, batches, NO_RATES, ranks.size)
        folded = fold(workload, torch_dtype, ranks.device, seed)
        turns = Turns(folded.units, ranks.size)
        losses = _steps(ranks, workload, folded.model, batches, seed)
        forwards = {size: partial(folded.step, loss, lambda: turns.unit) for size, loss in losses.items()}
        return _Running(folded.model, folded.units, turns, forwards, shapes)
    model, units = _build(workload, seed, torch_dtype, ranks.device)
    steps = _steps(ranks, workload, model, batches, seed)
    return _Running(model, units, Turns(units, ranks.size), steps, None)


def _measure_model(
    ranks: Ranks,
    workload: Workload,
    running: _Running,
    batches: Sequence[int],
    dtype: str,
    optimizer: str,
    parts: Progress,
    known: Known,
    said: Callable[[str], None],
) -> _Model:
    torch_dtype: torch.dtype = getattr(torch, dtype)
    entries = tuple(unit_entry(unit) for unit in running.units)
    shapes, taken = _taken(ranks, workload, running, batches, dtype, known, said)
    left = {size: step for size, step in running.steps.items() if size not in taken}
    parts.part(f"forward and backward, micro-batch {', '.join(map(str, left))}", PASS_S * len(left))
    mine: float | None = None
    if left:
        measured, mine = measure_uses(
            *(ranks, running.turns, running.units, left),
            label=workload.name,
            progress=parts.at,
            shapes=running.shapes,
        )
        order = [(use.unit, use.phase) for use in measured]
        if shapes is not None and taken and order != [(use.unit, use.phase) for use in shapes.uses]:
            raise UserError(
                f"{workload.name}: modules are used in another order with values than without; profile "
                "without --known"
            )
        uses = merged(measured, taken)
    else:
        assert shapes is not None
        uses = known.entries(shapes, taken)
    largest = max(sum(tensor.spec.numel for tensor in unit.tensors) for unit in entries)
    parts.part(f"{optimizer} steps", OPTIMIZER_S)
    steps = known.optimizer(optimizer, min(largest, LAST_ELEMENTS))
    return _Model(
        entry=model_entry(workload, [t.spec for unit in entries for t in unit.tensors], as_dtype(dtype)),
        units=joined_units(entries, uses),
        uses=uses,
        optimizer=steps or measure_optimizer(ranks, optimizer, torch_dtype, largest, running.once, parts.at),
        largest_bytes=largest * master_dtype_of(torch_dtype).itemsize,
        stragglers=slow_compute(ranks, mine) if mine is not None else (),
        ranks_per_host=local_ranks(ranks),
    )


def _taken(
    ranks: Ranks,
    workload: Workload,
    running: _Running,
    batches: Sequence[int],
    dtype: str,
    known: Known,
    said: Callable[[str], None],
) -> tuple[Shapes | None, dict[int, list[UseCost]]]:
    """The model in shapes, and by micro-batch size what is known of it."""
    if not known.costs:
        return None, {}
    say = said if ranks.rank == 0 else lambda text: None
    try:
        shapes = running.shapes or in_shapes(workload, dtype, batches, NO_RATES, ranks.size)
    except UserError as error:
        say(f"--known: all is measured: {error}")
        return None, {}
    taken = known.taken(shapes)
    sizes = ", ".join(map(str, taken)) or "no size"
    left = len(batches) - len(taken)
    say(f"--known: every unit's times are known at micro-batch {sizes}; {left} to measure")
    return shapes, taken


def _measure_links(
    ranks: Ranks,
    mesh: Mesh,
    tier_names: tuple[str, ...],
    dtype: str,
    largest_bytes: int,
    compute: Callable[[], None],
    parts: Progress,
    memory_bytes: int,
) -> Links:
    """A link's time depends on bytes, whatever they are; what travels is of the dtype of gradients."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    travelling = master_dtype_of(torch_dtype)
    parts.part("matrix products", MACHINE_S)
    peak = peak_flops(ranks, torch_dtype)
    parts.part("links", STAGE_S * len(mesh.stages()))
    collectives = measure_links(ranks, mesh, travelling, largest_bytes, parts.at)
    parts.part("compute and links together", TOGETHER_S * len(mesh.tiers))
    interference = measure_interference(ranks, mesh, travelling, largest_bytes, compute, parts.at)
    parts.part("the host's memory", HOST_S)
    apart = ranks.device.type != "cpu"  # else there is no memory but the host's
    return Links(
        provenance=provenance(),
        cluster=ClusterEntry(
            mesh=str(mesh),
            tier_names=tier_names,
            backend=ranks.backend,
            device=ranks.device.type,
            memory_bytes=memory_bytes,
            peak_flops=peak,
            reduce_scatter_by_exchange=_by_exchange(ranks),
            norm_seconds=measure_norm(ranks),
            wakeup_seconds=None if apart else measure_wakeup(ranks),
        ),
        collectives=collectives,
        interference=interference,
        host=measure_host(ranks, parts.at) if apart else None,
        stragglers=slow_links(ranks, mesh),
    )


def _by_exchange(ranks: Ranks) -> bool:
    """Whether the job's reduce-scatters go point to point."""
    world = dist.group.WORLD
    return world is not None and ranks.size > 1 and on_device(world, ranks.device).needs_scratch


def _check_mesh(ranks: Ranks, mesh: Mesh, tier_names: tuple[str, ...]) -> None:
    """UserError for a mesh that is not this job's."""
    if mesh.world != ranks.size:
        raise UserError(
            f"mesh {mesh} has {mesh.world} ranks, this job has {ranks.size}; give a mesh that fits"
        )
    if len(tier_names) != len(mesh.tiers):
        raise UserError(f"mesh {mesh} has {len(mesh.tiers)} tiers, but {len(tier_names)} have names")


def _checked(micro_batches: Sequence[int], dtype: str, optimizer: str) -> list[int]:
    """The micro-batch sizes, smallest first; UserError for arguments that cannot be measured."""
    if not micro_batches or min(micro_batches) < 1:
        raise UserError("--micro-batch: give at least one size, each 1 or more, for instance 1,2,4")
    as_dtype(dtype)
    if optimizer not in OPTIMIZERS:
        raise UserError(f"optimizer {optimizer} cannot be profiled; use one of {', '.join(OPTIMIZERS)}")
    return sorted(set(micro_batches))


def _build(
    workload: Workload, seed: int, dtype: torch.dtype, device: torch.device
) -> tuple[nn.Module, tuple[Unit, ...]]:
    """The model, the same on every rank, and its units. As in the runtime, buffers keep the master dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = workload.build().to(device=device, dtype=master_dtype_of(dtype))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    units = workload.units_of(model)
    if not any(parameter.requires_grad for unit in units for _, parameter in unit.parameters):
        raise UserError(f"{workload.name}: no parameter is trained, so there is nothing to plan")
    return model, units


def _steps(
    ranks: Ranks, workload: Workload, model: nn.Module, micro_batches: Sequence[int], seed: int
) -> Mapping[int, Callable[[], Tensor]]:
    """What computes the loss of a micro-batch, by its size; each rank on data of its own."""
    generator = torch.Generator().manual_seed(seed * ranks.size + ranks.rank)
    return {
        size: partial(
            workload.loss,
            model,
            tree_map_only(Tensor, lambda t: t.to(ranks.device), workload.batch(size, generator)),
        )
        for size in micro_batches
    }
