"""Records a rank's operations with their streams: a dispatch mode, and a device as the launcher sees one."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from hzplan.runtime import launcher
from tests.accelerator.program import POISON, Collective, Operation, Place, Program, View

COMPUTE = "compute"

HOST_WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "bincount")
"""Operations whose results the host looks at: it waits until the current stream is done."""

HOST_COPIES = ("tolist", "numpy", "cpu")
"""Methods of tensors that do the same, and are no operations of torch on a processor."""

_recording = threading.local()

NO_ACCESS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "set_", "is_pinned")
"""Operations that touch no values."""


class Recorder(TorchDispatchMode):
    """One rank's operations while it is active, each run at once as well.

    Host order is an order that the device's rules allow, so what is computed while recording is right.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.program = Program(rank)
        self.stream = COMPUTE
        self._held: dict[str, list[Place]] = {}  # by stream: events that its next operation waits for
        self._host: dict[str, int] = {}  # by stream: how many operations the host has seen done
        self._host_known: dict[str, dict[str, int]] = {}  # the same, when a stream was launched into last
        self._blocks: dict[int, int] = {}  # by address of a storage that lives: its block
        self._storages: dict[int, Any] = {}  # by block: weak references
        self._finalizers: dict[int, Any] = {}
        self._allocated_on: dict[int, str] = {}
        self._over = False

    # Memory.

    def _block(self, tensor: Tensor, *, is_new: bool) -> int:
        storage = tensor.untyped_storage()
        if (known := self._blocks.get(storage._cdata)) is not None:
            return known
        block = len(self.program.blocks)
        self.program.blocks.append(storage.nbytes())
        self._blocks[storage._cdata] = block
        self._storages[block] = weakref.ref(storage)
        self._finalizers[block] = weakref.finalize(storage, self._free, storage._cdata, block)
        self._allocated_on[block] = self.stream if is_new else COMPUTE
        if not is_new:
            self.program.begin[block] = _bytes(storage)
        return block

    def _free(self, address: int, block: int) -> None:
        """Whoever allocates on the stream next may have the memory."""
        del self._blocks[address]
        nbytes = self.program.blocks[block]
        if self._over or not nbytes:
            return
        whole = View(block, 0, (nbytes,), (1,), torch.uint8)
        self._add(
            Operation(
                *(self._allocated_on[block], "memory reused", 0, (), (), (whole,)),
                function=torch.Tensor.fill_,
                arguments=((whole, POISON), {}),
            )
        )

    def view(self, tensor: Tensor, *, is_new: bool = False) -> View:
        """A tensor as it is kept."""
        block = self._block(tensor, is_new=is_new)
        return View(block, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    # Streams and events.

    def _add(self, operation: Operation) -> None:
        stream = operation.stream
        waits = {place for place in self._held.pop(stream, []) if place.stream != stream and place.done}
        if self._host_known.get(stream) != self._host:
            self._host_known[stream] = dict(self._host)
            waits |= {Place(other, done) for other, done in self._host.items() if other != stream}
        operation.waits = tuple(sorted(waits))
        operation.order = len(self.program.launched)
        self.program.add(operation)

    def record(self, stream: str) -> Place:
        """An event after everything that is in a stream."""
        held = [place for place in self._held.get(stream, ()) if place.stream != stream and place.done]
        if held:  # what the stream waits for is part of it
            self._add(Operation(stream, "event", 0, (), (), (), function=None))
        return Place(stream, len(self.program.streams.get(stream, ())))

    def wait(self, stream: str, place: Place) -> None:
        """A stream's next operation waits for an event."""
        self._held.setdefault(stream, []).append(place)

    def host_waits(self, place: Place) -> None:
        """What the host launches from now on begins after an event."""
        if self._host.get(place.stream, 0) < place.done:
            self._host[place.stream] = place.done

    def collective(
        self, group: str, ranks: tuple[int, ...], operation: str, whole: Tensor, part: Tensor
    ) -> None:
        """Note one on the current stream, before it is run."""
        kept = Collective(group, ranks, operation, self.view(whole), self.view(part))
        reads, writes = {
            "all_gather": ((kept.part,), (kept.whole,)),
            "reduce_scatter": ((kept.whole,), (kept.part,)),
            "all_reduce": ((kept.whole,), (kept.whole,)),
            "all_to_all": ((kept.whole,), (kept.part,)),
        }[operation]
        label = f"{operation} {group}"
        self._add(Operation(self.stream, label, 0, (), reads, writes, collective=kept))

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """What is launched inside goes into a stream."""
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    # Operations.

    def __enter__(self) -> Recorder:
        _recording.recorder = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _recording.recorder = None
        super().__exit__(*error)

    def host_reads(self, name: str, tensor: Tensor) -> None:
        """The host copies a tensor's values."""
        self._add(Operation(self.stream, name, 0, (), (self.view(tensor),), (), function=None))
        self.program.host_reads += 1
        self.host_waits(Place(self.stream, len(self.program.streams[self.stream])))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if self._over or func.is_view or name in NO_ACCESS or func.namespace == "profiler":
            found = func(*args, **kwargs)
            for output in _tensors(found):
                if name in NO_ACCESS:
                    self._block(output, is_new=True)
            return found
        given = {id(t): self.view(t) for t in _tensors((args, kwargs))}
        arguments = tree_map_only(Tensor, lambda t: given[id(t)], (args, kwargs))
        written = {id(t) for t in _written(func, args, kwargs)}
        names = [a.name for a in func._schema.arguments if a.is_out]
        stream = self.stream
        found = func(*args, **kwargs)
        outputs = tree_map_only(
            Tensor, lambda t: None if id(t) in written else self.view(t, is_new=True), found
        )
        fresh = [one for one in tree_flatten(outputs)[0] if isinstance(one, View)]
        only_out = {id(t) for name in names for t in _tensors(kwargs.get(name))}
        if name in ("zero_", "fill_"):
            only_out |= written
        self._add(
            Operation(
                *(stream, name, 0, ()),
                tuple(view for key, view in given.items() if key not in only_out),
                (*(given[key] for key in written), *fresh),
                function=func,
                arguments=arguments,
                outputs=outputs if fresh else None,
            )
        )
        if name in HOST_WAITS:
            self.program.host_reads += 1
            self.host_waits(Place(stream, len(self.program.streams[stream])))
        return found

    def finish(self) -> Program:
        """Keep the values of what was there from the beginning to the end."""
        self._over = True
        for block in self.program.begin:
            storage = self._storages[block]()
            if storage is not None:
                self.program.end[block] = _bytes(storage)
        for finalizer in self._finalizers.values():
            finalizer.detach()
        return self.program


@contextmanager
def host_copies_seen() -> Iterator[None]:
    """Copies to the host are in the programs that are recorded inside."""

    def seen(name: str, method: Any) -> Any:
        def copy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            recorder = getattr(_recording, "recorder", None)
            if recorder is not None and not recorder._over:
                recorder.host_reads(name, tensor)
            return method(tensor, *args, **kwargs)

        return copy

    before = {name: getattr(Tensor, name) for name in HOST_COPIES}
    for name, method in before.items():
        setattr(Tensor, name, seen(name, method))
    yield
    for name, method in before.items():
        setattr(Tensor, name, method)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.tensor([], dtype=torch.uint8).set_(storage).clone()  # type: ignore[call-overload]


def _tensors(found: Any) -> list[Tensor]:
    return [one for one in tree_flatten(found)[0] if isinstance(one, Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation changes, by its schema."""
    changed: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed += _tensors(args[index] if index < len(args) else kwargs.get(argument.name))
    return changed


class Event:
    """See ``launcher.Event``."""

    def __init__(self, recorder: Recorder, place: Place, timed: bool = False) -> None:
        self._recorder, self.place, self.timed = recorder, place, timed

    def synchronize(self) -> None:
        """See ``launcher.Event``."""
        self._recorder.host_waits(self.place)

    def is_reached(self) -> bool:
        """See ``launcher.Event``."""
        return False

    def after_s(self, earlier: launcher.Event) -> float:
        """See ``launcher.Event``; nothing takes time here, but events of other kinds have none."""
        assert isinstance(earlier, Event) and earlier.timed and self.timed
        return 0.0


class Queue:
    """See ``launcher.Queue``."""

    def __init__(self, recorder: Recorder, stream: str) -> None:
        self._recorder, self.stream = recorder, stream

    def record(self, *, timed: bool = False) -> Event:
        """See ``launcher.Queue``."""
        return Event(self._recorder, self._recorder.record(self.stream), timed)

    def wait(self, event: launcher.Event) -> None:
        """See ``launcher.Queue``."""
        assert isinstance(event, Event)
        self._recorder.wait(self.stream, event.place)

    def current(self) -> Any:
        """See ``launcher.Queue``."""
        return self._recorder.on(self.stream)


class Device:
    """See ``launcher.Device``."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._made = itertools.count()

    def here(self) -> Queue:
        """See ``launcher.Device``."""
        return Queue(self._recorder, self._recorder.stream)

    def queue(self, name: str) -> Queue:
        """See ``launcher.Device``."""
        return Queue(self._recorder, f"{name}#{next(self._made)}")

    def now_s(self) -> float:
        """See ``launcher.Device``."""
        return 0.0
