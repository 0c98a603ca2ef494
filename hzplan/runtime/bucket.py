"""A bucket's storage on one rank, and the collectives that move it between levels."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor, nn

from hzplan.core.hierarchy import Mesh, Stage
from hzplan.core.layout import BucketLayout
from hzplan.core.schedule import Kind
from hzplan.core.stages import GROUP_OF, PARAMETERS, Collective, collectives_of, format_of
from hzplan.core.wire import Wire
from hzplan.models.local import cast, is_distributed, local, put
from hzplan.runtime.backends.base import Buffers, Groups
from hzplan.runtime.backends.packing import Cast, Errors, Form, form_of
from hzplan.runtime.world import World

CHUNK_ELEMENTS = 1 << 16
"""Elements of a gradient that are cast at once, for a cast allocates: few enough to stay in a cache."""


@dataclass
class Forms:
    """What values travel in. ``reduce_dtype``: gradients that no format narrows; None: as they are kept;
    ``sums``: whether libraries add up in it, where they add. ``errors``: of what is rounded."""

    wire: Wire | None = None
    reduce_dtype: torch.dtype | None = None
    sums: bool = False
    errors: Errors = field(default_factory=Errors)

    def of(self, kind: Kind, tier: int, layout: BucketLayout, stage: Stage, mesh: Mesh) -> Form | None:
        """The form of a bucket's values in a task of a kind; None: as they are."""
        name, of_gradients = format_of(self.wire, kind, tier, layout, stage, mesh), kind not in PARAMETERS
        if name == "exact":
            dtype = self.reduce_dtype if of_gradients else None
            return None if dtype is None else Cast(dtype, self.sums)
        return form_of(name, dithered=of_gradients, tier=tier, errors=self.errors)


