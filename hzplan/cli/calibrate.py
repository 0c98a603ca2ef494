"""``hzplan calibrate``: correct a profile by what a run measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hzplan.formats.metrics import Measured
    from hzplan.solver.calibrate import Calibration


def command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan that ran.")],
    metrics: Annotated[Path, typer.Argument(metavar="METRICS", help="What its run --metrics wrote.")],
    profile: Annotated[
        Path | None, typer.Option(help="The profile to correct; by default the plan's.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The corrected profile.")] = Path(
        "calibrated.json"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Correct a profile such that it predicts what a run of a plan measured; the next solve is truer.

    Compute, every tier's links and the optimizer get a factor each. What was hidden behind compute is not
    known better than before.

    Example: hzplan calibrate plan.json metrics.jsonl -o calibrated.json
    """
    from hzplan.cli.paths import check_writable
    from hzplan.formats.metrics import read_metrics
    from hzplan.formats.plan import Plan
    from hzplan.formats.profile import Profile
    from hzplan.formats.source import profile_path
    from hzplan.solver.calibrate import calibrate

    ran = Plan.load(plan)
    source = profile or profile_path(plan, ran)
    loaded = Profile.load(source)
    measured = read_metrics(metrics)
    check_writable(output, keep=[source])
    found = calibrate(ran, loaded, plan, measured)
    found.profile.save(output)
    host = "" if ran.source.host_memory_bytes is None else f" --host-memory {ran.source.host_memory_bytes}B"
    following = (
        f"hzplan solve {output} --memory {ran.source.memory_budget_bytes}B "
        f"--global-batch {ran.batch.global_batch}{'' if ran.clip else ' --no-clip'}{host} -o {plan}"
    )
    if as_json:
        print(json.dumps(_summary(found, measured) | {"profile": str(output), "next": following}))
    else:
        _print(found, measured, output, following)


def _summary(found: Calibration, measured: Measured) -> dict[str, object]:
    factors = found.factors
    return {
        "steps": measured.steps,
        "step_s": {
            "measured": measured.step_s,
            "before": found.before.step_s,
            "after": found.after.step_s,
        },
        "factors": {
            "compute": factors.compute,
            "tiers": dict(zip(found.profile.cluster.tier_names, factors.tiers, strict=True)),
            "optimizer": factors.optimizer,
        },
    }


def _print(found: Calibration, measured: Measured, output: Path, following: str) -> None:
    from hzplan.cli import console

    before, after = found.before.waits_s, found.after.waits_s
    table = console.table(
        f"A step, over {measured.steps} measured ones",
        *("", "measured", "was predicted", "is predicted", "factor"),
    )
    table.add_row(
        "step",
        console.duration(measured.step_s),
        console.duration(found.before.step_s),
        console.duration(found.after.step_s),
        f"compute {found.factors.compute:.2f}",
    )
    factors = [*found.factors.tiers, found.factors.optimizer]
    for (name, was), factor in zip(before.items(), factors, strict=True):
        table.add_row(
            f"waiting for {name}",
            console.duration(measured.exposed_s.get(name, 0.0)),
            console.duration(was),
            console.duration(after[name]),
            f"{factor:.2f}",
        )
    out = console.stdout()
    out.print(table)
    out.print(f"Wrote {output}. Next:\n  {following}", soft_wrap=True, markup=False)
