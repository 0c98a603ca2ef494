"""A run's terms: what it is asked, what it says on its way, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hzplan.show.trace import Span


@dataclass(frozen=True)
class Saving:
    """Where checkpoints go, after every how many steps one is made, how many are kept, and whether the run
    goes on from the newest."""

    folder: Path
    every: int
    keep: int
    resume: bool


@dataclass(frozen=True)
class RunOptions:
    """How to train.

    ``evaluate_every`` counts steps; the end is evaluated in any case. ``record_steps``: of how many steps at
    the end to keep what every stream did. ``skip_nonfinite``: leave out steps whose gradients are not finite
    (the plan must clip), up to MOST_SKIPPED in a row, instead of stopping. With ``saving``, SIGTERM saves and
    ends the run. ``check_replicas``: after every how many steps to compare what ranks hold in common.
    ``weights``: safetensors, or a checkpoint of torch.distributed.checkpoint, whose weights are begun with
    where no checkpoint of the run's own is gone on from; ``from_dcp``: one of the latter, which is then gone
    on from, with its optimizer state.
    """

    steps: int
    lr: float = 1e-3
    seed: int = 0
    clip_norm: float = 1.0
    evaluate_every: int | None = None
    heldout_tokens: int = 1 << 16
    record_steps: int = 0
    skip_nonfinite: bool = False
    saving: Saving | None = None
    check_replicas: int | None = None
    weights: Path | None = None
    from_dcp: Path | None = None


@dataclass(frozen=True)
class StepStats:
    """One step: a line of the metrics file. Loss: mean over ranks; times: this rank's; ``exposed_comm_s`` is
    empty where the step was not timed.

    ``skipped``: which units' gradients were not finite, so that nothing was updated; else empty.
    ``rounding``: by tier name the largest error of values that travel narrow, as a share of them, since ranks
    last compared it; empty where they did not.
    """

    step: int
    loss: float
    step_s: float
    exposed_comm_s: Mapping[str, float]
    tokens: int
    peak_memory_bytes: int
    skipped: str = ""
    rounding: Mapping[str, float] = field(default_factory=dict)


class Watcher:
    """Hears of a run as it goes on; this one says nothing of it. Every rank has one."""

    def on_start(self, step: int) -> None:
        """The first step is this one: 0, or where a checkpoint left off."""

    def on_step(self, stats: StepStats) -> None:
        """A step has ended, and so has the one after it: its loss is gathered while that runs."""

    def on_evaluation(self, step: int, loss: float) -> None:
        """The mean held-out loss over ranks after a step."""

    def on_remark(self, text: str) -> None:
        """Something that people should know, one line."""


@dataclass(frozen=True)
class GroupsResult:
    """What came of a tier that is not waited for: rounds that were ``applied`` and ``missed``, and the
    seconds that results which were due were ``waited_s`` for."""

    group: int
    applied: int
    missed: int
    waited_s: float


@dataclass(frozen=True)
class RunResult:
    """A run: medians of the last 1,000 steps after warm-up, means over ranks; memory of who needs most.

    ``steps`` counts from the beginning; the first ``resumed_from`` were trained by an earlier run.

    ``exposed_comm_s`` is by tier name, and "optim" for the optimizer; empty where no step was timed.
    ``unplanned_steps`` left the plan's order of uses and ran unoverlapped; in ``skipped_steps`` gradients
    were not finite. ``recorded``: what ``RunOptions.record_steps`` asked for, by rank. ``unsaved``: why the
    last checkpoint is none. ``groups``: under a plan in which groups do not wait for each other.
    """

    steps: int
    resumed_from: int
    losses: tuple[float, ...]
    step_s: float
    exposed_comm_s: Mapping[str, float]
    tokens_per_s: float
    peak_memory_bytes: int
    heldout_losses: tuple[tuple[int, float], ...]
    unigram_entropy_nats: float | None
    unplanned_steps: int
    skipped_steps: int
    recorded: Mapping[str, list[Span]]
    unsaved: str | None
    groups: GroupsResult | None = None

    @property
    def loss_first(self) -> float:
        """The first step's loss, before any update."""
        return self.losses[0]

    @property
    def loss_last(self) -> float:
        """The last step's loss."""
        return self.losses[-1]

    @property
    def heldout_loss(self) -> float:
        """Held-out loss of the trained model, in nats a token."""
        return self.heldout_losses[-1][1]
