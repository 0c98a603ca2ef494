"""What a constructor did to tensors that wait for their values, and how to repeat it tensor by tensor.

Calls are repeated in the order in which they were made, so that random numbers are those of ordinary
construction, and of what they write only as much is kept as later calls read: a model of any size needs the
memory of a few of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
OVERWRITES = {"fill_", "zero_", "copy_", "uniform_", "normal_", "random_", "exponential_", "log_normal_"}
"""What writes all of its first argument and reads none of it."""


class Place(NamedTuple):
    """A tensor as a window on a numbered storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def dense(self) -> bool:
        """Whether it is the elements from the storage's first on, in order."""
        strides = tuple(torch.empty(self.size, device=META).stride())
        return self.offset == 0 and self.stride == strides

    @property
    def nbytes(self) -> int:
        """Of the elements in the window."""
        return prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True)
class Call:
    """An operation with places for the tensors that wait. ``made``: of its results, None for what it wrote
    to; ``written``: of its arguments, what it writes to; ``random``: how many random calls were before it,
    where it is one."""

    operation: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    made: tuple[Place | None, ...]
    written: tuple[Place, ...]
    random: int | None

    @property
    def overwritten(self) -> Place | None:
        """What it writes without a look at what was there."""
        name = self.operation.overloadpacket.__name__
        return self.written[0] if len(self.written) == 1 and name in OVERWRITES else None

    @property
    def read(self) -> list[Place]:
        """The places among the arguments whose values matter."""
        found = [p for p in tree_leaves((self.arguments, self.options), is_leaf=_is_place) if _is_place(p)]
        if self.overwritten is not None:
            found.remove(self.overwritten)
        return found


def _is_place(thing: object) -> bool:
    return isinstance(thing, Place)


class Unrecorded(Exception):
    """A constructor does what cannot be left for later."""


@dataclass(eq=False)
class Record:
    """Everything that a constructor did to tensors that wait, in order.

    ``devices``: by storage, where it will lie. ``states``: of the default generators, by device type, before
    the random calls that were made so far for somebody who looked at values, and after the last of these;
    ``versions``: by storage, how often it had been written to when the constructor ended.
    """

    calls: list[Call] = field(default_factory=list)
    storages: list[UntypedStorage] = field(default_factory=list)  # kept, so that no other has their addresses
    devices: list[torch.device] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=dict)
    randoms: int = 0
    _numbers: dict[int, int] = field(default_factory=dict)

    def __deepcopy__(self, memo: object) -> Record:
        return self  # tensors that are copied outside are not its own, and nothing in it changes any more

    def knows(self, tensor: Tensor) -> bool:
        """Whether it is one of those that wait."""
        return isinstance(tensor, FakeTensor) and tensor.untyped_storage()._cdata in self._numbers

    def place(self, tensor: Tensor) -> Place:
        """Where a tensor that waits is."""
        if tensor.is_conj() or tensor.is_neg():
            raise Unrecorded("a conjugate or negative view")
        number = self._numbers[tensor.untyped_storage()._cdata]
        window = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        return Place(number, tensor.dtype, *window)

    def add(self, tensor: Tensor, device: torch.device) -> None:
        """A storage that is new."""
        storage = tensor.untyped_storage()
        self._numbers[storage._cdata] = len(self.storages)
        self.storages.append(storage)
        self.devices.append(device)

    def values(self, wanted: Collection[Place]) -> Iterator[tuple[Place, Tensor]]:
        """Replay: the values of tensors, each as soon as nothing writes to it any more.

        Random numbers come from the generators as they were; these stand after them then, as after ordinary
        construction, unless others were drawn since.
        """
        with self._restored(keep=self.untouched):
            yield from _Replay(self, wanted).run()

    def order(self, wanted: Collection[Place]) -> list[Place]:
        """In which ``values`` has them."""
        return _Replay(self, wanted).order()

    def now(self, tensor: Tensor) -> Tensor:
        """The values of a tensor that waits, while its constructor runs."""
        place = self.place(tensor)
        with self._restored():
            ((_, value),) = _Replay(self, [place], note=True).run()
        return value

    @contextmanager
    def _restored(self, *, keep: bool = False) -> Iterator[None]:
        """Inside, the default generators may be set; ``keep``: what they are then is kept."""
        before = {kind: default_state(kind) for kind in self.states[0]}
        try:
            yield
        finally:
            for kind, state in before.items():
                if not keep:
                    _default_generator(kind).set_state(state)

    def note_states(self) -> None:
        """The generators as they are."""
        self.states.append({kind: default_state(kind) for kind in self.states[0]})

    def set_states(self, number: int) -> None:
        """Before a random call that was made already, or after the last of these."""
        for kind, state in self.states[number].items():
            _default_generator(kind).set_state(state)

    @property
    def untouched(self) -> bool:
        """Whether nobody has drawn or seeded since the constructor began."""
        return all(torch.equal(state, default_state(kind)) for kind, state in self.states[0].items())


