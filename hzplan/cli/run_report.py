"""The output of ``hzplan run``: progress, metrics file, last table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO

from hzplan.cli import console
from hzplan.errors import UserError
from hzplan.formats.base import write_text
from hzplan.formats.plan import Plan
from hzplan.training.data import Corpus
from hzplan.training.run import RunResult, StepStats, Watcher
from hzplan.training.trackers import HELDOUT, Lasting, Tracker, open_tracker, values_of

CALIBRATE = 0.2
"""A step predicted wrong by more than this share makes ``run`` mention calibration."""


class RunReport(Watcher):
    """Rank 0's side of a run; on other ranks it does nothing."""

    def __init__(
        self,
        plan: Plan,
        steps: int,
        corpus: Corpus | None,
        metrics: Path | None,
        log: Sequence[str] = (),
        *,
        shown: bool,
        writes: bool,
    ) -> None:
        """``metrics``: where a JSON line per step goes; ``log``: trackers (``training.trackers``).
        ``writes``: whether this rank writes them."""
        self._plan, self._steps, self._corpus, self._shown = plan, steps, corpus, shown
        self._path = metrics if writes else None
        self._file: IO[str] | None = None
        self._log, self._trackers = tuple(log) if shown else (), list[Tracker]()
        self._bar = console.Bar("train", shown=shown)

    def __enter__(self) -> RunReport:
        if self._shown and self._corpus is not None:
            console.remark(f"Training on {self._corpus.description}")
        elif self._shown:
            console.remark("Training on the model's own synthetic batches")
        self._bar.__enter__()
        return self

    def on_start(self, step: int) -> None:
        """Open trackers and the metrics file; where a run goes on, the lines of the steps before stay."""
        self._trackers = [
            Lasting(text, open_tracker(text, self._plan, step), self.on_remark) for text in self._log
        ]
        if self._path is None:
            return
        try:
            if step and self._path.is_file():
                kept = _lines_before(self._path, step)
                write_text(self._path, "".join(kept))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a" if step and self._path.is_file() else "w", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{self._path}: cannot be written ({error.strerror})") from None

    def on_remark(self, text: str) -> None:
        """One line beside the progress."""
        if self._shown:
            console.remark(text)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)
        if self._file is not None:
            with suppress(OSError):  # of a line that did not go out, which was said
                self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def on_step(self, stats: StepStats) -> None:
        """Show a step, and write its line."""
        if stats.skipped and self._shown:
            console.remark(f"step {stats.step}: skipped, gradients of {stats.skipped} are not finite")
        speed = stats.tokens / stats.step_s
        self._bar.update(
            f"step {stats.step + 1}/{self._steps}  loss {stats.loss:.3f}  "
            f"{console.duration(stats.step_s)}  {speed:,.0f} tok/s",
            (stats.step + 1) / self._steps,
        )
        for tracker in self._trackers:
            tracker.log(stats.step, values_of(stats, self._plan))
        if self._file is not None:
            line = asdict(stats)
            line["exposed_comm_s"] = dict(stats.exposed_comm_s)
            line["rounding"] = dict(stats.rounding)
            line = line if stats.rounding else {key: line[key] for key in line if key != "rounding"}
            line["loss"] = stats.loss if math.isfinite(stats.loss) else None
            try:
                self._file.write(json.dumps(line, allow_nan=False) + "\n")
                self._file.flush()
            except OSError as error:
                self.on_remark(f"{self._path}: no more steps are written ({error.strerror})")
                with suppress(OSError):
                    self._file.close()
                self._file = None

    def on_evaluation(self, step: int, loss: float) -> None:
        """Say a held-out loss, but the last, which the table has."""
        if self._shown and step + 1 < self._steps:
            console.remark(f"step {step}: held-out loss {loss:.4f}")
        for tracker in self._trackers:
            tracker.log(step, {HELDOUT: loss})

    def show(self, result: RunResult, *, as_json: bool) -> None:
        """Print the end of it."""
        if as_json:
            print(json.dumps(_summary(self._plan, result), allow_nan=False))
        else:
            _print(self._plan, result)
            off = abs(self._plan.predicted.step_s / result.step_s - 1) if result.step_s else 0.0
            if off > CALIBRATE:
                console.stdout().print(
                    "The prediction is far off. To plan with what was measured: hzplan run with --metrics "
                    "metrics.jsonl, then hzplan calibrate PLAN metrics.jsonl."
                )


