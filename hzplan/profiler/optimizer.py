"""What an optimizer step costs: seconds by elements, state, temporaries."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hzplan.formats.profile import OptimizerEntry, OptimizerPoint
from hzplan.models.units import master_dtype_of
from hzplan.profiler.memory import memory_trace
from hzplan.profiler.ranks import Ranks
from hzplan.profiler.rounds import rounds
from hzplan.profiler.samples import nanoseconds, rising, sizes, spread

OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "adam": partial(torch.optim.Adam, fused=True),
    "sgd": partial(torch.optim.SGD, fused=True),
}
"""The optimizers that are measured, by the names that a profile uses."""

FIRST_ELEMENTS = 1 << 10
LAST_ELEMENTS = 16 << 20
FACTOR = 4
MIN_REPEATS = 3
MAX_REPEATS = 10
BUDGET_S = 2.0
BATCH_S = 0.002
"""Steps shorter than this are timed several at once."""
MAX_CALLS = 16
TRACED_ELEMENTS = 1 << 16


def measure_optimizer(
    ranks: Ranks, name: str, dtype: torch.dtype, largest_elements: int, progress: Callable[[float], None]
) -> OptimizerEntry:
    """Steps of one flat tensor of 1 Ki elements up to ``largest_elements`` (at most 16 Mi), on all ranks.

    The tensor has the dtype of the master weights for ``dtype``. Where that is another, a step includes the
    cast of the updated master weights, as the runtime's update does.
    """
    state, temporary = footprint(name, dtype, ranks.device)
    wanted = sizes(FIRST_ELEMENTS, min(largest_elements, LAST_ELEMENTS), FACTOR, 1)
    results = rounds(
        ranks,
        [_case(ranks, _stepper(name, elements, dtype, ranks.device).step) for elements in wanted],
        at_least=MIN_REPEATS,
        at_most=MAX_REPEATS,
        budget_s=BUDGET_S,
        progress=progress,
    )
    samples = [[seconds for by_rank in result for seconds in by_rank] for result in results]
    medians = rising([statistics.median(seconds) for seconds in samples])
    return OptimizerEntry(
        name=name,
        state_per_element=state,
        temporary_per_element=temporary,
        points=tuple(
            OptimizerPoint(elements=elements, seconds=nanoseconds(median), spread=spread(seconds))
            for elements, median, seconds in zip(wanted, medians, samples, strict=True)
        ),
    )


@dataclass(frozen=True)
class _Stepper:
    """An optimizer that has stepped once; ``published``: where the masters are cast to, if they are."""

    optimizer: Optimizer
    master: nn.Parameter
    published: Tensor | None

    @torch.no_grad()
    def step(self) -> None:
        """What the runtime's update does."""
        self.optimizer.step()
        if self.published is not None:
            self.published.copy_(self.master)


def _stepper(name: str, elements: int, dtype: torch.dtype, device: torch.device) -> _Stepper:
    master_dtype = master_dtype_of(dtype)
    master = nn.Parameter(torch.ones(elements, dtype=master_dtype, device=device))
    master.grad = torch.full_like(master, 1e-3)
    published = master.detach().to(dtype) if dtype != master_dtype else None
    stepper = _Stepper(OPTIMIZERS[name]([master], lr=1e-4), master, published)
    stepper.step()
    return stepper


def footprint(name: str, dtype: torch.dtype, device: torch.device) -> tuple[int, float]:
    """State tensors per parameter element, and temporary elements per parameter element."""
    stepper = _stepper(name, TRACED_ELEMENTS, dtype, device)
    held = stepper.optimizer.state[stepper.master].values()
    state = sum(isinstance(value, Tensor) and value.numel() == TRACED_ELEMENTS for value in held)
    with memory_trace(device) as trace:
        trace.cut()
        stepper.step()
    # Constants of a few bytes, such as a step's counter, are no share of an element.
    return state, round(trace.segments()[0].peak_bytes / stepper.master.nbytes, 2)


def _case(ranks: Ranks, step: Callable[[], None]) -> Callable[[], float]:
    """What times a step; all ranks step at the same time."""
    once = max(ranks.gather(_seconds(ranks, step, 1)))
    calls = max(1, min(MAX_CALLS, int(BATCH_S / once)))
    return partial(_seconds, ranks, step, calls)


def _seconds(ranks: Ranks, step: Callable[[], None], calls: int) -> float:
    ranks.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        step()
    ranks.finish_device()
    return (time.perf_counter() - started) / calls
