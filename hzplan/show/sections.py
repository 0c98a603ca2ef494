"""The sections of the report's page: what each says, and in which order. HTML, without the page around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hzplan.show import sentences
from hzplan.show.elements import Bar, bars, details, facts, figure, paragraph, rows_of, scroll, table
from hzplan.show.folding import layer_rows
from hzplan.show.readable import duration, size
from hzplan.show.report import Cause, ComparedScheme, PathPart, Report, TaskSpan, Tensor, Tier, WhatIf

Legends = Mapping[str, Sequence[tuple[str, str]]]
"""By figure: name and colour of its renderers, in order."""

_CONTROLS = "".join(
    f'<button type="button" data-move="{move}">{label}</button> '
    for move, label in (
        ("in", "Zoom in"),
        ("out", "Zoom out"),
        ("earlier", "Earlier"),
        ("later", "Later"),
        ("all", "Whole step"),
    )
)
_KEYS = "keys + and − zoom, arrows move, Home shows the whole step"
_ACTIVATIONS = "activations and temporaries"


class Section(NamedTuple):
    """A section: its id, its word in the navigation, its heading and content; ``wide``: it takes the page's
    whole width, where narrow ones stand two in a row."""

    name: str
    word: str
    heading: str
    content: str
    wide: bool = False


def sections(report: Report, legends: Legends) -> list[Section]:
    """What decides first: alternatives, memory that is free, what binds; then the charts, then settings."""
    odd = bool(report.beside)  # of an odd number of narrow sections the last would stand alone
    found = [
        Section("alternatives", "Alternatives", "Alternatives", _alternatives(report)),
        Section("headroom", "Headroom", "Headroom: memory at the peak", _headroom(report)),
        Section("binds", "What binds", "What binds the step", _binds(report)),
        Section("traffic", "Traffic", "Traffic, and communication not hidden", _traffic(report), odd),
        Section("step", "Timeline", "Timeline", _timeline(report, legends["timeline"]), wide=True),
        Section("memory", "Memory", "Memory over time", _memory(report, legends["memory"]), wide=True),
        Section("shards", "Shards", "Shards", _shards(report.tensors, legends["shards"]), wide=True),
        Section("settings", "Settings", "Settings", _settings(report), wide=True),
    ]
    if report.beside:
        measured = Section("measured", "Measured", "Predicted beside measured", _measured(report))
        found.insert(1, measured)
    return found


def _alternatives(report: Report) -> str:
    own = report.step_s
    listed = bars(
        [_scheme_bar(one, own) for one in report.schemes], ("not waiting", "not hidden: compute waits")
    )
    rows = [
        (
            one.name,
            duration(one.step_s),
            _longer(one.step_s, own),
            duration(one.exposed_s),
            size(one.sent_bytes),
            size(one.peak_bytes),
            "yes" if one.fits else "no",
        )
        for one in report.schemes
    ]
    heads = ("", "step", "vs plan", "not hidden", "sent per rank", "memory at the peak", "fits")
    caption = (
        "Known schemes at their best, on the same question, and how much longer their step is than the "
        "plan's; one that does not fit could not run."
    )
    return (
        listed
        + paragraph(caption, "remark")
        + details("Alternatives as a table", table(heads, rows))
        + _causes(report)
    )


def _scheme_bar(one: ComparedScheme, own_s: float) -> Bar:
    barred = "fits, but is not as asked" if one.fits and not one.allowed else ""
    note = "; ".join(filter(None, (f"{size(one.peak_bytes)} at the peak", one.setting, barred)))
    name = one.name if one.fits else f"{one.name} (does not fit)"
    return Bar(name, _beside(one.step_s, own_s), (one.step_s - one.exposed_s, one.exposed_s), note)


def _beside(step_s: float, own_s: float) -> str:
    """A step, and how much longer than the plan's it is."""
    return ", ".join(filter(None, (duration(step_s), _longer(step_s, own_s))))


def _longer(step_s: float, own_s: float) -> str:
    """How much longer than the plan's a step is; empty where it is the plan's."""
    return f"{step_s / own_s - 1:+.1%}" if own_s and step_s != own_s else ""


