"""Cost of an optimizer step: seconds by elements, state, temporaries; and of the norm for clipping."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hzplan.errors import UserError
from hzplan.formats.profile import OptimizerEntry, OptimizerPoint
from hzplan.models.units import master_dtype_of
from hzplan.profiler.model.memory import memory_trace
from hzplan.profiler.session.ranks import Ranks
from hzplan.profiler.session.rounds import rounds
from hzplan.profiler.session.statistics import nanoseconds, rising, sizes, spread
from hzplan.runtime.clipping import clipping, norms, square_sum
from hzplan.runtime.muon import Muon

OPTIMIZERS: Mapping[str, partial[Any]] = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "adam": partial(torch.optim.Adam, fused=True),
    "sgd": partial(torch.optim.SGD, fused=True),
    "muon": partial(Muon, adjust_lr_fn="match_rms_adamw", adamw={"fused": True}),
}
"""The optimizers that are measured, with the arguments that make them fast, by names in profiles. Muon's
learning rate is AdamW's, so that one is enough."""

FIRST_ELEMENTS = 1 << 10
LAST_ELEMENTS = 16 << 20
FACTOR = 4
MIN_REPEATS = 3
MAX_REPEATS = 10
BUDGET_S = 2.0
TRACED_ELEMENTS = 1 << 16
"""Elements of the parameter whose step is followed for temporaries; constants are no share of so many."""


def optimizer_named(name: str) -> partial[Any]:
    """A plan's optimizer; UserError when this version has none of that name."""
    if name not in OPTIMIZERS:
        raise UserError(f"field optimizer: {name!r} is not known; this version has {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def measure_optimizer(
    ranks: Ranks,
    name: str,
    dtype: torch.dtype,
    largest_elements: int,
    compute: Callable[[], None],
    progress: Callable[[float], None],
) -> OptimizerEntry:
    """Steps of one flat tensor of 1 Ki elements up to ``largest_elements`` (at most 16 Mi), on all ranks.

    The tensor has the dtype of the master weights for ``dtype``. Where that is another, a step includes the
    cast of the updated master weights, as the runtime's update does. It scales the gradient first, as under
    clipping; without clipping the runtime reads it once instead, to see whether it is finite. Also the time
    of a gradient's norm. ``compute``, the model's forward and backward, comes before every round, so that
    caches hold what they hold in a step.
    """
    state, temporary = footprint(name, dtype, ranks.device)
    wanted = sizes(FIRST_ELEMENTS, min(largest_elements, LAST_ELEMENTS), FACTOR, 1)
    steppers = [_stepper(name, elements, dtype, ranks.device) for elements in wanted]
    warm_up = _stepper(name, FIRST_ELEMENTS, dtype, ranks.device)

    def once() -> list[float]:
        """Seconds of every norm, then of every step, as a step has them."""
        compute()
        found = []
        for call in ("norm", "step"):
            getattr(warm_up, call)()
            found += [seconds_of(ranks, getattr(stepper, call)) for stepper in steppers]
        return found

    [result] = rounds(
        ranks,
        [once],
        at_least=MIN_REPEATS,
        at_most=MAX_REPEATS,
        budget_s=BUDGET_S,
        progress=progress,
    )
    samples = [*zip(*(seconds for by_rank in result for seconds in by_rank), strict=True)]
    return OptimizerEntry(
        name=name,
        state_per_element=state,
        temporary_per_element=temporary,
        points=points_of(wanted, samples[len(wanted) :]),
        norm=points_of(wanted, samples[: len(wanted)]),
    )


def points_of(elements: Sequence[int], samples: Sequence[Sequence[float]]) -> tuple[OptimizerPoint, ...]:
    medians = rising([statistics.median(seconds) for seconds in samples])
    return tuple(
        OptimizerPoint(elements=many, seconds=nanoseconds(median), spread=spread(seconds))
        for many, median, seconds in zip(elements, medians, samples, strict=True)
    )


@dataclass(frozen=True)
class _Stepper:
    """An optimizer that has stepped once; ``published``: where the masters are cast to, if they are."""

    optimizer: Optimizer
    master: nn.Parameter
    published: Tensor | None

    @torch.no_grad()
    def step(self) -> None:
        """Step as the runtime's update does."""
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):  # takes clipping's factor
            self.optimizer.grad_scale = self._one  # type: ignore[attr-defined]
        else:
            torch._foreach_mul_([self._gradient], 1.0)
        self.optimizer.step()
        if self.published is not None:
            self.published.copy_(self.master)

    @torch.no_grad()
    def norm(self) -> None:
        """The clipping coefficient of a rank's own gradients."""
        clipping(square_sum(norms([self._gradient], self._gradient.device)).sqrt(), 1.0)

    @property
    def _one(self) -> Tensor:
        return torch.ones((), device=self.master.device)

    @property
    def _gradient(self) -> Tensor:
        assert self.master.grad is not None
        return self.master.grad


def _elementwise(name: str) -> Callable[..., Optimizer]:
    """The optimizer of what works element by element, which under Muon AdamW does."""
    made = OPTIMIZERS[name]
    return partial(torch.optim.AdamW, **made.keywords["adamw"]) if made.func is Muon else made


def _stepper(
    name: str, elements: int, dtype: torch.dtype, device: torch.device, **arguments: Any
) -> _Stepper:
    master_dtype = master_dtype_of(dtype)
    master = nn.Parameter(torch.ones(elements, dtype=master_dtype, device=device))
    master.grad = torch.full_like(master, 1e-3)
    published = master.detach().to(dtype) if dtype != master_dtype else None
    stepper = _Stepper(_elementwise(name)([master], **{"lr": 1e-4, **arguments}), master, published)
    stepper.step()
    return stepper


def footprint(name: str, dtype: torch.dtype, device: torch.device, **arguments: Any) -> tuple[int, float]:
    """State tensors per parameter element, and temporary elements per parameter element; ``arguments``: of
    the optimizer, beside those that it is measured with."""
    stepper = _stepper(name, TRACED_ELEMENTS, dtype, device, **arguments)
    held = stepper.optimizer.state[stepper.master].values()
    state = sum(isinstance(value, Tensor) and value.numel() == TRACED_ELEMENTS for value in held)
    with memory_trace(device) as trace:
        trace.cut()
        stepper.step()
    # Constants of a few bytes, such as a step's counter, are no share of an element.
    return state, round(trace.segments()[0].peak_bytes / stepper.master.nbytes, 2)


def seconds_of(ranks: Ranks, call: Callable[[], None]) -> float:
    """Seconds of a call, on all ranks at once."""
    ranks.finish_device()
    ranks.barrier()
    started = time.perf_counter()
    call()
    ranks.finish_device()
    return time.perf_counter() - started
