"""Activations over a step, as the memory model counts them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hzplan.core.schedule import Kind, Schedule
from hzplan.cost.simulate import Timeline


def activations(
    schedule: Schedule, timeline: Timeline, by_use: Sequence[int], update_bytes: int
) -> tuple[list[float], list[int]]:
    """One rank's activation memory over a step: the seconds at which it changes, and the bytes from there on.

    ``by_use``: peak bytes at every use of a forward and backward, counted until the next use begins.
    ``update_bytes``: the optimizer's temporaries, which without clipping lie beside all activations, and with
    clipping are there during updates only, when few activations are alive.
    """
    uses = len(schedule.uses)
    beside = 0 if schedule.clip else update_bytes
    computes = schedule.compute
    kinds = (Kind.UPDATE, Kind.ORTHOGONALIZE, Kind.APPLY)
    updates = [task for task in schedule.tasks if task.kind in kinds] if schedule.clip else []
    marks = {timeline.start_ns[task.index] for task in computes}
    for task in updates:
        marks |= {timeline.start_ns[task.index], timeline.end_ns[task.index]}
    times = np.array(sorted(marks | {0.0}))
    most: dict[float, int] = {}  # of uses that take no time, and so begin with the next, the most counts
    for task in computes:
        begin = timeline.start_ns[task.index]
        most[begin] = max(most.get(begin, 0), by_use[task.position % uses] + beside)
    begins = np.array(sorted(most))
    levels = np.array([most[begin] for begin in sorted(most)], dtype=np.int64)
    held = np.searchsorted(begins, times, side="right") - 1
    found = np.where(held >= 0, levels[held], beside)
    for task in updates:
        start, end = timeline.start_ns[task.index], timeline.end_ns[task.index]
        during = slice(*np.searchsorted(times, [start, end]))
        found[during] = np.maximum(found[during], update_bytes)
    return [float(time) / 1e9 for time in times], [int(nbytes) for nbytes in found]


def spike_bytes(by_use: Sequence[int], of_loss: Sequence[bool], floor: int = 0) -> int:
    """Bytes by which the uses ``of_loss`` alone raise the peak of activations; 0 where other uses make it.

    ``by_use``: peak bytes at every use; ``floor``: bytes that the peak has in any case, of an update that
    lies beside no activations.
    """
    peaks = {True: floor, False: floor}
    for nbytes, loss in zip(by_use, of_loss, strict=True):
        peaks[loss] = max(peaks[loss], nbytes)
    return max(0, peaks[True] - peaks[False])