def _causes(report: Report) -> str:
    """What the gain over the fastest known scheme comes from, the largest part first."""
    worth = report.worth
    if worth is None or not worth.causes:
        return ""
    ordered = sorted(
        worth.causes, key=lambda one: float("inf") if one.share is None else one.share, reverse=True
    )
    most = max((cause.share or 0.0 for cause in ordered), default=0.0)
    caption = (
        f"How much longer the step is with that choice alone as in {worth.over}, and as many more layers "
        "recomputed as it then needs; they need not add up."
    )
    return (
        f"<h3>Where the gain comes from</h3>{bars([_cause_bar(cause, most) for cause in ordered])}"
        + paragraph(caption, "remark")
    )


def _cause_bar(cause: Cause, most: float) -> Bar:
    if cause.share is None:
        return Bar(cause.what, "needed to fit", (most or 1.0,))
    return Bar(cause.what, f"{cause.share:+.1%}", (cause.share,))


def _headroom(report: Report) -> str:
    over = report.occupancy
    free = over.budget_bytes - over.peak_bytes
    parts = [*over.static, *_activations(report)]
    if free > 0:
        parts.append(("free", free))
    whole = max(over.budget_bytes, over.peak_bytes)
    listed = [
        Bar(name, f"{size(nbytes)}, {nbytes / over.budget_bytes:.1%}", _of_part(name, nbytes))
        for name, nbytes in parts
    ]
    return "".join(map(paragraph, sentences.memory(over))) + bars(listed, whole=whole)


def _activations(report: Report) -> list[tuple[str, int]]:
    """Activations at the peak; the loss' spike apart where it makes the peak."""
    over = report.occupancy
    most = max(over.activations, default=0)
    if over.spike is None:
        return [(_ACTIVATIONS, most)]
    rest = most - over.spike.nbytes
    return [(_ACTIVATIONS, rest), ("the loss: logits and their gradients", over.spike.nbytes)]


def _of_part(name: str, nbytes: int) -> tuple[float, ...]:
    """A bar of memory: free memory in the second colour."""
    return (0.0, nbytes) if name == "free" else (nbytes,)


def _binds(report: Report) -> str:
    least_s = sentences.NAMED_SHARE * report.path_s
    named = [part for part in report.path if part.seconds >= least_s]
    listed = [_path_bar(part, report.path_s) for part in named]
    if rest := [part.seconds for part in report.path if part.seconds < least_s]:
        share = f"{len(rest)} others, each below {sentences.NAMED_SHARE:.0%}"
        listed.append(_path_bar(PathPart(share, sum(rest)), report.path_s))
    caption = (
        f"The critical path: one after the other these take {duration(report.path_s)}, no link or processor "
        "shared."
    )
    rows = [
        (part.what, ", ".join(part.units), duration(part.seconds), _share(part.seconds, report.path_s))
        for part in report.path
    ]
    heads = ("what", "mostly of", "seconds", "share")
    return (
        "".join(map(paragraph, sentences.binds(report)))
        + bars(listed)
        + paragraph(caption, "remark")
        + details("Critical path as a table", table(heads, rows, texts=2))
        + _what_if(report.what_if, report.step_s)
    )


def _path_bar(part: PathPart, path_s: float) -> Bar:
    value = f"{duration(part.seconds)}, {_share(part.seconds, path_s)}"
    return Bar(part.what, value, (part.seconds,), f"mostly of {', '.join(part.units)}" if part.units else "")


def _what_if(points: Sequence[WhatIf], own_s: float) -> str:
    heading = "<h3>What more hardware would change</h3>"
    if not points:
        line = "hzplan show PLAN --what-if --html FILE"
        return (
            f"{heading}<p>Not asked. <code>{line}</code> solves the question again with 1 GiB more, and with "
            "a network twice as fast.</p>"
        )
    listed = [
        Bar(
            point.what,
            _beside(point.step_s, own_s),
            (point.step_s,),
            point.said,
        )
        if point.step_s is not None
        else Bar(point.what, point.said, (0.0,))
        for point in points
    ]
    return (
        f"{heading}{bars(listed)}{paragraph('Each is solved again; the step beside this plan’s.', 'remark')}"
    )


