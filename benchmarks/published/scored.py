"""Rows beside their predictions, and what can be said of many of them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import log, sqrt

import numpy as np
from huggingface_hub.errors import StrictDataclassError

from benchmarks.published.parameters import CHIP_OF, Values, models
from benchmarks.published.predict import Prediction, Traces, predict
from benchmarks.published.settings import Setting, counted, published_tokens_per_s, settings
from hzplan.cost.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES
from hzplan.errors import UserError, one_line
from hzplan.formats.cluster import load_device
from hzplan.formats.published import TrainingRow

APART = 0.05
"""Least difference of two published rates, as a logarithm, that counts as one."""
NOISY = ("bigscience-workshop/bigscience",)
"""Sources whose rows scatter by 40 % from run to run, by their own statement, and are in no order."""


@dataclass(frozen=True)
class Question:
    """A row that can be predicted: the ways in which it may have run, and its rate as published."""

    row: TrainingRow
    options: list[Setting]
    published: float

    @property
    def chip(self) -> str:
        """The chip whose figures it depends on."""
        return CHIP_OF[self.options[0].device]

    @property
    def owners(self) -> frozenset[str]:
        """Chips and networks that it depends on."""
        first = self.options[0]
        network = {first.cluster.rsplit("-", 1)[1]} if first.nodes > 1 else set()
        return frozenset({self.chip, load_device(first.device).link or "", *network, "h100"})


@dataclass(frozen=True)
class Scored:
    """A question with its answer. ``error``: the logarithm of predicted over published."""

    question: Question
    prediction: Prediction

    @property
    def error(self) -> float:
        """The logarithm of predicted over published tokens per second."""
        return log(self.prediction.tokens_per_s / self.question.published)


@dataclass(frozen=True)
class Coverage:
    """Rows that are to be predicted, and why some are not."""

    questions: tuple[Question, ...]
    left_out: tuple[tuple[TrainingRow, str], ...]

    @property
    def share(self) -> float:
        """Predicted rows over all that state a rate or a step."""
        total = len(self.questions) + len(self.left_out)
        return len(self.questions) / total if total else 0.0


def questions(
    rows: Iterable[TrainingRow],
    wanted: Callable[[TrainingRow], bool] = counted,
    marked: Container[str] = (),
) -> Coverage:
    """The rows that the model is held to, or others that are ``wanted``; not those ``marked``, by their ids,
    as contradicting themselves."""
    found, left_out = [], []
    for row in rows:
        if not wanted(row):
            continue
        options = settings(row)
        published = published_tokens_per_s(row)
        if row.id in marked:
            left_out.append((row, "it contradicts itself"))
        elif isinstance(options, str):
            left_out.append((row, options))
        elif published is None:
            left_out.append((row, "neither tokens per second nor seconds of a step are published"))
        else:
            found.append(Question(row, options, published))
    return Coverage(tuple(found), tuple(left_out))


def scorable(coverage: Coverage, traces: Traces) -> Coverage:
    """The coverage without rows whose model cannot run in shapes, which are then left out with the reason."""
    found, left_out = [], [*coverage.left_out]
    for one in coverage.questions:
        try:
            for setting in one.options:
                traces.of(setting)
                models(setting, {})
            found.append(one)
        except (UserError, ValueError, StrictDataclassError) as error:  # the last: transformers' own
            left_out.append((one.row, one_line(error)))
    return Coverage(tuple(found), tuple(left_out))


def score(asked: Sequence[Question], traces: Traces, values: Values) -> list[Scored]:
    """Predict all."""
    return [Scored(one, predict(one.options, traces, values)) for one in asked]


@dataclass(frozen=True)
class Errors:
    """Errors of some rows: relative errors, signed ones positive where predicted is faster."""

    rows: int
    median: float
    p90: float
    low: float
    high: float
    bias: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> Errors:
        """``errors``: logarithms of predicted over published."""
        logs = np.array(list(errors))
        relative = np.abs(np.expm1(logs))
        low, high = np.exp(np.quantile(logs, [0.1, 0.9]))
        return cls(
            *(len(logs), float(np.median(relative)), float(np.quantile(relative, 0.9))),
            *(float(low), float(high), float(np.expm1(logs.mean()))),
        )


def by(scored: Iterable[Scored], key: Callable[[Scored], str]) -> dict[str, Errors]:
    """Errors by a key, those with most rows first."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in scored:
        found[key(one)].append(one.error)
    return {name: Errors.of(errors) for name, errors in sorted(found.items(), key=lambda item: -len(item[1]))}


