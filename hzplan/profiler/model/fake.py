"""A forward and backward without memory or arithmetic: shapes only, times from a device's rates.

The model's tensors are fake ones (torch's ``FakeTensorMode``): they have shape, dtype and storage, but no
bytes. What would run is the same, operation by operation, so uses, FLOPs and saved activations are those of
the real model; only seconds are modelled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hzplan.models.units import master_dtype_of
from hzplan.profiler.model.calls import Turns
from hzplan.profiler.model.flops import FlopProbe

LOOK_UPS = ("embedding", "index", "index_select", "gather", "nll_loss_forward")
"""Operations that read as much as they write, however large what they read from is."""


@dataclass(frozen=True)
class Rates:
    """What a device reaches: FLOPs per second in products, bytes per second of memory, and the least seconds
    of an operation."""

    flops_per_s: float
    bytes_per_s: float
    launch_s: float

    def seconds(self, flops: int, nbytes: int) -> float:
        """Of one operation, bound by arithmetic or memory (roofline: Williams, Waterman, Patterson 2009)."""
        return max(flops / self.flops_per_s, nbytes / self.bytes_per_s, self.launch_s)


@dataclass(frozen=True)
class FakeTurn:
    """What a turn would take; memory as in ``Segment``."""

    seconds: float
    flops: int
    retained_bytes: int
    peak_bytes: int


class Ledger(TorchDispatchMode):
    """A probe: notes what every operation costs, and which storages live, from cut to cut."""

    def __init__(self, rates: Rates, alive: Iterable[Tensor]) -> None:
        """``alive``: tensors that are there already."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._rates = rates
        self._flops = FlopProbe().counter
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._turns: list[FakeTurn] = []
        self._begun = False
        for tensor in alive:
            self._note(tensor)
        self._reset()

    def __enter__(self) -> Ledger:
        self._flops.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        self._flops.__exit__(*failure)

    def cut(self) -> None:
        """A turn begins."""
        if self._begun:
            self._turns.append(self._turn())
        self._begun = True
        self._reset()

    def end(self) -> None:
        """Nothing: what is freed after the backward belongs to the last turn."""

    def turns(self) -> list[FakeTurn]:
        """Every turn's cost; called once, after the pass."""
        return [*self._turns, self._turn()]

    def charge(self, nbytes: int) -> None:
        """An operation that moves so many bytes and is not run here."""
        self._seconds += self._rates.seconds(0, nbytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = self._flops.get_total_flops()
        found = func(*args, **(kwargs or {}))
        written = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        fresh = [tensor for tensor in written if self._note(tensor)]
        if fresh or func._schema.is_mutable:
            read = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
            moved = sum(map(_bytes, written))
            if str(func.overloadpacket).rpartition(".")[2] in LOOK_UPS:
                moved *= 2
            else:
                moved += sum(map(_bytes, read))
            flops = self._flops.get_total_flops() - before
            self._seconds += self._rates.seconds(flops, moved)
        return found

    def _turn(self) -> FakeTurn:
        flops = self._flops.get_total_flops() - self._flops_before
        return FakeTurn(self._seconds, flops, self._level, self._peak)

    def _reset(self) -> None:
        self._seconds, self._level, self._peak = 0.0, 0, 0
        self._flops_before = self._flops.get_total_flops()

    def _note(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is new; then it counts until it is freed."""
        storage = tensor.untyped_storage()
        key, nbytes = id(storage), storage.nbytes()
        if key in self._storages:
            return False

        def freed(_: object) -> None:
            del self._storages[key]
            self._level -= nbytes

        self._storages[key] = weakref.ref(storage, freed)
        self._level = getattr(self, "_level", 0) + nbytes
        self._peak = max(getattr(self, "_peak", 0), self._level)
        return True


def _bytes(tensor: Tensor) -> int:
    """What a tensor's values take; expanded ones are read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


class FakeTurns(Turns):
    """Turns whose gradients are taken away at the cost of one copy, which is charged and not made."""

    ledger: Ledger | None = None

    def gradient(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if self.ledger is not None:
            self.ledger.charge(_bytes(gradient) + gradient.numel() * master_dtype_of(gradient.dtype).itemsize)


@contextmanager
def fake_model(build: Callable[[], nn.Module], dtype: torch.dtype) -> Iterator[nn.Module]:
    """A model without memory, computing in ``dtype``; usable inside the block.

    It is built on torch's meta device, where constructors run as they are and allocate nothing.
    """
    with torch.device("meta"):
        model = build().to(master_dtype_of(dtype))
    with FakeTensorMode():
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
                key = id(parameter)
                if key not in made:
                    wanted = dtype if parameter.is_floating_point() else parameter.dtype
                    empty = torch.empty(parameter.shape, dtype=wanted)
                    made[key] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                setattr(module, name, made[key])  # which modules such as LSTM listen to
            for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
                kept = name not in module._non_persistent_buffers_set
                module.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype), persistent=kept)
        yield model
