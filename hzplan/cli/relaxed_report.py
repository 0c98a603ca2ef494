"""The output of ``hzplan solve --allow-stale``: what not waiting is worth, and what it costs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from hzplan.cli import console
from hzplan.formats.plan import Plan
from hzplan.show import readable
from hzplan.solver.relaxed import LEAST_GAIN, Relaxed


@dataclass(frozen=True)
class RelaxedReport:
    """One result, two renderings. ``path``: where the plan lies."""

    found: Relaxed
    plan: Plan
    path: Path

    def as_json(self) -> str:
        """The keys of ``solve``, of one group's plan, and what is beside it."""
        found, plan, tier = self.found, self.plan, self.found.tier
        seq_len = plan.model.seq_len
        more = {"interval": tier.policy.interval, "hidden": readable.hidden(tier)}
        return json.dumps(
            {
                "status": found.solved.status,
                "gap": plan.proof.gap,
                "objective_s": plan.proof.objective_s,
                "bound_s": plan.proof.bound_s,
                "solve_s": round(found.solved.seconds, 3),
                "modelled": found.profile.modelled is not None,
                "predicted": plan.predicted.model_dump(exclude={"memory_bytes"}),
                "relaxed": tier.model_dump() | more,
                "tokens_per_s": {name: rate * seq_len for name, rate in found.sequences_per_s.items()},
                "plan": str(self.path),
            }
        )

    def show(self) -> None:
        """Rates beside each other, the timetable, and what is not proven."""
        out, found, plan, tier = console.stdout(), self.found, self.plan, self.found.tier
        worker = readable.worker(found.profile.cluster.device)
        title = (
            f"{plan.model.name} on {tier.groups} groups of {plan.mesh.world} {worker}s over the {tier.tier}, "
            f"{'measured' if found.profile.modelled is None else 'modelled'}"
        )
        table = console.table(title, "who trains", "step", "tokens/s", "vs one")
        steps, rates = found.step_s, found.sequences_per_s
        for name, rate in rates.items():
            tokens = console.count(rate * plan.model.seq_len)
            table.add_row(name, console.duration(steps[name]), tokens, f"{rate / rates['one group']:.2f}×")
        out.print(table)
        said = Table.grid(padding=(0, 2))
        said.add_column()
        said.add_column(overflow="fold")
        for label, text in self._said(rates):
            said.add_row(label, text)
        out.print(said)
        out.print(f"next, on one machine:  hzplan run {self.path}", soft_wrap=True)
        out.print("on sites of their own: hzplan meet, and on each", soft_wrap=True)
        out.print(f"  hzplan run {self.path} --group 0 (1, …) --meet HOST:PORT", soft_wrap=True)

    def _said(self, rates: dict[str, float]) -> list[tuple[str, str]]:
        plan, tier = self.plan, self.found.tier
        lines = [("stale", readable.relaxed(tier))]
        if (waiting := rates.get("all, waiting")) is not None and waiting < rates["one group"]:
            lines.append(
                (
                    "waiting",
                    f"over the {tier.tier} synchronous training of all is "
                    f"{rates['one group'] / waiting:.3g} times as slow as one group by itself",
                )
            )
        kept = f"{console.size(tier.kept_bytes)} {'of it' if tier.copies == 'device' else 'on the host'}"
        lines += [
            (
                "memory",
                f"{console.size(plan.predicted.peak_memory_bytes)} of a budget of "
                f"{console.size(plan.source.memory_budget_bytes)}, {kept} for what groups keep of each other",
            ),
            (
                "proof",
                f"one group's step is at most {readable.at_most(plan.proof.gap)} above the best; that tokens "
                "are worth as much when groups do not wait is not proven: docs/relaxed.md has loss curves",
            ),
        ]
        return lines


def declined(found: Relaxed) -> str:
    """Why the plan is one in which all wait."""
    rates = found.sequences_per_s
    best = max((rate, name) for name, rate in rates.items() if name != "all, relaxed")
    return (
        f"--allow-stale: not waiting would be {rates['all, relaxed'] / best[0]:.2f} times as fast as "
        f"{best[1]}, less than {1 + LEAST_GAIN:.2f} times: "
        + (
            "the plan is one in which all groups wait"
            if found.together is not None
            else "that is hardly worth it; all waiting, nothing fits"
        )
    )