def _traffic(report: Report) -> str:
    sent = [Bar(tier.name, size(tier.sent_bytes), (tier.sent_bytes,)) for tier in report.tiers]
    waits = report.optimizer_exposed_s
    waited = [_tier_bar(tier, report.step_s) for tier in report.tiers]
    if waits:
        waited.append(Bar("optimizer", f"compute waits {duration(waits)}", (0.0, waits)))
    return (
        "<h3>Sent per rank in a step</h3>"
        + bars(sent)
        + "<h3>Links at work, and what of that compute waits for</h3>"
        + bars(waited, ("hidden behind compute", "not hidden: compute waits"), whole=report.step_s)
        + paragraph("A full bar is a step. Links at work: as if nothing else shared them.", "remark")
    )


def _tier_bar(tier: Tier, step_s: float) -> Bar:
    value = f"{duration(tier.busy_s)}, {_share(tier.busy_s, step_s)}"
    note = f"compute waits {duration(tier.exposed_s)}, {_share(tier.exposed_s, step_s)} of the step"
    return Bar(tier.name, value, (max(0.0, tier.busy_s - tier.exposed_s), tier.exposed_s), note)


def _timeline(report: Report, legend: Sequence[tuple[str, str]]) -> str:
    heads = ("stream", "what", "unit", "stage", "begins", "duration", "bytes", "critical")
    totals: dict[tuple[str, str], list[TaskSpan]] = {}
    for span in report.spans:
        totals.setdefault((span.stream, span.what), []).append(span)
    sums = [
        (
            *key,
            len(spans),
            duration(sum(span.end_s - span.start_s for span in spans)),
            size(sum(span.nbytes for span in spans)),
        )
        for key, spans in sorted(totals.items())
    ]
    caption = (
        "What every stream does in a step, in steady state; the dashed line is where the next step begins, "
        "and an orange edge marks what that waits for, one after the other. "
        f"With the focus on the chart, {_KEYS}; Ctrl and the wheel zoom too."
    )
    return (
        f'<p class="controls">{_CONTROLS}</p>'
        + figure("timeline", caption, legend, keys=True)
        + details(
            "Timeline as a table: sums",
            table(("stream", "what", "tasks", "seconds", "bytes"), sums, texts=2),
        )
        + details("Timeline as a table: every task", table(heads, []), rows_of("timeline", heads))
    )


def _memory(report: Report, legend: Sequence[tuple[str, str]]) -> str:
    caption = (
        "Memory of a rank; what is below the activations is allocated once. The red line is the budget. "
        f"With the focus on the chart, {_KEYS}."
    )
    columns = ("begins", "category", "bytes")
    return (
        f'<p class="controls">{_CONTROLS}</p>'
        + figure("memory", caption, legend, keys=True)
        + details(
            "Memory over time as a table", table(columns, []), rows_of("memory", ("begins", "what", "bytes"))
        )
    )


def _shards(tensors: Sequence[Tensor], legend: Sequence[tuple[str, str]]) -> str:
    rows = [
        (tensor.unit, tensor.name, *tensor.shards) for row in layer_rows(tensors) for _, tensor in row.tensors
    ]
    heads = ("unit", "tensor", "parameter", "gradient", "optimizer state")
    caption = (
        "Into how many shards every tensor is cut. A row is a layer, or a run of equal ones; each tensor's "
        "three cells are its parameter, gradient and optimizer state."
    )
    return figure("shards", caption, legend) + details("Shards as a table", table(heads, rows, texts=2))


def _settings(report: Report) -> str:
    return scroll("Settings", facts(report.facts))


def _measured(report: Report) -> str:
    rows = []
    for row in report.beside:
        said = size if row.bytes else duration
        change = f"{row.measured / row.predicted - 1:+.1%}" if row.predicted else ""
        rows.append((row.what, said(row.predicted), said(row.measured), change))
    shown = table(("", "predicted", "measured", "difference"), rows)
    caption = f"Medians of {report.measured_steps} measured steps beside the prediction."
    return scroll("Predicted beside measured", shown) + paragraph(caption, "remark")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""
