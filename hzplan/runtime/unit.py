"""A unit on one rank: its buffers, whether its parameters are unsharded, and where its gradients go."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import cache
from math import copysign

import torch
from torch import Tensor, nn

from hzplan.models.local import take_gradient
from hzplan.runtime.bucket import CHUNK_ELEMENTS, Bucket

ABSENT = -0.0
"""Every element of a gradient that there is none of. It changes no sum, and a sum is −0.0 only of nothing
else: gradients that there are have their zeros delivered as +0.0. So the reduced gradient says whether any
rank had one, without a message of its own (IEEE 754, §6.3)."""


class UnitState:
    """The buckets of one unit, and whether its parameters are unsharded."""

    def __init__(self, name: str, buckets: Sequence[Bucket], world: int, *, offload: bool = False) -> None:
        """``offload``: its optimizer state lies in the host's memory."""
        self.name, self.offload = name, offload
        self.buckets = tuple(buckets)
        self.trainable_buckets = tuple(bucket for bucket in buckets if bucket.layout.trainable)
        self._frozen_buckets = [bucket for bucket in buckets if not bucket.layout.trainable]
        self.is_unsharded = False
        self._scale = 1.0 / world
        self._place_of = {
            id(parameter): (bucket, index)
            for bucket in self.trainable_buckets
            for index, parameter in enumerate(bucket.parameters)
        }
        self._offered: dict[int, tuple[nn.Parameter, Tensor, int]] = {}  # and the version that it then had

    @property
    def unshard_bytes(self) -> int:
        """Bytes of the buffer that the unit's parameters need while unsharded."""
        return sum(bucket.layout.buffer_nbytes for bucket in self.buckets if bucket.sharded)

    @property
    def gradient_buffer_bytes(self) -> int:
        """Bytes of the buffer that the unit's gradients need before they are reduced."""
        return sum(bucket.layout.gradient_buffer_nbytes for bucket in self.buckets if bucket.grad_sharded)

    def assign_buffers(self, parameters: Tensor | None, gradients: Tensor | None) -> None:
        """Cut the unit's buffers (uint8), for parameters and for gradients, into its buckets' parts."""
        param_offset = grad_offset = 0
        for bucket in self.buckets:
            param_part = grad_part = None
            if bucket.sharded and parameters is not None:
                param_part = _cut(parameters, param_offset, bucket.layout.nbytes, bucket.param.dtype)
                param_offset += bucket.layout.buffer_nbytes
            if bucket.grad_sharded and gradients is not None:
                grad_part = _cut(gradients, grad_offset, bucket.layout.master_nbytes, bucket.master.dtype)
                grad_offset += bucket.layout.gradient_buffer_nbytes
            bucket.assign_buffers(param_part, grad_part)

    def to_unsharded(self) -> None:
        """The unshard has ended: make parameters views of the unsharded values."""
        if not self.is_unsharded:
            for bucket in self.buckets:
                bucket.to_unsharded()
            self.is_unsharded = True

    def to_sharded(self) -> None:
        """The buffer may be given to another unit: parameters read as NaN from now on."""
        if self.is_unsharded:
            for bucket in self.buckets:
                bucket.to_sharded()
            self.is_unsharded = False

    # Gradients of one micro-batch. ``delivered``: ids of the parameters whose gradient has been taken.

    def begin_gradients(self) -> None:
        """A step begins: of gradients that are added up where they are kept there is none yet."""
        for bucket in self.trainable_buckets:
            for run in bucket.sum_runs:
                run.fill_(ABSENT)

    def offer_sums(self) -> None:
        """Let autograd add a micro-batch's gradients to their sums.

        Otherwise it leaves new tensors: a model has many small ones, and each costs calls of Python.
        """
        for bucket in self.trainable_buckets:
            for parameter, total in zip(bucket.parameters, bucket.sums, strict=True):
                if total is not None and parameter.grad is None:
                    parameter.grad = total
                    self._offered[id(parameter)] = parameter, total, total._version

    def take_gradient(self, parameter: nn.Parameter, *, accumulate: bool, again: bool = False) -> None:
        """Move ``parameter.grad`` into the bucket, divided by the world: sums over ranks become means.

        ``again``: another part of it came in this micro-batch. Not for those that come by themselves.
        """
        if torch.is_grad_enabled():  # inside of a backward that is to be differentiated; a guard takes longer
            with torch.no_grad():
                return self.take_gradient(parameter, accumulate=accumulate, again=again)
        gradient = take_gradient(parameter)
        assert gradient is not None
        bucket, index = self._place_of[id(parameter)]
        accumulate = again or (accumulate and not bucket.grad_sharded)
        return deliver(gradient, bucket.grad_views[index], self._scale, accumulate=accumulate)

    def take_rest(self, delivered: Set[int], *, accumulate: bool) -> set[int]:
        """The turn is over: move the gradients not yet delivered into the buckets. Returns the ids of their
        parameters; one without a gradient, which took no part in this micro-batch, adds ``ABSENT``.

        All at once where that is possible: most parameters are small, and a model has many.
        """
        if torch.is_grad_enabled():  # see ``take_gradient``
            with torch.no_grad():
                return self.take_rest(delivered, accumulate=accumulate)
        taken = self.take_back_sums()
        for bucket in self.trainable_buckets:
            adds = accumulate and not bucket.grad_sharded
            gradients: list[Tensor] = []
            targets: list[Tensor] = []
            for parameter, target, total in zip(
                bucket.parameters, bucket.grad_views, bucket.sums, strict=True
            ):
                if id(parameter) in delivered or (parameter.grad is None and (adds or total is not None)):
                    continue
                gradient = take_gradient(parameter)
                if gradient is None:
                    target.fill_(ABSENT)
                    continue
                taken.add(id(parameter))
                if total is not None:
                    deliver(gradient, total, 1.0, accumulate=True)
                else:
                    gradients.append(gradient)
                    targets.append(target)
            deliver_all(gradients, targets, self._scale, accumulate=adds)
        return taken

    def take_back_sums(self) -> set[int]:
        """What was offered is so no more; the ids of the parameters that autograd had a gradient of."""
        taken: set[int] = set()
        for number, (parameter, total, version) in self._offered.items():
            if parameter.grad is total:  # else someone has taken it away, as model.zero_grad() does
                parameter.grad = None
            if total._version != version:
                taken.add(number)
        self._offered.clear()
        return taken

    @torch.no_grad()
    def end_gradients(self, used: Set[int]) -> None:
        """A step's last micro-batch is over: sums become means, as ``deliver`` makes them at once elsewhere.

        ``used``: ids of the parameters that had a gradient.
        """
        for bucket in self.trainable_buckets:
            for run in bucket.sum_runs:
                torch.add(zero_like(run), run, alpha=self._scale, out=run)
            for parameter, total in zip(bucket.parameters, bucket.sums, strict=True):
                if total is not None and id(parameter) not in used:
                    total.fill_(ABSENT)

    @property
    def is_sharded(self) -> bool:
        """Whether its parameters have to be gathered for a use."""
        return any(bucket.sharded for bucket in self.buckets)

    @property
    def has_sums(self) -> bool:
        """Whether autograd adds up any of its gradients."""
        return any(total is not None for bucket in self.trainable_buckets for total in bucket.sums)

    @property
    def grad_sharded(self) -> bool:
        """Whether any gradients come into a buffer that other units have, too."""
        return any(bucket.grad_sharded for bucket in self.trainable_buckets)

    def comes_by_itself(self, parameter: Tensor) -> bool:
        """Whether a gradient of a unit's is where it belongs without ``take_gradient``."""
        found = self._place_of.get(id(parameter))
        return found is not None and found[0].sums[found[1]] is not None

    def drop_gradients(self) -> None:
        """Forget gradients that backward has left in ``parameter.grad``."""
        for bucket in self.trainable_buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
        self._offered.clear()

    def unfrozen(self) -> str | None:
        """The name of a tensor with a gradient that there is no bucket for; None: there is none."""
        for bucket in self._frozen_buckets:
            for tensor, parameter in zip(bucket.layout.tensors, bucket.parameters, strict=True):
                if parameter.grad is not None:
                    return tensor.name
        return None

    def left_over(self) -> bool:
        """Whether gradients have come that nobody took."""
        return any(p.grad is not None for bucket in self.trainable_buckets for p in bucket.parameters)


