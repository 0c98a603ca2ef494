"""Models whose values wait: what a constructor does is recorded, and replayed tensor by tensor.

A tensor of the model has a shape and no memory until then. Calls are replayed in the order in which they were
made, so that random numbers are those of ordinary construction, and of what they write only as much is kept
as later calls read: a model of any size needs the memory of a few of its tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hzplan.errors import UserError, one_line
from hzplan.models.local import local

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)

HELD_AS = "_hzplan_deferred"
"""The attribute of a module that was made so: its record."""
EMPTY = ("empty", "new_", "zeros", "ones", "full", "rand")
"""How the names of operations begin that make tensors to be written to; others without inputs (a range) have
their values at once, where these are few: constructors look at them."""
FEW = 1 << 20
OVERWRITES = {"fill_", "zero_", "copy_", "uniform_", "normal_", "random_", "exponential_", "log_normal_"}
"""What writes all of its first argument and reads none of it."""


LOOKS = {torch.ops.aten._local_scalar_dense.default}
"""What a constructor looks at values with, as for ``if not mask.any():``."""


class Place(NamedTuple):
    """A tensor as a window on a numbered storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def covers(self) -> int:
        """Bytes that the window has."""
        return prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True)
class Call:
    """An operation with places for the tensors that wait. ``made``: of its results; ``written``: of its
    arguments, what it writes to; ``random``: how many random calls were before it, where it is one."""

    operation: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    made: tuple[Place, ...]
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


@dataclass
class Record:
    """Everything that a constructor did to tensors that wait, in order.

    ``devices``: by storage, where it will lie. ``states``: of the default generators, by device type, before
    the random calls that were made so far for somebody who looked at values, and after the last of these;
    ``generators``: copies of the constructor's own ones, as they were at first.
    """

    calls: list[Call] = field(default_factory=list)
    storages: list[UntypedStorage] = field(default_factory=list)  # kept, so that no other has their addresses
    devices: list[torch.device] = field(default_factory=list)
    states: list[dict[str | torch.Generator, Tensor]] = field(default_factory=list)
    generators: dict[torch.Generator, torch.Generator] = field(default_factory=dict)
    randoms: int = 0
    _numbers: dict[int, int] = field(default_factory=dict)

    def __deepcopy__(self, memo: object) -> Record:
        return self  # tensors that are copied outside are not its own, and nothing in it changes any more

    def knows(self, tensor: Tensor) -> bool:
        """Whether it is one of those that wait."""
        return isinstance(tensor, FakeTensor) and tensor.untyped_storage()._cdata in self._numbers

    def place(self, tensor: Tensor) -> Place:
        """Where a tensor that waits is."""
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
        untouched = all(torch.equal(state, _default(kind)) for kind, state in self.states[0].items())
        with _restored(keep=untouched):
            yield from _Replay(self, wanted).run()

    def now(self, tensor: Tensor) -> Tensor:
        """The values of a tensor that waits, while its constructor runs."""
        place = self.place(tensor)
        with _restored():
            ((_, value),) = _Replay(self, [place], note=True).run()
        return value

    def clone(self, generator: torch.Generator) -> torch.Generator:
        """A generator of the constructor's own, as it was when it was first used."""
        if generator not in self.generators:
            self.generators[generator] = torch.Generator(generator.device)
            self.generators[generator].set_state(generator.get_state())
        return self.generators[generator]

    def note_states(self) -> None:
        """The generators as they are."""
        self.states.append(
            {kind: _default(kind) for kind in self.states[0]}
            | {own: own.get_state() for own in self.generators.values()}
        )

    def set_states(self, number: int) -> None:
        """Before a random call that was made already, or after the last of these."""
        for which, state in self.states[number].items():
            if isinstance(which, torch.Generator):
                which.set_state(state)
            elif which == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state)


@contextmanager
def _restored(*, keep: bool = False) -> Iterator[None]:
    """Inside, the default generators may be set; ``keep``: what they are then is kept."""
    with nullcontext() if keep else torch.random.fork_rng(_devices()):
        yield


def _devices() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_available() else []


