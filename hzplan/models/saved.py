"""Activations in the host's memory: what a unit's forward makes and keeps for backward leaves the device and
comes back before it.

What forward was given, its parameters and buffers, and what it returns stay: others have them too, so that
nothing would be freed. Tensors move as whole storages, however many views of them are kept. A copy back that
was not asked for in time happens when backward needs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

LEAST_BYTES = 1024
"""Smaller storages stay on the device: a copy of its own is worth more than their bytes."""
ALIGNMENT = 256
"""Of storages in the host's buffer, bytes."""


class _Storage:
    """A storage that is kept for backward: ``here`` while it is on the device, at ``place`` of the host's
    buffer once it was copied."""

    __slots__ = ("__weakref__", "device", "here", "nbytes", "place")

    def __init__(self, of: Tensor) -> None:
        self.here: torch.UntypedStorage | None = of.untyped_storage()
        self.nbytes = self.here.nbytes()
        self.device = of.device
        self.place = -1

    def bytes(self) -> Tensor:
        """All of it [bytes], on the device."""
        assert self.here is not None
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.here)


@dataclass(slots=True, weakref_slot=True, eq=False)
class _View:
    """What autograd keeps instead of a tensor: of what moves, how it lies in its ``storage``. ``alias``: the
    tensor itself, while it is on the device for others; ``changed``: whether it was changed in place before
    it moved."""

    alias: Tensor | None
    version: int
    storage: _Storage | None
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    saved: Saved
    changed: bool = False

    @classmethod
    def of(cls, tensor: Tensor, storage: _Storage | None, saved: Saved) -> _View:
        """What stands for this tensor."""
        alias, offset = tensor.detach(), int(tensor.storage_offset())
        return cls(
            alias, tensor._version, storage, tensor.dtype, tensor.size(), tensor.stride(), offset, saved
        )

    def settle(self) -> None:
        """Its storage has moved: what is changed from here on is another one."""
        assert self.alias is not None
        self.changed = self.alias._version != self.version
        self.alias = None

    def check(self) -> None:
        """As torch does where no hook is between."""
        if self.changed or (self.alias is not None and self.alias._version != self.version):
            raise RuntimeError(
                f"a tensor of {self.dtype} {tuple(self.size)} that backward needs was changed in place after "
                "forward had kept it, so gradients would be wrong; write x = x + y for x += y there"
            )


class Saved:
    """One unit's activations between a forward and its backward.

    ``save`` and ``load`` copy, on the current stream; what they copy is prepared by the end of ``forward``
    and by ``allocate``, and the device's copy is let go by ``release``, all on the thread that computes.
    """

    def __init__(self, host_buffer: Callable[[int], Tensor] | None = None) -> None:
        """``host_buffer``: makes memory of so many bytes on the host; None: nothing is moved for real, as
        with torch's fake tensors."""
        self._host_buffer = host_buffer
        self.host: Tensor | None = None
        self._storages: list[weakref.ref[_Storage]] = []
        self._moving: list[weakref.ref[_View]] = []

    @property
    def _kept(self) -> list[_Storage]:
        """Those that autograd still keeps."""
        return [storage for one in self._storages if (storage := one()) is not None]

    @property
    def is_free(self) -> bool:
        """Whether nothing is kept from the forward before."""
        return not self._kept

    @contextmanager
    def forward(self, module: nn.Module, given: Iterable[Any]) -> Iterator[Callable[[Any], None]]:
        """A forward's context; what is yielded is to be called with what the forward returns."""
        outside = {_key(one) for one in (*tree_leaves(given), *module.buffers()) if _is_plain(one)}
        parameters = {_key(one) for one in module.parameters() if _is_plain(one)}
        found: dict[int, _Storage] = {}
        views: list[tuple[int, _View]] = []

        def pack(tensor: Tensor) -> Tensor | _View:
            if not _is_plain(tensor) or (key := _key(tensor)) in parameters:
                return tensor  # a parameter as it will be then, whatever storage it has
            storage, lazy = None, tensor.is_conj() or tensor.is_neg()
            if not (key in outside or lazy) and tensor.untyped_storage().nbytes() >= LEAST_BYTES:
                storage = found.get(key) or found.setdefault(key, _Storage(tensor))
            view = _View.of(tensor, storage, self)
            if storage is not None:
                views.append((key, view))
            return view

        def returned(result: Any) -> None:
            stays = {_key(tensor) for tensor in tree_leaves(result) if _is_plain(tensor)}
            for key, view in views:
                if key in stays:
                    view.storage = None
            self._moving = [weakref.ref(view) for key, view in views if key not in stays]
            self._begin([storage for key, storage in found.items() if key not in stays])

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield returned
        found.clear()
        views.clear()

    def _begin(self, storages: list[_Storage]) -> None:
        """Give every storage its place in the host's buffer, which is made once for as many bytes."""
        nbytes = 0
        for storage in storages:
            storage.place = nbytes
            nbytes += -(-storage.nbytes // ALIGNMENT) * ALIGNMENT
        self._storages = [weakref.ref(storage) for storage in storages]
        if self._host_buffer is not None and (self.host is None or self.host.numel() < nbytes):
            self.host = self._host_buffer(nbytes)

    def save(self) -> None:
        """Copy to the host's memory."""
        if self._host_buffer is not None:
            for storage in self._kept:
                if storage.here is not None:
                    self._on_host(storage).copy_(storage.bytes(), non_blocking=True)

    def release(self) -> None:
        """The copies on the host are done: free the device's."""
        for one in self._moving:
            if (view := one()) is not None:
                view.settle()
        self._moving.clear()
        for storage in self._kept:
            storage.here = None

    def allocate(self) -> None:
        """Make room on the device for ``load``."""
        for storage in self._kept:
            self._make(storage)

    def load(self) -> None:
        """Copy back to the device, where ``allocate`` has made room."""
        for storage in self._kept:
            self._fill(storage)

    def fetch(self, storage: _Storage) -> torch.UntypedStorage:
        """One storage on the device for backward, where nobody has loaded it."""
        if storage.here is not None:
            return storage.here
        made = self._make(storage)
        self._fill(storage)
        return made

    def _make(self, storage: _Storage) -> torch.UntypedStorage:
        if storage.here is None:
            room = torch.empty(storage.nbytes, dtype=torch.uint8, device=storage.device)
            storage.here = room.untyped_storage()
        return storage.here

    def _fill(self, storage: _Storage) -> None:
        if self._host_buffer is not None:
            storage.bytes().copy_(self._on_host(storage), non_blocking=True)

    def _on_host(self, storage: _Storage) -> Tensor:
        assert self.host is not None
        return self.host[storage.place : storage.place + storage.nbytes]


def _unpack(kept: Tensor | _View) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    kept.check()
    if kept.storage is None:
        assert kept.alias is not None
        return kept.alias
    empty = torch.empty(0, dtype=kept.dtype, device=kept.storage.device)
    return empty.set_(kept.saved.fetch(kept.storage), kept.offset, kept.size, kept.stride)


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor with a storage of its own, none of a subclass with tensors inside."""
    return type(value) in (Tensor, nn.Parameter, FakeTensor) and value.layout is torch.strided


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def unseen_host_buffer(nbytes: int) -> Tensor:
    """Memory [bytes] that torch's allocators do not count, where the host's memory is also the device's."""
    return torch.frombuffer(bytearray(max(nbytes, 1)), dtype=torch.uint8)[:nbytes]