def is_absent(gradient: Tensor) -> bool:
    """Whether no rank had a gradient that this is a slice of the sum of; waits for a device only then."""
    first = gradient[0].item()  # of most gradients this says it
    return first == 0 and copysign(1, first) < 0 and bool(gradient.signbit().all() & ~gradient.any())


def deliver(gradient: Tensor, target: Tensor, scale: float, *, accumulate: bool) -> None:
    """Write ``scale`` times a gradient into its place (or add it), rounding no earlier than there, with zeros
    as +0.0.

    A gradient of another dtype is cast first, or the product would be rounded to the gradient's; a GPU does
    both at once. To add it, the CPU casts into a tensor of its own, so a large one goes in chunks. The
    profiler calls it too: what is allocated here is in its record.
    """
    mixed = gradient.dtype != target.dtype
    if not accumulate:
        if mixed and target.is_cuda:
            torch.add(zero_like(target), gradient, alpha=scale, out=target)
            return
        if mixed:  # the copy casts
            gradient = target.copy_(gradient)
        torch.add(torch.zeros((), dtype=target.dtype), gradient, alpha=scale, out=target)
    elif mixed and not target.is_cuda and target.numel() > CHUNK_ELEMENTS:
        chunks = (tensor.flatten().split(CHUNK_ELEMENTS) for tensor in (target, gradient))
        for place, source in zip(*chunks, strict=True):
            place.add_(source, alpha=scale)
    else:
        target.add_(gradient, alpha=scale)


def zero_like(target: Tensor) -> Tensor:
    """A zero that a sum is computed in the dtype of: one of no dimensions would not count beside others."""
    return _zero(target.dtype, target.device, min(target.dim(), 1))


@cache
def _zero(dtype: torch.dtype, device: torch.device, dimensions: int) -> Tensor:
    return torch.zeros((1,) * dimensions, dtype=dtype, device=device)


def deliver_all(gradients: list[Tensor], targets: list[Tensor], scale: float, *, accumulate: bool) -> None:
    """``deliver`` for many."""
    if not gradients:
        return
    mixed = gradients[0].dtype != targets[0].dtype
    if not accumulate and mixed:  # the copy casts
        torch._foreach_copy_(targets, gradients)
        torch._foreach_mul_(targets, scale)
        torch._foreach_add_(targets, 0.0)
    elif not mixed or max(target.numel() for target in targets) <= CHUNK_ELEMENTS:
        if not accumulate:
            torch._foreach_zero_(targets)
        torch._foreach_add_(targets, gradients, alpha=scale)
    else:
        for gradient, target in zip(gradients, targets, strict=True):
            deliver(gradient, target, scale, accumulate=accumulate)


def _cut(buffer: Tensor, start: int, nbytes: int, dtype: torch.dtype) -> Tensor:
    return buffer[start : start + nbytes].view(dtype)
