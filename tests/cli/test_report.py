"""``hzplan show --html`` as a user has it: written by the command, opened in Chromium."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import hostile
from tests.cli.browser import FOUND, Page, browser
from tests.cli.command import ROOT, hzplan

TINY = ROOT / "plans" / "gpt-tiny-2x2.json"
LARGE = ROOT / "plans" / "llama3-405b-h100-128.json"
READY = "document.documentElement.dataset.readyMs !== undefined"
INTERACTIVE_MS = 2000
HOVERING = """(() => {
  const tip = (one) => String(one.className).includes("bk-Tooltip");
  const deep = (root) => [...root.querySelectorAll("*")].flatMap((one) =>
    [...(tip(one) ? [one] : []), ...(one.shadowRoot ? deep(one.shadowRoot) : [])]);
  return deep(document).map((one) => one.shadowRoot?.textContent ?? one.textContent).join(" ");
})()"""
"""Text of what is shown where the pointer is."""

in_chromium = pytest.mark.skipif(FOUND is None, reason="needs chromium, which is not there")


def metrics(path: Path) -> Path:
    lines = [
        {"step": step, "loss": 1.0, "step_s": 0.5, "exposed_comm_s": {"node": 0.1}, "tokens": 8}
        | {"peak_memory_bytes": 1 << 20}
        for step in range(6)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def written(folder: Path, plan: Path, *options: object) -> Path:
    done = hzplan("show", plan, "--html", folder / "report.html", *options, cwd=ROOT)
    assert done.code == 0, done.stderr
    assert "Wrote" in done.stdout
    return folder / "report.html"


@pytest.fixture
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


def quiet(tab: Page) -> None:
    """Nothing was complained of, and nothing asked of any network."""
    assert tab.complaints == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in tab.requests), tab.requests


def drawn(tab: Page) -> int:
    """Figures with a canvas, which lie in shadow roots."""
    script = """(() => {
      const canvases = (root) => [...root.querySelectorAll("*")].reduce((sum, one) =>
        sum + (one.localName === "canvas") + (one.shadowRoot ? canvases(one.shadowRoot) : 0), 0);
      return [...document.querySelectorAll("[id^=figure-]")].filter((place) => canvases(place) > 0).length;
    })()"""
    return int(tab.value(script))


@in_chromium
@pytest.mark.long
def test_the_report_of_126_layers_is_interactive_in_two_seconds(tab: Page, tmp_path: Path) -> None:
    path = written(tmp_path, LARGE)
    assert path.stat().st_size < 5e6
    tab.open(path, READY)
    took_ms, busy_ms = int(tab.value("document.documentElement.dataset.readyMs")), tab.busy_s() * 1e3
    quiet(tab)
    assert drawn(tab) == 7
    # On a machine that is busy with other tests the clock says nothing, and processor time does.
    assert min(took_ms, busy_ms) < INTERACTIVE_MS, (took_ms, busy_ms)
    tab.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    tab.until("document.querySelector('[data-rows=timeline] tbody').rows.length > 5000")
    quiet(tab)


@in_chromium
def test_keys_and_buttons_move_both_charts(tab: Page, tmp_path: Path) -> None:
    tab.open(written(tmp_path, TINY, "--metrics", metrics(tmp_path / "metrics.jsonl")), READY)
    assert drawn(tab) == 8

    def range_of(name: str) -> tuple[float, float]:
        number = ["shards", "timeline", "memory"].index(name)  # in the order of drawing
        start, end = tab.value(
            f"(({{start, end}}) => [start, end])(Bokeh.documents[{number}].roots()[0].x_range)"
        )
        return start, end

    whole = range_of("timeline")
    assert whole == range_of("memory")
    tab.value("document.querySelector('#step [data-move=in]').click()")
    near = range_of("timeline")
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 2) and range_of("memory") == near
    tab.value("document.getElementById('figure-memory').focus()")
    tab.press("ArrowRight")
    later = range_of("timeline")
    assert later[0] > near[0] and range_of("memory") == later
    tab.press("Home")
    assert range_of("timeline") == whole
    quiet(tab)


@in_chromium
def test_colours_follow_the_reader_and_print_is_light(tab: Page, tmp_path: Path) -> None:
    tab.prefer("dark")
    tab.open(written(tmp_path, TINY), READY)
    text = "Bokeh.documents[0].roots()[0].below[0].major_label_text_color"
    background = "getComputedStyle(document.body).backgroundColor"
    dark = tab.value(text)
    assert tab.value(background) != "rgb(255, 255, 255)"
    tab.prefer("light")
    tab.until(f"{text} !== '{dark}'")  # a page hears of it at its next frame
    light = tab.value(text)
    assert tab.value(background) == "rgb(255, 255, 255)"
    tab.prefer("dark", "print")
    assert tab.value(background) == "rgb(255, 255, 255)"
    tab.until(f"{text} === '{dark}'")
    tab.value("void dispatchEvent(new Event('beforeprint'))")
    assert tab.value(text) == light
    assert tab.ask("Page.printToPDF")["data"]
    quiet(tab)


@in_chromium
@pytest.mark.long
def test_hostile_names_do_nothing(tab: Page, tmp_path: Path) -> None:
    path = written(tmp_path, hostile.write(tmp_path))
    tab.open(path, READY)
    tab.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    tab.until("document.querySelector('[data-rows=timeline] tbody').rows.length > 10")
    said = set()
    # The pointer over every part of the charts shows what hovers there.
    for name in ("shards", "timeline", "traffic"):
        tab.value(f"document.getElementById('figure-{name}').scrollIntoView({{block: 'center'}})")
        x, y, width, height = tab.value(
            f"(({{x, y, width, height}}) => [x, y, width, height])"
            f"(document.getElementById('figure-{name}').getBoundingClientRect())"
        )
        for part in range(1, 12):
            for row in range(1, 16):
                tab.hover(x + width * part / 12, y + height * row / 16)
                said.add(tab.value(HOVERING))
    assert any("<script>" in text for text in said) and any("<img" in text for text in said), said
    assert tab.value("window.hacked") is None
    assert tab.value("document.title").startswith("</title><script>")
    assert tab.value("document.querySelectorAll('img, b').length") == 0
    quiet(tab)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--html", "."], "a folder"),
        (["--html", "plans/gpt-tiny-2x2.json"], "is what is read"),
        (["--html", "/dev/null/report.html"], "cannot be written"),
        (["--metrics", "nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
    ],
)
def test_errors_are_one_line(options: list[str], said: str) -> None:
    done = hzplan("show", TINY, *options, cwd=ROOT)
    assert done.code == 2 and len(done.lines) == 1 and said in done.stderr


def test_metrics_without_html(tmp_path: Path) -> None:
    path = metrics(tmp_path / "metrics.jsonl")
    done = hzplan("show", TINY, "--metrics", path, cwd=ROOT)
    assert done.code == 0 and "predicted beside 3 measured steps" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    done = hzplan("show", TINY, "--metrics", path, "--json", cwd=ROOT)
    assert json.loads(done.stdout)["measured"]["beside"][0]["measured"] == 0.5
