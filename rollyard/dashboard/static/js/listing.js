// A list of which the server gives one page at a time: filters above, pages below, and what is open of it beside.

import { newest, seldom } from "./api.js";
import { fill, h } from "./dom.js";
import { count } from "./format.js";
import { go, here, to } from "./place.js";

const PAGE = 50; // rows
const ROOMY = matchMedia("(min-width: 1100px)"); // as in the stylesheet: list and what is open side by side
const TYPING_MS = 250;
const MORE_MS = 4000; // between two looks at a list of a run that goes on

/**
 * What both lists share. A subclass has `view`, `label`, `columns`, `filters()`, `identity(row)`, `cells(row)`, which are those after the first, and `open(id, row)`,
 * which fills `detail`. What is asked for stands in the address, so that it can be kept and sent.
 *
 * A column is `{ name, title, sort, text }`: `sort` is what the server calls it, where it can be sorted by.
 */
export class Listing {
  rows = [];
  total = 0;
  #ask = newest();
  #asked = null; // of the rows that are shown
  #loading = null; // the same, until they are there
  #more = seldom(MORE_MS, () => this.#load(true));
  #typing = 0;
  #scrolled = 0;

  constructor(run) {
    this.run = run;
    this.form = h("form", { class: "filters", role: "search", "aria-label": `Filter ${this.label}`, onsubmit: (event) => event.preventDefault(),
      oninput: () => this.#typed(), onchange: () => this.#filtered() }, this.filters(), this.#order());
    this.body = h("tbody", {});
    this.head = h("tr", {});
    this.table = h("table", { class: "rows", "aria-label": this.label, onclick: (event) => this.#clicked(event) }, h("thead", {}, this.head), this.body);
    this.said = h("p", { class: "empty", role: "status" }, "Loading…");
    this.pages = h("nav", { class: "pages", "aria-label": "Pages" });
    this.detail = h("section", { class: "detail panel", "aria-label": "What is open", tabindex: "-1", hidden: true });
    this.element = h("div", { class: "view listing" }, h("div", { class: "list panel" }, this.form, this.table, this.said, this.pages), this.detail);
    this.on = { changed: () => this.#more() };
    this.keys = { j: () => this.step(1), ArrowDown: () => this.step(1), k: () => this.step(-1), ArrowUp: () => this.step(-1),
      "]": () => this.page(1), "[": () => this.page(-1), "/": () => this.form.elements.search.focus(), Escape: () => this.close() };
  }

  /** It is on the page, or its address has changed. */
  async shown() {
    const { questions } = here();
    const { open = "", ...asked } = questions;
    const elements = [...this.form.elements].filter((element) => element.name);
    for (const element of elements) if (element !== document.activeElement) element.value = asked[element.name] ?? element.dataset.default ?? "";
    if (JSON.stringify(asked) !== this.#asked) {
      this.#asked = JSON.stringify(asked);
      this.#loading = this.#load();
    }
    await this.#loading;
    this.#marked(open);
    this.#placed(open);
    if (open) await this.open(open);
  }

  dispose() {
    clearTimeout(this.#typing);
  }

  /** The one after, or before, of what is open; beyond the end of a page on the next one. */
  async step(by) {
    if (!this.rows.length) return;
    const at = this.rows.findIndex((row) => this.identity(row) === here().questions.open);
    const next = at < 0 ? (by > 0 ? 0 : this.rows.length - 1) : at + by;
    if (next >= 0 && next < this.rows.length) this.#go({ open: this.identity(this.rows[next]) });
    else if (await this.page(by)) this.#go({ open: this.identity(by > 0 ? this.rows[0] : this.rows.at(-1)) });
  }

  /** Goes to another page; says whether there is one. */
  async page(by) {
    const offset = this.offset + by * PAGE;
    if (offset < 0 || offset >= this.total) return false;
    this.#go({ offset: offset || "" });
    await this.shown();
    return this.rows.length > 0;
  }

  close() {
    if (document.activeElement?.name) document.activeElement.blur();
    else this.#go({ open: "" });
  }

  get offset() {
    return Number(here().questions.offset) || 0;
  }

  #go(changes, quietly = true) {
    go(this.view, { ...here().questions, ...changes }, quietly);
  }

  #typed() {
    clearTimeout(this.#typing);
    this.#typing = setTimeout(() => this.#filtered(), TYPING_MS);
  }

  #filtered() {
    clearTimeout(this.#typing);
    const asked = Object.fromEntries([...new FormData(this.form)].map(([name, value]) => [name, value === this.form.elements[name].dataset.default ? "" : value]));
    this.#go({ ...asked, offset: "" });
  }

  #clicked(event) {
    const row = event.target.closest("tbody tr");
    if (row && !event.target.closest("a, button")) this.#go({ open: row.dataset.id }, false);
  }

  async #load(quietly = false) {
    const { open: _, ...asked } = here().questions;
    if (quietly && this.body.contains(document.activeElement)) return; // somebody goes through it
    try {
      const found = await this.#ask(this.view, { ...asked, limit: PAGE });
      this.run.heard(null);
      if (found) this.#take(found);
    } catch (error) {
      this.run.heard(error);
      if (!quietly) this.#say(error.message);
    }
  }

  #take({ total, rows }) {
    this.rows = rows;
    this.total = total;
    fill(this.head, this.columns.map((column) => this.#heading(column)));
    fill(this.body, rows.map((row) => this.#row(row)));
    this.#say(rows.length ? "" : this.run.overview?.has_journal === false ? "This run has no journal: a simulation leaves none." : "Nothing is like that.");
    this.#paged();
    this.#marked(here().questions.open);
  }

  #row(row) {
    const id = this.identity(row);
    const link = h("a", { href: to(this.view, { ...here().questions, open: id }), "aria-label": `Open ${id}` }, id);
    const place = (column) => ({ class: `${column.text ? "text" : "number"} c-${column.name}`, "data-title": column.title });
    return h("tr", { "data-id": id }, [link, ...this.cells(row)].map((cell, at) => h("td", place(this.columns[at]), cell)));
  }

  #say(text) {
    this.said.textContent = text;
    this.said.hidden = !text;
  }

  #marked(open) {
    for (const row of this.body.rows) {
      const is = row.dataset.id === open;
      row.classList.toggle("open", is);
      if (is) row.scrollIntoView({ block: "nearest" });
    }
  }

  /** Where there is no room for both, what is open is in the place of the list, which is found again where it was. */
  #placed(open) {
    const before = this.element.classList.contains("opened");
    if (!before && open) this.#scrolled = scrollY;
    this.element.classList.toggle("opened", Boolean(open));
    this.detail.hidden = !open;
    if (ROOMY.matches || before === Boolean(open)) return;
    scrollTo(0, open ? 0 : this.#scrolled);
  }

  #heading({ name, title, sort, text }) {
    const { sort: by = this.first.sort, order = this.first.order } = here().questions;
    const sorted = sort && by === sort ? order : "";
    const turn = () => this.#go({ sort, order: sorted === "desc" ? "asc" : "desc", offset: "" });
    return h("th", { scope: "col", class: `${text ? "text" : "number"} c-${name}`, "aria-sort": sorted && (sorted === "desc" ? "descending" : "ascending") },
      sort ? h("button", { type: "button", class: "sort", onclick: turn }, title, h("span", { "aria-hidden": "true" }, sorted ? (sorted === "desc" ? " ↓" : " ↑") : "")) : title);
  }

  #order() {
    const sortable = this.columns.filter((column) => column.sort);
    return [select("sort", "Sort by", sortable.map((column) => [column.sort, column.title]), this.first.sort),
      select("order", "Order", [["desc", "highest first"], ["asc", "lowest first"]], this.first.order)];
  }

  #paged() {
    const last = Math.min(this.offset + this.rows.length, this.total);
    const button = (label, text, offset) => h("button", { type: "button", "aria-label": label, title: label, disabled: offset < 0 || offset >= this.total || offset === this.offset,
      onclick: () => this.#go({ offset: offset || "" }, false) }, text);
    const end = Math.max(0, Math.floor((this.total - 1) / PAGE) * PAGE);
    fill(this.pages, button("First page", "«", 0), button("Previous page ([)", "‹", this.offset - PAGE),
      h("span", { class: "figure", role: "status" }, this.total ? `${count(this.offset + 1)}–${count(last)} of ${count(this.total)}` : "0 of 0"),
      button("Next page (])", "›", this.offset + PAGE), button("Last page", "»", end));
  }
}

/** A labelled field of a form. */
export function field(name, label, props = {}) {
  return h("label", { class: `field f-${name}` }, h("span", {}, label), h("input", { name, type: "text", autocomplete: "off", ...props }));
}

/** A labelled choice; `choices` are `[value, text]`. */
export function select(name, label, choices, chosen = "") {
  return h("label", { class: `field f-${name}` }, h("span", {}, label),
    h("select", { name, "data-default": chosen }, choices.map(([value, text]) => h("option", { value, selected: value === chosen }, text))));
}
