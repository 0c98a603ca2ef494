"""``python -m benchmarks.gpu.multi``: a plan for this machine's GPUs beside what else would train there.

    python -m benchmarks.gpu.multi --model hf:config.json --global-batch 64 --output multi.json
    python -m benchmarks.gpu.multi --small  # the script itself, on any machine: its figures mean nothing

DeepSpeed and Megatron-FSDP take part where they are installed. Everything is the product's own commands.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.__main__ import about
from benchmarks.gpu.run import hzplan, named, skip, write
from benchmarks.regimes import NoResult
from hzplan.formats.plan import Plan
from hzplan.peers import OURS, PEERS

LEAST_GPUS = 2
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    model: Annotated[str, typer.Option(help="As for hzplan profile.")] = "gpt:1.3b",
    micro_batch: Annotated[str, typer.Option(help="Sizes to choose from.")] = "1,2,4",
    global_batch: Annotated[int | None, typer.Option(help="Sequences; by default 8 for every GPU.")] = None,
    memory: Annotated[str | None, typer.Option(help="Budget of a GPU, as in 60GiB.")] = None,
    nproc: Annotated[int | None, typer.Option(help="GPUs; by default all of this machine.")] = None,
    against: Annotated[str, typer.Option(help="Whom to measure beside.")] = ",".join(PEERS),
    steps: Annotated[int, typer.Option(help="Of everyone, in turns of 5.")] = 60,
    small: Annotated[bool, typer.Option("--small", help="Two ranks on processors, a small model.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    work: Annotated[Path, typer.Option(help="Profile and plan; a profile there is taken.")] = Path(
        "build/gpu-multi"
    ),
) -> None:
    """Profile, solve, and let the plan and its peers take turns on the GPUs of this machine.

    Example: python -m benchmarks.gpu.multi --output multi.json
    """
    results = about()
    count = 2 if small else nproc or torch.cuda.device_count()
    if not small and torch.cuda.device_count() < max(LEAST_GPUS, count):
        seen, wanted = torch.cuda.device_count(), max(LEAST_GPUS, count)
        skip(f"{seen} CUDA devices here, {wanted} are wanted (torch {torch.__version__})", output)
        return
    if small:
        model, micro_batch, steps = "gpt:tiny", "1", 6
    work.mkdir(parents=True, exist_ok=True)
    name = f"{named(model)}-{count}-{micro_batch.replace(',', '-')}"
    profile, plan = work / f"profile-{name}.json", work / f"plan-{name}.json"
    dtype = "fp32" if small else "bf16"
    try:
        if not profile.exists():
            sizes = ["--micro-batch", micro_batch, "--dtype", dtype]
            hzplan("profile", model, "--nproc", count, *sizes, "-o", profile)
        budget = ["--memory", memory] if memory else []
        hzplan("solve", profile, "--global-batch", global_batch or 8 * count, *budget, "-o", plan)
        turns = ["--steps", steps, "--round-steps", 1 if small else 5]
        compared = json.loads(hzplan("run", plan, model, "--against", against, *turns, "--json"))
    except NoResult as error:
        write(output, results | {"failed": str(error)})
        raise SystemExit(f"benchmarks.gpu.multi: {error}") from None
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    predicted = Plan.load(plan).predicted.model_dump()
    write(output, results | {"device": device, "gpus": count, "predicted": predicted, "compared": compared})
    print("\n".join(_table(compared, predicted, f"{count} × {device}")))


def _table(compared: Mapping[str, Any], predicted: Mapping[str, Any], where: str) -> Iterable[str]:
    """In Markdown, for docs/gpu.md."""
    control = compared["control"]
    yield f"{compared['model']}, {compared['dtype']}, on {where}, torch {torch.__version__}:\n"
    yield "| | step | ÷ hzplan's | peak memory | |"
    yield "|---|---|---|---|---|"
    for one in compared["contenders"]:
        ratio, remarks = one["ratio"], []
        if one["name"] == OURS:
            remarks.append(f"predicted {predicted['step_s'] * 1e3:,.1f} ms")
        if not one["losses_agree"]:
            remarks.append("trains something else")
        if not one["fits"]:
            remarks.append("over the budget")
        yield (
            f"| {one['name']} | {one['step_s']['median'] * 1e3:,.1f} ms "
            f"| {ratio['value']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f}) "
            f"| {one['peak_memory_bytes'] / 2**30:,.2f} GiB | {'; '.join(remarks)} |"
        )
    if control is not None:
        span = f"{control['low']:.2f}–{control['high']:.2f}"
        yield f"\nThe control, one against itself: {control['value']:.2f} ({span})."
    for name, reason in compared["absent"].items():
        yield f"{name} took no part: {reason}."


if __name__ == "__main__":
    app()
