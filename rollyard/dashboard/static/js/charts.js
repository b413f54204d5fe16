// The charts of the overview: each function gives what `Chart` draws, or null where there is nothing to draw.

import { colourOf, ordered } from "./activities.js";
import { axis, legend, tip } from "./chart.js";
import { count, moment, NONE, number, percent, plain, rate, reward, seconds, short } from "./format.js";

const MOST = 400; // columns of a chart of phases: more steps than that are taken together

/** Mean reward of each step, with one standard deviation to both sides, as far as there are rewards; means of rewards by name where there are several. */
export function rewardCurve(run, colour) {
  const { steps } = run;
  if (!steps.length) return null;
  const at = steps.column("step");
  const mean = steps.column("reward_mean");
  const std = steps.column("reward_std");
  const [least, most] = [steps.column("reward_min"), steps.column("reward_max")];
  const known = mean.filter((value) => value !== null);
  if (!known.length) return null; // no step has a verdict, or rewards are not modelled
  const spread = (of) => mean.map((value, step) => (value === null || std[step] === null ? null : of(value, std[step], step)));
  const lower = spread((value, off, step) => Math.max(value - off, least[step] ?? -Infinity)); // no reward lies beyond
  const upper = spread((value, off, step) => Math.min(value + off, most[step] ?? Infinity));
  const width = lower.map((value, step) => (value === null ? null : upper[step] - value));
  const parts = steps.names.filter((name) => /^reward\/.+\/mean$/.test(name)).map((name) => name.slice(7, -5));
  const named = parts.length > 1 ? parts : [];
  const hues = ["a-generate", "a-sync", "a-eval", "a-score", "a-checkpoint", "a-restart"];
  const line = (name, data, hue, rest = {}) => ({ name, type: "line", data: pairs(at, data), symbol: at.length > 1 ? "none" : "circle", color: hue, ...rest });
  const band = (name, data, rest) => ({ ...line(name, data, "transparent"), stack: "spread", stackStrategy: "all", silent: true, lineStyle: { opacity: 0 }, ...rest });
  return {
    label: `Reward by step: ${reward(known[0])} at first, ${reward(known.at(-1))} now, over ${count(steps.length)} steps`,
    table: {
      columns: [{ name: "step" }, { name: "reward (mean)" }, { name: "std" }, ...named.map((name) => ({ name }))],
      rows: steps.rows.map((row) => [count(row.step), reward(row.reward_mean), reward(row.reward_std), ...named.map((name) => reward(row[`reward/${name}/mean`]))]),
    },
    option: {
      ...(named.length ? { legend: legend(colour, ["mean", ...named]), grid: topped } : {}),
      tooltip: tip(colour, ([{ dataIndex: index }]) => [`step ${count(at[index])}`, [
        [colour("accent"), "mean", reward(mean[index])], [colour("band"), "std", reward(std[index])],
        ...named.map((name, place) => [colour(hues[place % hues.length]), name, reward(steps.rows[index][`reward/${name}/mean`])]),
      ]]),
      xAxis: stepAxis(colour, at),
      yAxis: axis(colour, { type: "value", scale: true, splitNumber: 4, axisLabel: { formatter: (value) => String(+value.toFixed(6)) } }),
      series: [
        band("lower", lower, {}),
        band("std", width, { areaStyle: { color: colour("band"), opacity: 1 } }),
        ...named.map((name, place) => line(name, steps.column(`reward/${name}/mean`), colour(hues[place % hues.length]), { lineStyle: { width: 1 } })),
        line("mean", mean, colour("accent"), { lineStyle: { width: 2 }, z: 5 }),
      ],
    },
  };
}

/** Tokens a second of generation, step by step. */
export function tokenRate(run, colour) {
  const { steps } = run;
  if (!steps.length) return null;
  const at = steps.column("step");
  const speed = steps.column("tokens_per_s");
  return {
    label: `Tokens a second of generation by step: ${rate(speed.at(-1) ?? null)} in the last of ${count(steps.length)} steps`,
    table: {
      columns: [{ name: "step" }, { name: "tok/s" }, { name: "tokens" }, { name: "generating" }, { name: "step took" }],
      rows: steps.rows.map((row) => [count(row.step), count(number(row.tokens_per_s)), count(row.tokens), seconds(row.generating_s), seconds(row.seconds)]),
    },
    option: {
      tooltip: tip(colour, ([{ dataIndex: index }]) => [`step ${count(at[index])}`, [
        [colour("a-generate"), "speed", speed[index] === null ? "nothing was generated" : rate(speed[index])], [null, "tokens", count(steps.rows[index].tokens)],
        [null, "generating", seconds(steps.rows[index].generating_s)], [null, "step took", seconds(steps.rows[index].seconds)],
      ]]),
      xAxis: stepAxis(colour, at),
      yAxis: axis(colour, { type: "value", min: 0, axisLabel: { formatter: short } }),
      series: [{ name: "tok/s", type: "line", data: pairs(at, speed), symbol: at.length > 1 ? "none" : "circle", color: colour("a-generate"),
        lineStyle: { width: 2 }, areaStyle: { color: colour("a-generate"), opacity: 0.12 } }],
    },
  };
}

