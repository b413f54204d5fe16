// A panel with a chart in it, and the same numbers as a table.

import * as echarts from "../vendor/echarts/echarts.esm.min.js";
import { fill, grid, h } from "./dom.js";
import { count } from "./format.js";
import { onTheme, palette } from "./theme.js";

const MOST = 1000; // rows of a table

/**
 * A panel. `draw(colour)` gives what the chart is made of: `{ option, label, table: { columns, rows } }`, or null where there is
 * nothing to show yet. It is asked again whenever colours change or `redraw` is called.
 */
export class Chart {
  #draw;
  #chart = null;
  #seen;
  #ends;

  /**
   * @param {string} title
   * @param {Object} options  `unit` stands beside the title; `name` finds the panel in tests; `tools` are elements at the right; `height` is a class of the stylesheet.
   */
  constructor(title, draw, { unit = "", name = "", tools = [], height = "medium" } = {}) {
    this.#draw = draw;
    this.canvas = h("div", { class: `canvas ${height}`, role: "img", "aria-label": title });
    this.table = h("div", { class: "as-table", hidden: true, tabindex: "0", role: "region", "aria-label": `${title}, as a table` });
    this.empty = null; // what is said where there is nothing to show, once it was asked for
    this.none = h("p", { class: "empty" });
    this.switch = h("button", { type: "button", class: "quiet", "aria-pressed": "false", "aria-label": `${title}: as a table`,
      onclick: () => this.#turn() }, "table");
    this.element = h("figure", { class: "panel", "data-panel": name },
      h("figcaption", { class: "caption" }, titled(title, unit), h("span", { class: "side" }, tools, this.switch)),
      this.none, this.canvas, this.table);
    this.#seen = new ResizeObserver(() => this.#chart?.resize());
    this.#seen.observe(this.canvas);
    this.#ends = onTheme(() => this.redraw());
  }

  /** The chart itself, once something was drawn. */
  get chart() {
    return this.#chart;
  }

  redraw() {
    const colour = palette();
    const drawn = this.#draw(colour);
    const asTable = this.switch.getAttribute("aria-pressed") === "true";
    this.none.hidden = Boolean(drawn);
    this.none.textContent = this.empty ?? "Loading…";
    this.switch.hidden = !drawn;
    this.canvas.hidden = !drawn || asTable;
    this.table.hidden = !drawn || !asTable;
    if (!drawn) return;
    this.canvas.setAttribute("aria-label", drawn.label);
    if (asTable) fill(this.table, tabled(drawn));
    if (this.canvas.hidden) return;
    this.#chart ??= echarts.init(this.canvas, null, { renderer: "canvas" });
    this.#chart.setOption({ ...basics(colour), ...drawn.option }, { replaceMerge: ["series"] });
  }

  dispose() {
    this.#ends();
    this.#seen.disconnect();
    this.#chart?.dispose();
    this.#chart = null;
  }

  #turn() {
    this.switch.setAttribute("aria-pressed", String(this.switch.getAttribute("aria-pressed") !== "true"));
    this.redraw();
  }
}

/** The numbers as a table: the last of them, where they are very many. */
function tabled({ label, table: { columns, rows } }) {
  const left = rows.length - MOST;
  return [left > 0 && h("p", { class: "dim" }, `The first ${count(left)} rows are left out.`), grid(label, columns, left > 0 ? rows.slice(left) : rows)];
}

/** A panel without a chart; what is told goes into its `body`. */
export function panel(title, unit, name) {
  const body = h("div", { class: "body" });
  return { body, element: h("section", { class: "panel", "data-panel": name, "aria-label": title }, h("div", { class: "caption" }, titled(title, unit)), body) };
}

function titled(title, unit) {
  return h("span", { class: "titled" }, h("h2", {}, title), unit && h("span", { class: "unit" }, unit));
}

function basics(colour) {
  return {
    animation: false,
    textStyle: { fontFamily: "inherit", color: colour("text") },
    grid: { left: 8, right: 12, top: 12, bottom: 6, containLabel: true },
  };
}

/** Options of an axis in the page's colours. */
export function axis(colour, options = {}) {
  return {
    axisLine: { lineStyle: { color: colour("line") } },
    axisTick: { show: false },
    axisLabel: { color: colour("dim"), fontSize: 11, ...options.axisLabel },
    splitLine: { show: options.type !== "category" && options.grid !== false, lineStyle: { color: colour("line-soft") } },
    nameTextStyle: { color: colour("dim"), fontSize: 11 },
    ...Object.fromEntries(Object.entries(options).filter(([name]) => !["axisLabel", "grid"].includes(name))),
  };
}

/** Options of a tooltip whose content is made of elements. `tell(params)` gives a head and lines of `[colour, name, value]`. */
export function tip(colour, tell, options = {}) {
  return {
    trigger: "axis",
    confine: true,
    transitionDuration: 0,
    backgroundColor: colour("panel"),
    borderColor: colour("line"),
    padding: [6, 8],
    textStyle: { color: colour("text"), fontSize: 12 },
    axisPointer: { type: "line", lineStyle: { color: colour("dim"), type: "dashed" }, label: { show: false } },
    formatter: (params) => {
      const [head, lines] = tell(params);
      return h("div", { class: "tip" }, h("b", {}, head),
        lines.map(([swatch, name, value]) => h("div", {}, swatch && dot(swatch), h("span", {}, name), h("span", { class: "value" }, value))));
    },
    ...options,
  };
}

/** Options of a legend above a chart. */
export function legend(colour, data) {
  return {
    type: "scroll", top: 0, left: 0, right: 0, itemWidth: 10, itemHeight: 10, itemGap: 12, icon: "roundRect", data,
    textStyle: { color: colour("dim"), fontSize: 11 }, inactiveColor: colour("line"),
    pageTextStyle: { color: colour("dim") }, pageIconColor: colour("dim"), pageIconInactiveColor: colour("line"), pageIconSize: 10,
  };
}

/** A square of a colour. */
export function dot(swatch) {
  const element = h("i", { class: "dot", "aria-hidden": "true" });
  element.style.background = swatch;
  return element;
}
