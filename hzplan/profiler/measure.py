"""A whole profile: a model's units at every micro-batch size, its optimizer, a cluster's links.

A model's part: find its units, record their calls, time them, time the optimizer's steps. A cluster's part:
links, interference with compute, host memory, stragglers. Steps are functions of ``model`` and ``network``.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist

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
    UseEntry,
)
from hzplan.models.units import master_dtype_of
from hzplan.models.workload import Workload
from hzplan.profiler.model.build import RunnableModel, build_model
from hzplan.profiler.model.entries import (
    as_dtype,
    joined_units,
    largest_elements,
    matrix_shapes,
    model_entry,
    trained_elements,
)
from hzplan.profiler.model.matrices import for_optimizer, measure_matrices
from hzplan.profiler.model.optimizer import LAST_ELEMENTS, OPTIMIZERS, measure_optimizer
from hzplan.profiler.model.outside import merged
from hzplan.profiler.model.passes import Pass, record_passes
from hzplan.profiler.model.reuse import EarlierCosts, with_reused
from hzplan.profiler.model.time import measure_uses
from hzplan.profiler.network.host import measure_host
from hzplan.profiler.network.interference import measure_interference
from hzplan.profiler.network.links import LAST_BYTES, measure_links, measure_norm, timed_stages
from hzplan.profiler.network.rounding import measure_rounding
from hzplan.profiler.network.stragglers import slow_compute, slow_links
from hzplan.profiler.network.wakeup import measure_wakeup
from hzplan.profiler.session.machine import peak_flops, provenance, rank_memory_bytes, untracked_bytes
from hzplan.profiler.session.processors import Processors, compute_share, of_sessions
from hzplan.profiler.session.progress import Progress
from hzplan.profiler.session.ranks import Ranks, local_ranks
from hzplan.profiler.session.resume import PartialResults
from hzplan.profiler.session.rounds import THOROUGH, Effort
from hzplan.runtime.backends.groups import on_device, release
from hzplan.runtime.backends.packing import forget

# About how many seconds each part takes at most, for the progress shown.
PASS_S = 12.0  # without recomputation and with it
OPTIMIZER_S = 2.0
MACHINE_S = 1.0
STAGE_S = 4.0
INTERFERENCE_S = 7.0
HOST_S = 2.0
ROUNDING_S = 1.5
STATE_BYTES = 20  # of a parameter: float32 weight, gradient and two moments, and what it is computed in
RECORDING_SHARE = 0.2  # of PASS_S, before passes are timed

PRODUCT_SIZE, PRODUCTS = 512, 8
"""Rows of square matrices, and products in a row: the compute that stands for a model when only links are
measured."""


class ModelResult(Strict):
    """A model's part of a profile. ``largest_bytes``: the largest unit's gradients, as they travel;
    ``joined_bytes``: the most that a plan sums as one message."""

    entry: ModelEntry
    units: tuple[UnitEntry, ...]
    uses: tuple[UseEntry, ...]
    optimizer: OptimizerEntry
    largest_bytes: int
    joined_bytes: int
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
            rounding=links.rounding,
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
    earlier: Mapping[str, Profile] | None = None,
    partial_path: Path | None = None,
    message: Callable[[str], None] = lambda text: None,
    effort: Effort = THOROUGH,
) -> Profile:
    """Measure a model and the links between ranks; the same profile on every rank.

    Every rank of an initialised torch.distributed job calls it with the same arguments, or one process
    without a job. ``micro_batches``: sequences per forward and backward; ``dtype``: the one that the model
    computes in, torch's name (bfloat16 is trained with float32 master weights, gradients and optimizer
    state); ``optimizer``: one of ``OPTIMIZERS``; ``progress`` is told the current part and the fraction done;
    ``memory_bytes``: a rank's memory (default: its device's, or its share of the host's); a model whose
    weights take most of it is measured weight-shared. ``earlier``: profiles, by their names in messages,
    whose costs are reused where shapes and micro-batches are the same. ``partial_path``: a file for partial
    results, to be removed when the profile is written; the same call resumes from it after an interruption.
    ``message`` gets a line on what is reused, and on what is resumed.

    Raises UserError when arguments do not fit the job, or the model cannot be run or planned for.
    """
    ranks = Ranks.here()
    _check_mesh(ranks, mesh, tier_names)
    sizes = _checked(micro_batches, dtype, optimizer)
    _advise(ranks, message)
    workload = for_optimizer(workload, optimizer)
    parts = Progress(progress, _model_s(sizes) + _links_s(mesh))
    memory = memory_bytes or rank_memory_bytes(ranks)
    message = message if ranks.rank == 0 else lambda text: None
    reusable = EarlierCosts.of_profiles(earlier or {}, ranks.device, dtype, local_ranks(ranks))
    model = build_model(ranks, workload, dtype, sizes, seed, memory, trace=bool(reusable), message=message)
    question = (
        *(workload.name, model.entries, sizes, dtype, optimizer),
        *(str(mesh), tier_names, seed, memory, torch.__version__, ranks.gather(platform.node())),
        [fingerprint(profile) for profile in (earlier or {}).values()],
    )
    partial = PartialResults(ranks, partial_path, question, message)
    result = partial.result(
        "model",
        ModelResult,
        lambda: _measure_model(
            *(ranks, workload, model, dtype, optimizer, reusable, parts, message, memory), effort
        ),
    )
    links = partial.result(
        "links",
        Links,
        lambda: _measure_links(
            *(ranks, mesh, tier_names, dtype, result.largest_bytes, result.joined_bytes),
            *(model.run_smallest, parts, memory, effort),
        ),
    )
    parts.finish("measured")
    return result.profile(links)


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
    earlier: Mapping[str, Profile] | None = None,
    message: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Measure a model in one process, for a cluster whose links were measured before.

    Arguments and errors as for ``measure``. Nobody else computes meanwhile: where the ranks of a node share
    processors or memory, times are those of a rank that has them to itself.
    """
    sizes = _checked(micro_batches, dtype, optimizer)
    workload = for_optimizer(workload, optimizer)
    ranks = Ranks.here()
    parts = Progress(progress, _model_s(sizes) + MACHINE_S)
    memory = memory_bytes or rank_memory_bytes(ranks)
    reusable = EarlierCosts.of_profiles(earlier or {}, ranks.device, dtype, local_ranks(ranks))
    model = build_model(ranks, workload, dtype, sizes, seed, memory, trace=bool(reusable), message=message)
    result = _measure_model(ranks, workload, model, dtype, optimizer, reusable, parts, message, memory)
    parts.part("matrix products", MACHINE_S)
    peak = peak_flops(ranks, getattr(torch, dtype))  # links may have been measured for another dtype
    on_processors = links.cluster.device == ranks.device.type == "cpu"
    wakeup = measure_wakeup(ranks) if on_processors else None
    share = links.cluster.compute_processor_share if on_processors else None
    parts.finish("measured")
    cluster = links.cluster.model_copy(
        update={"peak_flops": peak, "wakeup_seconds": wakeup, "compute_processor_share": share}
    )
    return result.profile(links.model_copy(update={"cluster": cluster}))


