"""The report of a plan: what it says, that names in it stay names, and how large it is."""

from __future__ import annotations

import html
import importlib.util
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from hzplan.cli.show import known
from hzplan.errors import UserError
from hzplan.formats.metrics import Measured
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile, RecomputeCost
from hzplan.formats.source import profile_of
from hzplan.show import page
from hzplan.show.charts import MOST_LABEL, label, plain
from hzplan.show.folding import folded, layer_rows, place
from hzplan.show.occupancy import spike_bytes
from hzplan.show.readable import duration
from hzplan.show.report import (
    ComparedScheme,
    Occupancy,
    PathPart,
    Report,
    Spike,
    Tensor,
    WhatIf,
    Worth,
)
from hzplan.show.sentences import binds, memory, worth
from hzplan.solver.evaluate import evaluate, replay, sent_bytes
from hzplan.solver.guard import request_of
from hzplan.solver.report import basis, bounds, build_report
from hzplan.solver.report import worth as worth_of
from tests.cli import hostile
from tests.cli.command import ROOT

PLANS = sorted((ROOT / "plans").glob("*.json"))
TINY = ROOT / "plans" / "gpt-tiny-2x2.json"
GIB = 2**30


def report(path: Path, measured: Measured | None = None) -> Report:
    plan = Plan.load(path)
    profile = profile_of(path, plan)
    found, rows = replay(plan, profile, path), known(plan, profile)
    return build_report("a plan", plan, profile, found, rows, request_of(plan), measured)


@cache
def tiny() -> Report:
    return report(TINY)


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
    made = build_report("a plan", plan, profile, found, [], request_of(plan))
    over = made.occupancy
    assert sum(nbytes for _, nbytes in over.static) + max(over.activations) == found.memory.peak
    assert list(over.times_s) == sorted(set(over.times_s)) and len(over.times_s) == len(over.activations)
    assert [tier.sent_bytes for tier in made.tiers] == list(sent_bytes(found))
    sent = sum(span.nbytes for span in made.spans)
    assert sent == pytest.approx(sum(tier.sent_bytes for tier in made.tiers), rel=1e-6, abs=len(made.spans))
    assert sum(part.seconds for part in made.path) == pytest.approx(made.path_s)
    assert sum(bound.seconds for bound in made.bounds) == pytest.approx(made.path_s)
    assert made.worth is None and worth(made).startswith(f"{duration(found.step_s)} a step")
    assert len(made.tensors) == sum(len(unit.tensors) for unit in profile.units)
    assert len({place(tensor.name) for tensor in made.tensors}) == len(made.tensors)
    assert [one.name for one in made.schemes] == ["this plan"]
    assert made.schemes[0].step_s == made.step_s == found.step_s


def test_first_things_first() -> None:
    text = page.page(tiny())
    shown = without_scripts(text)
    order = re.findall(r'<section id="(\w+)"', shown)
    assert order == ["alternatives", "headroom", "binds", "traffic", "step", "memory", "shards", "settings"]
    assert re.findall(r'href="#(\w+)"', shown) == ["alternatives", *order], "the skip link, then all of them"
    head = html.unescape(shown.split("<h1>")[1].split("</h1>")[0])
    assert head.startswith(worth(tiny())) and "predicted from measured layers and links" in head
    assert list(figures(text)) == ["shards", "timeline", "memory"]
    for name in figures(text):
        assert f'id="figure-{name}"' in shown and f'data-figure="{name}"' in shown
    for word in ("ZeRO-3", "ZeRO-1", "DDP", "layers.0–3.mlp.up.weight", "gap", "budget", "free"):
        assert word in shown, word
    assert not re.search(r'(src|href)="(?!#)', shown), "nothing is fetched"


def test_measured_stands_beside_predicted() -> None:
    made = report(TINY, Measured(17, 0.5, {"node": 0.1, "elsewhere": 0.2}, 1 << 30))
    rows = {row.what: row for row in made.beside}
    assert rows["step"].predicted == made.step_s and rows["step"].measured == 0.5
    assert rows["waiting for elsewhere"].predicted == 0.0 and rows["memory at the peak"].bytes
    text = page.page(made)
    assert "17 measured steps" in text and "1.00 GiB" in text and '<section id="measured"' in text
    assert '<span class="badge">measured</span>' in text
    assert worth(made).startswith(
        f"500 ms a step, measured over 17 steps; predicted were {duration(made.step_s)}, "
    )


def compared(own: float, over: Worth | None, peak: int = GIB, schemes: int = 2) -> str:
    """The sentence of a plan whose step is ``own``, where the budget is 2 GiB."""
    one = ComparedScheme("DDP", 1.0, 0.0, 0, 3 * GIB, False)
    occupancy = replace(tiny().occupancy, peak_bytes=peak, budget_bytes=2 * GIB)
    return worth(
        replace(tiny(), step_s=own, worth=over, occupancy=occupancy, schemes=(one,) * schemes, beside=())
    )


