"""Models whose values wait: constructors run on shapes, and ``parallelize`` repeats what they did.

A tensor of the model has a shape and no memory until then.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hzplan.errors import UserError, one_line
from hzplan.models.local import local
from hzplan.models.record import META, Call, Place, Record, Unrecorded, default_state, mapped

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)

HELD_AS = "_hzplan_deferred"
"""The attribute of a module that was made so: its record."""
EMPTY = ("empty", "new_", "zeros", "ones", "full", "rand")
"""How the names of operations begin that make tensors to be written to; others without inputs (a range) have
their values at once, where these are few: constructors look at them."""
FEW, MOST_CALLS = 1 << 20, 50_000
LOOK = torch.ops.aten._local_scalar_dense.default
"""What a constructor looks at values with, as for ``if not mask.any():``."""
GENERATORS = ("get_rng_state", "set_rng_state", "manual_seed", "seed")
"""Of torch and torch.random: what would find the generator where it is not yet, or put it elsewhere."""


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
        if waiting and func is LOOK:
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
        before = [self.record.knows(tensor) for tensor in made]
        if written or not all(before):
            for tensor, known in zip(made, before, strict=True):
                if not known:
                    self.record.add(tensor, tensor.device)
            places = [
                None if written and known else self.record.place(tensor)
                for tensor, known in zip(made, before, strict=True)
            ]
            self._write_down(func, args, options, places, written)
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
        made: Sequence[Place | None],
        written: Sequence[Tensor],
    ) -> None:
        def noted(thing: Any) -> Any:
            if isinstance(thing, torch.Generator):
                raise Unrecorded("numbers from a generator that is given")
            if not isinstance(thing, Tensor):
                return thing
            if self.record.knows(thing):
                return self.record.place(thing)
            if thing.is_meta or isinstance(thing, FakeTensor):
                raise Unrecorded(f"{func} reads a tensor of no device")
            return thing.detach().clone()  # its values now; who made it may change them

        if len(self.record.calls) == MOST_CALLS:
            raise Unrecorded(f"more than {MOST_CALLS} operations")
        random = self.record.randoms if _is_random(func) else None
        if random is not None and not self.record.untouched:
            raise Unrecorded("the generator is seeded in between")
        self.record.randoms += random is not None
        self.record.calls.append(
            Call(
                func,
                mapped(noted, tuple(args)),
                mapped(noted, options),
                tuple(made),
                tuple(map(self.record.place, written)),
                random,
            )
        )


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
    model. The generator moves on there too, as it would have here; what is drawn in between is drawn again.
    Weights are loaded after ``parallelize``.

    UserError where construction cannot be left for later: it converts tensors to others' arrays, sets
    generators or draws from its own, or keeps tensors outside of parameters and buffers.
    """
    record = Record(states=[{kind: default_state(kind) for kind in _kinds()}])
    if any(
        other.randoms and other.states[0].keys() == record.states[0].keys() and other.untouched
        for other in _pending
    ):
        raise UserError(
            "another model made by deferred_init waits to draw the numbers that this one would; make both in "
            "one function given to deferred_init, or parallelize the other one first"
        )
    recorder = _Recorder(record)
    try:
        with warnings.catch_warnings(), _unmoved_generators(), _kept_attributes(), recorder:
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # torch, to copy it
            model = build(*args, **kwargs)
        _check(model, record)
    except (Unrecorded, NotImplementedError, RuntimeError, AssertionError) as error:
        raise UserError(
            f"{getattr(build, '__name__', 'the model')} cannot be made without values ({one_line(error)}); "
            "make it without deferred_init"
        ) from error
    recorder.shapes.allow_non_fake_inputs = False  # values that come now would be lost
    setattr(model, HELD_AS, record)
    _pending.add(record)
    return model


_pending: weakref.WeakSet[Record] = weakref.WeakSet()
"""Records that nobody has replayed."""


def _kinds() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@contextmanager
def _unmoved_generators() -> Iterator[None]:
    """Inside, who asks torch where its generator is, or sets it, is refused: it stands where it stood."""

    def refuse(*_: object, **__: object) -> Any:
        raise Unrecorded("torch's generator is read or set")

    places = [(module, name) for module in (torch, torch.random) for name in GENERATORS]
    before = [getattr(module, name) for module, name in places]
    try:
        for module, name in places:
            setattr(module, name, refuse)
        yield
    finally:
        for (module, name), function in zip(places, before, strict=True):
            setattr(module, name, function)


@contextmanager
def _kept_attributes() -> Iterator[None]:
    """Inside, what parameters are marked with stays when a module is cast or moved: as it does with those
    that have values, and not with others, which torch makes anew."""
    apply: Callable[..., nn.Module] = nn.Module._apply

    def keeping(module: nn.Module, *given: Any, **options: Any) -> nn.Module:
        marked = [(tensor, _marks(tensor)) for tensor in module.parameters()]
        found = apply(module, *given, **options)
        for tensor, marks in marked:
            for name, value in marks.items():
                setattr(tensor, name, value)
        return found

    nn.Module._apply = keeping  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]


