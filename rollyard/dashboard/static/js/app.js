// The page: what stands above all views, which of them is shown, and what keys do.

import { byId, fill, h } from "./dom.js";
import { count, percent, seconds } from "./format.js";
import { Config } from "./config.js";
import { Groups } from "./groups.js";
import { showHelp, startKeys } from "./keys.js";
import { Overview } from "./overview.js";
import { go, here, to } from "./place.js";
import { Rollouts } from "./rollouts.js";
import { Run } from "./run.js";
import { nextTheme, startTheme } from "./theme.js";
import { Lanes } from "./lanes.js";

const VIEWS = { overview: Overview, timeline: Lanes, rollouts: Rollouts, groups: Groups, config: Config };
const run = new Run();
let name = "";
let view = null;

function show() {
  const wanted = here().view in VIEWS ? here().view : "overview";
  if (wanted !== name) {
    view?.dispose();
    name = wanted;
    view = new VIEWS[name](run);
    fill(byId("main"), view.element);
    scrollTo(0, 0);
    tabs();
  }
  view.shown();
}

function tabs() {
  fill(byId("tabs"), Object.keys(VIEWS).map((each, at) => h("a", { href: to(each), "aria-current": each === name && "page", title: `${each} (${at + 1})` }, each)));
  title();
}

function title() {
  const { overview } = run;
  document.title = overview ? `${overview.run} · ${name} · Rollyard` : "Rollyard";
}

/** What stands above all views. */
function head() {
  const { overview, live } = run;
  if (!overview) return;
  const now = { ...overview, ...live };
  fill(byId("run-name"), overview.run);
  const state = byId("run-state");
  fill(state, overview.state === "running" && live ? `running: ${live.activity || live.waiting}` : overview.state);
  state.dataset.state = overview.state;
  state.title = overview.cause ?? "";
  fill(byId("run-kind"), [overview.model, overview.placement, overview.engine, overview.transport].filter(Boolean).join(" · "));
  const [done, planned] = [now.step ?? overview.steps ?? 0, now.planned ?? 0];
  byId("run-progress").value = planned ? Math.min(done / planned, 1) : 0;
  fill(byId("run-steps"), `step ${count(done)}${planned ? ` of ${count(planned)}` : ""}`);
  fill(byId("run-eta"), overview.state === "running" ? (now.eta_s ? `${seconds(now.eta_s)} left` : planned ? percent(done / planned) : "") : (overview.cause ?? ""));
  title();
}

/** Whether what is shown is of now. */
function connection() {
  const { state, at } = run.connection;
  byId("connection").dataset.state = state;
  fill(byId("connection"), { connecting: "connecting…", live: "live", ended: "the run has ended", gone: "no server" }[state]);
  const since = at ? `What is shown is of ${new Date(at).toLocaleTimeString("sv-SE")}. ` : "";
  const said = state === "gone" ? `The server does not answer. ${since}The page goes on by itself once it is back.` : run.problem;
  byId("notice").hidden = !said;
  fill(byId("notice"), said);
}

startTheme();
startKeys((key) => view?.keys[key] ?? keys[key]);
const keys = Object.fromEntries(Object.keys(VIEWS).map((each, at) => [String(at + 1), () => go(each)]));
Object.assign(keys, { t: nextTheme, r: () => run.refresh(), "?": showHelp });

for (const what of ["overview", "steps", "live", "changed"]) {
  run.addEventListener(what, () => {
    if (what !== "changed") head();
    view?.on[what]?.();
  });
}
run.addEventListener("connection", connection);
addEventListener("hashchange", show);
connection();
show();
run.start();
