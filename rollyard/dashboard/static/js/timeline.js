// What every device did: a lane a device, coloured by activity, zoomed with wheel, drag, keys, buttons and the bar below. Under
// it, over the same time, how full the engines were.

import { ACTIVITIES, colourOf } from "./activities.js";
import { newest, seldom } from "./api.js";
import * as echarts from "../vendor/echarts/echarts.esm.min.js";
import { axis, Chart, dot, tip } from "./chart.js";
import { load } from "./charts.js";
import { fill, h } from "./dom.js";
import { count, moment, percent, seconds } from "./format.js";

const TOP = 18; // pixels for the numbers of steps
const AROUND = TOP + 24 + 26; // pixels above and below all lanes: seconds, and the bar
const CLOSEST_S = 1e-5; // what the whole width shows at least
const ZOOM = 1.6;
const NEAR = 10; // pixels between the ends of two steps, below which none are drawn

/** The panels of the timeline. `lanes` of it, of `height` pixels, are seen at once; more are reached by the bar at its right. */
export class Timeline {
  #run;
  #ask = newest();
  #from = 0; // seconds that are shown
  #until = null; // null: to the end, also when that moves
  #end = CLOSEST_S; // of the run
  #found = null;
  #chosen = false; // what is shown was
  #setup = 0; // seconds at the start that were left out at first
  #heeded = false; // the chart is listened to
  #lanes;
  #height;
  #soon = seldom(200, () => this.#read());

  constructor(run, { lanes, height = 20 }) {
    this.#run = run;
    this.#lanes = lanes;
    this.#height = height;
    const button = (label, text, act) => h("button", { type: "button", class: "quiet", "aria-label": label, title: label, onclick: act }, text);
    this.where = h("span", { class: "window" });
    const tools = [this.where, h("span", { class: "buttons" },
      button("Zoom out (−)", "−", () => this.zoom(ZOOM)), button("Zoom in (+)", "+", () => this.zoom(1 / ZOOM)),
      button("Earlier (←)", "‹", () => this.pan(-0.25)), button("Later (→)", "›", () => this.pan(0.25)), button("The whole run (0)", "all", () => this.all()))];
    this.panel = new Chart("Devices", (colour) => this.#draw(colour), { name: "timeline", tools, height: "lanes" });
    this.key = h("p", { class: "key" });
    this.panel.element.append(this.key);
    this.load = new Chart("Slots and queue", (colour) => this.#load(colour), { unit: "share of all slots, and requests that wait for one: means", name: "load", height: "low" });
    this.element = h("div", { class: "cards" }, this.panel.element, this.load.element);
    this.update();
  }

  /** There may be more to show. */
  update() {
    this.#soon();
  }

  dispose() {
    this.panel.dispose();
    this.load.dispose();
  }

  /** Shows `factor` times as much time. */
  zoom(factor) {
    const [from, until] = this.#shown();
    const half = Math.max((until - from) * factor, CLOSEST_S) / 2;
    this.#look((from + until) / 2 - half, (from + until) / 2 + half);
  }

  /** Moves by a share of what is shown. */
  pan(share) {
    const [from, until] = this.#shown();
    const by = Math.min(Math.max((until - from) * share, -from), this.#end - until);
    this.#look(from + by, until + by);
  }

  all() {
    this.#look(0, this.#end);
  }

  #shown() {
    return [this.#from, Math.max(this.#until ?? this.#end, this.#from + CLOSEST_S)];
  }

  #look(from, until) {
    this.#keep(from, until);
    this.#redraw();
    this.#soon();
  }

  #keep(from, until) {
    this.#from = Math.max(from, 0);
    this.#until = until >= this.#end ? null : until;
    this.#chosen = true;
  }

  /** The chart was zoomed by hand. */
  #zoomed() {
    const { startValue, endValue } = this.panel.chart.getOption().dataZoom[0];
    this.#keep(startValue, endValue);
    this.#say();
    this.load.redraw();
    this.#soon();
  }

