"""``hzplan verify``: a plan's group structure, on a small copy of its model, against one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hzplan.errors import CheckFailed


def command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan, as hzplan solve wrote it.")],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="The model; by default the plan's, which must then be built in."
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Keep all layers and micro-batches, also where they repeat.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Train a narrow copy of the model under the plan, and in one process, and compare losses and weights.

    Every level of the plan's mesh is there, with two ranks where it has more, and every pair of neighbouring
    layers whose levels differ from others'. Ranks are threads of this process. No GPU and no cluster is
    needed. A factory's model is taken as it is.

    Example: hzplan verify plan.json
    """
    from hzplan.cli import console
    from hzplan.cli.trust import check_alone, check_named
    from hzplan.formats.plan import Plan
    from hzplan.training.verify import TOLERANCE, verify

    loaded = Plan.load(plan)
    check_alone(plan, loaded, "verify")
    check_named(plan, loaded, model, "verify")
    with console.Bar("verify") as bar:
        found = verify(loaded, model, whole=whole, progress=bar.update)
    rounded = found.rounded
    if as_json:
        answer: dict[str, object] = {
            "ok": found.ok,
            "mesh": found.mesh,
            "loss_error": found.loss_error,
            "weight_error": found.weight_error,
            "worst_tensor": found.worst,
        }
        if rounded is not None:
            answer |= {"rounded_loss_error": rounded.loss_error, "rounded_tolerance": rounded.most}
        print(json.dumps(answer))
    else:
        print(
            f"{plan}: on {found.mesh}, losses differ by {found.loss_error:.1e} and weights by "
            f"{found.weight_error:.1e} at most (relative, float64; {TOLERANCE:.0e} is allowed)"
        )
        if rounded is not None and not rounded.loss_error:
            print("of what travels narrow nothing is in this small copy: its slices are no whole blocks")
        elif rounded is not None:
            print(
                f"with what travels narrow rounded, losses differ by {rounded.loss_error:.1e} "
                f"({rounded.most:.0e} is allowed, from the formats)"
            )
    if rounded is not None and rounded.loss_error > rounded.most:
        raise CheckFailed(
            f"{plan}: with what travels narrow rounded, losses are farther apart than formats are"
        )
    if not found.ok:
        raise CheckFailed(
            f"{plan}: training under it is not training in one process; farthest apart: {found.worst}"
        )
