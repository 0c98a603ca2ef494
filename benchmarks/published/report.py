"""docs/published.md: tables, a scatter plot, and what the worst rows have in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path

from benchmarks.published.fitting import Fit
from benchmarks.published.scored import (
    Coverage,
    Errors,
    MemoryErrors,
    Order,
    Regret,
    Scored,
    by,
    memory,
    order,
    regret,
)
from benchmarks.published.settings import SOFTWARE
from hzplan.formats.published import TrainingRow

WORST = 12
"""Rows that are shown as the worst."""


@dataclass(frozen=True)
class Result:
    """All that was found. ``without_source``, ``without_device``: rows as predicted without theirs."""

    coverage: Coverage
    scored: Sequence[Scored]
    before: Sequence[Scored]
    without_source: Sequence[Scored]
    without_device: Sequence[Scored]
    fit: Fit | None
    problems: Sequence[str]
    apart: Sequence[Scored] = ()
    apart_out: Sequence[tuple[TrainingRow, str]] = ()
    unused: Sequence[TrainingRow] = ()

    @property
    def ordered(self) -> Order:
        """Pairs."""
        return order(self.scored)

    @property
    def alike(self) -> Order:
        """Pairs that differ in what a planner chooses, predicted without their source where that was done."""
        return order(self.without_source or self.scored, alike=True)


def summary(result: Result) -> str:
    """Markdown: the figures that targets are about, and the tables."""
    parts = [
        _headline(result),
        _errors_table("source", by(result.scored, lambda one: one.question.row.family)),
        _errors_table("device", by(result.scored, lambda one: one.question.options[0].device)),
        _errors_table("tokens in a sequence", by(result.scored, _length)),
        _errors_table("devices", by(result.scored, _scale)),
        _errors_table("recomputation", by(result.scored, lambda one: one.question.options[0].recompute)),
    ]
    if result.apart:
        parts.append(
            "Counted apart, and fitted to nothing: dense rows in 16 bits with model parallelism beside, or "
            "that do not say what is recomputed."
        )
        parts.append(_errors_table("source", by(result.apart, lambda one: one.question.row.family)))
    return "\n\n".join(parts)


def document(result: Result, plot: str, command: str, freedoms: str) -> str:
    """The whole page."""
    worst = sorted(result.scored, key=lambda one: -abs(one.error))[:WORST]
    left_out = _reasons((row.id, why) for row, why in result.coverage.left_out)
    apart_out = _reasons((row.id, why) for row, why in result.apart_out)
    unused = _reasons((row.id, f"{row.kind}, {row.dtype}") for row in result.unused)
    problems = "\n".join(f"- {line}" for line in result.problems) or "- none"
    return f"""# Predictions held against published measurements

Made by `{command}`: the model of `hzplan profile --analytic`, fitted and held against the rows in
[cost_models/published/](../cost_models/published/README.md). Rows counted here are dense models in 16 bits
that say what is recomputed, without model parallelism. Errors are of tokens/s, predicted over published.

![predicted over published]({plot})

{summary(result)}

## The worst rows, and what they have in common

{_worst_table(worst)}

{_in_common(result)}

## What the planner would have chosen instead

{freedoms}

## Figures

{_figures_table(result.fit)}

## What sources leave open

Settings that rows do not state are taken as usual in a source's software; none is of a single row. They stay
where a source is predicted without its rows. The ones marked inferred, the part that pytorch/ao ran on, and
the attention of mosaicml/llm-foundry follow from how fast those rows are, so the error without a source is
smaller than of a source whose software nobody has looked at.

{_software_table()}

## Rows that are not predicted

Of those that are counted:

{left_out}

Of those that are counted apart:

{apart_out}

Of experts, or not in 16 bits, which are read and not used:

{unused}

## Lines that cannot be right

{problems}
"""


NAMED = 3
"""Rows that are named of those left out for one reason."""


def _reasons(rows: Iterable[tuple[str, str]]) -> str:
    """A line for each reason to leave rows out, most rows first."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, why in rows:
        found[why].append(name)
    lines = [
        f"- {why}: {len(names)} row{'s' if len(names) > 1 else ''} ({', '.join(names[:NAMED])}"
        f"{' …' if len(names) > NAMED else ''})"
        for why, names in sorted(found.items(), key=lambda item: -len(item[1]))
    ]
    return "\n".join(lines) or "- none"


def _headline(result: Result) -> str:
    lines = [
        f"- coverage: {len(result.coverage.questions)} of "
        f"{len(result.coverage.questions) + len(result.coverage.left_out)} rows "
        f"({result.coverage.share:.0%})",
        f"- error: {_errors_line(result.scored)}",
    ]
    for name, rows in (
        ("with the figures before this fit", result.before),
        ("each source predicted without its rows", result.without_source),
        ("each device predicted without its rows", result.without_device),
    ):
        said = _errors_line(rows) if rows else ""
        if said and said not in lines[-1]:  # figures that are shipped are those of the last fit
            lines.append(f"- {name}: {said}")
    lines += [_order_line(result.ordered), _alike_line(result.alike), _regret_line(regret(result.scored))]
    lines.append(_memory_line(memory(result.scored)))
    return "\n".join(lines)


def _errors_line(rows: Iterable[Scored]) -> str:
    found = Errors.of(one.error for one in rows)
    return f"median {found.median:.1%}, nine of ten {found.p90:.1%}, bias {found.bias:+.1%}"