/** Which share of each step every phase took. Of many steps some are taken together. */
export function phaseShares(run, colour) {
  const { steps } = run;
  const names = ordered(steps.names.filter((name) => /^phase\/.+_s$/.test(name)).map((name) => name.slice(6, -2)));
  if (!steps.length || !names.length) return null;
  const bins = binned(steps.rows, names);
  const used = names.filter((name) => bins.some((bin) => bin.parts[name] > 0));
  const share = (bin, name) => (bin.seconds ? bin.parts[name] / bin.seconds : 0);
  return {
    label: `Share of each phase by step, over ${count(steps.length)} steps`,
    table: {
      columns: [{ name: "step" }, { name: "took" }, ...used.map((name) => ({ name }))],
      rows: bins.map((bin) => [bin.name, seconds(bin.seconds), ...used.map((name) => percent(share(bin, name)))]),
    },
    option: {
      legend: legend(colour, used),
      grid: topped,
      tooltip: tip(colour, ([{ dataIndex: index }]) => [`step ${bins[index].name}: ${seconds(bins[index].seconds)}`, used
        .filter((name) => bins[index].parts[name] > 0)
        .map((name) => [colour(colourOf(name)), name, `${percent(share(bins[index], name))}, ${seconds(bins[index].parts[name])}`])],
      { axisPointer: { type: "shadow" } }),
      xAxis: axis(colour, { type: "category", data: bins.map((bin) => bin.name) }),
      yAxis: axis(colour, { type: "value", min: 0, max: 1, axisLabel: { formatter: (value) => `${Math.round(value * 100)} %` } }),
      series: used.map((name) => ({ name, type: "bar", stack: "phases", barCategoryGap: bins.length > 60 ? 0 : "18%", color: colour(colourOf(name)),
        data: bins.map((bin) => share(bin, name)) })),
    },
  };
}

function binned(rows, names) {
  const each = Math.ceil(rows.length / MOST);
  const bins = [];
  for (let at = 0; at < rows.length; at += each) {
    const some = rows.slice(at, at + each);
    const sum = (name) => some.reduce((whole, row) => whole + (number(row[name]) ?? 0), 0);
    const name = some.length > 1 ? `${some[0].step}–${some.at(-1).step}` : String(some[0].step);
    bins.push({ name, seconds: sum("seconds"), parts: Object.fromEntries(names.map((phase) => [phase, sum(`phase/${phase}_s`)])) });
  }
  return bins;
}

/** Bars between edges. `what` is said of a value: "tokens". */
export function histogram(found, colour, { what, of, hue = "a-generate", name = between }) {
  if (!found || !found.counts.some((bin) => bin > 0)) return null;
  const { edges, counts } = found;
  const whole = counts.reduce((sum, bin) => sum + bin, 0);
  return {
    label: `Histogram of ${what} of ${count(whole)} ${of}`,
    table: {
      columns: [{ name: what }, { name: of }, { name: "share" }],
      rows: counts.map((bin, at) => [name(edges, at), count(bin), percent(bin / whole)]),
    },
    option: bars(colour, { names: counts.map((_, at) => name(edges, at)), values: counts, hue, whole, of, what }),
  };
}

/** Whole numbers that a bar holds. */
function between(edges, at) {
  return edges[at + 1] - edges[at] > 1 ? `${count(edges[at])}–${count(edges[at + 1] - 1)}` : count(edges[at]);
}

/** The midst of a bar. */
export function midst(edges, at) {
  return plain((edges[at] + edges[at + 1]) / 2);
}