def _check(model: nn.Module, record: Record) -> None:
    """Unrecorded, when something of the model waits that ``stand_in`` would not find."""
    if not record.untouched:
        raise Unrecorded("the generator is seeded")
    registered = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    for name, module in model.named_modules():
        for attribute, held in vars(module).items():
            inside = attribute in ("_parameters", "_buffers")
            for leaf in tree_leaves(held):
                if isinstance(leaf, FakeTensor) and not (inside or id(leaf) in registered):
                    raise Unrecorded(f"{name or 'the model'}.{attribute} holds a tensor that is no buffer")
                if isinstance(leaf, FakeTensor) and not record.knows(leaf):
                    raise Unrecorded(f"{name or 'the model'} has a tensor of another origin")
    for tensor in [*model.parameters(), *model.buffers()]:
        if record.knows(tensor):
            if isinstance(tensor, nn.Parameter) and (tensor._backward_hooks or _accumulates(tensor)):
                raise Unrecorded("a parameter has hooks")
            record.versions[record.place(tensor).storage] = tensor._version


def _accumulates(tensor: Tensor) -> bool:
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def deferred_if_possible(build: Callable[[], M]) -> M:
    """``deferred_init(build)``, or ``build()`` where that is refused. For models that are known: what else a
    constructor does, it may do twice."""
    try:
        return deferred_init(build)
    except Exception:
        return build()


def _marks(tensor: Tensor) -> dict[str, Any]:
    """A tensor's attributes, without those that torch gives one that has only a shape."""
    of_torch: set[str] = set()
    if isinstance(tensor, FakeTensor):
        with tensor.fake_mode:
            of_torch = {*vars(nn.Parameter(torch.empty(0)))}
    return {name: value for name, value in vars(tensor).items() if name not in of_torch}


def become(model: nn.Module, old: Tensor, new: Tensor) -> Tensor:
    """Let a parameter or buffer of a model be another tensor, with its attributes; returns what it is now:
    the same object, if nothing holds weak references to it, as torch's recurrent modules do, which listen to
    what is set."""
    for name, value in _marks(old).items():
        setattr(new, name, value)
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:
        for module in model.modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is old:
                    setattr(module, name, new)
        return new
    return old


@dataclass(frozen=True)
class Waiting:
    """What of a model waits for values: the names of parameters, of buffers, and where all of it is.

    ``replaced``: tensors that had to become other objects, by the id of the old one, with it.
    """

    parameters: frozenset[str]
    buffers: frozenset[str]
    places: Sequence[tuple[Record, Mapping[Place, list[str]]]]
    replaced: Mapping[int, tuple[Tensor, Tensor]]

    @property
    def order(self) -> list[str]:
        """The names in the order of ``values``."""
        return [
            name for record, names in self.places for place in record.order(names) for name in names[place]
        ]

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
    for record in records:
        _pending.discard(record)
    places: list[dict[Place, list[str]]] = [{} for _ in records]
    replaced: dict[int, tuple[Tensor, Tensor]] = {}
    kinds = dict(model.named_parameters()), dict(model.named_buffers())
    for name, tensor in [*kinds[0].items(), *kinds[1].items()]:
        if not (local(tensor).is_meta or isinstance(local(tensor), FakeTensor)):
            continue
        known = next((i for i, record in enumerate(records) if record.knows(tensor)), None)
        if known is None:
            raise UserError(
                f"{name} has no values: it was made on no device, or copied, cast or set after "
                "hzplan.deferred_init; make the whole model inside hzplan.deferred_init(Model, …), which "
                "parallelize gives values slice by slice"
            )
        place = records[known].place(tensor)
        if tensor._version != records[known].versions.get(place.storage, tensor._version):
            raise UserError(
                f"{name} was written to after hzplan.deferred_init, when it had no values yet; do that "
                "inside, or load weights after parallelize"
            )
        places[known].setdefault(place, []).append(name)
        empty = torch.full((), float("nan") if tensor.is_floating_point() else 0, dtype=tensor.dtype)
        shaped = empty.to(tensor.device).expand(tensor.shape)
        if name in kinds[0]:
            shaped = nn.Parameter(shaped, requires_grad=tensor.requires_grad)
        now = become(model, tensor, shaped)
        if now is not tensor:
            replaced[id(tensor)] = tensor, now
    named = {name for by_place in places for names in by_place.values() for name in names}
    return Waiting(
        frozenset(named & kinds[0].keys()),
        frozenset(named & kinds[1].keys()),
        list(zip(records, places, strict=True)),
        replaced,
    )