def measure_links_alone(
    *,
    mesh: Mesh,
    tier_names: tuple[str, ...],
    dtype: str,
    progress: Callable[[str, float], None],
    message: Callable[[str], None] = lambda text: None,
) -> Links:
    """Measure a cluster without a model: links carry large buffers and disturb matrix products.

    Every rank calls it with the same arguments and gets the same.
    """
    ranks = Ranks.here()
    _check_mesh(ranks, mesh, tier_names)
    _advise(ranks, message)
    matrix = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, dtype=getattr(torch, dtype), device=ranks.device)
    out = matrix @ matrix

    def compute() -> None:
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix, out=out)

    parts = Progress(progress, _links_s(mesh))
    memory = rank_memory_bytes(ranks)
    links = _measure_links(ranks, mesh, tier_names, dtype, LAST_BYTES, LAST_BYTES, compute, parts, memory)
    parts.finish("measured")
    return ranks.share(links)


def _model_s(micro_batches: Sequence[int]) -> float:
    return PASS_S * len(micro_batches) + OPTIMIZER_S


def _links_s(mesh: Mesh) -> float:
    links_s = STAGE_S * len(timed_stages(mesh)) + INTERFERENCE_S * len(mesh.tiers)
    return MACHINE_S + links_s + ROUNDING_S + HOST_S


