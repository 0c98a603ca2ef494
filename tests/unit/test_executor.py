"""What runs on the threads of a schedule's streams, and how."""

from __future__ import annotations

import threading

import pytest
import torch

from hzplan.core.schedule import COMPUTE_STREAM, Schedule, Task
from hzplan.runtime.executor import Executor, Streams
from tests.unit.steps import chain


def _steps(schedule: Schedule, streams: Streams, count: int) -> list[tuple[str, int, bool]]:
    """Of every task that ran: its stream, its thread, and whether autograd records there."""
    ran: list[tuple[str, int, bool]] = []

    def run(task: Task, scratch: int) -> None:
        ran.append((task.stream, threading.get_ident(), torch.is_grad_enabled()))

    executor = Executor(schedule, run, lambda task: False, streams)
    for _ in range(count):
        executor.begin_step()
        for task in schedule.tasks[1:]:
            if task.stream == COMPUTE_STREAM:
                executor.start(task)
                executor.end(task)
    executor.close()
    return ran


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("streams", [*Streams])
def test_tasks_run_where_autograd_does_not_record(streams: Streams, clip: bool) -> None:
    schedule = chain(3, tiers=2, clip=clip).build()
    ran = _steps(schedule, streams, 3)
    others = [task for task in schedule.tasks if task.stream != COMPUTE_STREAM]
    assert len(ran) == 3 * len(others) and not any(records for _, _, records in ran)
    assert torch.is_grad_enabled()
    here = {stream for stream, thread, _ in ran if thread == threading.get_ident()}
    if streams is Streams.NONE:
        assert here == {stream for stream, _, _ in ran}
    else:  # updates that the end of a step launches are done by who computes
        assert here == ({"optim"} if streams is Streams.TIERS and clip else set())