def test_worth_is_one_sentence() -> None:
    zero3 = Worth("ZeRO-3", 4.0, False, 0.005)
    beside = "ZeRO-3 at its best (4.00 s), the fastest known scheme that fits."
    assert compared(3.0, zero3) == f"3.00 s a step, 25.0% less than {beside}"
    assert compared(5.0, zero3) == f"5.00 s a step, 25.0% more than {beside}"
    assert compared(3.99, zero3) == f"3.99 s a step, as fast as {beside}"
    same = compared(4.0, replace(zero3, same=True))
    assert same == "4.00 s a step, and the plan is ZeRO-3 at its best, the fastest known scheme that fits."
    assert compared(4.0, None) == "4.00 s a step, and no known scheme fits the budget of 2.00 GiB."
    assert compared(4.0, None, schemes=1) == "4.00 s a step."
    over = compared(4.0, None, peak=3 * GIB, schemes=1)
    assert over == "4.00 s a step; its peak is 1.00 GiB above the budget of 2.00 GiB."


def test_the_gain_has_causes() -> None:
    made = report(ROOT / "plans" / "gpt-small-4.json")
    own, *others = made.schemes
    steps = [one.step_s for one in others if one.fits]
    assert own.name == "this plan" and steps == sorted(steps)
    assert made.worth is not None and not made.worth.same and made.worth.step_s == steps[0]
    assert own.step_s < steps[0] / (1 + made.worth.tie), "the example is ahead"
    causes = {cause.what: cause.share for cause in made.worth.causes}
    assert causes.keys() == {"sharding", "message order"}, "only what differs is a cause"
    assert all(share is not None and share > 0 for share in causes.values())
    text = page.page(made)
    assert "Where the gain comes from" in text and f"{causes['sharding']:+.1%}" in text


def test_a_plan_that_is_a_scheme_is_called_so() -> None:
    plan = Plan.load(TINY)
    profile = profile_of(TINY, plan)
    rows, request = known(plan, profile), request_of(plan)
    best = min((row for row in rows if row.fits), key=lambda row: row.found.step_s)
    found = worth_of(replace(best.found), rows, request)
    assert found is not None and found.same and found.over == best.name and not found.causes
    least = replace(request, memory_bytes=1)
    assert worth_of(best.found, [replace(row, fits=False) for row in rows], least) is None


@pytest.mark.parametrize(
    ("name", "said"),
    [("gpt-tiny-2x2", "predicted from measured layers and links"), ("llama3-8b-h100-8", "modelled")],
)
def test_the_badge_says_where_seconds_come_from(name: str, said: str) -> None:
    profile = profile_of(path := ROOT / "plans" / f"{name}.json", Plan.load(path))
    assert basis(profile) == said
    if profile.modelled is not None:
        links = profile.modelled.model_copy(update={"device": None})
        of_links = basis(profile.model_copy(update={"modelled": links}))
        assert of_links == "predicted from measured layers, links modelled"


