"""The fit of all figures, and of parts: with a source, or a device, left out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import log

from benchmarks.published.figures import (
    best_shares,
    limited,
    micro_figures,
    sustained_share,
    training_figures,
)
from benchmarks.published.fit import Datum, Fitted, fit
from benchmarks.published.micro import Measured
from benchmarks.published.parameters import CHIPS, Values
from benchmarks.published.predict import Traces, predict
from benchmarks.published.scored import Question, Scored, score

MICRO_SIGMA, MICRO_SOURCE_SIGMA = 0.05, 0.03


@dataclass
class Fit:
    """What was fitted. ``micro``: to microbenchmarks; ``training``: to rows; ``values``: all figures."""

    micro: Fitted
    training: Fitted
    values: dict[str, float]
    best: dict[str, float]
    sustained: float


def fit_micro(measured: Sequence[Measured]) -> Fitted:
    """Figures of attention, links and networks."""

    def datum(one: Measured) -> Datum:
        def of(values: Values) -> float:
            return log(one.of(values) / one.value)

        return Datum(f"{one.row.family} {one.row.device}", frozenset({one.owner}), of, of)

    data = [datum(one) for one in measured if one.kind != "matmul"]
    return fit(data, micro_figures(), sigma=MICRO_SIGMA, source_sigma=MICRO_SOURCE_SIGMA, limits=limited)


@dataclass
class Training:
    """Questions, and derivatives of their answers, which parts of the fit share."""

    questions: Sequence[Question]
    measured: Sequence[Measured]
    micro: Fitted
    traces: Traces
    say: Callable[[str], None] = lambda text: None
    _whole: Fit | None = field(default=None)

    def whole(self) -> Fit:
        """The fit to all rows."""
        if self._whole is None:
            self._whole = self._fit(list(range(len(self.questions))), None)
        return self._whole

    def without(self, ids: Collection[str]) -> tuple[Fit, list[Scored]]:
        """The fit to the other rows, and these rows under it."""
        whole = self.whole()
        kept = [at for at, one in enumerate(self.questions) if one.row.id not in ids]
        rest = [one for one in self.questions if one.row.id in ids]
        found = self._fit(kept, whole)
        return found, score(rest, self.traces, found.values)

    def _fit(self, kept: Sequence[int], whole: Fit | None) -> Fit:
        micro = self.micro.values
        best = best_shares(self.measured, micro)
        figures = training_figures(best, micro)
        chips = [chip for chip in ("a100", "h100") if any(self.questions[at].chip == chip for at in kept)]

        def datum(one: Question) -> Datum:
            def of(values: Values) -> float:
                return log(
                    predict(one.options, self.traces, {**micro, **values}).tokens_per_s / one.published
                )

            def quick(values: Values) -> float:
                found = predict(one.options, self.traces, {**micro, **values}, quick=True)
                return log(found.tokens_per_s / one.published)

            return Datum(one.row.family, one.owners, of, quick)

        data = [datum(self.questions[at]) for at in kept]
        if whole is None:
            training = fit(data, figures, limits=limited, say=self.say)
        else:
            training = fit(
                *(data, figures, whole.training.values),
                rounds=1,
                limits=limited,
                known=(whole.training.jacobian[kept], whole.training.residuals[kept]),
            )
        sustained = sustained_share(training.values, best, chips)
        values = {**micro, **training.values}
        moved = whole is not None
        for chip in CHIPS:
            rows = sum(self.questions[at].chip == chip for at in kept)
            if chip in best and not rows and (moved or f"{chip}.product_share" not in training.values):
                values[f"{chip}.product_share"] = limited("product_share", best[chip] * sustained)
        for chip, like in (("a100", "h100"), ("h100", "a100")):
            if chip not in chips and like in chips:  # what a kernel reaches beside a better known one
                for name in ("share", "narrow_share"):
                    scale = 1.0
                    if name == "share":
                        scale = (
                            micro[f"{chip}.attention.flash-2.share"]
                            / micro[f"{like}.attention.flash-2.share"]
                        )
                    path = f"attention.triton.{name}"
                    values[f"{chip}.{path}"] = values[f"{like}.{path}"] * scale
                values[f"{chip}.bytes_share"] = values[f"{like}.bytes_share"]
        return Fit(self.micro, training, values, best, sustained)
