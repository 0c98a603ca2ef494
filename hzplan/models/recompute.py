"""Recomputation (activation checkpointing) of units: forward keeps its inputs, and with them the results of
some operations (``core.recompute``); the others are computed again.

The wrapper lies inside of a unit's hooks: the recorded uses are the same with it and without, and the second
forward happens within the unit's backward call, when its parameters are unsharded.
"""

from __future__ import annotations

import functools
import re
import types
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hzplan.core.recompute import HOST, PRODUCTS, SAVES_NOTHING, Way
from hzplan.errors import UserError
from hzplan.models import chunked_loss
from hzplan.models.chunked_loss import ChunkedLogits
from hzplan.models.saved import Saved, unseen_host_buffer
from hzplan.models.units import Unit

SECOND_RUN = getattr(torch.utils.checkpoint, "_RECOMPUTE", None)
"""torch's mark of a result that the second run of a forward computes; None: of another version of torch."""


STAYS = (
    "hzplan: a layer's activations stay on the device, for the host still has those of an earlier forward "
    "whose graph is kept; more memory is needed than the plan says (backward, or let go of its loss, first)"
)


def leaves(units: Iterable[Unit]) -> frozenset[str]:
    """The units whose forward is Python's and that have no other unit inside; a second forward would begin
    calls of inner units."""
    listed = list(units)
    modules = {id(unit.module) for unit in listed}
    return frozenset(
        unit.name
        for unit in listed
        if not isinstance(unit.module, torch.jit.ScriptModule)
        and not any(id(module) in modules for module in unit.module.modules() if module is not unit.module)
    )


class _Policy:
    """What of one forward is kept; made anew for each, and told of the operations of the second, too."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._products = [0, 0]  # of the first run, and of the second
        # The last operation, a product, if it is kept and what follows saves nothing.
        self._unread: Any = None

    def __call__(
        self, context: SelectiveCheckpointContext, operation: Any, *arguments: Any, **keywords: Any
    ) -> CheckpointPolicy:
        again = bool(context.is_recompute)
        kept = self._keeps(operation, again=again) and not _drops_out(operation, arguments, keywords)
        if kept:  # attention's backward needs its result
            self._unread = operation if _name(operation) in PRODUCTS else None
        elif not (_name(operation) in SAVES_NOTHING or getattr(operation, "is_view", False)):
            self._unread = None
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def let_go(self, kept: Mapping[Any, Any]) -> None:
        """Let go, when forward ends, what no second run comes to: that stops at the last tensor that backward
        needs, and a block's last product is often only added to its input. ``kept``: torch's results by
        operation; in another form than this one they stay."""
        entries = kept.get(self._unread)
        if isinstance(entries, dict) and entries and get_proxy_mode() is None:
            entries[max(entries)] = SECOND_RUN

    def _keeps(self, operation: Any, *, again: bool) -> bool:
        name = _name(operation)
        if name in PRODUCTS:
            self._products[again] += 1
            every = 2 if self._way == "operations" else 1
            return self._way != "products" and self._products[again] % every == 1 % every
        attends = "scaled_dot_product" in name or "flash_attention" in name or name == "flex_attention"
        return attends and self._way != "attention"


def _drops_out(operation: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether it draws random numbers: a second run that leaves it out would draw others afterwards, since
    the generator is restored for all of the forward."""
    schema = getattr(operation, "_schema", None)
    names = [one.name for one in schema.arguments] if schema is not None else []
    given = {**dict(zip(names, arguments, strict=False)), **keywords}
    return bool(given.get("dropout_p"))


def _name(operation: Any) -> str:
    return str(getattr(operation, "overloadpacket", operation)).rpartition(".")[2]


@functools.cache
def _ending(mode: Hashable) -> type:
    """torch's dispatch mode of a first run, which lets go what is not needed when it ends."""

    class Ending(mode):  # type: ignore[misc, valid-type]
        supports_higher_order_operators = True  # torch knows its own class alone, and calls that likewise

        def __exit__(self, *error: Any) -> Any:
            found = super().__exit__(*error)
            self.policy_fn.let_go(getattr(self, "storage", {}))
            return found

    return Ending


def _contexts(way: Way) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What a checkpoint's two forwards run in."""
    if way == "full":
        return nullcontext(), nullcontext()
    first, second = cast(Any, create_selective_checkpoint_contexts(policy := _Policy(way)))
    if SECOND_RUN is not None and getattr(first, "policy_fn", None) is policy:
        first.__class__ = _ending(cast(Hashable, type(first)))
    return first, second


def recomputed_modules(units: Iterable[Unit], names: Collection[str]) -> dict[str, nn.Module]:
    """Those of the units named; UserError for one that the model lacks or that has units inside."""
    listed = {unit.name: unit for unit in units}
    inner = leaves(listed.values())
    for name in sorted(names):
        if name not in listed:
            raise UserError(
                f"the plan recomputes unit {name}, which the model does not have; profile and solve again"
            )
        if name not in inner:
            raise UserError(
                f"the plan recomputes unit {name}, which has other units inside; solve again without it"
            )
    return {name: listed[name].module for name in sorted(names)}


