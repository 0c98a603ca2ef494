"""The HTML page of a report: one file that loads nothing from the network."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from hzplan.errors import UserError
from hzplan.show.elements import paragraph, text
from hzplan.show.report import Report
from hzplan.show.sections import Section, sections
from hzplan.show.sentences import worth

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Content security policy: the browser loads nothing from the network."""


def check() -> None:
    """UserError where bokeh is not installed."""
    if importlib.util.find_spec("bokeh") is None:
        raise UserError("--html: needs the package bokeh; pip install bokeh")


def page(report: Report) -> str:
    """The file's text."""
    from bokeh.resources import Resources

    from hzplan.show.charts import draw

    charts = draw(report)
    listed = sections(report, {name: chart.legend for name, chart in charts.items()})
    style, script = (
        (Path(__file__).parent / name).read_text(encoding="utf-8") for name in ("report.css", "report.js")
    )
    links = "".join(f'<a href="#{one.name}">{text(one.word)}</a>' for one in listed)
    first = listed[0]
    library = Resources(mode="inline", components=["bokeh"], minified=True, log_level="error")
    figures = {name: chart.item for name, chart in charts.items()}
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(report.title)} · hzplan</title>\n<style>\n{style}</style></head>\n"
        f'<body><a class="skip" href="#{first.name}">Skip to: {text(first.heading)}</a>\n'
        f"{_header(report)}\n"
        f'<nav aria-label="Sections">{links}</nav>\n<main>\n{"".join(map(_section, listed))}</main>\n'
        f'<script type="application/json" id="figures">{embedded(figures)}</script>\n'
        + "".join(f"<script>{part}</script>\n" for part in library.js_raw)
        + f"<script>{script}</script>\n</body></html>\n"
    )


def _header(report: Report) -> str:
    """The plan's worth in one sentence, where its seconds come from, and whose plan it is."""
    expected = paragraph(f"How sure: {report.expected}.", "remark") if report.expected else ""
    basis = "measured" if report.beside else report.basis
    return (
        f'<header><h1>{text(worth(report))} <span class="badge">{text(basis)}</span></h1>'
        f'<p class="whose">{text(report.title)}</p>{paragraph(report.subtitle, "remark")}{expected}</header>'
    )


def _section(one: Section) -> str:
    kind = ' class="wide"' if one.wide else ""
    return (
        f'<section id="{one.name}"{kind} aria-labelledby="{one.name}-title">'
        f'<h2 id="{one.name}-title">{text(one.heading)}</h2>{one.content}</section>\n'
    )


def embedded(data: Any) -> str:
    """JSON that ends no script element and begins no comment, whatever its strings say."""
    found = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return found.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
