"""A forward and backward in shapes only: its units, their calls, FLOPs and memory, and modelled seconds.

The model's tensors are fake ones (torch's ``FakeTensorMode``): they have shape, dtype and storage, but no
bytes. The operations are those of the real model, so its calls, FLOPs and saved activations are too; only
seconds are modelled, from a device's rates.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hzplan.core.schedule import Use
from hzplan.errors import UserError, one_line
from hzplan.formats.profile import UnitEntry, UseCost
from hzplan.models.recompute import leaves, switched
from hzplan.models.units import Unit, master_dtype_of
from hzplan.models.workload import Workload
from hzplan.profiler.model.calls import RecordedCalls, Step
from hzplan.profiler.model.entries import unit_entry
from hzplan.profiler.model.flops import FlopProbe
from hzplan.profiler.session.clock import Probe
from hzplan.profiler.session.statistics import nanoseconds

LOOK_UPS = ("embedding", "index", "index_select", "gather", "nll_loss_forward")
"""Operations that read as much as they write, however large the tensor that they read from."""


@dataclass(frozen=True)
class Rates:
    """A device's reachable rates: FLOPs per second in products, bytes per second of memory, and the least
    seconds of an operation."""

    flops_per_s: float
    bytes_per_s: float
    launch_s: float

    def seconds(self, flops: int, nbytes: int) -> float:
        """Of one operation, bound by arithmetic or memory (roofline: Williams, Waterman, Patterson 2009)."""
        return max(flops / self.flops_per_s, nbytes / self.bytes_per_s, self.launch_s)


NO_TIME = Rates(math.inf, math.inf, 0.0)
"""Where shapes are asked for memory and FLOPs only."""


@dataclass(frozen=True)
class Shapes:
    """A model as far as it is known without values.

    ``reads``: whether each use may read parameters; ``costs``: every use's modelled cost, by micro-batch
    size; ``recompute``: the same where all ``recomputable`` units compute their forward again, empty where
    the model does not allow that.
    """

    units: tuple[UnitEntry, ...]
    uses: tuple[Use, ...]
    reads: tuple[bool, ...]
    costs: Mapping[int, Sequence[UseCost]]
    recompute: Mapping[int, Sequence[UseCost]]
    recomputable: frozenset[str]


def trace_shapes(
    workload: Workload,
    dtype: torch.dtype,
    micro_batches: Sequence[int],
    world: int,
    rates: Rates = NO_TIME,
    progress: Callable[[str, float], None] = lambda text, fraction: None,
) -> Shapes:
    """Run a workload without memory at every micro-batch size, computing in ``dtype``.

    Raises UserError for a model that cannot run so, as one whose forward looks at values.
    """
    with _model_without_values(workload, dtype) as model:
        units = workload.units_of(model)
        recomputable = leaves(units)
        orders: set[tuple[Use, ...]] = set()
        costs: dict[int, Sequence[UseCost]] = {}
        recompute: dict[int, Sequence[UseCost]] = {}
        for number, size in enumerate(micro_batches):
            progress(f"forward and backward in shapes, micro-batch {size}", number / len(micro_batches))
            uses, costs[size] = _trace(workload, model, units, size, rates, world)
            orders.add(uses)
            progress(f"recomputation in shapes, micro-batch {size}", (number + 0.5) / len(micro_batches))
            with suppress(UserError), switched(units, keep_random_state=False) as switch:
                same, costs_then = _trace(workload, model, units, size, rates, world, switch.around)
                if same == uses:
                    recompute[size] = costs_then
        if len(orders) > 1:
            raise UserError(
                f"{workload.name}: the order in which modules are used depends on the micro-batch size"
            )
        looked_up = {unit.name for unit in units if _looks_up(unit.module)}
        return Shapes(
            units=tuple(unit_entry(unit) for unit in units),
            uses=uses,
            reads=tuple(use.phase == "forward" or use.unit not in looked_up for use in uses),
            costs=costs,
            recompute=recompute if len(recompute) == len(costs) else {},
            recomputable=recomputable,
        )


def _trace(
    workload: Workload,
    model: nn.Module,
    units: Sequence[Unit],
    size: int,
    rates: Rates,
    world: int,
    around: Callable[[Step], Step] = lambda step: step,
) -> tuple[tuple[Use, ...], list[UseCost]]:
    """The uses of a forward and backward, and their modelled costs."""
    with unset_fake_temporarily():
        real = workload.batch(size, torch.Generator().manual_seed(0))
    batch = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), real)
    calls = RecordedCalls(units, world, copy_gradients=False)
    inputs = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    ledger = Ledger(rates, size, [*model.parameters(), *model.buffers(), *inputs])
    try:
        with workload.in_shapes(), ledger:
            uses = calls.run(around(partial(workload.loss, model, batch)), ledger)
            costs = ledger.costs()
    except Exception as error:  # the user's model, which may raise anything
        raise UserError(
            f"{workload.name}: a forward and backward without values failed: {one_line(error)}; where the "
            "model looks at values, profile it on a device instead"
        ) from error
    finally:
        calls.detach()
    if not uses:
        raise UserError(f"{workload.name}: its loss uses no module that has parameters")
    return uses, costs


def _looks_up(module: nn.Module) -> bool:
    """Whether a module's backward surely reads no parameter."""
    return type(module) is nn.Embedding and module.max_norm is None


