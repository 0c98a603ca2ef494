"""A forward and backward in shapes only: its units, their calls, operations, FLOPs and memory.

The model's tensors are fake ones (torch's ``FakeTensorMode``): they have shape, dtype and storage, but no
bytes. The operations are those of the real model, so its calls, FLOPs and saved activations are too. Seconds
are not known here: ``profiler.model.kernels`` models them from the operations.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hzplan.core.recompute import WAYS, Way
from hzplan.core.schedule import Use
from hzplan.errors import UserError, one_line
from hzplan.formats.profile import UnitEntry, UseCost
from hzplan.models.recompute import leaves, switched
from hzplan.models.units import Unit, master_dtype_of
from hzplan.models.workload import Workload, for_training
from hzplan.profiler.model.calls import RecordedCalls, Step
from hzplan.profiler.model.entries import unit_entry
from hzplan.profiler.model.flops import FlopProbe
from hzplan.profiler.model.folding import Fold, fold
from hzplan.profiler.model.operations import Operated, Recorder, bytes_of
from hzplan.profiler.model.outside import Outside, OutsideReads, merged, requiring
from hzplan.profiler.session.clock import Probe


@dataclass(frozen=True)
class Shapes:
    """A model as far as it is known without values.

    ``reads``: whether each use may read parameters; ``costs``: every use's FLOPs and bytes, without seconds,
    by micro-batch size; ``outside``: what is read during other units' calls; ``recompute``: costs where all
    ``recomputable`` units compute their forward again, by way, without those that the model does not allow.
    ``operations``, ``recompute_operations``: of the same uses.
    """

    units: tuple[UnitEntry, ...]
    uses: tuple[Use, ...]
    reads: tuple[bool, ...]
    costs: Mapping[int, Sequence[UseCost]]
    outside: Outside
    recompute: Mapping[Way, Mapping[int, Sequence[UseCost]]]
    recomputable: frozenset[str]
    operations: Mapping[int, Sequence[Operated]]
    recompute_operations: Mapping[Way, Mapping[int, Sequence[Operated]]]


def trace_shapes(
    workload: Workload,
    dtype: torch.dtype,
    micro_batches: Sequence[int],
    world: int,
    progress: Callable[[str, float], None] = lambda text, fraction: None,
) -> Shapes:
    """Run a workload without memory at every micro-batch size, computing in ``dtype``.

    Raises UserError for a model that cannot run so, as one whose forward looks at values.
    """
    model = model_on_meta(workload, dtype)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    units = workload.units_of(model)
    recomputable, passes = leaves(units), None
    if not workload.units and (folded := fold(model)) is not None:
        with suppress(UserError):  # of a model that counts its blocks
            passes = _passes(workload, model, dtype, micro_batches, world, folded, progress)
        if passes is not None and not {use.unit for use in passes.uses} <= {unit.name for unit in units}:
            passes = None
        model = model_on_meta(workload, dtype) if passes is None else model
    if passes is None:  # nothing repeats, or blocks that look alike are not
        passes = _passes(workload, model, dtype, micro_batches, world, None, progress)
    assert passes is not None, "without folding there is a result"
    looked_up = {unit.name for unit in units if _looks_up(unit.module)}
    return Shapes(
        units=tuple(
            unit_entry(unit, workload.matrices_of(unit)) for unit in requiring(units, passes.outside)
        ),
        uses=passes.uses,
        reads=tuple(
            use.phase == "forward" or use.unit not in looked_up or use.unit in passes.outside
            for use in passes.uses
        ),
        costs=passes.costs,
        outside=passes.outside,
        recompute=passes.recompute,
        recomputable=recomputable,
        operations=passes.operations,
        recompute_operations=passes.recompute_operations,
    )


@dataclass
class _Passes:
    """The passes at every micro-batch size, without recomputation and with it."""

    uses: tuple[Use, ...] = ()
    costs: dict[int, Sequence[UseCost]] = field(default_factory=dict)
    outside: Outside = field(default_factory=dict)
    operations: dict[int, Sequence[Operated]] = field(default_factory=dict)
    recompute: dict[Way, dict[int, Sequence[UseCost]]] = field(default_factory=dict)
    recompute_operations: dict[Way, dict[int, Sequence[Operated]]] = field(default_factory=dict)


def _passes(
    workload: Workload,
    model: nn.Module,
    dtype: torch.dtype,
    micro_batches: Sequence[int],
    world: int,
    folded: Fold | None,
    progress: Callable[[str, float], None],
) -> _Passes | None:
    """Run the passes; None where the model is ``folded`` and its blocks turn out to differ."""
    found = _Passes()
    orders: set[tuple[Use, ...]] = set()
    with _without_values(model, dtype):
        units = workload.units_of(model)

        def trace(size: int, around: Callable[[Step], Step] | None = None) -> _Unfolded | None:
            traced = _trace(workload, model, units, size, world, around or (lambda step: step))
            uses, costs, operations, outside, met = traced
            if around is None:
                found.outside = merged([found.outside, outside])
            if folded is None:
                return uses, costs, operations
            outer = {unit.name for unit in units if unit.parameters and folded.index(unit.name) is None}
            read = {unit for of in found.outside.items() for unit in (of[0], *of[1])}
            if not outer <= met or not read <= outer:  # a block that is not there may be the one that reads
                return None
            unfolded = folded.unfolded(uses, [*zip(costs, operations, strict=True)])
            if unfolded is None:
                return None
            return unfolded[0], [cost for cost, _ in unfolded[1]], [done for _, done in unfolded[1]]

        for number, size in enumerate(micro_batches):
            progress(f"forward and backward in shapes, micro-batch {size}", number / len(micro_batches))
            traced = trace(size)
            if traced is None:
                return None
            found.uses, found.costs[size], found.operations[size] = traced
            orders.add(found.uses)
            progress(f"recomputation in shapes, micro-batch {size}", (number + 0.5) / len(micro_batches))
            for way in WAYS:
                with (
                    suppress(UserError),
                    switched(units, keep_random_state=False, without_values=True) as switch,
                ):
                    traced = trace(size, partial(switch.around, way=way))
                    if traced is None:
                        return None
                    if traced[0] == found.uses:
                        found.recompute.setdefault(way, {})[size] = traced[1]
                        found.recompute_operations.setdefault(way, {})[size] = traced[2]
    if len(orders) > 1:
        raise UserError(
            f"{workload.name}: the order in which modules are used depends on the micro-batch size"
        )
    for way in [way for way, by_size in found.recompute.items() if len(by_size) < len(found.costs)]:
        del found.recompute[way], found.recompute_operations[way]
    return found


_Unfolded = tuple[tuple[Use, ...], Sequence[UseCost], Sequence[Operated]]


def _trace(
    workload: Workload,
    model: nn.Module,
    units: Sequence[Unit],
    size: int,
    world: int,
    around: Callable[[Step], Step],
) -> tuple[tuple[Use, ...], list[UseCost], list[Operated], Outside, set[str]]:
    """The uses of a forward and backward, their costs, their operations, what is read outside, and the units
    that are met at all."""
    with unset_fake_temporarily():
        real = workload.batch(size, torch.Generator().manual_seed(0))
    batch = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), real)
    calls = RecordedCalls(units, world, copy_gradients=False)
    inputs = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    ledger = Ledger(size, [*model.parameters(), *model.buffers(), *inputs])
    reads = OutsideReads(units, lambda: calls.current_unit)
    try:
        with workload.in_shapes(), ledger, reads:
            uses = calls.run(around(partial(workload.loss, model, batch)), ledger)
            costs, operations = ledger.result()
    except Exception as error:  # the user's model, which may raise anything
        raise UserError(
            f"{workload.name}: a forward and backward without values failed: {one_line(error)}; where the "
            "model looks at values, profile it on a device instead"
        ) from error
    finally:
        calls.detach()
    if not uses:
        raise UserError(f"{workload.name}: its loss uses no module that has parameters")
    try:
        return uses, costs, operations, reads.found, reads.met
    except UserError as error:
        raise UserError(f"{workload.name}: {error}") from None


def _looks_up(module: nn.Module) -> bool:
    """Whether a module's backward surely reads no parameter."""
    return type(module) is nn.Embedding and module.max_norm is None


