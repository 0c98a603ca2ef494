"""The output of ``hzplan solve``: tables and lines for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path

from rich.table import Table

from hzplan.cli import console
from hzplan.cli.expectation import described as expectation_of
from hzplan.cli.expectation import range_s, within_error
from hzplan.cost.memory import Reserve, reserve
from hzplan.formats.accuracy import published
from hzplan.formats.plan import Plan, PlanUnit
from hzplan.formats.profile import Profile
from hzplan.show import readable
from hzplan.solver.alone import Alone
from hzplan.solver.evaluate import Evaluation, evaluate
from hzplan.solver.gain import Gain
from hzplan.solver.gap import described, parts
from hzplan.solver.patterns import MAX_BUCKETS
from hzplan.solver.prefer import margin_of
from hzplan.solver.report import narrower
from hzplan.solver.schemes import RecomputeOptions
from hzplan.solver.solve import Request, Solved


@dataclass(frozen=True)
class SolveReport:
    """One result, two renderings. ``gained``: None where no scheme fits. ``reserved``: whether the
    budget is the device's memory, less what is left free. ``alone``: one group of the slowest tier, where it
    is faster by itself, and ``beside`` where its plan lies."""

    profile: Profile
    request: Request
    solved: Solved
    gained: Gain | None
    plan: Plan
    path: Path
    reserved: bool = False
    alone: Alone | None = None
    beside: Path | None = None

    def as_json(self) -> str:
        """The keys of the command line's contract."""
        predicted = self.plan.predicted
        return json.dumps(
            {
                "status": self.solved.status,
                "gap": self.plan.proof.gap,
                "objective_s": self.plan.proof.objective_s,
                "bound_s": self.plan.proof.bound_s,
                "replayed": self.plan.proof.replayed,
                "solve_s": round(self.solved.seconds, 3),
                "modelled": self.profile.modelled is not None,
                "predicted": predicted.model_dump(exclude={"memory_bytes"}),
                "expected_step_s": range_s(self.profile, predicted.step_s),
                "baselines": [
                    {
                        "name": row.name,
                        "step_s": row.found.step_s,
                        "peak_memory_bytes": row.found.memory.peak,
                        "fits": row.fits,
                        "allowed": row.allowed,
                        "micro_batch": row.found.micro_batch,
                        "recompute": self.recompute(row.found),
                    }
                    for row in self.solved.rows
                ],
                "gain": self._gain_as_json(),
                "plan": str(self.path),
            }
            | self._alone_as_json()
        )

    def _alone_as_json(self) -> dict[str, object]:
        if self.alone is None:
            return {}
        found = {"groups": self.alone.groups, "times": self.alone.times, "plan": str(self.beside)}
        return {"alone": found | {"step_s": self.alone.solved.best.step_s}}

    def _gain_as_json(self) -> dict[str, object] | None:
        gained = self.gained
        if gained is None:
            return None
        parts = {part.freedom: part.share for part in gained.parts}
        return {"over": gained.over.name, "share": gained.share, "is_the_plan": gained.same, "without": parts}

    def show(self) -> None:
        """The plan beside the known schemes, what it gains and from what, how sure that is, what to do
        next."""
        out = console.stdout()
        out.print(self._comparison())
        out.print(self._choices())
        said = Table.grid(padding=(0, 2))
        said.add_column()
        said.add_column(overflow="fold")
        for label, text in self._said():
            said.add_row(label, text)
        out.print(said)
        for line in self._next():
            out.print(line, soft_wrap=True)

    def _said(self) -> Iterator[tuple[str, str]]:
        yield "fits", self._memory()
        yield "gain", self._gain()
        if self.gained is not None and self.gained.parts and self.gained.share > 0:
            yield "from", self.parts()
        predicted = self.plan.predicted
        worker = readable.worker(self.profile.cluster.device)
        mfu = f", MFU {predicted.mfu:.1%}" if predicted.mfu else ""
        yield (
            "speed",
            f"{console.count(predicted.tokens_per_s_per_gpu)} tokens/s per {worker}{mfu}; communication not "
            f"hidden {console.duration(sum(predicted.exposed_comm_s.values()))} a step",
        )
        batch = self.plan.batch
        yield (
            "settings",
            f"micro-batch {batch.micro_batch}, accumulation {batch.accumulation}, "
            f"prefetch {self.plan.prefetch} unit{'s' * (self.plan.prefetch > 1)} ahead, "
            f"{self.plan.gradient_buffers} gradient buffer{'s' * (self.plan.gradient_buffers > 1)}, "
            + _together(self.plan)
            + _order(self.plan),
        )
        if self.alone is not None:
            yield "too slow", self._alone(self.alone)
        if (wire := self._wire()) is not None:
            yield "wire", wire
        yield "how sure", self.expected_error()
        yield "proof", self._proof()
        if from_what := described(parts(self.solved.best, self.solved.in_order_bound_ns)):
            yield "gap from", from_what
        if (beside := self._beside()) is not None:
            yield "beside", beside

    def _alone(self, alone: Alone) -> str:
        """What the slowest link costs."""
        return (
            f"over the {alone.tier} synchronous training of {alone.groups} groups is {alone.times:.3g} times "
            f"as slow as one of them by itself, which takes {console.duration(alone.solved.best.step_s)} for "
            f"its share of the batch: its plan is {self.beside}"
        )

    def _wire(self) -> str | None:
        """What travels narrower than it is, and what that is worth."""
        best = self.solved.best
        if best.model.wire is None:
            return None
        listed = "; ".join(f"{said} on the {name}" for name, said in narrower(self.plan))
        exact = evaluate(
            replace(best.model, wire=None), best.levels, best.schedule, best.micro_batch, modes=best.modes
        )
        longer = exact.predicted.period_ns / best.predicted.period_ns - 1
        return (
            f"{listed}; with everything exact the same plan would take {longer:.0%} longer. Values are "
            "rounded: docs/convergence.md has loss curves"
        )

    def _proof(self) -> str:
        """What was searched, and how far above the best of it the plan is at most."""
        proof, world = self.plan.proof, self.profile.data_ranks
        sizes = [n for n in self.profile.micro_batches if self.request.global_batch % (world * n) == 0]
        step = console.duration(self.plan.predicted.step_s)
        any_order = readable.at_least(proof.bound_s)
        above = f", so it is at most {readable.at_most(proof.gap)} above the best"
        searched, depths = console.duration(self.solved.seconds), ", ".join(map(str, self.request.depths))
        if proof.replayed is not None:
            within = "" if proof.in_order_bound_s is None else " or messages in this order"
            least = (
                f"no choice searched is faster with links shared{within}: all {proof.replayed} that might be"
            )
            beside = f" were replayed (in no order is any below {any_order})"
        elif proof.in_order_bound_s is None:
            least, beside = f"no choice searched is below {any_order}", above
        else:
            in_order = readable.at_least(proof.in_order_bound_s)
            least = f"no choice searched is below {in_order} with messages in this order"
            beside = f"{above} (in no order below {any_order})"
        cut = f"tensor by tensor (at most {MAX_BUCKETS} kinds in a unit, its smallest tensors together)"
        if self.request.target is not None:
            cut = f"unit by unit, as {self.request.target} has them"
        return (
            f"predicted {step}; in this model {least}{beside}. Searched for {searched}: micro-batch "
            f"{', '.join(map(str, sizes))}, prefetch {depths}, shards {cut}"
        )

    def _memory(self) -> str:
        peak, budget = self.plan.predicted.peak_memory_bytes, self.request.memory_bytes
        unit, scale = readable.unit_of(budget)
        free = f"{(budget - peak) / scale:.2f} {unit}"
        said = f"yes: {console.size(peak)} of a budget of {console.size(budget)}; headroom {free}"
        if self.reserved:
            said += f" (budget: {self._reserve()})"
            if (short := self._short_bytes()) > 0:
                less = f"{peak - short}B"
                said += (
                    f"; with its communicators {console.size(short)} may be missing: ask for --memory {less}"
                )
        if self.solved.best.memory.host:
            said += f"; of the host's {console.size(self.solved.best.memory.host)}"
        return said

    def _kept(self) -> Reserve:
        """What the budget leaves free, for as many communicators as most plans have."""
        matrices = self.profile.optimizer.matrix is not None
        return reserve(self.profile.cluster, matrices=matrices, flat=self.profile.sums_over_tiers)

    def _short_bytes(self) -> int:
        """By how much the device is too small for the plan and its own communicators."""
        kept = self._kept()
        if not kept.communicators:
            return 0
        own = replace(kept, communicators=self.solved.best.communicators)
        return self.plan.predicted.peak_memory_bytes + own.nbytes - self.profile.cluster.memory_bytes

    def _reserve(self) -> str:
        """What the budget leaves free, for what, and who says so."""
        cluster = self.profile.cluster
        kept = self._kept()
        said = f"the device's {console.size(cluster.memory_bytes)} less {console.size(kept.nbytes)}"
        if not kept.communicators:
            return said
        own = self.solved.best.communicators
        fewer = f", of which this plan has {own}" if own < kept.communicators else ""
        if own > kept.communicators:
            fewer = f"; this plan has {own}"
        how = "measured" if kept.measured else "assumed"
        return (
            f"{said} for context, NCCL, fragments; {how}: a context of {console.size(kept.context)}, "
            f"{kept.communicators} communicators of {console.size(kept.communicator)}{fewer}"
        )

    def _gain(self) -> str:
        gained = self.gained
        if gained is None:
            return "no scheme set by hand fits as asked, so there is none to compare with"
        tie = margin_of(self.request.gap, self.request.tie, self.solved.best.model)
        name = gained.over.name
        if gained.same:
            more = f"by more than {tie:.1%}" if tie else "at all"
            return f"none: no faster than {name}; use {name}, which is this plan. None found is faster {more}"
        said = f"{gained.share:.1%} faster than {name}, the best that fits of the schemes set by hand"
        known = None if self.profile.modelled is not None else published(self.profile.cluster.backend)
        if known is not None and gained.share < known.step_mean:
            said += (
                f". Predictions are wrong by more than that on average ({known.step_mean:.1%}): try both, "
                f"with hzplan run {self.path} --against fsdp2,hsdp,ddp"
            )
        if (doubt := within_error(self.profile, gained.share)) is not None:
            said += f". {doubt}"
        return said

    def parts(self) -> str:
        """Each freedom switched off in turn."""
        assert self.gained is not None, "there are parts of a gain"
        other = self.gained.over.found
        mine = self.solved.best

        def instead(freedom: str, one: object, two: object) -> str:
            return f"{freedom} {one} instead of {two}" if one != two else freedom

        named = {
            "levels": "sharding",
            "recompute": instead("recompute", self.recompute(mine), self.recompute(other)),
            "micro-batch": instead("micro-batch", mine.micro_batch, other.micro_batch),
            "prefetch": instead("prefetch", mine.schedule.prefetch, other.schedule.prefetch),
            "message order": "message order",
        }
        worth = [
            (part.share is None, part.share or 0.0, f"{named[part.freedom]}: {_worth(part.share)}")
            for part in self.gained.parts
        ]
        listed = "; ".join(said for *_, said in sorted(worth, key=lambda one: one[:2], reverse=True))
        return (
            f"{listed}. Each is how much longer the step is with that choice alone as in "
            f"{self.gained.over.name} (and as many more layers recomputed as it then needs); they need not "
            "add up"
        )

    def _next(self) -> Iterator[str]:
        """The lines to type next; for a cluster elsewhere the export and the launch line."""
        if self.plan.parallel is not None:
            yield f"next: hzplan show {self.path}"
            return
        if self.alone is not None:
            yield f"next, on one group of ranks: hzplan run {self.beside}"
            return
        cluster, target = self.profile.cluster, self.plan.source.target
        if target is not None:
            file = "zero.json" if target == "deepspeed" else "sharding.py"
            yield f"next: hzplan export {self.path} --to {target} -o {file}"
            return
        if self.profile.modelled is None and cluster.device != "cuda":
            yield f"next: hzplan run {self.path}"
            return
        from hzplan.launch.local import cluster_line
        from hzplan.models.workload import BUILT_IN

        yield f"next: hzplan export {self.path} --to fsdp2 -o sharding.py"
        sizes = [prod(tier) for tier in self.profile.mesh.tiers]
        inside = cluster.tier_names.index("node") + 1 if "node" in cluster.tier_names else 1
        model = [] if self.plan.model.name.startswith(BUILT_IN) else [self.plan.model.name]
        line = cluster_line(
            ["run", str(self.path), *model], nodes=prod(sizes[inside:]), ranks_per_node=prod(sizes[:inside])
        )
        untried = " (hzplan's runtime has not yet run on several GPUs)" if cluster.backend == "nccl" else ""
        yield f"  or, on each node of the cluster{untried}: {line}"

    def _beside(self) -> str | None:
        """The effect of model parallelism beside the plan; None without any."""
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

    def expected_error(self) -> str:
        """The known error of predictions like this one."""
        if self.profile.modelled is not None:
            of_links = self.profile.modelled.device is None
            what, how = (
                ("links are", "units were measured") if of_links else ("times are", "none was measured")
            )
            said = (
                f"{what} modelled for {self.profile.modelled.cluster} from rates in cost_models/, {how}; "
                "bytes and FLOPs are counted"
            )
            if (expectation := expectation_of(self.profile, self.plan)) is not None:
                said = f"{expectation}; {said}"
            return said
        backend = self.profile.cluster.backend
        known = published(backend)
        if known is None:
            said = f"units and links were measured; no error is published for {backend}"
            return f"{said}: hzplan run prints predicted beside measured"
        where = f"{known.plans} random plans on {known.where}"
        if self.profile.calibrated is not None:
            step, when = f"{known.calibrated_mean:.1%} on average", " after calibration"
        else:
            step, when = f"{known.step_mean:.1%} on average, {known.step_worst:.0%} at most", ""
        memory = f"{known.memory_worst:.1%} at most"
        return (
            f"units and links were measured; expected error: step {step}, memory {memory}, as {where} came "
            f"out{when} (docs/accuracy.md)"
        )

    def _comparison(self) -> object:
        profile = self.profile
        sizes = [prod(tier) for tier in profile.mesh.tiers]
        tiers = readable.cluster(sizes, profile.cluster.tier_names, profile.cluster.device)
        where = f" ({tiers})" if len(sizes) > 1 else ""
        beside = "" if self.plan.parallel is None else f" beside {self.plan.parallel}"
        badge = "measured" if profile.modelled is None else "modelled"
        unit, _ = readable.unit_of(self.solved.best.memory.peak)
        workers = f"{profile.mesh.world} {readable.worker(profile.cluster.device)}s"
        batch, length = self.plan.batch.global_batch, self.plan.model.seq_len
        table = console.table(
            f"{self.plan.model.name} on {workers}{where}{beside}, {batch} sequences of {length}, {badge}",
            *(
                "scheme",
                "micro-\nbatch",
                "recompute",
                "step",
                "vs plan",
                "peak",
                f"vs plan\n({unit})",
                "fits",
            ),
        )
        self._row(table, "this plan", self.solved.best, True)
        for row in self.solved.rows:
            self._row(table, row.name, row.found, row.fits, allowed=row.allowed)
        table.caption = (
            "Schemes at their best micro-batch, recomputed layers and prefetch, in hzplan's runtime."
        )
        if any(row.fits and not row.allowed for row in self.solved.rows):
            table.caption += "\nbarred: fits, but is not as the options of this question say"
        table.caption_justify = "left"
        return table

    def _row(self, table: Table, name: str, found: Evaluation, fits: bool, *, allowed: bool = True) -> None:
        best = self.solved.best
        _, scale = readable.unit_of(best.memory.peak)
        slower = f"{found.step_s / best.step_s - 1:+.1%}" if best.step_s else ""
        larger = f"{(found.memory.peak - best.memory.peak) / scale:+.1f}"
        changes = ("", "") if name == "this plan" else (slower, larger)
        table.add_row(
            name,
            str(found.micro_batch),
            "mixed" if "," in (recompute := self.recompute(found)) else recompute,
            console.duration(found.step_s),
            changes[0],
            console.size(found.memory.peak),
            changes[1],
            ("yes" if allowed else "barred") if fits else "no",
        )

    def recompute(self, found: Evaluation) -> str:
        """What a plan recomputes, in words."""
        return RecomputeOptions.of(found.model).name(found.modes.recompute)

    def _choices(self) -> object:
        table = console.table("into how many shards each unit's states are cut", "units", "shards")
        table.columns[1].justify = "left"
        for names, choice in _runs(self.plan):
            table.add_row(names, choice)
        return table