class Bucket:
    """Flat buffers [elements] of one bucket.

    ``param``: model weights, the level-ℓp slice, allocated for good; ``unsharded``: all model weights, a view
    of the unit's unshard buffer (or ``param`` itself where it is not sharded); ``master``: the level-ℓo slice
    that the optimizer updates, allocated where the layout keeps one (in the host's memory where the plan
    offloads the unit), else a view of ``param``; ``grad``: reduced gradients, the level-ℓg slice, allocated
    for good, None when frozen; ``gradient_buffer``: unsharded gradients of one micro-batch, a view of the
    unit's gradient buffer (or ``grad`` itself, with those of all micro-batches). Gradients have the master
    weights' dtype. Slices nest, with the same bounds in every dtype, so every other level is a view of one
    of these.

    ``sums``: by tensor, the place of its gradient where autograd adds it up (``adds_up``), with a version of
    its own, else None; ``sum_runs``: those places, neighbours as one.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: list[nn.Parameter],
        mesh: Mesh,
        world: World,
        forms: Forms | None = None,
        *,
        offload: bool = False,
        waits: Collection[str] = (),
    ) -> None:
        """``forms``: what values travel in; by default as they are. ``offload``: master weights go to the
        host's memory at once. ``waits``: tensors whose values come to ``begin_with``."""
        self.layout, self.parameters, self.mesh = layout, parameters, mesh
        self.rank, self._world = world.rank, world
        self._forms = forms or Forms()
        levels = layout.levels
        self.sharded = mesh.shards[levels.param] > 1
        self.grad_sharded = layout.trainable and mesh.shards[levels.grad] > 1
        first = local(parameters[0])
        dtype: torch.dtype = getattr(torch, layout.dtype)
        self.param = first.new_zeros(layout.numel // mesh.shards[levels.param], dtype=dtype)
        self.unsharded = self.param
        if layout.keeps_master:
            where = "cpu" if offload else first.device
            self.master = first.new_zeros(layout.numel // mesh.shards[levels.optim], device=where)
        else:
            self.master = self.within(self.param, levels.param, levels.optim)
        if waits:
            for index, parameter in enumerate(parameters):
                if layout.tensors[index].name not in waits:
                    self.begin_with(index, parameter)
        else:
            for index, values in enumerate(self.views(self._gathered_initial())):
                self.fill(index, values)
        self.grad: Tensor | None = None
        if layout.trainable:
            self.grad = self.param.new_zeros(
                layout.numel // mesh.shards[levels.grad], dtype=self.master.dtype
            )
            self.gradient_buffer = self.grad

    @torch.no_grad()
    def _gathered_initial(self) -> Tensor:
        """All parameters in one buffer, rank 0's values on every rank, in the dtype that they come in."""
        first = self.parameters[0]
        flat = torch.zeros(self.layout.numel, dtype=first.dtype, device=first.device)
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            view.copy_(local(parameter))
        self._world.broadcast(flat)
        return flat

    @torch.no_grad()
    def begin_with(self, index: int, values: Tensor) -> None:
        """Rank 0's values of a tensor, in its shape; every rank calls it."""
        sent = local(values).detach().contiguous()
        self._world.broadcast(sent)
        self.fill(index, sent)

    def fill(self, index: int, values: Tensor) -> None:
        """Keep this rank's parts of a tensor's values."""
        levels, flat = self.layout.levels, values.reshape(-1)
        kept = [(self.param, levels.param)]
        if self.layout.keeps_master:
            kept.append((self.master, levels.optim))
        offset = self.layout.offsets[index]
        for buffer, level in kept:
            start, end = self.bounds(level)
            low, high = max(start, offset), min(end, offset + flat.numel())
            if low < high:
                buffer[low - start : high - start].copy_(flat[low - offset : high - offset])

    @property
    def assembles(self) -> bool:
        """Whether matrices have to be brought together from slices for their updates."""
        return self.layout.levels.assembles(self.mesh)

    def keep_gradients_in(self, values: Tensor) -> None:
        """Reduced gradients are kept in ``values`` from now on; called before ``assign_buffers``."""
        self.grad = self.gradient_buffer = values

    def bounds(self, level: int) -> tuple[int, int]:
        """This rank's slice at a level, in elements of the whole buffer."""
        return self.mesh.slice_bounds(self.rank, level, self.layout.numel)

    def views(self, whole: Tensor) -> list[Tensor]:
        """The tensors of the bucket as views of a whole buffer, in their shapes."""
        return [
            whole[offset : offset + tensor.numel].view(tensor.shape)
            for tensor, offset in zip(self.layout.tensors, self.layout.offsets, strict=True)
        ]

    def assign_buffers(self, parameters: Tensor | None, gradients: Tensor | None) -> None:
        """Give the bucket its parts of the unit's buffers; called once."""
        if self.sharded:
            assert parameters is not None
            self.unsharded = parameters
        if self.grad_sharded:
            assert gradients is not None
            self.gradient_buffer = gradients
        self.param_views = self.views(self.unsharded)
        self.grad_views = self.views(self.gradient_buffer) if self.layout.trainable else []
        self.sums = [view.data if self.adds_up(index) else None for index, view in enumerate(self.grad_views)]
        self.sum_runs = [*self._runs()] if any(total is not None for total in self.sums) else []
        # What a sharded parameter reads as outside its turn: its shape, and NaN for whoever computes with it.
        self.placeholders = [
            torch.full((), float("nan"), dtype=self.param.dtype, device=self.param.device).expand(
                tensor.shape
            )
            for tensor in self.layout.tensors
        ]
        self._has_parts = any(map(is_distributed, self.parameters))
        named = zip(self.parameters, self.param_views, self.layout.tensors, strict=True)
        for parameter, view, tensor in named:
            cast(parameter, view.dtype, tensor.name)
            put(parameter, view)
            parameter.grad = None  # of an earlier backward, which is not of this training
        for parameter, total in zip(self.parameters, self.sums, strict=False):
            if total is not None and total.dtype != parameter.dtype:
                parameter.grad_dtype = None  # any: it is cast where it is added, not in the graph before
        self.to_sharded()

    def adds_up(self, index: int) -> bool:
        """Whether autograd itself adds a tensor's gradients to their sum.

        Whole ones, on a CPU, that are so small that calls cost more than bytes: to begin with nothing, and to
        make a mean of it, a sum is gone over twice more.
        """
        return (
            not self.grad_sharded
            and self.param.device.type == "cpu"
            and not is_distributed(self.parameters[index])
            and self.grad_views[index].numel() <= CHUNK_ELEMENTS
        )

    def _runs(self) -> Iterator[Tensor]:
        """The parts of the gradients' buffer that are sums, neighbours as one."""
        offsets, tensors = self.layout.offsets, self.layout.tensors
        for is_sum, group in groupby(range(len(tensors)), key=lambda index: self.sums[index] is not None):
            if is_sum:
                indices = [*group]
                end = offsets[indices[-1]] + tensors[indices[-1]].numel
                yield self.gradient_buffer[offsets[indices[0]] : end]

    def to_unsharded(self) -> None:
        """Make parameters views of the unsharded values, which are there."""
        if self.sharded:
            self._show(self.param_views)

    def to_sharded(self) -> None:
        """Make parameters read as NaN: the buffer goes to another unit."""
        if self.sharded:
            self._show(self.placeholders)

    def _show(self, values: list[Tensor]) -> None:
        """``put`` of all parameters, twice in each use of a unit."""
        if self._has_parts:
            for parameter, view in zip(self.parameters, values, strict=True):
                put(parameter, view)
        else:
            for parameter, view in zip(self.parameters, values, strict=True):
                parameter.data = view

    def within(self, buffer: Tensor, of: int, level: int) -> Tensor:
        """The level-``level`` slice of a buffer that holds the slice of level ``of`` (coarser or equal)."""
        origin = self.bounds(of)[0]
        start, end = self.bounds(level)
        return buffer[start - origin : end - origin]

    # The collectives of tasks, and the buffers of each. They touch only this bucket's buffers.

    def collectives(self, kind: Kind, tier: int) -> tuple[Collective, ...]:
        """What this bucket does in a task of a kind on a tier."""
        return collectives_of(kind, tier, self.layout, self.mesh)

    def gathers(self, kind: Kind, tier: int) -> Iterator[tuple[Stage, Buffers]]:
        """Unshard parameters into a buffer; gather reduced gradients and updated parameters in place."""
        levels = self.layout.levels
        for _, stage in self.collectives(kind, tier):
            form = self.form(kind, tier, stage)
            if kind is Kind.UNSHARD:
                # From the shard, or from the slice that the tier outside has gathered.
                from_shard = self.mesh.shards[stage.high] == self.mesh.shards[levels.param]
                part = self.param if from_shard else self.within(self.unsharded, 0, stage.high)
                yield stage, Buffers(self.within(self.unsharded, 0, stage.low), part, form)
            elif kind is Kind.PARAM_GATHER:
                yield stage, self._in_place(self.param, levels.param, stage, form)
            else:
                assert self.grad is not None
                yield stage, self._in_place(self.grad, levels.grad, stage, form)

    def reductions(self, kind: Kind, tier: int) -> Iterator[tuple[Collective, Buffers]]:
        """Reduce this micro-batch's gradients down to ℓg, and on the last one their sum down to L, or over
        all replicas at once.

        Gradients that arrive in ``grad`` from another buffer are added to it from the second micro-batch on.
        """
        if self.grad is None:
            return
        shards, level = self.mesh.shards, self.layout.levels.grad
        for one in self.collectives(kind, tier):
            stage, arrives = one.stage, False
            if stage.low >= level:
                source = self.within(self.grad, level, stage.low)
                target = self.within(self.grad, level, stage.high)
            else:
                source = self.within(self.gradient_buffer, 0, stage.low)
                arrives = shards[stage.high] == shards[level]
                target = self.grad if arrives else self.within(self.gradient_buffer, 0, stage.high)
            yield one, Buffers(source, target, self.form(kind, tier, stage), adds=arrives)

    def form(self, kind: Kind, tier: int, stage: Stage) -> Form | None:
        """What values travel in, in a task of a kind; None: as they are."""
        return self._forms.of(kind, tier, self.layout, stage, self.mesh)

    def sent_nbytes(self, kind: Kind, tier: int, stage: Stage) -> int:
        """Bytes of the coarser slice that a collective is about, in the form that it travels in."""
        elements, form = self.layout.numel // self.mesh.shards[stage.low], self.form(kind, tier, stage)
        if form is None:
            return elements * (self.param if kind in PARAMETERS else self.master).element_size()
        return form.units(elements) * form.dtype.itemsize

    def _in_place(self, buffer: Tensor, level: int, stage: Stage, form: Form | None = None) -> Buffers:
        whole, part = (self.within(buffer, level, inner) for inner in stage)
        return Buffers(whole, part, form)

    def copy_master_to_model(self, master: Tensor | None = None) -> None:
        """Round the updated master weights into ``param``, for ``param_gather`` to gather.

        ``master``: their device copy, where they are offloaded.
        """
        if self.layout.keeps_master:
            levels = self.layout.levels
            updated = self.master if master is None else master
            self.within(self.param, levels.param, levels.optim).copy_(updated)

    def gathered(self, groups: Groups) -> list[Tensor]:
        """Return new tensors with all values, of master weights where there are any, else of model weights.

        Without master weights the bucket must be unsharded, and what is there may be rounded: then it is
        gathered again. It takes the communicators of two streams: no task may be under way.
        """
        if not self.layout.keeps_master and not self.layout.narrow:
            return [view.clone() for view in self.param_views]
        levels, tiers = self.layout.levels, range(len(self.mesh.tiers))
        has_master = self.layout.keeps_master
        values, level = (self.master, levels.optim) if has_master else (self.param, levels.param)
        whole = values.new_empty(self.layout.numel, device=self.param.device)
        self.within(whole, 0, level).copy_(values)
        for kind in (Kind.PARAM_GATHER, Kind.UNSHARD) if has_master else (Kind.UNSHARD,):
            for tier in reversed(tiers):
                for _, stage in self.collectives(kind, tier):
                    groups[GROUP_OF[kind], stage].all_gather([self._in_place(whole, 0, stage)]).run()
        return self.views(whole)

    def master_shard(self, low: int, high: int, master: Tensor | None = None) -> Tensor:
        """Master weights ``[low, high)``, elements of the whole buffer; ``master``: their device copy."""
        start = self.bounds(self.layout.levels.optim)[0]
        return (self.master if master is None else master)[low - start : high - start]

    def grad_shard(self, low: int, high: int) -> Tensor:
        """Reduced gradients ``[low, high)``, elements of the whole buffer."""
        assert self.grad is not None
        start = self.bounds(self.layout.levels.grad)[0]
        return self.grad[low - start : high - start]
