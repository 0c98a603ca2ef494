"""Logits that are never there as a whole: cross-entropy computes them, and their gradient, in chunks.

Logits and their gradient have the size of the vocabulary for each token, and so are often a step's peak. A
head that is an ``nn.Linear`` returns what it was given instead, as a tensor that says it has the logits'
shape; ``cross_entropy`` of it multiplies and reduces chunk after chunk, gradients included, in forward.
Whoever asks such a tensor for anything else gets logits, as a whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from hzplan.models.local import is_distributed

LEAST_ROWS = 128
"""Tokens of a chunk, at least: with fewer a product does not fill a device."""
WARNING = ".* was asked of logits, which are computed as a whole"
IGNORED = -100


def applies_to(module: nn.Module) -> bool:
    """Whether a module can be a head whose loss is computed in chunks."""
    return type(module) is nn.Linear and not is_distributed(module.weight)


class ChunkedLogits(Tensor):
    """Logits [..., vocab] that are not computed: ``hidden`` [..., width], the head, and the dtype they are
    asked for in."""

    hidden: Tensor
    head: nn.Linear
    as_dtype: torch.dtype

    @classmethod
    def of(cls, hidden: Tensor, head: nn.Linear, as_dtype: torch.dtype | None = None) -> ChunkedLogits:
        """Logits of ``hidden`` under a head."""
        with _disable_current_modes():  # nobody's operation, and no fake tensor
            found = torch.empty(0).as_subclass(cls)
        found.hidden, found.head, found.as_dtype = hidden, head, as_dtype or hidden.dtype
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, keywords = getattr(func, "__name__", ""), dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(args[0] if args else None, ChunkedLogits):
                rule = _RULES.get(func, _RULES.get(name))
                found = rule(*args, **keywords) if rule is not None else NotImplemented
                if found is not NotImplemented:
                    return found
            warnings.warn(
                f"{name or func} was asked of logits, which are computed as a whole for it; the plan counts "
                "on torch's cross_entropy, which computes them in chunks",
                stacklevel=2,
            )
            whole = tree_map_only(ChunkedLogits, _whole, (tuple(args), keywords))
            return func(*whole[0], **whole[1])


def _whole(logits: ChunkedLogits) -> Tensor:
    return F.linear(logits.hidden, logits.head.weight, logits.head.bias).to(logits.as_dtype)


def _shape(logits: ChunkedLogits) -> torch.Size:
    return torch.Size((*logits.hidden.shape[:-1], logits.head.out_features))


def _size(logits: ChunkedLogits, dim: int | None = None) -> Any:
    return _shape(logits) if dim is None else _shape(logits)[dim]


def _viewed(logits: ChunkedLogits, *shape: Any) -> Any:
    """Of views that leave the vocabulary alone."""
    wanted = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if not wanted or not all(isinstance(size, int) for size in wanted):
        return NotImplemented
    if wanted[-1] != logits.head.out_features:
        return NotImplemented
    hidden = logits.hidden.reshape(*wanted[:-1], logits.hidden.shape[-1])
    return ChunkedLogits.of(hidden, logits.head, logits.as_dtype)


def _flattened(logits: ChunkedLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    last = logits.hidden.dim() - 1
    if end_dim % (last + 1) == last:
        return NotImplemented
    return ChunkedLogits.of(logits.hidden.flatten(start_dim, end_dim), logits.head, logits.as_dtype)


def _item(logits: ChunkedLogits, key: Any) -> Any:
    keys = key if isinstance(key, tuple) else (key,)
    dims = logits.hidden.dim()
    if Ellipsis in [one for one in keys if not isinstance(one, Tensor)]:
        place = next(index for index, one in enumerate(keys) if one is Ellipsis)
        keys = (*keys[:place], *(slice(None),) * (dims - len(keys) + 1), *keys[place + 1 :])
    if len(keys) > dims or not all(isinstance(one, int | slice) for one in keys):
        return NotImplemented
    if len(keys) == dims and keys[-1] != slice(None):
        return NotImplemented
    return ChunkedLogits.of(logits.hidden[keys[: dims - 1]], logits.head, logits.as_dtype)


def _cast(logits: ChunkedLogits, dtype: Any = None, **keywords: Any) -> Any:
    if keywords or not isinstance(dtype, torch.dtype):
        return NotImplemented
    return ChunkedLogits.of(logits.hidden, logits.head, dtype)


def _same(logits: ChunkedLogits) -> ChunkedLogits:
    return logits


def _cross_entropy(
    logits: ChunkedLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORED,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if not plain or reduction not in ("mean", "sum") or logits.hidden.dim() != 2 or target.dim() != 1:
        return NotImplemented
    head, hidden = logits.head, logits.hidden
    # As many tokens as have no more logits than all tokens have elements of ``hidden``.
    rows = max(LEAST_ROWS, hidden.shape[0] * head.in_features // head.out_features)
    found: Tensor = _Loss.apply(  # type: ignore[no-untyped-call]
        *(hidden, head.weight, head.bias, target, ignore_index, reduction == "mean", rows, logits.as_dtype)
    )
    return found


_RULES: Mapping[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    Tensor.shape.__get__: _shape,  # type: ignore[attr-defined]
    Tensor.ndim.__get__: lambda logits: logits.hidden.dim(),  # type: ignore[attr-defined]
    Tensor.dtype.__get__: lambda logits: logits.as_dtype,  # type: ignore[attr-defined]
    Tensor.device.__get__: lambda logits: logits.hidden.device,
    Tensor.requires_grad.__get__: lambda logits: logits.hidden.requires_grad,  # type: ignore[attr-defined]
    "size": _size,
    "dim": lambda logits: logits.hidden.dim(),
    "view": _viewed,
    "reshape": _viewed,
    "flatten": _flattened,
    "__getitem__": _item,
    "float": lambda logits: _cast(logits, torch.float32),
    "to": _cast,
    "contiguous": _same,
}
"""What is asked of logits, by function or by its name."""


class _Loss(torch.autograd.Function):
    """Cross-entropy of a linear layer, and its gradients, chunk by chunk (as Hsu et al. 2024, Liger Kernel,
    §3.2: the gradient of logits is softmax less one at the target, and is used up where it is made)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignored: int,
        mean: bool,
        rows: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """``hidden`` [tokens, width], ``weight`` [vocab, width], ``target`` int64 [tokens]; ``rows``: tokens
        of a chunk. The loss [] is reduced in ``dtype``, as that of logits cast to it."""
        counted = target != ignored
        number = counted.sum().clamp(min=1) if mean else torch.ones((), device=hidden.device)
        loss = torch.zeros((), dtype=dtype, device=hidden.device)
        trains = ctx.needs_input_grad[1:3]
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight) if trains[0] else None
        of_bias = torch.zeros_like(bias) if bias is not None and trains[1] else None
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = F.linear(hidden[part], weight, bias).to(dtype)
            kept, places = counted[part, None], target[part, None].clamp(min=0)
            logits -= logits.logsumexp(1, keepdim=True)  # log-probabilities
            loss -= (logits.gather(1, places) * kept).sum()
            gradient = logits.exp_()
            gradient.scatter_add_(1, places, torch.full_like(places, -1, dtype=dtype))
            gradient *= kept.to(dtype) / number.to(dtype)
            narrow = gradient.to(hidden.dtype)
            torch.mm(narrow, weight, out=of_hidden[part])
            if of_weight is not None:
                of_weight.addmm_(narrow.T, hidden[part])
            if of_bias is not None:
                of_bias += gradient.sum(0).to(of_bias.dtype)
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        return loss / number

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Times the loss's own gradient [], in place."""
        scale = gradients[0]
        found = [None if one is None else one.mul_(scale.to(one.dtype)) for one in ctx.saved_tensors]
        return (*found, *(None,) * 5)