@contextmanager
def _model_without_values(workload: Workload, dtype: torch.dtype) -> Iterator[nn.Module]:
    """A workload's model of torch's fake tensors, computing in ``dtype``; usable inside the block."""
    model = model_on_meta(workload, dtype)

    def empty(parameter: nn.Parameter) -> Tensor:
        wanted = dtype if parameter.is_floating_point() else parameter.dtype
        return torch.empty(parameter.shape, dtype=wanted)

    with FakeTensorMode():
        replace_tensors(model, empty, torch.empty)
        yield model


def model_on_meta(workload: Workload, dtype: torch.dtype) -> nn.Module:
    """The model on torch's meta device, where constructors run as they are and allocate nothing."""
    with torch.device("meta"):
        return workload.build().to(master_dtype_of(dtype))


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
    """Sums up seconds, FLOPs and memory of the operations of every call; a context in which one pass runs."""

    def __init__(self, rates: Rates, micro_batch: int, alive: Iterable[Tensor]) -> None:
        """``alive``: tensors that are there already."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._rates, self._micro_batch = rates, micro_batch
        self._flops = FlopProbe().counter
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._costs: list[UseCost] = []
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
            self._costs.append(self._cost())
        self._begun = True
        self._reset()

    def gradient(self, gradient: Tensor) -> None:
        """Charge the runtime's copy of a gradient, which is not made here."""
        copied = gradient.numel() * master_dtype_of(gradient.dtype).itemsize
        self._seconds += self._rates.seconds(0, _bytes(gradient) + copied)

    def costs(self) -> list[UseCost]:
        """The modelled cost of every call; asked for once, after the pass."""
        return [*self._costs, self._cost()]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = self._flops.get_total_flops()
        result = func(*args, **(kwargs or {}))
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = [tensor for tensor in written if self._add_storage(tensor)]
        if fresh or func._schema.is_mutable:
            read = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
            moved = sum(map(_bytes, written))
            if str(func.overloadpacket).rpartition(".")[2] in LOOK_UPS:
                moved *= 2
            else:
                moved += sum(map(_bytes, read))
            flops = self._flops.get_total_flops() - before
            self._seconds += self._rates.seconds(flops, moved)
        return result

    def _cost(self) -> UseCost:
        return UseCost(
            micro_batch=self._micro_batch,
            seconds=nanoseconds(self._seconds),
            spread=0.0,
            flops=self._flops.get_total_flops() - self._flops_before,
            retained_bytes=self._level,
            peak_bytes=self._peak,
        )

    def _reset(self) -> None:
        self._seconds, self._level, self._peak = 0.0, 0, 0
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


def _bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's values; expanded ones are read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
