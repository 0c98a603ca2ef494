"""The one place where hooks are registered: they tell a listener when a call of a unit begins.

A call lasts until the next one begins, so calls cut a forward and backward into segments without gaps; the
profiler times them and the runtime schedules them, from the same events.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from hzplan.models.chunked_loss import ChunkedLogits
from hzplan.models.units import Unit

SMALL_ELEMENTS = 1 << 14
"""Least elements of a gradient that a listener is told of; smaller ones, of norms and biases, are not worth a
call of Python each."""


Phase = Literal["forward", "backward"]


class Listener(Protocol):
    """Follows a model's forward and backward, on the thread that computes."""

    def enter(self, unit: str, phase: Phase) -> None:
        """A unit's call begins; its parameters must be unsharded when this returns."""

    def gradient(self, parameter: nn.Parameter) -> None:
        """A parameter's gradient of this backward is complete, in ``parameter.grad``.

        Not called for small ones, which a listener finds there when a call ends, and for silent ones
        (``attach``).
        """

    def backward_end(self) -> None:
        """``backward()`` is about to return."""


def attach(
    units: Sequence[Unit],
    listener: Listener,
    *,
    silent: Callable[[Tensor], bool] = lambda parameter: False,
    passed_over: Callable[[str, Phase], bool] = lambda unit, phase: False,
) -> Callable[[], None]:
    """Register the hooks; the function returned removes them.

    ``silent``: says of a parameter that the listener need not be told of its gradient. ``passed_over``: says
    of a unit's call that it need not be told of that, of one in backward when its forward ends. Hooks of
    outputs cost more than small layers compute.

    Where a unit's parameters are bfloat16, floating tensors passed to its forward are cast to it too, inside
    its call, as FSDP2 does: earlier modules may compute in float32.
    """
    hooks = _Hooks(listener, passed_over)
    handles: list[RemovableHandle] = []
    outside = _outside_of_graphs()
    for unit in units:
        if all(parameter.dtype == torch.bfloat16 for parameter in unit.module.parameters()):
            cast = outside(_cast_inputs)  # called after the one that is prepended next
            handles.append(unit.module.register_forward_pre_hook(cast, prepend=True, with_kwargs=True))
        before, after = outside(hooks.before_forward(unit.name)), outside(hooks.after_forward(unit.name))
        handles.append(unit.module.register_forward_pre_hook(before, prepend=True))
        handles.append(unit.module.register_forward_hook(after))
        for _, parameter in unit.parameters:
            if parameter.requires_grad and not is_small(parameter) and not silent(parameter):
                handles.append(parameter.register_post_accumulate_grad_hook(hooks.gradient))

    def detach() -> None:
        for handle in handles:
            handle.remove()
        hooks.forget_leaves()

    return detach


def _outside_of_graphs() -> Callable[[Any], Any]:
    """Keeps torch.compile from tracing a hook, where it is imported; else its import is not waited for."""
    return torch.compiler.disable if "torch._dynamo" in sys.modules else lambda hook: hook


def backward_is_running() -> bool:
    """Whether this thread is inside of a ``backward()``, as a recomputed forward is."""
    return torch._C._current_graph_task_id() != -1


def is_small(parameter: Tensor) -> bool:
    """Whether a parameter's gradient comes without a call."""
    return parameter.numel() < SMALL_ELEMENTS


def _cast_inputs(
    module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.bfloat16() if tensor.is_floating_point() else tensor

    def cast_in(value: Any) -> Any:
        if isinstance(value, Tensor):
            return cast(value)
        return value if value is None or isinstance(value, bool | int) else tree_map_only(Tensor, cast, value)

    return tuple(map(cast_in, arguments)), {name: cast_in(value) for name, value in keywords.items()}


class _Hooks:
    def __init__(self, listener: Listener, passed_over: Callable[[str, Phase], bool]) -> None:
        self.listener, self.passed_over = listener, passed_over
        self.graph_task = -1  # autograd's number of the outermost backward under way
        self.of_leaves: list[tuple[Tensor, RemovableHandle]] = []

    def before_forward(self, unit: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: object) -> None:
            if self.passed_over(unit, "forward"):
                return
            if not backward_is_running():
                self.graph_task = -1  # of a backward that raised
            self.listener.enter(unit, "forward")

        return hook

    def after_forward(self, unit: str) -> Callable[..., None]:
        """The first gradient that reaches any of the outputs begins the unit's backward.

        Of units that return the same tensor, such as a model and its head, the outer one begins first.
        """

        def hook(module: nn.Module, arguments: object, output: object) -> None:
            if not torch.is_grad_enabled() or self.passed_over(unit, "backward"):
                return
            begun_in = -1

            def begin() -> None:
                nonlocal begun_in
                self.enter_backward()
                if begun_in != self.graph_task:
                    begun_in = self.graph_task
                    self.listener.enter(unit, "backward")

            for tensor in _tensors(output):
                if tensor.requires_grad:
                    self.before_gradient(tensor, unit, begin)
                    # What is done in place to a view gives it another history, without the view's hooks, and
                    # a linear layer's output is one. That of what it is a view of keeps its own.
                    if tensor._base is not None and tensor._base.grad_fn is not None:
                        self.before_gradient(tensor._base, unit, begin)

        return hook

    def before_gradient(self, tensor: Tensor, unit: str, begin: Callable[[], None]) -> None:
        """Call ``begin`` when the tensor's gradient is there, before what other units asked for earlier."""
        of, begins = getattr(tensor, "_hzplan_begins", (None, None))
        if begins is None or of is not tensor.grad_fn:  # an operation in place makes another gradient of it
            begins = {}
            tensor._hzplan_begins = tensor.grad_fn, begins  # type: ignore[attr-defined]

            def all_begin(gradient: Tensor, begins: dict[str, Callable[[], None]] = begins) -> None:
                for one in reversed(list(begins.values())):
                    one()

            handle = tensor.register_hook(all_begin)
            if isinstance(tensor, nn.Parameter):  # which is there in the next forward, too
                self.of_leaves.append((tensor, handle))
        begins[unit] = begin

    def forget_leaves(self) -> None:
        """Remove what outlasts a forward."""
        for tensor, handle in self.of_leaves:
            handle.remove()
            del tensor._hzplan_begins  # type: ignore[attr-defined]
        self.of_leaves.clear()

    def enter_backward(self) -> None:
        """A checkpoint with ``use_reentrant=True`` runs a backward inside of the backward, which is not one
        more."""
        if self.graph_task == -1:
            self.graph_task = torch._C._current_graph_task_id()
            Variable._execution_engine.queue_callback(self.end_backward)

    def end_backward(self) -> None:
        self.graph_task = -1
        self.listener.backward_end()

    def gradient(self, parameter: Tensor) -> None:
        if self.graph_task == -1:
            self.enter_backward()
        self.listener.gradient(parameter)  # type: ignore[arg-type] # torch calls it a tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's output, in any nesting of tuples, lists, dicts and dataclass-like objects."""
    if isinstance(value, ChunkedLogits):
        yield value.hidden
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name))