def _default(kind: object) -> Tensor:
    return torch.get_rng_state() if kind == "cpu" else torch.cuda.get_rng_state()


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
            writes = {place.storage for place in (*call.made, *call.written)}
            undrawn = call.random is not None and call.random >= self.drawn
            if not (undrawn or writes & live):
                continue
            needed.append(number)
            reads = {place.storage for place in call.read}
            ends[number] = {s for s in writes | reads if s not in live}
            lasts[number] = {s for s in writes | reads if s in self.wanted and s not in seen}
            seen |= writes | reads
            gone = {place.storage for place in call.made}
            if (over := call.overwritten) and over.covers == self.record.storages[over.storage].nbytes():
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
            if isinstance(thing, Place):
                return self._tensor(thing)
            return self.record.clone(thing) if isinstance(thing, torch.Generator) else thing

        arguments = _mapped(real, call.arguments)
        results = call.operation(*arguments, **_mapped(real, call.options))
        made = [result for result in tree_leaves(results) if isinstance(result, Tensor)]
        for place, result in zip(call.made, made, strict=False):
            same = tuple(result.stride()) == place.stride and result.storage_offset() == place.offset
            if same and result.untyped_storage().nbytes() >= self.record.storages[place.storage].nbytes():
                self.there[place.storage] = result.untyped_storage()
            else:  # laid out otherwise where it is real
                self._tensor(place).copy_(result)


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with its leaves changed; a Place, though a tuple, is a leaf."""
    if isinstance(tree, Place) or not isinstance(tree, (tuple, list, dict)):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _mapped(change, value) for key, value in tree.items()}
    return type(tree)(_mapped(change, value) for value in tree)


class _Shapes(FakeTensorMode):
    def __deepcopy__(self, memo: object) -> _Shapes:
        return self  # a copied parameter's


class _Recorder(TorchDispatchMode):
    """Writes down what is done to tensors that wait; what has values, and is small, is computed at once."""

    def __init__(self, record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record, self.shapes = record, _Shapes(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        waiting = [tensor for tensor in tensors if self.record.knows(tensor)]
        if waiting and func in LOOKS:
            return func(self.record.now(waiting[0]))
        if not waiting and not self._begins(func, args, options, tensors):
            return func(*args, **options)
        written = [
            tensor
            for argument, given in _arguments(func, args, options)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(given)
            if isinstance(tensor, Tensor)
        ]
        if any(not self.record.knows(tensor) for tensor in written):
            raise Unrecorded(f"{func} writes to a tensor that was there before, or to one of fixed values")
        with self.shapes:
            result = func(*args, **options)
        # Tensors that it refers to weakly cannot become others in place, as those of a model do that is cast.
        self.shapes.fake_tensor_converter.meta_converter.tensor_memo.clear()
        made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        new = [tensor for tensor in made if not self.record.knows(tensor)]
        if written or new:
            for tensor in new:
                self.record.add(tensor, tensor.device)
            self._write_down(func, args, options, [] if written else made, written)
        return result

    def _begins(self, func: Any, args: Sequence[Any], options: dict[str, Any], tensors: list[Tensor]) -> bool:
        """Whether the result of an operation on no tensor that waits is to wait: never where the constructor
        means no device."""
        device = options.get("device")
        if any(tensor.is_meta for tensor in tensors) or (device is not None and torch.device(device) == META):
            return False
        if _is_random(func) or func.overloadpacket.__name__.startswith(EMPTY):
            return True
        if tensors or not any(argument.name == "device" for argument in func._schema.arguments):
            return False
        shape = func(*args, **{**options, "device": META})
        return isinstance(shape, Tensor) and shape.numel() > FEW

    def _write_down(
        self,
        func: Any,
        args: Sequence[Any],
        options: dict[str, Any],
        made: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> None:
        def noted(thing: Any) -> Any:
            if isinstance(thing, torch.Generator):
                self.record.clone(thing)
            if not isinstance(thing, Tensor):
                return thing
            if self.record.knows(thing):
                return self.record.place(thing)
            if thing.is_meta or isinstance(thing, FakeTensor):
                raise Unrecorded(f"{func} reads a tensor of no device")
            return thing.detach().clone()  # its values now; who made it may change them

        random = self.record.randoms if _is_random(func) else None
        self.record.randoms += random is not None
        self.record.calls.append(
            Call(
                func,
                _mapped(noted, tuple(args)),
                _mapped(noted, options),
                tuple(map(self.record.place, made)),
                tuple(map(self.record.place, written)),
                random,
            )
        )


META = torch.device("meta")


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _arguments(func: Any, args: Sequence[Any], options: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """An operation's arguments by its schema, with what is given for them."""
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in options:
            yield argument, options[argument.name]


