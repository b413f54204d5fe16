// What keys do, in one place, and the page that says so.

import { byId, fill, h } from "./dom.js";

const HELP = [
  ["1 – 5", "overview, timeline, rollouts, groups, config"], ["j  k  or  ↓  ↑", "next and previous rollout or group of a list"], ["]  [", "next and previous page of a list"],
  ["/", "search"], ["Esc", "leave the search; close what is open"], ["+  −  0", "timeline: closer, farther, the whole run"], ["←  →", "timeline: earlier, later; in a completion: the token before, after"],
  ["Ctrl + wheel, drag", "timeline: zoom, move"], ["t", "colours: as the system, light, dark"], ["r", "read all again"], ["?", "this page"],
];

/** Listens. `lookup(key)` gives what a key does now, or nothing. */
export function startKeys(lookup) {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
    const writing = event.target.matches?.("input, select, textarea");
    if (writing && event.key !== "Escape") return;
    const act = lookup(event.key);
    if (!act) return;
    event.preventDefault();
    act();
  });
  const dialog = byId("help");
  fill(dialog, h("h2", { id: "help-title" }, "Keyboard"), h("dl", { class: "facts" }, HELP.map(([keys, what]) => h("div", {}, h("dt", {}, h("kbd", {}, keys)), h("dd", {}, what)))),
    h("button", { type: "button", onclick: () => dialog.close() }, "close"));
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  byId("help-button").addEventListener("click", showHelp);
}

export function showHelp() {
  byId("help").showModal();
}