def test_the_loss_is_named_where_it_makes_the_peak() -> None:
    assert spike_bytes([5, 9, 4], [False, True, False]) == 4
    assert spike_bytes([5, 3, 4], [False, True, False]) == 0
    assert spike_bytes([5, 9, 4], [False, True, False], floor=7) == 2, "an update needs 7 in any case"
    plan = Plan.load(TINY)
    profile = in_chunks(profile_of(TINY, plan))
    found = replay(plan, profile, TINY)
    over = build_report("a plan", plan, profile, found, [], request_of(plan)).occupancy
    assert over.spike is not None and over.spike.unit == "head" and over.spike.in_chunks is not None
    modes = found.modes._replace(recompute=found.modes.recompute.with_(["head"], "chunks"))
    chunked = evaluate(found.model, found.levels, found.schedule, found.micro_batch, modes=modes)
    assert found.memory.peak - chunked.memory.peak == over.spike.in_chunks
    assert 0 < over.spike.in_chunks <= over.spike.nbytes <= max(over.activations)
    assert "The loss makes the peak: logits and their gradients at head take" in " ".join(memory(over))
    small = replace(over.spike, nbytes=over.peak_bytes // 101)
    assert "The loss" not in " ".join(memory(replace(over, spike=small)))


def in_chunks(profile: Profile) -> Profile:
    """The profile with a head that can compute the loss in chunks, without its memory at the peak."""
    uses = []
    for use in profile.uses:
        costs = [
            cost.model_copy(
                update={
                    "partial": {
                        "chunks": RecomputeCost(
                            seconds=0.0, retained_bytes=cost.retained_bytes, peak_bytes=cost.peak_bytes // 2
                        )
                    }
                }
            )
            for cost in use.costs
        ]
        uses.append(use.model_copy(update={"costs": tuple(costs)}) if use.unit == "head" else use)
    return profile.model_copy(update={"uses": tuple(uses)})


def test_memory_that_is_free_is_counted() -> None:
    over = Occupancy([("parameters", GIB)], [0.0], [GIB // 2], 3 * GIB // 2, 2 * GIB)
    assert list(memory(over)) == ["1.50 GiB of a budget of 2.00 GiB at the peak: 512 MiB (25.0%) is free."]
    more = list(memory(replace(over, budget_bytes=GIB)))
    assert more == ["1.50 GiB of a budget of 1.00 GiB at the peak: 512 MiB too much."]
    spike = Spike("head", GIB // 4, GIB // 8)
    listed = page.page(replace(tiny(), occupancy=replace(over, spike=spike)))
    assert "The loss makes the peak: logits and their gradients at head take 256 MiB above" in listed
    assert "would be 128 MiB less" in listed and "256 MiB, 12.5%" in listed


def test_what_binds() -> None:
    parts = (PathPart("compute", 6.0), PathPart("activation recomputation", 2.0))
    parts += (
        PathPart("gathering parameters over node", 1.5),
        PathPart("saving activations on the host", 0.5),
    )
    found = bounds(parts, ("node", "network"))
    assert [(one.resource, one.seconds) for one in found] == [
        ("compute", 8.0),
        ("communication over node", 1.5),
        ("the link to the host's memory", 0.5),
    ]
    made = replace(tiny(), path=parts, path_s=10.0, bounds=found, binding=None, recomputed_s=2.0, step_s=10.0)
    larger = ComparedScheme("DDP", 8.0, 0.0, 0, made.occupancy.budget_bytes + GIB, False)
    said = list(binds(replace(made, schemes=[tiny().schemes[0], larger])))
    assert said[0] == (
        "Compute binds: 80.0% of the critical path, 8.00 s of 10.0 s; then communication over node 15.0%, "
        "the link to the host's memory 5.0%."
    )
    assert said[1] == "20.0% of the critical path is activations computed again, because memory is short."
    assert said[2].startswith("With more memory DDP would take 20.0% less: it needs at least ")
    assert said[2].endswith(", 1.00 GiB more than the budget.") and len(said) == 3
    links = PathPart("all that is sent over network", 12.0)
    assert next(binds(replace(made, binding=links))) == (
        "All that is sent over network binds: 12.0 s, longer than the critical path of 10.0 s."
    )


def test_hardware_is_asked_for_or_was_solved() -> None:
    assert "hzplan show PLAN --what-if" in page.page(tiny())
    half = WhatIf("a network twice as fast", tiny().step_s / 2, "optimal")
    text = page.page(replace(tiny(), what_if=[half, WhatIf("1 GiB more", None, "nothing fits")]))
    assert "-50.0%" in text and "nothing fits" in text and "--what-if" not in without_scripts(text)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["layers.0", "layers.1", "layers.2"], "layers.0–2"),
        (["layers.9", "layers.8", "head"], "layers.9–8, head"),
        (["layers.0", "layers.2", "layers.3"], "layers.0, layers.2–3"),
        (["layers.0", "layers.1", "layers.0"], "layers.0–1, layers.0"),
        (["a.0", "b.1", "a"], "a.0, b.1, a"),
        (["", "a.²", "a.1"], ", a.², a.1"),
    ],
)
def test_names_that_count_are_folded(names: list[str], said: str) -> None:
    assert folded(names) == said


def test_equal_layers_are_one_row() -> None:
    def layer(number: int, optim: int) -> list[Tensor]:
        name = f"layers.{number}"
        return [
            Tensor(f"{name}.{part}", f"{name}.{part}.weight", 8, (1, 1, optim)) for part in ("up", "down")
        ]

    embed = Tensor("", "embed.weight", 16, (1, 2, 4))
    listed = [embed, *layer(0, 8), *layer(1, 8), *layer(2, 4), *layer(3, 8), *layer(4, 8)]
    rows = layer_rows(listed)
    assert [(row.name, row.layers) for row in rows] == [
        ("embed", 1),
        ("layers.0–1", 2),
        ("layers.2", 1),
        ("layers.3–4", 2),
    ]
    assert rows[1].tensors[1] == (
        "down.weight",
        Tensor("layers.0–1.down", "layers.0–1.down.weight", 8, (1, 1, 8)),
    )
    assert rows[0].tensors == (("weight", embed),)
    wider = [*layer(0, 8), *(replace(tensor, nbytes=9) for tensor in layer(1, 8))]
    assert len(layer_rows(wider)) == 2, "layers of other sizes are not equal"


def test_a_long_label_keeps_its_ends() -> None:
    assert label("model.layers.0–31") == "model.layers.0–31"
    long = "language_model.model.layers"
    assert label(f"{long}.0–31") == "language…del.layers.0–31" and label(f"{long}.32") != label(f"{long}.33")
    assert label(f"gather · {long}") != label(f"reduce · {long}")
    assert len(label("x" * 99)) == MOST_LABEL


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
    with pytest.raises(UserError, match=r"^--html: needs the package bokeh; pip install bokeh$"):
        page.check()