def deferred_init(build: Callable[P, M], *args: P.args, **kwargs: P.kwargs) -> M:
    """``build(*args, **kwargs)`` without memory for what it makes, for ``parallelize``.

    There every rank makes one tensor after the other and keeps its slices: the values are those of ordinary
    construction under the same ``torch.manual_seed``, rank 0's on every rank, and no rank ever holds the
    model. What weights are loaded into may be made so too.

    UserError where construction looks at the values of a tensor that it has allocated.
    """
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    record = Record(states=[{kind: _default(kind) for kind in kinds}])
    try:
        with warnings.catch_warnings(), _Recorder(record):
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # torch, to copy it
            model = build(*args, **kwargs)
    except (Unrecorded, NotImplementedError, RuntimeError) as error:
        raise UserError(
            f"{getattr(build, '__name__', 'the model')} cannot be made without values ({one_line(error)}); "
            "make it without deferred_init"
        ) from error
    setattr(model, HELD_AS, record)
    return model


def deferred_if_possible(build: Callable[[], M]) -> M:
    """``deferred_init(build)``, or ``build()`` where construction looks at values or fails."""
    try:
        with torch.random.fork_rng(_devices()):  # of a constructor that has begun
            return deferred_init(build)
    except UserError:
        return build()


def become(model: nn.Module, old: Tensor, new: Tensor) -> None:
    """Let a parameter or buffer of a model be another tensor: the same object, if nothing holds weak
    references to it, as torch's recurrent modules do, which listen to what is set."""
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:
        for module in model.modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is old:
                    setattr(module, name, new)


@dataclass(frozen=True)
class Waiting:
    """What of a model waits for values: the names of parameters, of buffers, and where all of it is."""

    parameters: frozenset[str]
    buffers: frozenset[str]
    places: Sequence[tuple[Record, Mapping[Place, list[str]]]]

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by its name, once it has its values; what comes next may take their memory."""
        for record, names in self.places:
            for place, value in record.values(names):
                for name in names[place]:
                    yield name, value


def stand_in(model: nn.Module) -> Waiting:
    """Give what waits a tensor of its shape on its device, of NaN and without memory of its own, in place.

    UserError for a tensor that has no values and that no record knows, by name.
    """
    records = [r for module in model.modules() if (r := module.__dict__.pop(HELD_AS, None)) is not None]
    places: list[dict[Place, list[str]]] = [{} for _ in records]
    kinds = dict(model.named_parameters()), dict(model.named_buffers())
    for name, tensor in [*kinds[0].items(), *kinds[1].items()]:
        if not (local(tensor).is_meta or isinstance(local(tensor), FakeTensor)):
            continue
        known = next((i for i, record in enumerate(records) if record.knows(tensor)), None)
        if known is None:
            raise UserError(
                f"{name} has no values: it was made on no device, outside of hzplan.deferred_init; make the "
                "model with hzplan.deferred_init(Model, …), which parallelize gives values slice by slice"
            )
        places[known].setdefault(records[known].place(tensor), []).append(name)
        empty = torch.full((), float("nan") if tensor.is_floating_point() else 0, dtype=tensor.dtype)
        shaped = empty.to(tensor.device).expand(tensor.shape)
        if name in kinds[0]:
            shaped = nn.Parameter(shaped, requires_grad=tensor.requires_grad)
        become(model, tensor, shaped)
    named = {name for by_place in places for names in by_place.values() for name in names}
    return Waiting(
        frozenset(named & kinds[0].keys()),
        frozenset(named & kinds[1].keys()),
        list(zip(records, places, strict=True)),
    )
