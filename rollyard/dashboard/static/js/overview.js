// The run at a glance: its figures, what devices do, and how reward, speed, lengths and staleness went.

import { colourOf, ordered } from "./activities.js";
import { newest, seldom } from "./api.js";
import { Chart, dot, panel } from "./chart.js";
import { histogram, midst, phaseShares, rewardCurve, staleness, tokenRate } from "./charts.js";
import { fill, grid, h } from "./dom.js";
import { clock, count, NONE, number, percent, rate, reward, seconds, short } from "./format.js";
import { timelineKeys } from "./lanes.js";
import { busy } from "./run.js";
import { palette } from "./theme.js";
import { Timeline } from "./timeline.js";

const LANES = 12;
const HISTOGRAMS_MS = 3000; // between two looks
const STEPS_MS = 400; // between two drawings, however many steps there are

/** The view. */
export class Overview {
  #run;
  #histograms = null;
  #ask = newest();
  #look = seldom(HISTOGRAMS_MS, () => this.#load());
  #draw = seldom(STEPS_MS, () => this.#curves());

  constructor(run) {
    this.#run = run;
    this.tiles = h("section", { class: "tiles", "aria-label": "Figures" });
    this.timeline = new Timeline(run, { lanes: LANES });
    const chart = (title, draw, rest) => new Chart(title, (colour) => draw(run, colour), rest);
    const drawn = (title, name, draw, rest) => new Chart(title, (colour) => draw(this.#histograms, colour), { name, ...rest });
    this.curves = [
      chart("Reward", rewardCurve, { unit: "mean of each step, ± one standard deviation", name: "reward" }),
      chart("Tokens per second", tokenRate, { unit: "tok/s while engines generate, by step", name: "tokens" }),
    ];
    this.shares = chart("Phases", phaseShares, { unit: "share of each step's wall time", name: "phases" });
    this.engines = panel("Engines", "now", "engines");
    this.bars = [
      drawn("Lengths", "lengths", (found, colour) => histogram(found?.lengths, colour, { what: "tokens", of: "completions" }), { unit: "tokens of a completion" }),
      drawn("Staleness", "staleness", (found, colour) => staleness(found?.staleness, colour), { unit: "trained tokens, by versions behind" }),
      drawn("Rewards", "rewards", (found, colour) => histogram(found?.rewards, colour, { what: "reward", of: "rollouts", hue: "accent", name: midst }), { unit: "of judged rollouts" }),
    ];
    this.phases = panel("Where the time went", "seconds of the run, by phase", "phase-seconds");
    this.drops = panel("Drops", "prompts that were not trained on, by reason", "drops");
    this.forecast = panel("Forecast and what happened", "of a step", "forecast");
    this.trouble = panel("Trouble", "the newest last", "trouble");
    this.element = h("div", { class: "view overview" }, this.tiles, this.timeline.element, this.engines.element,
      h("div", { class: "cards half" }, this.curves.map((each) => each.element), this.shares.element, this.phases.element),
      h("div", { class: "cards third" }, this.bars.map((each) => each.element)),
      h("div", { class: "cards half" }, this.drops.element, this.forecast.element), this.trouble.element);
    this.on = { overview: () => this.#figures(), live: () => this.#lives(), steps: () => this.#draw(), changed: () => this.#changed() };
    this.keys = timelineKeys(this.timeline);
  }

  /** It is on the page. */
  shown() {
    this.#figures();
    this.#curves();
    this.#engines();
    this.bars.forEach((each) => each.redraw());
    this.#look();
  }

  dispose() {
    [...this.curves, this.shares, ...this.bars, this.timeline].forEach((each) => each.dispose());
  }

  #lives() {
    this.#tiles();
    this.#engines();
    this.timeline.update();
  }

  /** What is known only while a run goes on. */
  #engines() {
    const { live } = this.#run;
    this.engines.element.hidden = !live;
    if (live) fill(this.engines.body, enginesNow(live));
  }

  #changed() {
    this.timeline.update();
    this.#look();
  }

  #curves() {
    [...this.curves, this.shares].forEach((each) => this.#fill(each));
    this.#tiles();
  }

