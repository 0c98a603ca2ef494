"""What ``hzplan solve`` says of its plan: for people, and for machines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from hzplan.cli import console
from hzplan.formats.accuracy import published
from hzplan.formats.plan import Plan, PlanUnit
from hzplan.formats.profile import Profile
from hzplan.solver.emit import predict
from hzplan.solver.evaluate import Evaluation
from hzplan.solver.solve import Request, Solved


@dataclass(frozen=True)
class Report:
    """One result, two renderings."""

    profile: Profile
    request: Request
    solved: Solved
    plan: Plan
    baselines: Mapping[str, Evaluation]
    path: Path

    def as_json(self) -> str:
        """The keys of the command line's contract."""
        predicted = self.plan.predicted
        return json.dumps(
            {
                "status": self.solved.status,
                "gap": self.plan.proof.gap,
                "objective_s": self.plan.proof.objective_s,
                "bound_s": self.plan.proof.bound_s,
                "solve_s": round(self.solved.seconds, 3),
                "predicted": predicted.model_dump(exclude={"memory_bytes"}),
                "baselines": [
                    {
                        "name": name,
                        "step_s": found.step_s,
                        "peak_memory_bytes": found.memory.peak,
                        "fits": found.memory.peak <= self.request.memory_bytes,
                    }
                    for name, found in self.baselines.items()
                ],
                "plan": str(self.path),
            }
        )

    def show(self) -> None:
        """The plan beside the known schemes, the choice per run of units, the gap, what to do next."""
        out = console.stdout()
        out.print(self._comparison())
        out.print(self._choices())
        batch = self.plan.batch
        out.print(
            f"micro-batch {batch.micro_batch}, accumulation {batch.accumulation}, "
            f"prefetch {self.plan.prefetch}, gradient buffers {self.plan.gradient_buffers}; "
            f"memory {console.size(self.plan.predicted.peak_memory_bytes)} "
            f"of {console.size(self.request.memory_bytes)}"
            + (f", of the host's {console.size(self.solved.best.memory.host)}" if self.plan.offloaded else "")
        )
        out.print(
            f"{self.solved.status}: at most {self.plan.proof.gap:.2%} above the best possible "
            f"({console.duration(self.plan.proof.bound_s)} proven, "
            f"{console.duration(self.plan.proof.objective_s)} reached, links not shared), "
            f"in {console.duration(self.solved.seconds)}"
        )
        if (beside := self._beside()) is not None:
            out.print(beside)
        out.print(f"expected error: {self._expected_error()}")
        following = "run" if self.plan.parallel is None else "show"
        out.print(f"next: hzplan {following} {self.path}", soft_wrap=True)

    def _beside(self) -> str | None:
        """What model parallelism adds that the plan does not see."""
        parallel = self.plan.parallel
        if parallel is None:
            return None
        world = self.plan.mesh.world * parallel.tensor * parallel.pipeline
        said = f"one rank's share of {parallel}, {world} ranks in all"
        if parallel.pipeline == 1:
            return said
        accumulation = self.plan.batch.accumulation
        bubble = (parallel.pipeline - 1) / accumulation
        if accumulation < parallel.pipeline:
            said += f"; with {accumulation} micro-batches a step, fewer than stages, memory is overestimated"
        return (
            f"{said}: the first of {parallel.pipeline} stages, with as many micro-batches under way; a "
            f"pipeline that is not interleaved adds a bubble of {bubble:.0%} to the step"
        )

    def _expected_error(self) -> str:
        """What is known of it."""
        if self.profile.modelled is not None:
            of_links = self.profile.modelled.device is None
            return (
                f"not known; {'links' if of_links else 'seconds'} are modelled for "
                f"{self.profile.modelled.cluster}, and what its files in cost_models/ assume decides them. "
                f"Bytes and FLOPs are counted{', units were measured' if of_links else ''}"
            )
        backend = self.profile.cluster.backend
        known = published(backend)
        if known is None:
            return f"nothing is published for {backend}; hzplan run prints predicted beside measured"
        where = f"{known.plans} random plans on {known.where}"
        if self.profile.calibrated is not None:
            step, when = f"{known.calibrated_mean:.1%} on average", " after calibration"
        else:
            step, when = f"{known.step_mean:.1%} on average, {known.step_worst:.0%} at most", ""
        memory = f"{known.memory_worst:.1%} at most"
        return f"step {step}, memory {memory}, as {where} came out{when} (docs/accuracy.md)"

    def _comparison(self) -> object:
        beside = "" if self.plan.parallel is None else f" beside {self.plan.parallel}"
        where = f"{self.profile.mesh.world} ranks{beside}, {self.plan.batch.global_batch} sequences"
        table = console.table(
            f"{self.plan.model.name}, {where}",
            "scheme",
            "step",
            "tokens/s/rank",
            "MFU",
            "exposed",
            "peak",
            "fits",
        )
        rows = {"this plan": (self.plan.predicted, True)} | {
            name: (predict(self.profile, found), found.memory.peak <= self.request.memory_bytes)
            for name, found in self.baselines.items()
        }
        for name, (predicted, fits) in rows.items():
            table.add_row(
                name,
                console.duration(predicted.step_s),
                console.count(predicted.tokens_per_s_per_gpu),
                f"{predicted.mfu:.1%}",
                console.duration(sum(predicted.exposed_comm_s.values())),
                console.size(predicted.peak_memory_bytes),
                "yes" if fits else "no",
            )
        return table

    def _choices(self) -> object:
        table = console.table("shards (parameter, gradient, optimizer)", "units", "shards")
        table.columns[1].justify = "left"
        for names, choice in _runs(self.plan):
            table.add_row(names, choice)
        return table


def _runs(plan: Plan) -> Iterator[tuple[str, str]]:
    """Neighbouring units with the same choice, in one line each."""
    with_tensors = [unit for unit in plan.units if unit.buckets]
    for choice, run in groupby(with_tensors, key=_choice):
        names = [unit.name or "(root)" for unit in run]
        yield names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}", choice


def _choice(unit: PlanUnit) -> str:
    marks = [", recomputed"] * bool(unit.recompute) + [", offloaded"] * bool(unit.offload)
    return _shards(unit) + "".join(marks)


def _shards(unit: PlanUnit) -> str:
    parts = []
    for bucket in sorted(unit.buckets, key=lambda bucket: -len(bucket.tensors)):
        shards = f"{bucket.shards.param}, {bucket.shards.grad}, {bucket.shards.optim}"
        if len(unit.buckets) == 1:
            return shards
        prefix = f"{unit.name}."
        names = [name.removeprefix(prefix).removesuffix(".weight") for name in bucket.tensors]
        label = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        parts.append(f"{shards}: {label}")
    return "; ".join(parts)