def recompute(
    module: nn.Module,
    wanted: Callable[[], Way | None] = lambda: "full",
    *,
    keep_random_state: bool = True,
    saved: Saved | None = None,
    in_time: Callable[[], bool] = lambda: False,
) -> Callable[[], None]:
    """Let a module compute its forward again in backward, in the way that is ``wanted`` when forward begins;
    the function returned undoes it. ``keep_random_state``: dropout is the same both times. Buffers that
    forward changes, such as BatchNorm's, change once. ``saved``: for way ``host`` the module's activations;
    ``in_time``: whether somebody else copies them when a forward has ended, else it does so itself."""
    own = module.__dict__.get("forward")
    changing = _Buffers()

    def recomputing(this: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        forward = own if own is not None else functools.partial(type(this).forward, this)
        if not torch.is_grad_enabled() or (way := wanted()) is None:
            return forward(*arguments, **keywords)
        if way == "chunks":
            if not (chunked_loss.applies_to(this) and len(arguments) == 1 and not keywords):
                return forward(*arguments, **keywords)
            (hidden,) = arguments  # its gradient, as a tensor of its own, begins the unit's backward
            return ChunkedLogits.of(hidden.view_as(hidden), cast(nn.Linear, this))
        if way == HOST:
            if saved is None:
                return forward(*arguments, **keywords)
            if not saved.is_free:
                warnings.warn(STAYS, stacklevel=2)
                return forward(*arguments, **keywords)
            with saved.forward(this, (arguments, keywords)) as returned:
                result = forward(*arguments, **keywords)
                returned(result)
            if not in_time():
                saved.save()
                saved.release()
            return result
        # Its keywords are of its own, and it looks after what comes by position: devices, changes in place.
        names, count = tuple(keywords), len(arguments)

        def with_names(*given: Any) -> Any:
            return forward(*given[:count], **dict(zip(names, given[count:], strict=True)))

        return checkpoint(
            functools.partial(changing.once, this, with_names),
            *(*arguments, *keywords.values()),
            use_reentrant=False,
            preserve_rng_state=keep_random_state,
            context_fn=functools.partial(_contexts, way),
        )

    # A method, so that a copy of the module is bound to the copy.
    module.forward = types.MethodType(functools.wraps(type(module).forward)(recomputing), module)

    def undo() -> None:
        module.__dict__.pop("forward", None)
        if own is not None:
            module.forward = own

    return undo


class _Buffers:
    """The buffers that a forward changes, which its second run leaves as the first one did."""

    def __init__(self) -> None:
        self._changed: dict[tuple[bool, ...], set[tuple[str, str]]] = {}

    def once(self, module: nn.Module, forward: Callable[..., Any], *arguments: Any) -> Any:
        """Run a forward, the first time or, within a backward, again.

        What it changes is seen once, for each way in which modules are in training or not: operations do not
        always tell (torch's batch norm leaves versions as they are).
        """
        mode = tuple(inner.training for inner in module.modules())
        if torch._C._current_graph_task_id() == -1:
            if mode in self._changed:
                return forward(*arguments)
            with _disable_current_modes():  # which hold the second run's operations against the first one's
                before = {key: (tensor, tensor.clone()) for key, tensor in _buffers(module)}
            found = forward(*arguments)
            with _disable_current_modes():
                self._changed[mode] = {
                    key
                    for key, tensor in _buffers(module)
                    if key in before and not (tensor is before[key][0] and _equal(tensor, before[key][1]))
                }
            return found
        changed = self._changed.get(mode, set())
        with _disable_current_modes():
            saved = [(key, tensor, tensor.clone()) for key, tensor in _buffers(module) if key in changed]
        try:
            return forward(*arguments)
        finally:
            inner = dict(module.named_modules()) if saved else {}
            with torch.no_grad(), _disable_current_modes():
                for (path, name), tensor, values in saved:
                    tensor.copy_(values)
                    inner[path]._buffers[name] = tensor


def _equal(one: Tensor, other: Tensor) -> bool:
    """Not so of fake ones, which have no values."""
    try:
        return torch.equal(one, other)
    except (RuntimeError, NotImplementedError):
        return True


def _buffers(module: nn.Module) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """With the module's path and the name in it."""
    for path, inner in module.named_modules():
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                yield (path, name), buffer


class Switch:
    """In what way forwards that begin now are to be computed again in backward."""

    def __init__(self) -> None:
        self.way: Way | None = None

    def around(self, step: Callable[[], Tensor], way: Way = "full") -> Callable[[], Tensor]:
        """The step with the switch on, whose warnings are about no plan."""

        def run() -> Tensor:
            self.way = way
            try:
                with warnings.catch_warnings():
                    for told in (chunked_loss.WARNING, re.escape(STAYS)):
                        warnings.filterwarnings("ignore", message=told)
                    return step()
            finally:
                self.way = None

        return run


@contextmanager
def switched(
    units: Iterable[Unit], *, keep_random_state: bool = True, without_values: bool = False
) -> Iterator[Switch]:
    """All units that can be recomputed, under one switch. ``without_values``: of fake tensors."""
    listed, switch = list(units), Switch()
    able = leaves(listed)
    host_buffer = None if without_values else unseen_host_buffer
    undo = [
        recompute(
            unit.module,
            lambda: switch.way,
            keep_random_state=keep_random_state,
            saved=Saved(host_buffer),
        )
        for unit in listed
        if unit.name in able
    ]
    try:
        yield switch
    finally:
        for one in reversed(undo):
            one()
