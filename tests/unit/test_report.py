"""The report of a plan: what it says, that names in it stay names, and how large it is."""

from __future__ import annotations

import html
import importlib.util
import json
import re
from pathlib import Path

import pytest

from hzplan.cli.show import _known
from hzplan.errors import UserError
from hzplan.formats.metrics import Measured
from hzplan.formats.plan import Plan
from hzplan.formats.source import profile_of
from hzplan.show import page
from hzplan.show.charts import place, plain
from hzplan.show.report import Report
from hzplan.solver.evaluate import replay, sent_bytes
from hzplan.solver.report import build_report
from tests.cli import hostile
from tests.cli.command import ROOT

PLANS = sorted((ROOT / "plans").glob("*.json"))


def report(path: Path, measured: Measured | None = None) -> Report:
    plan = Plan.load(path)
    profile = profile_of(path, plan)
    return build_report("a plan", plan, profile, replay(plan, profile, path), _known(plan, profile), measured)


def figures(text: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, object] = json.loads(found[1])
    return data


def without_scripts(text: str) -> str:
    return re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_what_is_gathered_adds_up(path: Path) -> None:
    plan = Plan.load(path)
    profile = profile_of(path, plan)
    found = replay(plan, profile, path)
    made = build_report("a plan", plan, profile, found, {})
    over = made.occupancy
    assert sum(nbytes for _, nbytes in over.static) + max(over.activations) == found.memory.peak
    assert list(over.times_s) == sorted(set(over.times_s)) and len(over.times_s) == len(over.activations)
    assert [tier.sent_bytes for tier in made.tiers] == list(sent_bytes(found, profile, plan.reduce_dtype))
    sent = sum(span.nbytes for span in made.spans)
    assert sent == pytest.approx(sum(tier.sent_bytes for tier in made.tiers), rel=1e-6, abs=len(made.spans))
    assert sum(part.seconds for part in made.path) == pytest.approx(made.path_s)
    assert len(made.tensors) == sum(len(unit.tensors) for unit in profile.units)
    assert len({place(tensor.name) for tensor in made.tensors}) == len(made.tensors)
    assert [one.name for one in made.schemes] == ["this plan"]
    assert made.schemes[0].step_s == made.step_s == found.step_s


def test_the_page_has_every_section_and_its_tables() -> None:
    text = page.page(report(ROOT / "plans" / "gpt-tiny-2x2.json"))
    assert "measured" not in figures(text)
    shown = without_scripts(text)
    for name in ("summary", "shards", "step", "memory", "traffic", "path", "alternatives"):
        assert f'<section id="{name}"' in shown and f'href="#{name}"' in shown
    for name in figures(text):
        assert f'id="figure-{name}"' in shown
    for word in ("ZeRO-3", "ZeRO-1", "DDP", "layers.3.mlp.up.weight", "gap", "budget"):
        assert word in shown, word
    assert not re.search(r'(src|href)="(?!#)', shown), "nothing is fetched"


def test_measured_stands_beside_predicted() -> None:
    plan = ROOT / "plans" / "gpt-tiny-2x2.json"
    made = report(plan, Measured(17, 0.5, {"node": 0.1, "elsewhere": 0.2}, 1 << 30))
    rows = {row.what: row for row in made.beside}
    assert rows["step"].predicted == made.step_s and rows["step"].measured == 0.5
    assert rows["waiting for elsewhere"].predicted == 0.0 and rows["memory at the peak"].bytes
    text = page.page(made)
    assert "17 measured steps" in text and "1.00 GiB" in text and "measured" in figures(text)


@pytest.mark.long
def test_the_largest_plan_stays_under_5_mb() -> None:
    path = ROOT / "plans" / "llama3-405b-h100-128.json"
    made = report(path)
    assert len({place(tensor.name)[0] for tensor in made.tensors}) >= 126 and len(made.spans) > 5000
    assert len(page.page(made).encode()) < 5e6


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    text = page.page(report(hostile.write(tmp_path)))
    own = sum("<script" in part for part in re.findall(r"<script[ >]", text))
    assert own == 4, "the figures, Bokeh in two, and ours"
    shown = without_scripts(text)
    assert "window.hacked" in shown and "<img" not in shown and "<b " not in shown and "<!--" not in shown
    for name in hostile.NAMES.values():
        assert html.escape(name) in shown, name
    data = json.dumps(figures(text), ensure_ascii=False)
    assert "onerror=window.hacked=1" in data and "$$" not in data
    inside = text.split('id="figures">')[1].split("</script>")[0]
    assert "<" not in inside and ">" not in inside


def test_json_in_a_script_ends_nothing() -> None:
    data = {"</script>": ["<!--", "]]>", "&amp;", "\u2028"]}
    text = page.embedded(data)
    assert not set("<>&\u2028") & set(text) and json.loads(text) == data


@pytest.mark.parametrize(
    ("name", "row", "column"),
    [
        ("model.layers.17.mlp.up.weight", "model.layers.17", "mlp.up.weight"),
        ("lm_head.weight", "lm_head", "weight"),
        ("scale", "scale", "scale"),
        ("blocks.3", "blocks", "3"),
    ],
)
def test_layers_are_rows(name: str, row: str, column: str) -> None:
    assert place(name) == (row, column)


def test_no_name_is_tex() -> None:
    assert all(mark not in plain("$$a$$ \\[b\\] \\(c\\)") for mark in ("$$", "\\[", "\\("))


def test_without_bokeh_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^--html: needs the package bokeh; pip install 'hzplan\[report\]'$"):
        page.check()