  async #read() {
    const width = Math.max(200, Math.round(this.panel.canvas.clientWidth || this.element.clientWidth || 800));
    const ns = (at) => at && Math.round(at * 1e9);
    try {
      const found = await this.#ask("timeline", { from: ns(this.#from), to: ns(this.#until), width });
      this.#run.heard(null);
      if (found) this.#take(found);
    } catch (error) {
      this.#run.heard(error);
    }
  }

  #take(found) {
    this.panel.empty = found.why || "No device has told yet what it did.";
    this.load.empty = found.why || "Nobody has told yet.";
    this.#found = found;
    this.#end = Math.max(found.whole_ns / 1e9, CLOSEST_S);
    if (!this.#chosen && this.#skipSetup(found.lanes)) return;
    this.panel.canvas.style.height = `${Math.min(found.lanes.length, this.#lanes) * this.#height + AROUND}px`;
    this.#redraw();
    if (this.panel.chart && !this.#heeded) this.panel.chart.on("datazoom", () => this.#zoomed());
    this.#heeded = Boolean(this.panel.chart);
  }

  /** A long setup would leave little room for the rest: what is shown first begins with its end. */
  #skipSetup(lanes) {
    const ends = lanes.filter((lane) => lane.role !== "driver").map((lane) => Math.max(0, ...lane.spans.filter((span) => span[2] === "setup" && span[0] === 0).map((span) => span[1] / 1e9)));
    const setup = Math.min(...ends);
    if (!Number.isFinite(setup) || setup < this.#end / 10 || setup >= this.#end) return false;
    this.#setup = setup;
    this.#look(setup, this.#end);
    return true;
  }

  #redraw() {
    this.panel.redraw();
    this.load.redraw();
  }

  #load(colour) {
    return load(this.#found?.slots ?? [], this.#shown(), this.#sides(), colour);
  }

  /** Pixels left and right of what is drawn: names of devices, numbers of requests. */
  #sides() {
    return { left: this.#narrow() ? 92 : 150, right: 44 };
  }

  #narrow() {
    return this.element.clientWidth < 600;
  }

  #say() {
    const [from, until] = this.#shown();
    const without = this.#setup && from >= this.#setup ? `, without the setup (${seconds(this.#setup)}): all shows it` : "";
    fill(this.where, `${moment(from, (until - from) / 10)} – ${moment(until, (until - from) / 10)} of ${seconds(this.#end)}${without}`);
    this.where.dataset.from = from;
    this.where.dataset.until = until;
  }

  #draw(colour) {
    const lanes = this.#found?.lanes ?? [];
    if (!lanes.length) return null;
    const used = ACTIVITIES.filter((activity) => lanes.some((lane) => lane.spans.some((span) => span[2] === activity)));
    fill(this.key, used.map((activity) => h("span", {}, dot(colour(colourOf(activity))), activity)), h("span", {}, dot(colour("track")), "waits"));
    this.#say();
    const [from, until] = this.#shown();
    const share = (lane, activity) => percent(spent(lane, activity, from * 1e9, until * 1e9) / ((until - from) * 1e9));
    return {
      label: `What ${count(lanes.length)} devices did, from ${seconds(from)} to ${seconds(until)} after the start`,
      table: {
        columns: [{ name: "device", text: true }, { name: "role", text: true }, ...used.map((name) => ({ name }))],
        rows: lanes.map((lane) => [lane.name, lane.role, ...used.map((activity) => share(lane, activity))]),
      },
      option: this.#option(colour, lanes, [from, until]),
    };
  }

  #option(colour, lanes, [from, until]) {
    const narrow = this.#narrow();
    const names = lanes.map((lane) => lane.name);
    const many = names.length > this.#lanes;
    const zoom = { filterMode: "none", startValue: from, endValue: until, minValueSpan: CLOSEST_S, xAxisIndex: 0 };
    const slider = { type: "slider", filterMode: "none", showDetail: false, brushSelect: false, borderColor: colour("line"), fillerColor: colour("band"),
      backgroundColor: "transparent", dataBackground: { lineStyle: { opacity: 0 }, areaStyle: { opacity: 0 } }, handleStyle: { color: colour("panel"), borderColor: colour("dim") },
      moveHandleStyle: { color: colour("dim"), opacity: 0.5 } };
    return {
      grid: { ...this.#sides(), top: TOP, bottom: AROUND - TOP },
      tooltip: tip(colour, ({ data }) => [names[data.value[0]], [
        [data.itemStyle.color, data.what ? `${data.activity}: ${data.what}` : data.activity, seconds(data.value[2] - data.value[1])],
        [null, "from", moment(data.value[1], (until - from) / 1000)], [null, "until", moment(data.value[2], (until - from) / 1000)],
      ]], { trigger: "item" }),
      dataZoom: [
        { type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: "shift", preventDefaultMouseMove: false, throttle: 30, ...zoom },
        { ...slider, ...zoom, bottom: 4, height: 16, throttle: 30 },
        ...(many ? [{ ...slider, yAxisIndex: 0, right: 4, width: 12, startValue: 0, endValue: this.#lanes - 1, zoomLock: true, handleSize: 0 }] : []),
      ],
      xAxis: axis(colour, { type: "value", min: 0, max: this.#end, splitNumber: narrow ? 3 : 8, interval: even((until - from) / (narrow ? 3 : 8)),
        axisLabel: { formatter: (value) => moment(value, (until - from) / 8), hideOverlap: true, alignMinLabel: "left", alignMaxLabel: "right" } }),
      yAxis: axis(colour, { type: "category", inverse: true, data: names,
        axisLabel: { color: colour("text"), width: narrow ? 84 : 140, overflow: "truncate", interval: 0 } }),
      series: [{ id: "spans", type: "custom", clip: true, encode: { x: [1, 2], y: 0 }, progressive: 0, renderItem: bar, data: this.#spans(colour, lanes) },
        this.#steps(colour, from, until)],
    };
  }

  #spans(colour, lanes) {
    const item = (lane, begin, end, activity, what, hue) => ({ value: [lane, begin, end], activity, what, itemStyle: { color: colour(hue) } });
    return lanes.flatMap((lane, at) => [
      item(at, 0, this.#end, "waits", "", "track"),
      ...lane.spans.map(([begin, end, activity, what]) => item(at, begin / 1e9, end / 1e9, activity, what, colourOf(activity))),
    ]);
  }

  /** The ends of steps and the beginnings of lives, as lines. */
  #steps(colour, from, until) {
    const inside = ([, at]) => at >= from && at <= until;
    const marks = (this.#found.marks ?? []).map(([step, at]) => [`${step}`, at / 1e9]).filter(inside);
    const lives = (this.#found.lives ?? []).map(([life, at]) => [`life ${life}`, at / 1e9]);
    const ends = marks.length > this.panel.canvas.clientWidth / NEAR ? [] : marks;
    const line = (type, width) => ({ color: colour("dim"), type, width, opacity: 0.7 });
    const label = (show) => ({ show, position: "start", rotate: 0, distance: 3, color: colour("dim"), fontSize: 10, formatter: ({ data }) => data.name });
    const lines = (shown, style, named) => shown.map(([name, at]) => ({ xAxis: at, name, lineStyle: style, label: label(named) }));
    return { id: "steps", type: "custom", renderItem: () => null, data: [], markLine: { silent: true, symbol: "none", animation: false,
      data: [...lines(ends, line("dotted", 1), marks.length <= 24), ...lines(lives, line("solid", 2), true)] } };
  }
}

/** Seconds between two marks of the axis, about `wanted`, where they are minutes and hours; null: tenths, as ever. */
function even(wanted) {
  return wanted < 8 ? null : ([10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200].find((step) => step >= wanted) ?? 86400 * Math.ceil(wanted / 86400));
}

/** Nanoseconds of an activity between two moments. */
function spent(lane, activity, from, until) {
  return lane.spans.reduce((sum, [begin, end, kind]) => sum + (kind === activity ? Math.max(Math.min(end, until) - Math.max(begin, from), 0) : 0), 0);
}

function bar(params, api) {
  const [left, middle] = api.coord([api.value(1), api.value(0)]);
  const [right] = api.coord([api.value(2), api.value(0)]);
  const height = Math.min(api.size([0, 1])[1] * 0.74, 22);
  const { x, y, width, height: whole } = params.coordSys;
  const shape = echarts.graphic.clipRectByRect({ x: left, y: middle - height / 2, width: Math.max(right - left, 0.6), height }, { x, y, width, height: whole });
  return shape && { type: "rect", shape, style: { fill: api.visual("color") } };
}