@contextmanager
def _without_values(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Make a model one of torch's fake tensors, computing in ``dtype``; to be run inside the block."""

    def empty(parameter: nn.Parameter) -> Tensor:
        wanted = dtype if parameter.is_floating_point() else parameter.dtype
        return torch.empty(parameter.shape, dtype=wanted)

    with FakeTensorMode():
        replace_tensors(model, empty, torch.empty)
        yield


def model_on_meta(workload: Workload, dtype: torch.dtype) -> nn.Module:
    """The model on torch's meta device, where constructors run as they are and allocate nothing."""
    with torch.device("meta"):
        return for_training(workload.build()).to(master_dtype_of(dtype))


def replace_tensors(
    model: nn.Module, values: Callable[[nn.Parameter], Tensor], buffer: Callable[..., Tensor]
) -> None:
    """Give every parameter new values, tied ones the same, and make buffers by ``buffer(shape, dtype=)``."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(values(parameter), requires_grad=parameter.requires_grad)
            setattr(module, name, made[id(parameter)])  # modules such as LSTM listen to attributes
        for name, old in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            persistent = name not in module._non_persistent_buffers_set
            module.register_buffer(name, buffer(old.shape, dtype=old.dtype), persistent=persistent)


class Ledger(TorchDispatchMode, Probe):
    """Records operations, FLOPs and memory of every call; a context in which one pass runs."""

    def __init__(self, micro_batch: int, alive: Iterable[Tensor]) -> None:
        """``alive``: tensors that are there already."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._micro_batch = micro_batch
        self._flops = FlopProbe().counter
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._costs: list[UseCost] = []
        self._operations: list[Operated] = []
        self._recorder = Recorder()
        self._begun = False
        self._reset()
        for tensor in alive:
            self._add_storage(tensor)
        self._reset()

    def __enter__(self) -> Ledger:
        self._flops.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        self._flops.__exit__(*failure)

    def cut(self) -> None:
        if self._begun:
            self._end_call()
        self._begun = True
        self._reset()

    def gradient(self, gradient: Tensor) -> None:
        """Charge the runtime's copy of a gradient, which is not made here."""
        copied = gradient.numel() * master_dtype_of(gradient.dtype).itemsize
        self._recorder.move(bytes_of(gradient) + copied)

    def result(self) -> tuple[list[UseCost], list[Operated]]:
        """The cost and the operations of every call; asked for once, after the pass."""
        self._end_call()
        return self._costs, self._operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = self._flops.get_total_flops()
        result = func(*args, **(kwargs or {}))
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = [tensor for tensor in written if self._add_storage(tensor)]
        if fresh or func._schema.is_mutable:
            read = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
            self._recorder.add(func, args, read, written, self._flops.get_total_flops() - before)
        return result

    def _end_call(self) -> None:
        self._costs.append(
            UseCost(
                micro_batch=self._micro_batch,
                seconds=0.0,
                spread=0.0,
                flops=self._flops.get_total_flops() - self._flops_before,
                retained_bytes=self._level,
                peak_bytes=self._peak,
            )
        )
        self._operations.append(self._recorder.take())

    def _reset(self) -> None:
        self._level, self._peak = 0, 0
        self._recorder.take()
        self._flops_before = self._flops.get_total_flops()

    def _add_storage(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is new; then it counts until it is freed."""
        storage = tensor.untyped_storage()
        key, nbytes = id(storage), storage.nbytes()
        if key in self._storages:
            return False

        def freed(_: object) -> None:
            del self._storages[key]
            self._level -= nbytes

        self._storages[key] = weakref.ref(storage, freed)
        self._level += nbytes
        self._peak = max(self._peak, self._level)
        return True
