"""Fitted figures, written into ``cost_models/``, each with its rows and interval."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.published.fit import Z90, Fitted
from benchmarks.published.fitting import Fit
from benchmarks.published.parameters import CHIPS, PARENTS
from benchmarks.published.scored import Order, Scored
from hzplan.formats.base import Strict
from hzplan.formats.cluster import (
    COMPOSED,
    USUAL_NETWORK,
    ClusterModel,
    DeviceModel,
    NetworkModel,
    load_device,
    load_network,
)
from hzplan.formats.expected import Covered, Expected, ExpectedEntry, Range

TRANSFER_SIGMA = 0.1
"""Standard deviation, as a logarithm, of a share that is taken over from other devices."""
LEAST_ROWS = 8
"""Rows from which on a device has an expected range of its own."""
Kind = TypeVar("Kind", bound=Strict)
SIGNIFICANT = 4
"""Digits of a fitted figure."""


def write_models(found: Fit, folder: Path) -> list[str]:
    """Write all figures; names of the files that were written."""
    written = []
    for chip, stems in CHIPS.items():
        for stem in stems:
            path = folder / "devices" / f"{stem}.json"
            device = DeviceModel.load(path)
            for owner in (*([PARENTS[chip]] if chip in PARENTS else []), chip):
                device = _with(device, owner, found)
            device.save(path)
            written.append(str(path))
    for path in sorted((folder / "networks").glob("*.json")):
        network = _with(NetworkModel.load(path), path.stem, found)
        network.save(path)
        written.append(str(path))
    for path in sorted((folder / "clusters").glob("*.json")):
        if COMPOSED.fullmatch(path.stem):
            _compose_again(path)
            written.append(str(path))
    return written


def _compose_again(path: Path) -> None:
    """A cluster that is composed of a device and networks, with their figures."""
    cluster = ClusterModel.load(path)
    device = load_device(cluster.device)
    assert device.link is not None, "a composed cluster's device says its link"
    link, network = load_network(device.link), load_network(USUAL_NETWORK)
    inner, outer = cluster.tiers
    rate = outer.bytes_per_s
    tiers = (link.joining(inner.ranks), network.joining(outer.ranks, rate))
    cluster.model_copy(update={"tiers": tiers}).save(path)


def _with(model: Kind, owner: str, found: Fit) -> Kind:
    """A device or a network with the figures fitted for it."""
    for path, value in found.values.items():
        name, _, field = path.partition(".")
        if name == owner:
            model = _set(model, field.split("."), _figure(path, value, found))
    return model


def _set(model: Kind, fields: Sequence[str], figure: dict[str, object]) -> Kind:
    name, *rest = fields
    inner = getattr(model, name)
    if rest and isinstance(inner, dict):
        if rest[0] not in inner:
            return model
        made: object = inner | {rest[0]: _set(inner[rest[0]], rest[1:], figure)}
    elif rest:
        made = _set(inner, rest, figure)
    else:
        if inner is None:
            return model
        made = type(inner)(**figure)
    return model.model_copy(update={name: made})


def _figure(path: str, value: float, found: Fit) -> dict[str, object]:
    """A fitted figure's fields."""
    for fitted, of in ((found.training, "training rows"), (found.micro, "microbenchmarks")):
        if path in fitted.values and fitted.values[path] == value and fitted.touched[path]:
            return _said(fitted, path, value, of)
    chip = path.partition(".")[0]
    spread = exp(Z90 * TRANSFER_SIGMA)
    share = "product_share" in path
    source = (
        f"its best published matrix product, {found.best[chip]:.2f} of the peak, times "
        f"{found.sustained:.2f}, which is what training reaches of that on the devices that have rows"
        if share and chip in found.best
        else "as on the devices that have rows"
        if chip in CHIPS
        else "as before the fit: no published row that is used depends on it"
    )
    return _fields("assumed", value, source, None, value / spread, value * spread)


def _said(fitted: Fitted, path: str, value: float, of: str) -> dict[str, object]:
    chip = CHIPS.get(path.partition(".")[0], ())
    devices = f" of {' and '.join(chip)}, which share a chip," if len(chip) > 1 else ""
    source = f"{of} of cost_models/published/{devices} that it matters to, by python -m benchmarks.published"
    return _fields("fitted", value, source, fitted.touched[path], *fitted.interval(path))


def _fields(
    kind: str, value: float, source: str, rows: int | None, low: float, high: float
) -> dict[str, object]:
    def rounded(number: float) -> float:
        return float(f"{number:.{SIGNIFICANT}g}")

    return {
        "value": rounded(value),
        "kind": kind,
        "source": source,
        "rows": rows,
        "low": rounded(low),
        "high": rounded(high),
    }


def expected_errors(
    scored: Sequence[Scored], without_source: Sequence[Scored], without_device: Sequence[Scored], alike: Order
) -> Expected:
    """What a user should expect, from rows that the model had not seen where there are such.

    ``alike``: pairs that differ in nothing but what a planner chooses.
    """
    entries, few = [], {}
    for chip, stems in CHIPS.items():
        rows = [one for one in scored if one.question.chip == chip]
        if len({one.question.row.family for one in rows}) > 1:
            rows = [one for one in without_source if one.question.chip == chip]
        for stem in stems:
            if len(rows) >= LEAST_ROWS:
                entries.append(_entry(stem, rows))
            elif rows:
                few[load_device(stem).name] = len(rows)
    errors = [one.error for one in without_device]
    low, high = _between(without_device)
    return Expected(
        entries=tuple(entries),
        rows=len(errors),
        low=low,
        high=high,
        covered=Covered(**_covered(without_device)),
        few=few,
        pairs=alike.pairs,
        difference=round(exp(alike.most) - 1, 3),
    )


def _between(rows: Sequence[Scored]) -> tuple[float, float]:
    """Published over predicted seconds, between which eight of ten rows are."""
    low, high = np.exp(np.quantile([one.error for one in rows], [0.1, 0.9]))
    return round(float(low), 2), round(float(high), 2)


def _entry(stem: str, rows: Sequence[Scored]) -> ExpectedEntry:
    asked = [one.question.row for one in rows]
    low, high = _between(rows)
    return ExpectedEntry(
        device=load_device(stem).name,
        rows=len(rows),
        own=sum(one.question.options[0].device == stem for one in rows),
        sources=len({row.family for row in asked}),
        low=low,
        high=high,
        **_covered(rows),
    )


def _covered(rows: Sequence[Scored]) -> dict[str, Any]:
    asked = [one.question.row for one in rows]
    return {
        "seq_len": _range([row.seq_len or 1 for row in asked]),
        "devices": _range([row.devices or 1 for row in asked]),
        "parameters": _range([one.prediction.parameters for one in rows]),
        "kernels": tuple(sorted({one.question.options[0].kernels for one in rows})),
    }


def _range(values: Sequence[int]) -> Range:
    return Range(least=min(values), most=max(values))


def fitted_count(found: Fit) -> dict[str, int]:
    """Fitted figures of each chip and network."""
    counts: dict[str, int] = {}
    for path in {**found.micro.values, **found.training.values}:
        owner = path.partition(".")[0]
        counts[owner] = counts.get(owner, 0) + 1
    return counts
