// The timeline with room for many devices, and what those of each role did with their time.

import { ordered } from "./activities.js";
import { panel } from "./chart.js";
import { fill, grid, h } from "./dom.js";
import { many, NONE, percent } from "./format.js";
import { Timeline } from "./timeline.js";

const LANES = 40;
const LEAST = 0.0005; // shares below this are shown as none

/** The view. */
export class Lanes {
  constructor(run) {
    this.run = run;
    this.timeline = new Timeline(run, { lanes: LANES, height: 26 });
    this.roles = panel("By role", "share of the time of its devices, setup left out", "roles");
    this.element = h("div", { class: "view" }, this.timeline.element,
      h("p", { class: "hint dim" }, "Drag to move, Ctrl + wheel to zoom, or use the bar below the lanes, or the keys + − ← → 0. Dotted lines are the ends of steps, others the beginnings of lives. Where a lane is grey, its device waits."),
      this.roles.element);
    this.on = { live: () => this.timeline.update(), changed: () => this.timeline.update(), overview: () => this.shown() };
    this.keys = timelineKeys(this.timeline);
  }

  shown() {
    if (this.run.overview) fill(this.roles.body, byRole(this.run.overview));
  }

  dispose() {
    this.timeline.dispose();
  }
}

/** What keys do to a timeline. */
export function timelineKeys(timeline) {
  const keys = { "-": () => timeline.zoom(1.6), 0: () => timeline.all(), ArrowLeft: () => timeline.pan(-0.25), ArrowRight: () => timeline.pan(0.25) };
  return { ...keys, "+": () => timeline.zoom(1 / 1.6), "=": () => timeline.zoom(1 / 1.6) };
}

/** Roles that the same devices have are one column: such devices have the same numbers in each. */
function together(pools, work) {
  const found = new Map();
  for (const pool of pools) {
    const numbers = JSON.stringify([{ ...pool, role: "" }, work[pool.role]]);
    found.set(numbers, { ...pool, name: [found.get(numbers)?.name, pool.role].filter(Boolean).join(" + ") });
  }
  return [...found.values()];
}

function byRole({ pools: all, work }) {
  const pools = together(all, work);
  if (!pools.length) return h("p", { class: "empty" }, "Told at the end of a run.");
  const waits = [...new Set(pools.flatMap((pool) => Object.keys(pool.wait_share)))].filter((cause) => pools.some((pool) => pool.wait_share[cause] >= LEAST));
  const most = (cause) => Math.max(...pools.map((pool) => pool.wait_share[cause] ?? 0));
  const share = (value) => (value >= LEAST ? percent(value) : NONE);
  const did = ordered(new Set(Object.values(work).flatMap((spent) => Object.keys(spent)))).filter((name) => pools.some(({ role }) => work[role]?.[name] >= LEAST));
  return grid("By role", [{ name: "", text: true }, ...pools.map((pool) => ({ name: `${pool.name} (${many(pool.devices, "device")})` }))], [
    ["busy", ...pools.map((pool) => h("b", {}, percent(pool.busy_share)))],
    ...did.map((name) => [`busy with ${name}`, ...pools.map(({ role }) => share(work[role]?.[name]))]),
    ...waits.sort((one, other) => most(other) - most(one)).map((cause) => [cause === "unexplained" ? "waits, unexplained" : `waits for ${cause}`, ...pools.map((pool) => share(pool.wait_share[cause]))]),
  ]);
}
