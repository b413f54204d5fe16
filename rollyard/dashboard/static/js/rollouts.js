// The list of rollouts, and one of them with all that is known of it.

import { newest } from "./api.js";
import { fill, h } from "./dom.js";
import { count, NONE, number, reward } from "./format.js";
import { field, Listing, select } from "./listing.js";
import { here } from "./place.js";
import { drawRollout } from "./rollout.js";

const REASONS = ["context", "failed", "no_verdict", "stale", "filtered", "oversampled", "distrusted", "stopped"];
const FINISHES = ["stop", "length", "context", "abort", "error"];

/** The view. */
export class Rollouts extends Listing {
  view = "rollouts";
  #ask = newest();

  get label() {
    return "rollouts";
  }

  get first() {
    return { sort: "id", order: "asc" };
  }

  get columns() {
    return [
      { name: "id", title: "rollout", sort: "id" }, { name: "step", title: "step", sort: "step" }, { name: "reward", title: "reward", sort: "reward" },
      { name: "tokens", title: "tokens", sort: "tokens" }, { name: "lag", title: "lag", sort: "lag" }, { name: "finish", title: "ended", text: true },
      { name: "words", title: "prompt and completion", text: true },
    ];
  }

  filters() {
    const [search, ...rest] = filters();
    return [search, field("group", "Group", { type: "number", min: 0, inputmode: "numeric" }), ...rest, select("finish", "Ended by", [["", "whatever"], ...FINISHES.map((finish) => [finish, finish])])];
  }

  identity(row) {
    return `${row.group}.${row.member}`;
  }

  cells(row) {
    return [
      row.step === null ? NONE : count(row.step), reward(number(row.reward)), count(number(row.tokens)),
      row.lag === null ? NONE : count(row.lag), h("span", { class: row.dropped ? "dropped" : "" }, row.dropped ?? row.finish ?? NONE),
      h("div", { class: "pair" }, h("span", { class: "prompt" }, row.prompt), h("span", {}, row.completion)),
    ];
  }

  async open(id) {
    const [group, member] = id.split(".");
    try {
      const found = await this.#ask(`rollouts/${encodeURIComponent(group)}/${encodeURIComponent(member ?? 0)}`);
      this.run.heard(null);
      if (found && here().questions.open === id) drawRollout(this.detail, found, this);
    } catch (error) {
      this.run.heard(error);
      fill(this.detail, h("p", { class: "empty" }, error.message));
    }
  }
}

/** The filters that both lists have. */
export function filters() {
  const bound = { type: "number", step: "any", inputmode: "decimal" };
  return [
    field("search", "Search the text (/)", { type: "search", placeholder: "words of a prompt or completion" }),
    field("step", "Step", { type: "number", min: 1, inputmode: "numeric" }),
    field("min_reward", "Reward from", bound), field("max_reward", "to", bound),
    select("reason", "Dropped", [["", "whatever"], ["any", "for any reason"], ...REASONS.map((reason) => [reason, reason])]),
  ];
}
