// Colours: as the system has them, unless the switch says otherwise. The stylesheet has all of them.

import { byId } from "./dom.js";

const CHOICES = { auto: "◐ auto", light: "○ light", dark: "● dark" };
const KEPT = "rollyard-theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

/** Calls back whenever colours changed. Returns what ends that. */
export function onTheme(changed) {
  listeners.add(changed);
  return () => listeners.delete(changed);
}

export function startTheme() {
  set(kept());
  byId("theme").addEventListener("click", nextTheme);
  system.addEventListener("change", tell);
}

export function nextTheme() {
  const names = Object.keys(CHOICES);
  const name = names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length];
  try {
    localStorage.setItem(KEPT, name);
  } catch {
    // A browser that keeps nothing: the choice holds for this page.
  }
  set(name);
}

function kept() {
  try {
    const name = localStorage.getItem(KEPT);
    return name in CHOICES ? name : "auto";
  } catch {
    return "auto";
  }
}

function set(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = CHOICES[name];
  byId("theme").setAttribute("aria-label", `Colours: ${name}`);
  tell();
}

function tell() {
  listeners.forEach((changed) => changed());
}

/** The colours of the stylesheet that charts need, as they are now: `palette()("text")` is that of `--text`. */
export function palette() {
  const probe = document.createElement("i");
  probe.hidden = true;
  document.body.append(probe);
  const found = new Map();
  return (name) => {
    if (!found.has(name)) {
      if (!probe.isConnected) document.body.append(probe);
      probe.style.color = `var(--${name})`;
      found.set(name, getComputedStyle(probe).color);
      probe.remove();
    }
    return found.get(name);
  };
}