def _lines_before(path: Path, step: int) -> list[str]:
    """The metrics lines of steps before ``step``; lines that cannot be read are dropped."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [line for line in lines if _step_of(line) < step]


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _summary(plan: Plan, result: RunResult) -> dict[str, object]:
    predicted = plan.predicted
    return {
        "steps": result.steps,
        "resumed_from": result.resumed_from,
        "loss_first": result.loss_first if math.isfinite(result.loss_first) else None,
        "loss_last": result.loss_last if math.isfinite(result.loss_last) else None,
        "skipped_steps": result.skipped_steps,
        "heldout_loss": result.heldout_loss,
        "unigram_entropy": result.unigram_entropy_nats,
        "tokens_per_s": result.tokens_per_s,
        "step_s": {"predicted": _step_s(plan), "measured": result.step_s},
        "computing_s": {
            "predicted": _computing_s(_step_s(plan), predicted.exposed_comm_s),
            "measured": _computing_s(result.step_s, result.exposed_comm_s),
        },
        "exposed_comm_s": {
            "predicted": dict(predicted.exposed_comm_s),
            "measured": dict(result.exposed_comm_s),
        },
        "peak_memory_bytes": {
            "predicted": predicted.peak_memory_bytes,
            "measured": result.peak_memory_bytes,
        },
    } | ({} if result.groups is None else {"groups": asdict(result.groups)})


def _step_s(plan: Plan) -> float:
    """The predicted step; beside transfers to other groups, where there are any."""
    return plan.predicted.step_s if isinstance(plan.replica_sync, str) else plan.replica_sync.step_s


def _computing_s(step_s: float, waits_s: Mapping[str, float]) -> float:
    """Seconds of a step in which compute waits for nothing."""
    return max(0.0, step_s - sum(waits_s.values()))


def _print(plan: Plan, result: RunResult) -> None:
    predicted, world = plan.predicted, plan.mesh.world
    table = console.table(
        f"{plan.model.name}, {result.steps} steps on {world} rank{'s' * (world > 1)} ({plan.cluster.mesh})",
        *("", "predicted", "measured", "error"),
    )

    def row(name: str, before: float | None, after: float | None, text: Callable[[float], str]) -> None:
        table.add_row(
            name,
            "–" if before is None else text(before),
            "–" if after is None else text(after),
            "" if not before or not after else f"{before / after - 1:+.0%}",
        )

    row("step time", _step_s(plan), result.step_s, console.duration)
    row("peak memory per rank", predicted.peak_memory_bytes, result.peak_memory_bytes, console.size)
    row("tokens/s", predicted.tokens_per_s_per_gpu * world, result.tokens_per_s, lambda rate: f"{rate:,.0f}")
    measured: Mapping[str, float] = result.exposed_comm_s
    computing_s = _computing_s(_step_s(plan), predicted.exposed_comm_s)
    row("computing", computing_s, _computing_s(result.step_s, measured), console.duration)
    for name in dict.fromkeys([*predicted.exposed_comm_s, *measured]):
        row(f"waiting for {name}", predicted.exposed_comm_s.get(name), measured.get(name), console.duration)
    out = console.stdout()
    out.print(table)
    out.print(f"Loss {result.loss_first:.3f} → {result.loss_last:.3f}, held-out {_heldout(result)}.")
    if (groups := result.groups) is not None:
        missed = f", {groups.missed} missed" if groups.missed else ""
        out.print(
            f"Group {groups.group}: {groups.applied} rounds with the others applied{missed}; waited "
            f"{console.duration(groups.waited_s)} for them in all."
        )
    if result.skipped_steps:
        out.print(f"{result.skipped_steps} of {result.steps} steps were skipped: gradients were not finite.")
    if result.unplanned_steps:
        out.print(
            f"{result.unplanned_steps} of {result.steps} steps left the plan's order of uses and ran without "
            "overlap; profile this model again."
        )


def _heldout(result: RunResult) -> str:
    text = f"{result.heldout_loss:.3f} nats per token"
    if result.unigram_entropy_nats is not None:
        text += f" (unigram entropy {result.unigram_entropy_nats:.3f})"
    return text
