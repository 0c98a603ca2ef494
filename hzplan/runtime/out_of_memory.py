"""Out-of-memory report: the unit, the category of memory, and what the plan predicted for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hzplan.errors import OutOfMemory, StreamError, is_out_of_memory, last_cause
from hzplan.formats.plan import Plan
from hzplan.runtime.apply import NOTE
from hzplan.runtime.engine import Engine


@contextmanager
def explain_out_of_memory(plan: Plan, engine: Callable[[], Engine | None]) -> Iterator[None]:
    """Errors of allocators in the block as OutOfMemory: unit and category, predicted against allowed.

    ``engine``: the plan's, None while there is none yet.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        where, category = _where(error, engine())
        raise _explained(plan, error, where, category) from error


def _where(error: Exception, engine: Engine | None) -> tuple[str, str]:
    """The work under way, and the category of memory that it takes, as plans name it."""
    if isinstance(error, StreamError):  # the only task that allocates is an update
        return str(error).partition(":")[0], "optimizer"
    if engine is None:
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(NOTE)]
        return (f"unit {notes[0].removeprefix(NOTE)}" if notes else "the model as it is built"), "parameters"
    turn = engine.turn
    if turn is None:
        return "the step, outside every unit", "activations"
    where, following = f"the {turn.phase} of unit {turn.unit}", engine.turn_after
    if following is not None:  # uses between the two have no turns
        where += f", or what follows it before the {following.phase} of unit {following.unit}"
    return where, "activations"


def _explained(plan: Plan, error: Exception, where: str, category: str) -> OutOfMemory:
    predicted, allowed = plan.predicted, plan.source.memory_budget_bytes
    wanted = re.search(r"allocate (\d+ bytes|[\d.]+ [KMGT]iB)", str(last_cause(error)))
    asked = f" asked for {wanted[1]} more" if wanted else ""
    return OutOfMemory(
        f"out of memory: {where}{asked} ({category}: {_mib(predicted.memory_bytes.get(category, 0))} "
        f"predicted); in all the plan predicts {_mib(predicted.peak_memory_bytes)}, of {_mib(allowed)} "
        "allowed; solve with less --memory, or profile a smaller --micro-batch"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"