/** Trained tokens by how many versions they were behind. */
export function staleness(found, colour) {
  if (!found || !found.tokens.some((tokens) => tokens > 0)) return null;
  const { lags, tokens } = found;
  const whole = tokens.reduce((sum, some) => sum + some, 0);
  return {
    label: `Trained tokens by staleness: ${lags.map((lag, at) => `${percent(tokens[at] / whole)} at lag ${lag}`).join(", ")}`,
    table: {
      columns: [{ name: "versions behind" }, { name: "tokens" }, { name: "share" }],
      rows: lags.map((lag, at) => [count(lag), count(tokens[at]), percent(tokens[at] / whole)]),
    },
    option: bars(colour, { names: lags.map(count), values: tokens, hue: "a-sync", whole, of: "tokens", what: "versions behind" }),
  };
}

function bars(colour, { names, values, hue, whole, of, what }) {
  return {
    tooltip: tip(colour, ([{ dataIndex: at }]) => [`${names[at]} ${what}`, [[colour(hue), of, count(values[at])], [null, "share", percent(values[at] / whole)]]],
      { axisPointer: { type: "shadow" } }),
    xAxis: axis(colour, { type: "category", data: names, axisLabel: { hideOverlap: true } }),
    yAxis: axis(colour, { type: "value", min: 0, minInterval: 1, axisLabel: { formatter: short } }),
    series: [{ type: "bar", data: values, color: colour(hue), barCategoryGap: values.length > 4 ? "8%" : "40%", barMaxWidth: 60 }],
  };
}

/** Slots that hold a request and requests that wait, from one second of the timeline to another; `grid` is that of the lanes above. */
export function load(slots, [from, until], grid, colour) {
  if (!slots.length) return null;
  const points = []; // each lasts until the next; between two lives there is none
  for (const [begin, end, busy, queue] of slots) {
    if (points.length && points.at(-1).end !== begin) points.push({ at: points.at(-1).end / 1e9, busy: null, queue: null });
    points.push({ at: begin / 1e9, end, busy, queue });
  }
  const last = points.at(-1);
  points.push({ ...last, at: last.end / 1e9 });
  const step = (until - from) / 100;
  const line = (name, value, hue, rest) => ({ name, type: "line", step: "end", symbol: "none", color: colour(hue), data: points.map((point) => [point.at, value(point)]), lineStyle: { width: 1.5 }, ...rest });
  return {
    label: `Slots busy ${percent(last.busy)} and ${plain(last.queue)} requests waiting at ${moment(last.at, step)}`,
    table: {
      columns: [{ name: "from" }, { name: "until" }, { name: "slots busy" }, { name: "waiting requests" }],
      rows: slots.map(([begin, end, busy, queue]) => [moment(begin / 1e9, step), moment(end / 1e9, step), percent(busy), plain(queue)]),
    },
    option: {
      legend: legend(colour, ["slots busy", "waiting requests"]),
      grid: { ...grid, top: 28, bottom: 22 },
      tooltip: tip(colour, ([{ dataIndex: at }]) => [moment(points[at].at, step), [
        [colour("a-train"), "slots busy", percent(points[at].busy)], [colour("a-restart"), "waiting requests", points[at].queue === null ? NONE : plain(points[at].queue)],
      ]]),
      xAxis: axis(colour, { type: "value", min: from, max: until, grid: false, axisLabel: { formatter: (value) => moment(value, (until - from) / 8), hideOverlap: true, alignMinLabel: "left", alignMaxLabel: "right" } }),
      yAxis: [
        axis(colour, { type: "value", min: 0, max: 1, interval: 0.5, axisLabel: { formatter: (value) => `${Math.round(value * 100)} %` } }),
        axis(colour, { type: "value", min: 0, minInterval: 1, splitNumber: 2, grid: false, axisLabel: { formatter: short } }),
      ],
      series: [
        line("slots busy", (point) => point.busy, "a-train", { areaStyle: { color: colour("a-train"), opacity: 0.12 } }),
        line("waiting requests", (point) => point.queue, "a-restart", { yAxisIndex: 1 }),
      ],
    },
  };
}

const topped = { left: 8, right: 12, top: 28, bottom: 6, containLabel: true };

function pairs(at, values) {
  return at.map((step, index) => [step, values[index]]);
}

function stepAxis(colour, at) {
  return axis(colour, { type: "value", min: at[0] ?? 0, max: Math.max(at.at(-1) ?? 1, (at[0] ?? 0) + 1), minInterval: 1, grid: false, axisLabel: { formatter: count, hideOverlap: true } });
}
