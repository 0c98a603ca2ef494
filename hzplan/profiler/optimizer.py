"""What an optimizer step costs: seconds by elements, state, temporaries."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hzplan.formats.profile import OptimizerEntry, OptimizerPoint
from hzplan.profiler.memory import memory_trace
from hzplan.profiler.quiet import no_garbage_collection
from hzplan.profiler.ranks import Ranks
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
REPEATS = 7
BUDGET_S = 0.5
"""Per size, unless the fewest repeats take longer."""
MIN_REPEATS = 3
BATCH_S = 0.002
MAX_CALLS = 16
TRACED_ELEMENTS = 1 << 16


def measure_optimizer(
    ranks: Ranks, name: str, dtype: torch.dtype, largest_elements: int, progress: Callable[[float], None]
) -> OptimizerEntry:
    """Steps of one flat tensor of 1 Ki elements up to ``largest_elements`` (at most 16 Mi), on all ranks."""
    state, temporary = _footprint(name, dtype, ranks.device)
    wanted = sizes(FIRST_ELEMENTS, min(largest_elements, LAST_ELEMENTS), FACTOR, 1)
    samples: list[list[float]] = []
    for index, elements in enumerate(wanted):
        samples.append(_sample(ranks, _stepper(name, elements, dtype, ranks.device)[0]))
        progress((index + 1) / len(wanted))
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


def _stepper(
    name: str, elements: int, dtype: torch.dtype, device: torch.device
) -> tuple[Optimizer, nn.Parameter]:
    parameter = nn.Parameter(torch.ones(elements, dtype=dtype, device=device))
    parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = OPTIMIZERS[name]([parameter], lr=1e-4)
    optimizer.step()
    return optimizer, parameter


def _footprint(name: str, dtype: torch.dtype, device: torch.device) -> tuple[int, float]:
    """State tensors per parameter element, and temporary elements per parameter element."""
    optimizer, parameter = _stepper(name, TRACED_ELEMENTS, dtype, device)
    held = optimizer.state[parameter].values()
    state = sum(isinstance(value, Tensor) and value.numel() == parameter.numel() for value in held)
    with memory_trace(device) as trace:
        trace.cut()
        optimizer.step()
    # Constants of a few bytes, such as a step's counter, are no share of an element.
    return state, round(trace.segments()[0].peak_bytes / parameter.nbytes, 2)


def _sample(ranks: Ranks, optimizer: Optimizer) -> list[float]:
    """Seconds of a step, by repeat and rank; all ranks step at the same time."""
    with no_garbage_collection():
        once = max(ranks.gather(_batch(ranks, optimizer, 1)))
        calls = max(1, min(MAX_CALLS, int(BATCH_S / max(once, 1e-9))))
        repeats = max(MIN_REPEATS, min(REPEATS, int(BUDGET_S / (once * calls))))
        by_rank = ranks.gather([_batch(ranks, optimizer, calls) / calls for _ in range(repeats)])
    return [seconds for rank in by_rank for seconds in rank]


def _batch(ranks: Ranks, optimizer: Optimizer, calls: int) -> float:
    ranks.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        optimizer.step()
    ranks.finish_device()
    return time.perf_counter() - started
