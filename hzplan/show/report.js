"use strict";
// Draws the figures, gives them the page's colours and legends, moves them by key, and writes long tables when asked.
(() => {
  const items = JSON.parse(document.getElementById("figures").textContent);
  const figures = {};
  const dark = matchMedia("(prefers-color-scheme: dark)");

  function colour(isDark) {
    const text = isDark ? "#e8e8e8" : "#1b1b1b", line = isDark ? "#4a4a4a" : "#c8c8c8";
    for (const figure of Object.values(figures)) {
      for (const part of [...figure.left, ...figure.below, ...figure.above, ...figure.center]) {
        if ("major_label_text_color" in part)
          part.setv({ axis_label_text_color: text, major_label_text_color: text, axis_line_color: line,
            major_tick_line_color: line, minor_tick_line_color: null });
        if ("grid_line_color" in part) part.setv({ grid_line_color: line });
      }
    }
  }

  // The two charts over a step show the same part of it.
  function show(start, end) {
    const range = figures.timeline.x_range, [low, high] = range.bounds;
    const width = Math.min(Math.max(end - start, range.min_interval), high - low);
    const from = Math.min(Math.max(start, low), high - width);
    for (const name of ["timeline", "memory"]) figures[name].x_range.setv({ start: from, end: from + width });
  }

  function move(how) {
    const { start, end } = figures.timeline.x_range, width = end - start;
    if (how === "in") show(start + width / 4, end - width / 4);
    if (how === "out") show(start - width / 2, end + width / 2);
    if (how === "earlier") show(start - width / 4, end - width / 4);
    if (how === "later") show(start + width / 4, end + width / 4);
    if (how === "all") show(...figures.timeline.x_range.bounds);
  }

  const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "earlier", ArrowRight: "later", Home: "all", 0: "all" };

  // A legend's button hides and shows its part of a figure.
  function toggle(button) {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    figures[button.dataset.figure].renderers[button.dataset.renderer].visible = shown;
  }

  function write(details) {
    const name = details.dataset.rows, table = details.querySelector("tbody");
    if (table.rows.length) return;
    const rows = [];
    for (const renderer of figures[name].renderers) {
      const data = renderer.data_source.data;
      const columns = details.dataset.columns.split(" ").map((column) => data[column] ?? data.get(column));
      const left = data.left ?? data.get("left");
      for (let at = 0; at < left.length; at++) rows.push([left[at], columns.map((column) => column[at])]);
    }
    rows.sort((one, other) => one[0] - other[0]);
    for (const [, cells] of rows) {
      const row = table.insertRow();
      for (const cell of cells) row.insertCell().textContent = cell;
    }
  }

  async function draw() {
    for (const [name, item] of Object.entries(items)) {
      const views = await Bokeh.embed.embed_item(item, `figure-${name}`);
      figures[name] = views.roots[0].model;
    }
    colour(dark.matches);
    dark.addEventListener("change", () => colour(dark.matches));
    addEventListener("beforeprint", () => colour(false));
    addEventListener("afterprint", () => colour(dark.matches));
    for (const [one, other] of [["timeline", "memory"], ["memory", "timeline"]]) {
      const range = figures[one].x_range;
      range.change.connect(() => figures[other].x_range.setv({ start: range.start, end: range.end }));
    }
    for (const button of document.querySelectorAll("button[data-move]"))
      button.addEventListener("click", () => move(button.dataset.move));
    for (const button of document.querySelectorAll("button[data-renderer]"))
      button.addEventListener("click", () => toggle(button));
    for (const place of document.querySelectorAll("[data-keys]"))
      place.addEventListener("keydown", (event) => {
        if (event.target !== place || event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
        event.preventDefault();
        move(keys[event.key]);
      });
    for (const details of document.querySelectorAll("details[data-rows]"))
      details.addEventListener("toggle", () => details.open && write(details));
    document.documentElement.dataset.readyMs = Math.round(performance.now());
  }

  draw();
})();
