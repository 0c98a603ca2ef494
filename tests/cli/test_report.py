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
EIGHT = ROOT / "plans" / "llama3-8b-h100-8.json"
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

LONG = {
    "layers.0": "a_module_of_a_very_long_name.inside_of_another.and_of_one_that_does_not_end.blocks.0",
    "network": "a network with a very long name that nobody would choose",
    "embed": "embeddings_" * 9,
}
"""Names that nobody has room for; see ``hostile.NAMES``."""
INK_AT_EDGES = """(() => {
  const canvases = (root) => [...root.querySelectorAll("*")].flatMap((one) =>
    [...(one.localName === "canvas" ? [one] : []), ...(one.shadowRoot ? canvases(one.shadowRoot) : [])]);
  const inked = (canvas) => {
    const copy = new OffscreenCanvas(canvas.width, canvas.height);
    const context = copy.getContext("2d", { willReadFrequently: true });
    context.drawImage(canvas, 0, 0);
    const { width, height } = canvas;
    const columns = [0, width - 1].map((x) => [x, 0, 1, height]);
    const rows = [0, height - 1].map((y) => [0, y, width, 1]);
    const opaque = (value, at) => at % 4 === 3 && value > 0;
    return [...columns, ...rows].map((edge) => context.getImageData(...edge).data.some(opaque));
  };
  return [...document.querySelectorAll("[id^=figure-]")].flatMap((place) =>
    canvases(place).filter((one) => one.width && one.height)
      .map((one) => [place.id, one.getBoundingClientRect().width, ...inked(one)]));
})()"""
"""By canvas: its figure, its width, and whether anything is drawn at its left, right, upper and lower edge,
where a label that is cut has its cut."""
DOT_AT_LEFT = """(() => {
  const canvas = (root) => [...root.querySelectorAll("*")].reduce((found, one) =>
    found ?? (one.localName === "canvas" ? one : one.shadowRoot ? canvas(one.shadowRoot) : null), null);
  canvas(document.getElementById("figure-timeline")).getContext("2d").fillRect(0, 50, 3, 3);
})()"""
OUTSIDE = """[...document.querySelectorAll(%r)].filter((one) => {
  const { left, right, width } = one.getBoundingClientRect();
  return width === 0 || left < 0 || right > innerWidth;
}).map((one) => one.textContent)"""
"""Texts of elements that are not wholly within the page's width, or not shown."""
FOLLOWS = """[...document.querySelectorAll("[id^=figure-]")].every((place) => place.firstElementChild &&
  Math.abs(place.firstElementChild.getBoundingClientRect().width - place.clientWidth) < 2)"""
"""Whether the figures are as wide as their places."""

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
    assert drawn(tab) == 3
    # On a machine that is busy with other tests the clock says nothing, and processor time does.
    assert min(took_ms, busy_ms) < INTERACTIVE_MS, (took_ms, busy_ms)
    tab.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    tab.until("document.querySelector('[data-rows=timeline] tbody').rows.length > 5000")
    quiet(tab)


@in_chromium
def test_keys_and_buttons_move_both_charts(tab: Page, tmp_path: Path) -> None:
    tab.open(written(tmp_path, TINY, "--metrics", metrics(tmp_path / "metrics.jsonl")), READY)
    assert drawn(tab) == 3

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
@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("names", ["short", "usual", "long"])
def test_nothing_is_cut_and_no_page_scrolls_sideways(
    tab: Page, tmp_path: Path, names: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if names == "long":
        monkeypatch.setattr(hostile, "NAMES", LONG)
    plan = {"short": TINY, "usual": EIGHT}.get(names) or hostile.write(tmp_path)
    tab.resize(width)
    tab.prefer("dark" if names == "short" else "light")
    tab.open(written(tmp_path, plan), READY)
    fits_the_page(tab)
    tab.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    fits_the_page(tab)
    quiet(tab)


@in_chromium
def test_figures_follow_the_page_when_it_gets_narrow(tab: Page, tmp_path: Path) -> None:
    tab.resize(1600)
    tab.open(written(tmp_path, TINY, "--metrics", metrics(tmp_path / "metrics.jsonl")), READY)
    columns = "getComputedStyle(document.querySelector('main')).gridTemplateColumns.split(' ').length"
    assert tab.value(columns) == 2
    tab.resize(400)
    fits_the_page(tab)
    assert tab.value(columns) == 1
    tab.value(DOT_AT_LEFT)
    assert any(edges[0] for _, _, *edges in tab.value(INK_AT_EDGES)), "a cut label would be seen"
    quiet(tab)


def fits_the_page(tab: Page) -> None:
    """Nothing reaches past the page's width, no label past its canvas; figures have room beside labels."""
    tab.until(FOLLOWS)
    tab.value("new Promise((done) => setTimeout(() => requestAnimationFrame(done), 100))")  # it draws later
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")
    for selector in (".legend button", "nav a", "h1", "h2", ".badge", ".bars li", ".controls button"):
        assert tab.value(f"document.querySelectorAll({selector!r}).length") > 0
        assert tab.value(OUTSIDE % selector) == [], selector
    boxes = "section > .scroll"  # those that are always open are as high as what is in them
    assert tab.value(
        f"[...document.querySelectorAll({boxes!r})].every((box) => box.scrollHeight <= box.offsetHeight)"
    )
    canvases = tab.value(INK_AT_EDGES)
    assert {name for name, *_ in canvases} == {"figure-shards", "figure-timeline", "figure-memory"}
    for name, wide, *edges in canvases:
        assert wide <= tab.value("innerWidth") and not any(edges), (name, wide, edges)
    rooms = tab.value(
        "Bokeh.documents.map((one) => one.roots()[0]).map((one) => [one.inner_width, one.inner_height])"
    )
    assert all(width > 100 and height > 80 for width, height in rooms), rooms


@in_chromium
def test_the_keyboard_reaches_everything(tab: Page, tmp_path: Path) -> None:
    tab.open(written(tmp_path, TINY), READY)
    focus = "document.activeElement"
    tab.press("Tab")
    assert tab.value(f"{focus}.className") == "skip"
    tab.press("Enter")
    tab.until("location.hash === '#alternatives'")
    tab.press("Tab")
    assert tab.value(f"document.getElementById('alternatives').contains({focus})")
    reached = set()
    for _ in range(80):
        reached.add(tab.value(f"{focus}.dataset.renderer !== undefined ? 'legend' : {focus}.localName"))
        tab.press("Tab")
    assert {"legend", "summary", "button", "div"} <= reached
    shown = "Bokeh.documents[1].roots()[0].renderers[0].visible"
    tab.value("document.querySelector('[data-figure=timeline]').focus()")
    assert tab.value(shown) is True
    tab.press("Enter")
    assert tab.value(shown) is False and tab.value(f"{focus}.getAttribute('aria-pressed')") == "false"
    tab.press("Enter")
    assert tab.value(shown) is True
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
    for name in ("shards", "timeline"):
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
