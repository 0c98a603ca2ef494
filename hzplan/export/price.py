"""What a target's losses cost: steps with them beside the plan's own, by hzplan's model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from hzplan.core.schedule import Schedule
from hzplan.cost.model import CostModel
from hzplan.export.shape import GRADIENTS, MESSAGES, OPTIMIZER, TOGETHER, WIRE, Exported, Lost
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from hzplan.solver.evaluate import Modes, evaluate, replay


def priced(path: Path, plan: Plan, profile: Profile, made: Exported) -> tuple[Exported, dict[str, float]]:
    """The export with the cost of each loss by itself, and that of all together: seconds a step, bytes."""
    before = replay(plan, profile, path)
    rescheduled = before.model.schedule(
        prefetch=plan.prefetch,
        accumulation=plan.batch.accumulation,
        clip=plan.clip,
        gradient_buffers=made.gradient_buffers or plan.gradient_buffers,
        offload=plan.source.host_memory_bytes is not None,
    )
    exact = replace(before.model, wire=None)
    on_device = before.modes._replace(offload=frozenset())

    def kept(losses: Iterable[Lost], modes: Modes) -> Modes:
        """With nothing computed again of what these losses keep."""
        units = [one.where for one in losses if one.keeps_all]
        return modes._replace(recompute=modes.recompute.with_(units, None))

    def changed(
        units: set[str],
        schedule: Schedule = before.schedule,
        modes: Modes = before.modes,
        model: CostModel = before.model,
    ) -> tuple[float, int]:
        levels = {
            unit: tuple(made.levels[unit] for _ in of_tensors)
            if unit in units and unit in made.levels
            else of_tensors
            for unit, of_tensors in before.levels.items()
        }
        after = evaluate(
            *(model, levels, schedule, before.micro_batch),
            modes=modes,
        )
        return after.step_s - before.step_s, after.memory.peak - before.memory.peak

    losses: list[Lost] = []
    for one in made.lost:
        if one.where in before.levels:
            step_s, peak_bytes = changed({one.where}, modes=kept([one], before.modes))
            losses.append(replace(one, step_s=step_s, peak_bytes=peak_bytes))
        elif (one.where == GRADIENTS and made.gradient_buffers is not None) or one.where == TOGETHER:
            step_s, peak_bytes = changed(set(), rescheduled)
            losses.append(replace(one, step_s=step_s, peak_bytes=peak_bytes))
        elif one.where == MESSAGES:
            step_s, peak_bytes = changed(set(), before.schedule.shared or before.schedule)
            losses.append(replace(one, step_s=step_s, peak_bytes=peak_bytes))
        elif one.where == OPTIMIZER and not made.offloads:
            step_s, peak_bytes = changed(set(), modes=on_device)
            losses.append(replace(one, step_s=step_s, peak_bytes=peak_bytes))
        elif one.where == WIRE:
            step_s, peak_bytes = changed(set(), model=exact)
            losses.append(replace(one, step_s=step_s, peak_bytes=peak_bytes))
        else:
            losses.append(one)
    together = kept(made.lost, before.modes if made.offloads else on_device)
    step_s, peak_bytes = changed(set(before.levels), rescheduled, together, exact)
    return replace(made, lost=tuple(losses)), {
        "step_s": step_s,
        "peak_bytes": peak_bytes,
        "plan_step_s": before.step_s,
    }