def _order_line(found: Order) -> str:
    return (
        f"- order: {found.right} of {found.pairs} pairs that differ by more than 5 % are right "
        f"({found.share:.1%}, 95 % interval {found.low:.1%} to {found.high:.1%}); the predicted difference "
        f"is off by {exp(found.half) - 1:.1%} in half of them and by {exp(found.most) - 1:.1%} in nine of ten"
    )


def _alike_line(found: Order) -> str:
    return (
        f"- of those with one number of devices and one length, which differ in what a planner chooses, and "
        f"predicted without their source where one was fitted: {found.right} of {found.pairs} right; off by "
        f"{exp(found.half) - 1:.1%} in half of them and by {exp(found.most) - 1:.1%} in nine of ten"
    )


def _regret_line(found: Regret) -> str:
    return (
        f"- regret: over {found.groups} groups of one source, model, device and length the pick costs "
        f"{found.mean:.1%} on average, at most {found.worst:.1%} ({found.worst_group})"
    )


def _memory_line(found: MemoryErrors) -> str:
    refused = f"; refused: {', '.join(found.refused)}" if found.refused else ""
    return (
        f"- memory: median error {found.median:.1%} on {found.rows} rows; of {found.ran} rows that ran "
        f"{len(found.refused)} are predicted not to fit their device{refused}, and {len(found.tight)} not "
        f"to fit what `solve` leaves to plans by default ({', '.join(found.tight) or 'none'})"
    )


def _errors_table(what: str, found: Mapping[str, Errors]) -> str:
    lines = [f"| {what} | rows | median | nine of ten | 10–90 % of predicted / published | bias |"]
    lines.append("|---|---|---|---|---|---|")
    for name, one in found.items():
        lines.append(
            f"| {name} | {one.rows} | {one.median:.1%} | {one.p90:.1%} | {one.low:.2f}–{one.high:.2f} | "
            f"{one.bias:+.1%} |"
        )
    return "\n".join(lines)


def _worst_table(worst: Iterable[Scored]) -> str:
    lines = ["| row | device | model | tokens | micro-batch | devices | predicted / published | peak, GiB |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for one in worst:
        row, first = one.question.row, one.question.options[0]
        lines.append(
            f"| {row.id} | {first.device} | {row.model} | {row.seq_len} | {first.micro_batch} | "
            f"{row.devices} | {exp(one.error):.2f} | {one.prediction.peak_bytes / 2**30:.0f} |"
        )
    return "\n".join(lines)


def _in_common(result: Result) -> str:
    """Rows near their device's memory against the others."""
    from hzplan.formats.cluster import load_device

    full = [
        one
        for one in result.scored
        if one.prediction.peak_bytes > 0.9 * load_device(one.question.options[0].device).memory_bytes.value
    ]
    if not full:
        return "No row is predicted to fill more than 90 % of its device."
    errors = Errors.of(one.error for one in full)
    return (
        f"{len(full)} rows are predicted to fill more than 90 % of their device: median error "
        f"{errors.median:.1%}, bias {errors.bias:+.1%}. Where memory is that short an allocator frees and "
        "asks again, with the device waiting, which is not in the model."
    )


def _figures_table(found: Fit | None) -> str:
    if found is None:
        return "As shipped."
    lines = ["| figure | value | 90 % interval | data it matters to |", "|---|---|---|---|"]
    for fitted in (found.training, found.micro):
        for path, value in fitted.values.items():
            if fitted is found.micro and path in found.training.values:
                continue
            low, high = fitted.interval(path)
            lines.append(f"| {path} | {value:.4g} | {low:.4g}–{high:.4g} | {fitted.touched[path]} |")
    return "\n".join(lines)


def _software_table() -> str:
    lines = ["| source | kernels | attention | loss | why |", "|---|---|---|---|---|"]
    for family, usual in SOFTWARE.items():
        fused = "fused" if usual.fused_loss else "eager"
        lines.append(
            f"| {family} | {usual.kernels} | {usual.attention or 'usual'} | {fused} | {usual.reason} |"
        )
    return "\n".join(lines)


def _length(one: Scored) -> str:
    length = one.question.row.seq_len or 0
    return next((name for most, name in ((1024, "≤ 1,024"), (4096, "2,048–4,096"), (16384, "8,192–16,384"))
                 if length <= most), "≥ 32,768")  # fmt: skip


def _scale(one: Scored) -> str:
    devices = one.question.row.devices or 0
    return next((name for most, name in ((8, "≤ 8"), (64, "16–64"), (256, "128–256")) if devices <= most),
                "≥ 512")  # fmt: skip


def plot(scored: Sequence[Scored], path: Path) -> None:
    """Write an SVG: predicted over published tokens/s, a mark for each source."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "hzplan"  # the same figures, the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5.5))
    published = [one.question.published for one in scored]
    ends = [0.8 * min(published), 1.25 * max(published)]
    axes.plot(ends, ends, color="gray", linewidth=0.8)
    axes.fill_between(ends, [0.9 * s for s in ends], [1.1 * s for s in ends], color="gray", alpha=0.15)
    families = list(by(scored, lambda one: one.question.row.family))
    for family, marker in zip(families, "o^sDvP*X<>hd" * 4, strict=False):
        some = [one for one in scored if one.question.row.family == family]
        axes.scatter(
            [one.question.published for one in some],
            [one.prediction.tokens_per_s for one in some],
            marker=marker,
            s=16,
            label=f"{family} ({len(some)})",
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="published tokens/s per device",
        ylabel="predicted tokens/s per device",
    )
    axes.set_title("Published training runs; band: ±10 %", fontsize=10)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
