"""A profile as tables, or as one JSON object."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from hzplan.cli import console
from hzplan.core.hierarchy import Mesh
from hzplan.core.matrices import Shape
from hzplan.cost.model import CostModel
from hzplan.formats.links import Links
from hzplan.formats.profile import Profile, UnitEntry, UseCost

SCATTERED = 0.25
"""Spread (half the distance between quartiles, over the median) above which a figure is marked."""

MATTERS = 0.01
"""Share of a forward and backward: uses that take less are not marked."""


def show(profile: Profile, path: Path, *, as_json: bool) -> None:
    """Print what was measured and what to type next."""
    micro_batch = profile.micro_batches[-1]
    following = (
        f"hzplan solve {path} -o plan.json --global-batch {profile.mesh.world * micro_batch}"  # one pass each
    )
    if as_json:
        print(json.dumps(_summary(profile, path, following)))
        return
    out = console.stdout()
    out.print(_units(profile, micro_batch))
    if profile.optimizer.matrix is not None:
        out.print(_matrices(profile), soft_wrap=True, markup=False)
    if profile.collectives:
        out.print(_links(profile))
    _name_slow(profile)
    _mark_scattered(profile)
    out.print(f"Wrote {path}. Next:\n  {following}", soft_wrap=True, markup=False)


def _matrices(profile: Profile) -> str:
    """Which parameters the optimizer updates as matrices, and what orthogonalising all of them takes."""
    tensors = [tensor for unit in profile.units for tensor in unit.tensors if tensor.trainable]
    own = [tensor for tensor in tensors if tensor.matrix]
    kinds: dict[str, int] = {}
    for tensor in own:
        shape = "×".join(map(str, tensor.shape))
        kinds[shape] = kinds.get(shape, 0) + 1
    listed = ", ".join(f"{many} of {shape}" for shape, many in [*kinds.items()][:4])
    more = f" and {len(kinds) - 4} more shapes" if len(kinds) > 4 else ""
    costs = CostModel(profile).matrices
    assert costs is not None
    alone = sum(
        shape.many * costs.orthogonalize_ns(shape.rows, shape.columns)
        for shape in (Shape.of(tensor.shape) for tensor in own)
    )
    return (
        f"{profile.optimizer.name}: {len(own)} parameters are matrices, {listed}{more}; orthogonalising all "
        f"on one rank takes {console.duration(alone / 1e9)}. {len(tensors) - len(own)} others: AdamW. "
        "--matrix and --no-matrix change which.\n"
    )


def show_links(links: Links, path: Path, *, as_json: bool) -> None:
    """Print what was measured of a cluster, and what to type next."""
    following = f"hzplan profile MODEL --links {path} -o profile.json"
    if as_json:
        print(json.dumps(_links_summary(links, path, following)))
        return
    out = console.stdout()
    if links.collectives:
        out.print(_links(links))
    _name_slow(links)
    _mark_scattered(links)
    out.print(f"Wrote {path}. Next, on one device:\n  {following}", soft_wrap=True, markup=False)


def _links_summary(links: Links, path: Path, following: str) -> dict[str, object]:
    return {
        "links": str(path),
        "mesh": links.cluster.mesh,
        "stragglers": [entry.model_dump() for entry in links.stragglers],
        "scattered": _scattered(links),
        "next": following,
    }


def _name_slow(measured: Profile | Links) -> None:
    """Print the slow ranks."""
    out = console.stdout()
    for entry in measured.stragglers:
        out.print(f"Slow: {entry.describe()}", soft_wrap=True, markup=False, style="yellow")


def _mark_scattered(measured: Profile | Links) -> None:
    """Print a warning about figures with a large spread."""
    if found := _scattered(measured):
        console.stdout().print(
            f"Not steady: {found[0]}"
            + (f" and {len(found) - 1} more figures" if len(found) > 1 else "")
            + f" scatter by more than {SCATTERED:.0%}; measure again when nothing else runs.",
            markup=False,
            style="yellow",
        )


def _scattered(measured: Profile | Links) -> list[str]:
    """Figures whose quartiles are far apart, the worst first, that take long enough to matter."""
    found: list[tuple[float, str]] = []
    if isinstance(measured, Profile):
        total = sum(use.costs[-1].seconds for use in measured.uses)
        found += [
            (cost.spread, f"the {use.phase} of {use.unit or '(the model)'} at micro-batch {cost.micro_batch}")
            for use in measured.uses
            for cost in use.costs
            if cost.seconds > MATTERS * total
        ]
    found += [
        (point.spread, f"{curve.operation}, levels {curve.low}–{curve.high}, {console.size(point.bytes)}")
        for curve in measured.collectives
        for point in curve.points[-1:]
    ]
    return [text for spread, text in sorted(found, reverse=True) if spread > SCATTERED]


def _summary(profile: Profile, path: Path, following: str) -> dict[str, object]:
    return {
        "profile": str(path),
        "model": profile.model.name,
        "parameters": profile.model.parameters,
        "mesh": profile.cluster.mesh,
        "units": len(profile.units),
        "micro_batches": list(profile.micro_batches),
        "compute_s": {
            str(size): sum(use.costs[index].seconds for use in profile.uses)
            for index, size in enumerate(profile.micro_batches)
        },
        "stragglers": [entry.model_dump() for entry in profile.stragglers],
        "scattered": _scattered(profile),
        "next": following,
    }


def _units(profile: Profile, micro_batch: int) -> Table:
    """Neighbours of the same kind in one row, with the mean of their times."""
    table = console.table(
        f"Units of {profile.model.name}, micro-batch {micro_batch}, {profile.model.seq_len} tokens",
        *("unit", "params", "calls", "forward", "backward", "FLOPs", "activa-\ntions\nkept"),
    )
    at = profile.micro_batches.index(micro_batch)
    for group in _alike(profile.units):
        names = {unit.name for unit in group}
        costs = [(use.phase, use.costs[at]) for use in profile.uses if use.unit in names]
        forward = [cost for phase, cost in costs if phase == "forward"]
        backward = [cost for phase, cost in costs if phase == "backward"]
        parameters = sum(tensor.spec.numel for tensor in group[0].tensors)
        table.add_row(
            _name(group),
            console.count(parameters) if parameters else "tied",
            str(len(costs) // len(group)),
            console.duration(_mean(forward, len(group), "seconds")),
            console.duration(_mean(backward, len(group), "seconds")),
            console.count(_mean([cost for _, cost in costs], len(group), "flops")),
            console.size(_mean(forward, len(group), "retained_bytes")),
        )
    every = [cost for use in profile.uses for cost in (use.costs[at],)]
    table.caption = (
        f"{console.count(profile.model.parameters)} parameters; forward and backward "
        f"{console.duration(sum(cost.seconds for cost in every))}, "
        f"{console.count(sum(cost.flops for cost in every))}FLOP"
    )
    if profile.modelled is not None:
        table.caption += f"\n{profile.modelled.what}"
    table.caption_justify = "left"
    return table


def _alike(units: Sequence[UnitEntry]) -> Iterator[list[UnitEntry]]:
    """Runs of neighbouring units of one class with the same shapes."""

    def kind(unit: UnitEntry) -> object:
        return unit.module, tuple((tensor.shape, tensor.trainable) for tensor in unit.tensors)

    return (list(group) for _, group in itertools.groupby(units, kind))


def _name(group: Sequence[UnitEntry]) -> str:
    first, last = group[0].name or "(the model's own)", group[-1].name
    if len(group) == 1:
        return first
    shared = first.rpartition(".")[0] + "."
    return f"{first}–{last.removeprefix(shared)} (each)"


def _mean(costs: Sequence[UseCost], units: int, field: str) -> float:
    return float(sum(getattr(cost, field) for cost in costs)) / units


def _links(profile: Profile | Links) -> Table:
    """Each collective over the groups between two levels, at its smallest and largest size."""
    mesh, names = Mesh.parse(profile.cluster.mesh), profile.cluster.tier_names
    table = console.table(
        f"Links, {profile.cluster.backend}, all groups at once",
        *("collective", "levels", "ranks", "shortest", "largest", "time", "GB/s"),
    )
    for curve in profile.collectives:
        tier = mesh.tier_of(curve.high - 1)
        first, last = curve.points[0], curve.points[-1]
        at = "all tiers" if (curve.low, curve.high) == mesh.whole else names[tier]
        table.add_row(
            curve.operation + (f", {at}" if len(names) > 1 else ""),
            f"{curve.low}–{curve.high}",
            str(mesh.shards[curve.high] // mesh.shards[curve.low]),
            console.duration(first.seconds),
            console.size(last.bytes),
            console.duration(last.seconds),
            f"{last.bytes / last.seconds / 1e9:.2f}" if last.seconds else "–",
        )
    if profile.interference:
        pairs = zip(names, profile.interference, strict=True)
        table.caption = "while both run: " + "; ".join(
            f"{name} costs compute {entry.compute_loss:.0%}, "
            f"its collectives take {entry.communication_slowdown:.2f} times, "
            f"two at once {entry.contention:.2f}"
            for name, entry in pairs
        )
        table.caption_justify = "left"
    return table