def _runs(plan: Plan) -> Iterator[tuple[str, str]]:
    """Neighbouring units with the same choice, in one line each."""
    with_tensors = [unit for unit in plan.units if unit.buckets]
    for choice, run in groupby(with_tensors, key=_choice):
        yield _names([unit.name or "(root)" for unit in run]), choice


def _together(plan: Plan) -> str:
    said = ""
    if plan.message_bytes is not None:
        said = f"gradients of several units reduced together, up to {console.size(plan.message_bytes)}, "
    return said + ("whole gradients summed over all tiers at once, " if plan.flat_sums else "")


def _order(plan: Plan) -> str:
    if plan.message_order is None:
        return "messages of a tier share its link"
    return "one message at a time on each tier"


def _worth(share: float | None) -> str:
    """A freedom's share of the step as text; None where nothing fits without it."""
    return "needed to fit" if share is None else f"{share:.1%}"


def _names(names: Sequence[str]) -> str:
    """``model.layers.0 … 31``: the first and the last, of which what they begin with is said once."""
    first, last = names[0], names[-1]
    if len(names) == 1:
        return first
    shared = first.rpartition(".")[0]
    return f"{first} … {last.removeprefix(f'{shared}.') if shared else last}"


def _choice(unit: PlanUnit) -> str:
    way = "full" if unit.recompute is True else unit.recompute or None
    marks = [f", {readable.way(way)}"] * bool(way) + [", offloaded"] * bool(unit.offload)
    return _shards(unit) + "".join(marks)


def _shards(unit: PlanUnit) -> str:
    parts = []
    for bucket in sorted(unit.buckets, key=lambda bucket: -len(bucket.tensors)):
        shards = readable.shards(bucket.shards.param, bucket.shards.grad, bucket.shards.optim)
        if bucket.matrix is not None:
            shards += f", matrices {bucket.matrix}"
        if len(unit.buckets) == 1:
            return shards
        prefix = f"{unit.name}."
        names = [name.removeprefix(prefix).removesuffix(".weight") for name in bucket.tensors]
        label = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        parts.append(f"{shards}: {label}")
    return "; ".join(parts)
