// The resolved options: each with its value, and where that comes from.

import { ask } from "./api.js";
import { fill, h } from "./dom.js";
import { count, literal, many } from "./format.js";
import { field } from "./listing.js";

/** The view. */
export class Config {
  #options = null;

  constructor(run) {
    this.run = run;
    this.form = h("form", { class: "filters", role: "search", "aria-label": "Filter options", onsubmit: (event) => event.preventDefault(), oninput: () => this.#draw() },
      field("search", "Search (/)", { type: "search", placeholder: "name, value or description" }),
      h("label", { class: "field check" }, h("input", { type: "checkbox", name: "given", checked: true }), h("span", {}, "only what is no default")));
    this.body = h("tbody", {});
    this.said = h("p", { class: "dim", role: "status" }, "Loading…");
    this.element = h("div", { class: "view" }, h("div", { class: "panel" }, this.form, this.said, h("table", { class: "rows options", "aria-label": "Resolved options" },
      h("thead", {}, h("tr", {}, ["option", "value", "from", "what it is"].map((name) => h("th", { scope: "col", class: "text" }, name)))), this.body)));
    this.on = {};
    this.keys = { "/": () => this.form.elements.search.focus() };
  }

  async shown() {
    if (this.#options) return;
    try {
      this.#options = await ask("config");
      this.run.heard(null);
      this.#draw();
    } catch (error) {
      this.run.heard(error);
      this.said.textContent = error.message;
    }
  }

  dispose() {}

  #draw() {
    const words = this.form.elements.search.value.toLowerCase();
    const given = this.form.elements.given.checked;
    const options = this.#options ?? [];
    const found = options.filter((option) => `${option.name} ${literal(option.value)} ${option.description ?? ""}`.toLowerCase().includes(words));
    const wanted = found.filter((option) => !given || option.from !== "default");
    const rest = found.length - wanted.length;
    this.said.textContent = `${many(wanted.length, "option")} of ${options.length}${rest ? `; ${count(rest)} more with their defaults` : ""}`;
    const sections = Map.groupBy(wanted, (option) => option.name.split(".")[0]);
    fill(this.body, [...sections].map(([section, its]) => [
      h("tr", { class: "section" }, h("th", { scope: "colgroup", colspan: 4 }, section)),
      its.map((option) => h("tr", { class: option.from === "default" ? "" : "given", "data-option": option.name },
        h("td", { class: "text mono" }, option.name), h("td", { class: "text mono value" }, literal(option.value)),
        h("td", { class: "text dim from" }, option.from), h("td", { class: "text dim about" }, option.description))),
    ]));
  }
}