def _measure_model(
    ranks: Ranks,
    workload: Workload,
    model: RunnableModel,
    dtype: str,
    optimizer: str,
    reusable: EarlierCosts,
    parts: Progress,
    message: Callable[[str], None],
    memory_bytes: int,
    effort: Effort = THOROUGH,
) -> ModelResult:
    """Record and time the calls of units, then the optimizer's steps, as far as they cannot be reused."""
    reused = reusable.costs_of(model.shapes) if model.shapes is not None and reusable else {}
    left = [size for size in model.steps if size not in reused]
    if model.shapes is not None and reusable:
        known = ", ".join(map(str, reused)) or "no size"
        message(f"--known: every unit's times are known at micro-batch {known}; {len(left)} to measure")
    parts.part(f"forward and backward, micro-batch {', '.join(map(str, left))}", PASS_S * len(left))
    if left:
        passes = record_passes(ranks, model, left, lambda done: parts.at(RECORDING_SHARE * done))
        model = model.reading(merged(recorded.outside for recorded in passes))
        if reused and model.shapes is not None and passes[0].uses != model.shapes.uses:
            raise UserError(
                f"{workload.name}: modules are used in another order with values than without; profile "
                "without --known"
            )
        measured, own_seconds = measure_uses(
            *(ranks, model, passes),
            lambda done: parts.at(RECORDING_SHARE + (1 - RECORDING_SHARE) * done),
            effort,
            recompute=any(ranks.gather(_needed_bytes(model, passes) >= effort.spare * memory_bytes)),
        )
        uses, stragglers = with_reused(measured, reused), slow_compute(ranks, own_seconds)
    else:
        shapes = model.shapes
        assert shapes is not None
        model = model.reading(shapes.outside)
        uses, stragglers = reusable.use_entries(shapes, reused), ()
    largest, elements = largest_elements(model.entries), trained_elements(model.entries)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    parts.part(f"{optimizer} steps", OPTIMIZER_S)
    steps = reusable.optimizer(optimizer, min(largest, LAST_ELEMENTS)) or measure_optimizer(
        ranks, optimizer, torch_dtype, largest, model.run_smallest, parts.at
    )
    if sides := matrix_shapes(model.entries):
        matrix = measure_matrices(ranks, optimizer, torch_dtype, sides, model.run_smallest, parts.at)
        steps = steps.model_copy(update={"matrix": matrix})
    return ModelResult(
        entry=model_entry(workload, model.entries, as_dtype(dtype)),
        units=joined_units(model.entries, uses),
        uses=uses,
        optimizer=steps,
        largest_bytes=largest * master_dtype_of(torch_dtype).itemsize,
        # Plans join units to about a third of all gradients at most (``solver.search.MESSAGES``).
        joined_bytes=max(largest, elements // 2) * master_dtype_of(torch_dtype).itemsize,
        stragglers=stragglers,
        ranks_per_host=local_ranks(ranks),
    )


def _needed_bytes(model: RunnableModel, passes: Sequence[Pass]) -> int:
    """About what a rank needs that has everything whole: state in float32, and activations."""
    elements = sum(prod(tensor.shape) for unit in model.entries for tensor in unit.tensors)
    kept = max(sum(max(0, segment.retained_bytes) for segment in one.memory) for one in passes)
    return STATE_BYTES * elements + kept + max(segment.peak_bytes for one in passes for segment in one.memory)


def _measure_links(
    ranks: Ranks,
    mesh: Mesh,
    tier_names: tuple[str, ...],
    dtype: str,
    largest_bytes: int,
    joined_bytes: int,
    compute: Callable[[], None],
    parts: Progress,
    memory_bytes: int,
    effort: Effort = THOROUGH,
) -> Links:
    """Measure a cluster; ``compute`` is the work that links disturb. Messages have the gradients' dtype: only
    their bytes decide how long they take."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    travelling = master_dtype_of(torch_dtype)
    parts.part("matrix products", MACHINE_S)
    peak = peak_flops(ranks, torch_dtype)
    parts.part("links", STAGE_S * len(timed_stages(mesh)))
    before = untracked_bytes(ranks)
    apart = ranks.device.type != "cpu"  # else ranks share processors, and there is no memory but the host's
    processors = None if apart else Processors.of(ranks)
    collectives = measure_links(*(ranks, mesh, travelling, largest_bytes, joined_bytes, parts.at, processors))
    context, communicator = _reserve(before, untracked_bytes(ranks), len(timed_stages(mesh)))
    release()
    parts.part("compute and links together", INTERFERENCE_S * len(mesh.tiers))
    interference = measure_interference(ranks, mesh, travelling, largest_bytes, compute, parts.at, effort)
    parts.part("rounding of what travels", ROUNDING_S)
    rounding = measure_rounding(ranks, parts.at)
    parts.part("the host's memory", HOST_S)
    host, stragglers = measure_host(ranks, parts.at) if apart else None, slow_links(ranks, mesh)
    release()
    forget()
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
            context_bytes=context if apart else None,
            communicator_bytes=communicator if apart else None,
            compute_processor_share=None
            if processors is None
            else round(compute_share(ranks, processors, compute), 4),
        ),
        collectives=collectives,
        interference=interference,
        host=host,
        rounding=rounding or None,
        stragglers=stragglers,
    )


def _reserve(before: int, after: int, communicators: int) -> tuple[int, int | None]:
    """Bytes of CUDA's context, and of a communicator, from bytes beside tensors before and after the first
    collectives of ``communicators``; before there was the job's own."""
    if not communicators:
        return before, None
    each = max(0, after - before) // communicators
    return max(0, before - each), each


def _by_exchange(ranks: Ranks) -> bool:
    """Whether the job's reduce-scatters go point to point."""
    world = dist.group.WORLD
    return world is not None and ranks.size > 1 and on_device(world, ranks.device).needs_scratch


def _advise(ranks: Ranks, message: Callable[[str], None]) -> None:
    """Rank 0 says what makes ranks of a host disturb each other more than they must."""
    advice = of_sessions(ranks, Processors.of(ranks)) if ranks.device.type == "cpu" else None
    if advice is not None and ranks.rank == 0:
        message(advice)


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
