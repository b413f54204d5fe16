// The list of groups: one prompt each, with what its members came to.

import { newest } from "./api.js";
import { facts, fill, grid, h } from "./dom.js";
import { count, literal, NONE, number, reward } from "./format.js";
import { Listing } from "./listing.js";
import { here, to } from "./place.js";
import { filters } from "./rollouts.js";

/** The view. */
export class Groups extends Listing {
  view = "groups";
  #ask = newest();

  get label() {
    return "groups";
  }

  get first() {
    return { sort: "id", order: "asc" };
  }

  get columns() {
    return [
      { name: "id", title: "group", sort: "id" }, { name: "step", title: "step", sort: "step" }, { name: "reward", title: "mean reward", sort: "reward" },
      { name: "range", title: "least – most" }, { name: "members", title: "judged" }, { name: "tokens", title: "tokens", sort: "tokens" },
      { name: "lag", title: "lag", sort: "lag" }, { name: "finish", title: "outcome", text: true }, { name: "words", title: "prompt", text: true },
    ];
  }

  filters() {
    return filters();
  }

  identity(row) {
    return String(row.group);
  }

  cells(row) {
    const range = number(row.worst) === null ? NONE : `${reward(row.worst)} – ${reward(row.best)}`;
    return [
      row.step === null ? NONE : count(row.step), reward(number(row.mean)), range, `${count(row.judged)} / ${count(row.members)}`,
      count(number(row.tokens)), row.lag === null ? NONE : count(row.lag),
      h("span", { class: row.dropped ? "dropped" : "" }, row.dropped ?? (row.trained ? "trained" : row.step === null ? "under way" : "in a batch")), h("div", { class: "pair" }, h("span", { class: "prompt" }, row.prompt)),
    ];
  }

  async open(id) {
    try {
      const found = await this.#ask(`groups/${encodeURIComponent(id)}`);
      this.run.heard(null);
      if (found && here().questions.open === id) this.#draw(id, found);
    } catch (error) {
      this.run.heard(error);
      fill(this.detail, h("p", { class: "empty" }, error.message));
    }
  }

  #draw(id, { text, columns, members }) {
    const names = Object.entries(columns);
    fill(this.detail,
      h("div", { class: "caption" }, h("h2", {}, `Group ${id}`), h("span", { class: "side" },
        h("button", { type: "button", "aria-label": "Previous group (k)", title: "Previous group (k)", onclick: () => this.step(-1) }, "‹"),
        h("button", { type: "button", "aria-label": "Next group (j)", title: "Next group (j)", onclick: () => this.step(1) }, "›"),
        h("button", { type: "button", "aria-label": "Close (Escape)", title: "Close (Escape)", onclick: () => this.close() }, "×"))),
      h("h3", {}, "Prompt"), h("pre", { class: "words", tabindex: "0", "aria-label": "Prompt" }, text),
      names.length > 0 && facts(names.map(([name, value]) => [name, literal(value)]), { "aria-label": "Columns of the prompt" }),
      h("div", { class: "caption" }, h("h3", {}, "Members"), h("a", { href: to("rollouts", { group: id }) }, "as a list")),
      grid("Members", [{ name: "rollout", text: true }, { name: "reward" }, { name: "tokens" }, { name: "ended", text: true }, { name: "completion", text: true }],
        members.map((row) => [h("a", { href: to("rollouts", { open: `${row.group}.${row.member}` }), "aria-label": `Rollout ${row.group}.${row.member}` }, `${row.group}.${row.member}`),
          reward(number(row.reward)), count(number(row.tokens)), row.dropped ?? row.finish ?? NONE, h("span", { class: "completion" }, row.completion)])));
  }
}