def _default_generator(kind: str) -> torch.Generator:
    if kind == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device()]


def default_state(kind: str) -> Tensor:
    """The state of torch's own generator of a device type, uint8."""
    return _default_generator(kind).get_state()


class _Replay:
    """One pass through a record's calls that are needed for some places.

    Random calls draw in the order of the record. ``note``: the generators' states at each are written down,
    so that another pass need not repeat those that it does not need.
    """

    def __init__(self, record: Record, wanted: Collection[Place], *, note: bool = False) -> None:
        self.record, self.note = record, note
        self.drawn = len(record.states) - 1
        self.wanted: dict[int, list[Place]] = {}
        for place in wanted:
            self.wanted.setdefault(place.storage, []).append(place)
        self.there: dict[int, UntypedStorage] = {}
        self.needed, self.lasts, self.ends = self._needed()

    def _needed(self) -> tuple[list[int], dict[int, set[int]], dict[int, set[int]]]:
        """The calls to repeat, in order; the wanted storages that a call is the last to touch; and those
        that nobody looks at after a call.

        Backwards: a call is repeated when what it writes is looked at later, or for its random numbers.
        """
        live, seen = set(self.wanted), set[int]()
        needed: list[int] = []
        lasts: dict[int, set[int]] = {}
        ends: dict[int, set[int]] = {}
        for number in range(len(self.record.calls) - 1, -1, -1):
            call = self.record.calls[number]
            writes = {place.storage for place in (*call.made, *call.written) if place is not None}
            undrawn = call.random is not None and call.random >= self.drawn
            if not (undrawn or writes & live):
                continue
            needed.append(number)
            reads = {place.storage for place in call.read}
            ends[number] = {s for s in writes | reads if s not in live}
            lasts[number] = {s for s in writes | reads if s in self.wanted and s not in seen}
            seen |= writes | reads
            gone = {place.storage for place in call.made if place is not None}
            over = call.overwritten
            if over and over.dense and over.nbytes == self.record.storages[over.storage].nbytes():
                gone.add(over.storage)
            live = (live - gone) | reads
        return needed[::-1], lasts, ends

    def run(self) -> Iterator[tuple[Place, Tensor]]:
        """See Record.values."""
        for number in self.needed:
            call = self.record.calls[number]
            if call.random is not None and call.random <= self.drawn:
                self.record.set_states(call.random)
            with torch.no_grad():
                self._repeat(call)
            if self.note and call.random is not None and call.random >= self.drawn:
                self.record.note_states()
            for storage in sorted(self.lasts[number]):
                yield from self._hand_on(storage)
            for storage in self.ends[number]:
                self.there.pop(storage, None)
        for storage in sorted(self.wanted):  # what nothing was written to
            yield from self._hand_on(storage)
        if all(call.random is None or call.random < self.drawn for call in self.record.calls):
            self.record.set_states(self.drawn)

    def order(self) -> list[Place]:
        """What ``run`` hands on, in order, without running."""
        touched = [s for number in self.needed for s in sorted(self.lasts[number])]
        listed = dict.fromkeys([*touched, *sorted(self.wanted)])
        return [place for storage in listed for place in self.wanted[storage]]

    def _hand_on(self, storage: int) -> Iterator[tuple[Place, Tensor]]:
        for place in self.wanted.pop(storage, ()):
            yield place, self._tensor(place)
        self.there.pop(storage, None)

    def _tensor(self, place: Place) -> Tensor:
        device = self.record.devices[place.storage]
        if place.storage not in self.there:
            nbytes = self.record.storages[place.storage].nbytes()
            self.there[place.storage] = torch.zeros(
                nbytes, dtype=torch.uint8, device=device
            ).untyped_storage()
        empty = torch.empty(0, dtype=place.dtype, device=device)
        return empty.set_(self.there[place.storage], place.offset, place.size, place.stride)

    def _repeat(self, call: Call) -> None:
        def real(thing: Any) -> Any:
            return self._tensor(thing) if isinstance(thing, Place) else thing

        arguments = mapped(real, call.arguments)
        results = call.operation(*arguments, **mapped(real, call.options))
        made = [result for result in tree_leaves(results) if isinstance(result, Tensor)]
        for place, result in zip(call.made, made, strict=True):
            if place is None:
                continue
            same = tuple(result.stride()) == place.stride and result.storage_offset() == place.offset
            if same and result.untyped_storage().nbytes() >= self.record.storages[place.storage].nbytes():
                self.there[place.storage] = result.untyped_storage()
            else:  # laid out otherwise where it is real
                self._tensor(place).copy_(result)


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with its leaves changed; a Place, though a tuple, is a leaf."""
    if isinstance(tree, Place) or not isinstance(tree, (tuple, list, dict)):
        return change(tree)
    if isinstance(tree, dict):
        return {key: mapped(change, value) for key, value in tree.items()}
    return type(tree)(mapped(change, value) for value in tree)