  #figures() {
    this.#tiles();
    const { overview } = this.#run;
    if (!overview) return;
    fill(this.phases.body, phaseSeconds({ ...overview, ...this.#run.live }));
    fill(this.drops.body, dropsByReason({ ...overview, ...this.#run.live?.prompts }));
    fill(this.forecast.body, foretold(overview));
    const trouble = troubles(overview);
    this.trouble.element.hidden = !trouble;
    if (trouble) fill(this.trouble.body, trouble);
  }

  #fill(chart) {
    if (this.#run.overview) chart.empty = this.#run.going ? "Nothing yet." : "Nothing to show.";
    chart.redraw();
  }

  async #load() {
    try {
      const found = await this.#ask("histograms");
      this.#run.heard(null);
      if (!found) return;
      this.#histograms = found;
      this.bars.forEach((each) => this.#fill(each));
    } catch (error) {
      this.#run.heard(error);
    }
  }

  #tiles() {
    const { overview, live, steps } = this.#run;
    if (!overview) return;
    const now = { ...overview, ...live, ...live?.prompts };
    const curve = steps.column("reward_mean").filter((value) => value !== null);
    const first = overview.reward.first ?? curve[0];
    const last = curve.at(-1) ?? overview.reward.last;
    const dropped = Object.values(now.dropped).reduce((sum, some) => sum + some, 0);
    fill(this.tiles,
      tile("reward", "Reward", reward(number(last)), `from ${reward(number(first))}`),
      tile("eval", "Held-out reward", reward(number(now.eval.last)), `from ${reward(number(now.eval.first))}`),
      tile("speed", "Generation", rate(number(now.tokens_per_s)), "while generating"),
      tile("tokens", "Tokens", short(number(now.tokens)), "sampled for rollouts"),
      live ? tile("slots", "Slots busy", percent(busy(live)), `${percent(number(now.slots_busy))} so far`) : tile("slots", "Slots busy", percent(number(now.slots_busy)), "mean of the run"),
      tile("queue", "Queue", live ? count(live.queue) : NONE, live ? `${count(live.live)} groups under way` : "no request waits"),
      tile("trained", "Prompts trained", count(now.trained), `${count(dropped)} dropped`),
      tile("wall", "Wall time", seconds(number(now.wall_s)), overview.lives.length > 1 ? `of life ${overview.lives.length}` : ""),
    );
  }
}

function tile(name, title, value, beside) {
  return h("div", { class: "tile", "data-figure": name }, h("span", { class: "name" }, title), h("span", { class: "value" }, value), h("span", { class: "dim" }, beside));
}

function enginesNow({ engines, states, lost }) {
  const named = (name) => states[name] ?? "";
  return [grid("Engines", [{ name: "engine", text: true }, { name: "slots" }, { name: "busy" }, { name: "version" }, { name: "state", text: true }],
    engines.map((engine) => [engine.name, `${count(engine.running)} / ${count(engine.slots)}`, percent(engine.slots ? engine.running / engine.slots : null), engine.version ?? NONE,
      `${named(engine.name)}${engine.held ? " (gets no request now)" : ""}`])),
  lost.length > 0 && h("p", { class: "dropped" }, `Lost: ${lost.join("; ")}`)];
}

/** What went wrong besides what was dropped, or null. */
function troubles({ lost, problems, unreadable }) {
  const lines = [
    ...[...problems].reverse().map(([at, engine, event, text]) => [clock(at), `${engine}: ${event}`, text]),
    ...lost.map((what) => ["", "lost", what]), ...Object.entries(unreadable).map(([file, why]) => ["", file, why]),
  ];
  return lines.length ? grid("Trouble", [{ name: "when", text: true }, { name: "what", text: true }, { name: "", text: true }], lines) : null;
}

function phaseSeconds({ phases, canary_s: canary }) {
  const whole = Object.values(phases).reduce((sum, spent) => sum + spent, 0);
  if (!whole) return h("p", { class: "empty" }, "Nothing yet.");
  const colour = palette();
  const names = ordered(Object.keys(phases)).filter((name) => phases[name] > 0);
  return [listed("Seconds by phase", names.map((name) => [[dot(colour(colourOf(name))), name], seconds(phases[name]), phases[name] / whole])),
    canary > 0 && h("p", { class: "dim" }, `Of sync, ${seconds(canary)} were the canary, once at the start: every tensor is moved, and engines have to follow.`)];
}

function dropsByReason({ dropped, admitted }) {
  const reasons = Object.entries(dropped).sort((one, other) => other[1] - one[1]);
  if (!reasons.length) return h("p", { class: "empty" }, "No prompt was dropped.");
  return listed("Drops by reason", reasons.map(([reason, some]) => [reason, count(some), admitted ? some / admitted : 0]));
}

/** Names, each with a number and its share of the whole as a bar. */
function listed(label, rows) {
  return h("table", { class: "grid shares", "aria-label": label }, h("tbody", {}, rows.map(([name, value, share]) => h("tr", {},
    h("th", { scope: "row" }, name), h("td", { class: "number" }, value), h("td", { class: "number dim" }, percent(share)),
    h("td", { class: "meter" }, h("meter", { min: 0, max: 1, value: share, "aria-hidden": "true" }))))));
}

function foretold({ forecast, forecast_of: source }) {
  if (!forecast.length) return h("p", { class: "empty" }, "The config has no forecast; rollyard plan writes one.");
  const shown = ({ name }, value) => (name.endsWith("_busy") ? percent(value) : name === "trained_tokens_per_s" ? rate(value) : seconds(value));
  const off = ({ ratio }) => (ratio > 1.25 || ratio < 0.8 ? "off" : "near");
  const told = forecast.filter((row) => row.forecast || row.measured);
  return [grid("Forecast and measured", [{ name: "", text: true }, { name: "forecast" }, { name: "measured" }, { name: "ratio" }],
    told.map((row) => [row.name.replace(/_per_s$/, "/s").replace(/_s$/, "").replaceAll("_", " "), shown(row, row.forecast), shown(row, row.measured),
      row.ratio === null ? NONE : h("span", { class: off(row) }, row.ratio.toFixed(2))])),
  source && h("p", { class: "dim" }, `The forecast is of ${source}.`)];
}
