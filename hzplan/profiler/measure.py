"""A whole profile: units at every micro-batch size, optimizer, machine, links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hzplan.errors import UserError
from hzplan.formats.profile import ClusterEntry, Profile
from hzplan.hierarchy import Mesh
from hzplan.models.units import Unit, find_units, master_dtype_of
from hzplan.models.workload import Workload
from hzplan.profiler.entries import as_dtype, joined_units, model_entry, unit_entry
from hzplan.profiler.interference import measure_interference
from hzplan.profiler.links import measure_links
from hzplan.profiler.machine import peak_flops, provenance, rank_memory_bytes
from hzplan.profiler.optimizer import OPTIMIZERS, measure_optimizer
from hzplan.profiler.progress import Progress
from hzplan.profiler.ranks import Ranks
from hzplan.profiler.turns import Turns
from hzplan.profiler.uses import measure_uses
from hzplan.runtime.collectives import exchanges

# About how many seconds each part takes at most, for the progress shown.
PASS_S = 6.0
OPTIMIZER_S = 2.0
MACHINE_S = 1.0
STAGE_S = 4.0
TOGETHER_S = 2.0


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
) -> Profile:
    """Measure a model and the links between ranks; the same profile on every rank.

    Every rank of an initialised torch.distributed job calls it with the same arguments, or one process
    without a ranks. ``micro_batches``: sequences per forward and backward; ``dtype``: what the model computes
    in, torch's name (bfloat16 is trained with float32 master weights, gradients and optimizer state);
    ``optimizer``: one of ``OPTIMIZERS``; ``progress`` gets what is being measured and the fraction done;
    ``memory_bytes``: what a rank may use (default: its device's memory, or its share of the host's).

    Raises UserError when arguments do not fit the job, or the model cannot be run or planned for.
    """
    ranks = Ranks.here()
    batches = _checked(ranks, mesh, tier_names, micro_batches, dtype, optimizer)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    links_s, together_s = STAGE_S * len(mesh.stages()), TOGETHER_S * len(mesh.tiers)
    parts = Progress(progress, PASS_S * len(batches) + OPTIMIZER_S + MACHINE_S + links_s + together_s)
    model, units = _build(workload, seed, torch_dtype, ranks.device)
    entries = tuple(unit_entry(unit) for unit in units)
    parts.part(f"forward and backward, micro-batch {', '.join(map(str, batches))}", PASS_S * len(batches))
    turns = Turns(units, ranks.size)
    steps = _steps(ranks, workload, model, batches, seed)
    uses = measure_uses(ranks, turns, units, steps, label=workload.name, progress=parts.at)
    turns.detach()
    del units, turns
    master_dtype = master_dtype_of(torch_dtype)
    largest_elements = max(sum(tensor.spec.numel for tensor in unit.tensors) for unit in entries)
    parts.part(f"{optimizer} steps", OPTIMIZER_S)
    update = measure_optimizer(ranks, optimizer, torch_dtype, largest_elements, parts.at)
    parts.part("matrix products", MACHINE_S)
    peak = peak_flops(ranks, torch_dtype)
    memory = memory_bytes or rank_memory_bytes(ranks)
    parts.part("links", links_s)
    # Gradients are the largest buffers that travel. A link's time depends on bytes, whatever they are.
    largest_bytes = largest_elements * master_dtype.itemsize
    collectives = measure_links(ranks, mesh, master_dtype, largest_bytes, parts.at)
    parts.part("compute and links together", together_s)
    forward_backward = partial(_forward_backward, model, steps[batches[0]])
    interference = measure_interference(ranks, mesh, master_dtype, largest_bytes, forward_backward, parts.at)
    tensors = [tensor.spec for unit in entries for tensor in unit.tensors]
    profile = ranks.share(
        Profile(
            provenance=provenance(),
            model=model_entry(workload, tensors, as_dtype(dtype)),
            cluster=ClusterEntry(
                mesh=str(mesh),
                tier_names=tier_names,
                backend=ranks.backend,
                device=ranks.device.type,
                memory_bytes=memory,
                peak_flops=peak,
                scattered_by_exchange=ranks.size > 1 and exchanges(ranks.device),
            ),
            optimizer=update,
            units=joined_units(entries, uses),
            uses=uses,
            collectives=collectives,
            interference=interference,
        )
    )
    parts.finish("measured")
    return profile


def _checked(
    ranks: Ranks,
    mesh: Mesh,
    tier_names: tuple[str, ...],
    micro_batches: Sequence[int],
    dtype: str,
    optimizer: str,
) -> list[int]:
    """The micro-batch sizes, smallest first; UserError for arguments that cannot be measured."""
    if mesh.world != ranks.size:
        raise UserError(
            f"mesh {mesh} has {mesh.world} ranks, this job has {ranks.size}; give a mesh that fits"
        )
    if len(tier_names) != len(mesh.tiers):
        raise UserError(f"mesh {mesh} has {len(mesh.tiers)} tiers, but {len(tier_names)} have names")
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
    units = find_units(model)
    if not any(parameter.requires_grad for unit in units for _, parameter in unit.parameters):
        raise UserError(f"{workload.name}: no parameter is trained, so there is nothing to plan")
    return model, units


def _steps(
    ranks: Ranks, workload: Workload, model: nn.Module, micro_batches: Sequence[int], seed: int
) -> dict[int, Callable[[], Tensor]]:
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


def _forward_backward(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    loss().backward()
    for parameter in model.parameters():
        parameter.grad = None
