"""Pieces of the report's HTML: tables, bars, legends, figures. All text from outside is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from hzplan.errors import printable


@dataclass(frozen=True)
class Bar:
    """One bar: ``value`` in words, ``parts`` drawn one after the other, ``note`` in small print."""

    name: str
    value: str
    parts: Sequence[float]
    note: str = ""


def text(value: object) -> str:
    """Text from outside, safe between tags and in quoted attributes."""
    return escape(printable(value))


def paragraph(content: str, kind: str = "") -> str:
    """A paragraph of text; ``kind``: its class in the style sheet."""
    return f'<p class="{kind}">{text(content)}</p>' if kind else f"<p>{text(content)}</p>"


def bars(rows: Sequence[Bar], series: Sequence[str] = (), whole: float | None = None) -> str:
    """A list of horizontal bars, which wrap with the page and need no script.

    ``series``: the names of the parts, as a legend; ``whole``: what a full bar stands for, by default the
    longest.
    """
    longest = whole or max((sum(row.parts) for row in rows), default=0.0)
    key = "".join(
        f'<span><i class="part{number}"></i>{text(name)}</span>' for number, name in enumerate(series)
    )
    listed = "".join(
        f'<li><span class="name">{text(row.name)}</span><span class="value">{text(row.value)}</span>'
        f'<span class="bar">{_parts(row.parts, longest)}</span>'
        + (f'<span class="note">{text(row.note)}</span>' if row.note else "")
        + "</li>"
        for row in rows
    )
    return (f'<p class="key">{key}</p>' if key else "") + f'<ul class="bars">{listed}</ul>'


def _parts(parts: Sequence[float], longest: float) -> str:
    shares = [100 * max(0.0, part) / longest if longest else 0.0 for part in parts]
    return "".join(
        f'<i class="part{number}" style="width:{share:.2f}%"></i>' for number, share in enumerate(shares)
    )


def figure(name: str, caption: str, legend: Sequence[tuple[str, str]], *, keys: bool = False) -> str:
    """Where report.js draws; the caption names it to who cannot see it.

    ``legend``: name and colour of every renderer of the figure, in order, as buttons that hide and show it.
    """
    focus = ' tabindex="0" role="group" data-keys' if keys else ""
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-figure="{name}" data-renderer="{number}">'
        f'<i style="background:{escape(colour)}"></i>{text(label)}</button>'
        for number, (label, colour) in enumerate(legend)
    )
    return (
        f'<figure aria-labelledby="caption-{name}">'
        f'<div class="legend" role="group" aria-label="Legend: shown or hidden">{buttons}</div>'
        f'<div id="figure-{name}"{focus} aria-labelledby="caption-{name}"></div>'
        f'<figcaption id="caption-{name}">{escape(caption)}</figcaption></figure>'
    )


def rows_of(figure_name: str, columns: Sequence[str]) -> str:
    """Marks a table that report.js fills from a figure's data when it is opened: it may be long."""
    listed = " ".join(columns)
    return f' data-rows="{figure_name}" data-columns="{listed}"'


def details(summary: str, content: str, more: str = "") -> str:
    """Content that is shown when it is opened, in a box of its own that scrolls."""
    return f"<details{more}><summary>{escape(summary)}</summary>{scroll(summary, content)}</details>"


def scroll(label: str, content: str) -> str:
    """A box that scrolls by itself, so that the page never does sideways; keys reach it."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{content}</div>'


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, texts: int = 1) -> str:
    """The first columns are text, the first of them the row's head; the others are numbers."""

    def cell(place: int, value: object) -> str:
        tag, scope = ("th", ' scope="row"') if place == 0 else ("td", "")
        number = ' class="number"' if place >= texts else ""
        return f"<{tag}{scope}{number}>{text(value)}</{tag}>"

    numbers = ("" if place < texts else ' class="number"' for place in range(len(heads)))
    top = "".join(
        f'<th scope="col"{number}>{escape(head)}</th>' for number, head in zip(numbers, heads, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(cell(place, value) for place, value in enumerate(row))}</tr>" for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and values, without heads."""
    listed = "".join(
        f'<tr><th scope="row">{text(name)}</th><td>{text(value)}</td></tr>' for name, value in rows
    )
    return f"<table>{listed}</table>"
