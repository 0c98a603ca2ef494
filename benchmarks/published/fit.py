"""The fit: microbenchmarks first, then training rows, by Gauss and Newton with what is known before.

Residuals are logarithms of predicted over published. A common offset of each source is part of the error, so
that a source with many rows does not outvote the others; rows that lie far off count less (Huber 1964).
Figures are fitted as logarithms, each with an interval that its data sheet, its microbenchmarks or experience
leave it before any training row is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[Any]

ROW_SIGMA, SOURCE_SIGMA = 0.05, 0.02
"""Standard deviation of a row's error, and of its source's common offset, as logarithms."""
HUBER = 1.5
"""Standard deviations beyond which a residual's weight falls."""
STEP = 0.04
"""Relative change of a figure from which its derivative is taken."""
Z90 = 1.645
"""Standard deviations of a normal distribution on both sides of its middle 90 %."""


@dataclass(frozen=True)
class Figure:
    """A figure to fit: its path, its value before, and the standard deviation of that as a logarithm."""

    path: str
    before: float
    sigma: float


@dataclass(frozen=True)
class Fitted:
    """Fitted figures. ``covariance``: of their logarithms; ``touched``: data that each depends on;
    ``jacobian`` and ``residuals``: of all data at these values."""

    figures: tuple[Figure, ...]
    values: dict[str, float]
    covariance: Vector
    touched: dict[str, int]
    jacobian: Vector
    residuals: Vector

    def interval(self, path: str) -> tuple[float, float]:
        """The middle 90 % of a figure."""
        at = next(index for index, figure in enumerate(self.figures) if figure.path == path)
        spread = exp(Z90 * float(np.sqrt(self.covariance[at, at])))
        return self.values[path] / spread, self.values[path] * spread


@dataclass(frozen=True)
class Datum:
    """One equation: ``of(values)`` is the logarithm of predicted over published. ``group``: its source;
    ``owners``: the first parts of paths that it depends on."""

    group: str
    owners: frozenset[str]
    of: Callable[[dict[str, float]], float]
    quick: Callable[[dict[str, float]], float]


def fit(
    data: Sequence[Datum],
    figures: Sequence[Figure],
    start: dict[str, float] | None = None,
    *,
    rounds: int = 4,
    sigma: float = ROW_SIGMA,
    source_sigma: float = SOURCE_SIGMA,
    limits: Callable[[str, float], float] = lambda path, value: value,
    known: tuple[Vector, Vector] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Fitted:
    """The most probable values of figures.

    ``known``: derivatives and residuals at ``start``, so that nothing is predicted: a step from there to the
    values that fewer data ask for.
    """
    before = np.array([log(figure.before) for figure in figures])
    at = before.copy()
    for index, figure in enumerate(figures):
        if start and figure.path in start:
            at[index] = log(start[figure.path])
    precision = np.diag([figure.sigma**-2 for figure in figures])
    jacobian = np.zeros((len(data), len(figures)))
    for number in range(rounds):
        values = _values(figures, at, limits)
        say(f"round {number + 1} of {rounds}")
        if known is not None:
            jacobian, residuals = known
        else:
            residuals = np.array([datum.of(values) for datum in data])
            if number < 2:  # derivatives hardly change after that
                jacobian = _jacobian(data, figures, at, limits)
        weights = _covariance_inverse(data, residuals, sigma, source_sigma)
        normal = jacobian.T @ weights @ jacobian + precision
        step = np.linalg.solve(normal, -jacobian.T @ weights @ residuals - precision @ (at - before))
        at = at + np.clip(step, -0.7, 0.7)
        at = np.array([log(limits(f.path, exp(x))) for f, x in zip(figures, at, strict=True)])
    residuals = residuals + jacobian @ (at - _logs(figures, values))
    touched = {f.path: int((np.abs(jacobian[:, i]) > 1e-3).sum()) for i, f in enumerate(figures)}
    found = _values(figures, at, limits)
    return Fitted(tuple(figures), found, np.linalg.inv(normal), touched, jacobian, residuals)


def _logs(figures: Sequence[Figure], values: dict[str, float]) -> Vector:
    return np.array([log(values[figure.path]) for figure in figures])


def _values(figures: Sequence[Figure], at: Vector, limits: Callable[[str, float], float]) -> dict[str, float]:
    return {figure.path: limits(figure.path, exp(x)) for figure, x in zip(figures, at, strict=True)}


def _jacobian(
    data: Sequence[Datum],
    figures: Sequence[Figure],
    at: Vector,
    limits: Callable[[str, float], float],
) -> Vector:
    found = np.zeros((len(data), len(figures)))
    values = _values(figures, at, limits)
    base = [datum.quick(values) for datum in data]
    for column, figure in enumerate(figures):
        owner = figure.path.partition(".")[0]
        other = at.copy()
        other[column] -= STEP  # downward, where no limit is
        changed = _values(figures, other, limits)
        for row, datum in enumerate(data):
            if owner in datum.owners:
                found[row, column] = (datum.quick(changed) - base[row]) / -STEP
    return found


def _covariance_inverse(
    data: Sequence[Datum], residuals: Vector, sigma: float, source_sigma: float
) -> Vector:
    """Of errors: each row's own, larger where it is an outlier, and its source's."""
    found = np.zeros((len(data), len(data)))
    groups: dict[str, list[int]] = {}
    for index, datum in enumerate(data):
        groups.setdefault(datum.group, []).append(index)
    for members in groups.values():
        own = residuals[members]
        scaled = np.abs(own - np.median(own)) / sigma
        variance = sigma**2 * np.maximum(1.0, scaled / HUBER)
        block = np.diag(variance) + source_sigma**2
        found[np.ix_(members, members)] = np.linalg.inv(block)
    return found