@dataclass(frozen=True)
class Order:
    """Pairs of one source, model and device that differ: how many are ordered right, with the middle 95 % of
    that share (Wilson), and the error of their difference, as a logarithm, in half and in nine of ten."""

    right: int
    pairs: int
    low: float
    high: float
    half: float
    most: float

    @property
    def share(self) -> float:
        """Of pairs ordered right."""
        return self.right / self.pairs if self.pairs else 1.0


def order(scored: Iterable[Scored], *, alike: bool = False) -> Order:
    """The order of pairs; ``alike``: of those with one number of devices and one length only, which differ in
    what a planner chooses."""
    right = pairs = 0
    differences = []
    for group in _groups(scored, lengths=alike, sizes=alike):
        for one, other in combinations(group, 2):
            published = log(one.question.published / other.question.published)
            if abs(published) <= APART:
                continue
            predicted = log(one.prediction.tokens_per_s / other.prediction.tokens_per_s)
            pairs += 1
            right += predicted * published > 0
            differences.append(abs(predicted - published))
    z, share = 1.96, right / pairs if pairs else 1.0
    middle = (share + z * z / (2 * pairs)) / (1 + z * z / pairs) if pairs else 1.0
    half = (
        z * sqrt(share * (1 - share) / pairs + (z / (2 * pairs)) ** 2) / (1 + z * z / pairs) if pairs else 0
    )
    spread = np.quantile(differences, [0.5, 0.9]) if differences else (0.0, 0.0)
    return Order(right, pairs, middle - half, middle + half, float(spread[0]), float(spread[1]))


@dataclass(frozen=True)
class Regret:
    """Over the groups of one source, model and device: what the pick by prediction costs over the best."""

    groups: int
    mean: float
    worst: float
    worst_group: str


def regret(scored: Iterable[Scored]) -> Regret:
    """The regret of picks. Rows of other lengths of sequences are other questions."""
    found = []
    for group in _groups(scored, lengths=True):
        if len(group) > 1:
            pick = max(group, key=lambda one: one.prediction.tokens_per_s)
            best = max(one.question.published for one in group)
            row = pick.question.row
            name = f"{row.family} {row.model}, {row.seq_len} tokens"
            found.append((best / pick.question.published - 1, name))
    worst = max(found, default=(0.0, ""))
    return Regret(len(found), sum(cost for cost, _ in found) / max(1, len(found)), *worst)


def _groups(scored: Iterable[Scored], *, lengths: bool = False, sizes: bool = False) -> list[list[Scored]]:
    found: dict[tuple[object, ...], list[Scored]] = defaultdict(list)
    for one in scored:
        row = one.question.row
        if row.family not in NOISY:
            device = one.question.options[0].device
            key = (row.family, row.model, device, lengths and row.seq_len, sizes and row.devices)
            found[key].append(one)
    return list(found.values())


@dataclass(frozen=True)
class MemoryErrors:
    """Peaks beside published ones, and beside the card on which the row ran. ``refused``: ids of rows whose
    predicted peak does not fit their device; ``tight``: does not fit it with the default reserve."""

    rows: int
    median: float
    refused: tuple[str, ...]
    tight: tuple[str, ...]
    ran: int


def memory(scored: Sequence[Scored]) -> MemoryErrors:
    """Errors of memory."""
    apart = [
        abs(_memory_bytes(one) / 2**30 / one.question.row.memory_gib - 1)
        for one in scored
        if one.question.row.memory_gib
    ]
    refused = tuple(
        one.question.row.id
        for one in scored
        if one.prediction.peak_bytes > load_device(one.question.options[0].device).memory_bytes.value
    )
    median = float(np.median(apart)) if apart else 0.0
    tight = tuple(one.question.row.id for one in scored if not one.prediction.fits_budget)
    return MemoryErrors(len(apart), median, refused, tight, len(scored))


OTHER_COMMUNICATORS = 2
"""Communicators of other runtimes: of gathers and of reductions."""


def _memory_bytes(one: Scored) -> int:
    """The peak in the sense of the row: of tensors, or as the driver counts it, with the context, libraries
    and communicators beside them."""
    said = f"{one.question.row.notes}".lower()
    beside = CONTEXT_BYTES + OTHER_COMMUNICATORS * COMMUNICATOR_BYTES
    return one.prediction.peak_bytes + beside * bool(re.search(r"nvidia-smi|driver", said))
