// One rollout: what it was asked, what it wrote token by token, and what came of it.

import { facts, fill, grid, h } from "./dom.js";
import { clock, count, literal, many, NONE, number, percent, plain, reward } from "./format.js";
import { to } from "./place.js";

const HEAT = [0.05, 0.25, 0.7, 1.4, 2.3, 3.5, 5]; // nats of surprise at which the next colour begins
const HUES = 6; // of versions
const AT_ONCE = 4000; // tokens that are drawn before one asks for more
const MODES = { heat: "logprob", version: "version", text: "text" };
let mode = "heat"; // stays while one goes through a list

/** Fills `place`. `list` knows the ways to its neighbours. */
export function drawRollout(place, found, list) {
  const { row, tokens } = found;
  const words = new Words(tokens);
  fill(place,
    h("div", { class: "caption" }, h("h2", {}, `Rollout ${row.group}.${row.member}`), h("span", { class: "side" },
      h("button", { type: "button", "aria-label": "Previous rollout (k)", title: "Previous rollout (k)", onclick: () => list.step(-1) }, "‹"),
      h("button", { type: "button", "aria-label": "Next rollout (j)", title: "Next rollout (j)", onclick: () => list.step(1) }, "›"),
      h("button", { type: "button", "aria-label": "Close (Escape)", title: "Close (Escape)", onclick: () => list.close() }, "×"))),
    facts([
      ["reward", h("b", {}, reward(number(found.reward)))],
      ...Object.entries(found.rewards).map(([name, value]) => [`reward: ${name}`, reward(number(value))]),
      ["problem", found.problem && h("span", { class: "dropped" }, found.problem)],
      ["tokens", count(tokens.length)], ["mean logprob", surprise(tokens)], ["ended", found.finish ?? "not finished"],
      ["step", row.step === null ? null : count(row.step)], ["lag", row.lag === null ? null : many(row.lag, "version")],
      ["outcome", row.dropped ? h("span", { class: "dropped" }, `dropped: ${row.dropped}`) : row.trained ? "trained" : row.step === null ? "in no batch yet" : "in a batch"],
      ["cause", row.cause], ["group", h("a", { href: to("groups", { open: row.group }), "aria-label": `Group ${row.group}` }, row.group)], ["life", row.life ? count(row.life) : null],
      ["finished", found.finished_at === null ? null : clock(found.finished_at)],
    ]),
    prompt(found), words.element, turns(found.turns), spans(found.spans), found.no_texts && h("p", { class: "dim" }, `Tokens are shown by their numbers: ${found.no_texts}`),
  );
}

function prompt({ prompt: text, columns }) {
  const names = Object.entries(columns);
  return [h("h3", {}, "Prompt"), h("pre", { class: "words", tabindex: "0", "aria-label": "Prompt" }, text),
    names.length > 0 && facts(names.map(([name, value]) => [name, literal(value)]), { "aria-label": "Columns of the prompt" })];
}

/** Of an episode: what the policy read before each answer. */
function turns(found) {
  if (found.length < 2) return null;
  return [h("h3", {}, `Turns (${found.length})`), h("ol", { class: "turns" }, found.map((turn) => h("li", {},
    h("pre", { class: "words read" }, turn.prompt.map((token) => token.text ?? `⟨${token.id}⟩`).join("")),
    h("p", { class: "dim" }, `then ${many(turn.tokens, "token")}, ended by ${turn.finish}${turn.cut ? `; ${many(turn.cut, "token")} before it were cut` : ""}`))))];
}

/** The completion, token by token, in colours. */
class Words {
  constructor(tokens) {
    this.tokens = tokens;
    const byVersion = [...new Set(tokens.map((token) => token.version))];
    this.hue = (version) => byVersion.indexOf(version) % HUES;
    this.text = h("pre", { class: "words", tabindex: "0", role: "group", "aria-label": "Completion, token by token; left and right go through it",
      onmouseover: (event) => this.#look(event), onclick: (event) => this.#look(event), onkeydown: (event) => this.#key(event) });
    this.said = h("p", { class: "token", role: "status" }, "Point at a token to see what is known of it.");
    this.legend = h("p", { class: "key" });
    this.buttons = Object.entries(MODES).map(([name, text]) => h("button", { type: "button", "data-mode": name, onclick: () => this.#turn(name) }, text));
    this.element = [h("div", { class: "caption" }, h("h3", {}, "Completion"), h("span", { class: "side", role: "group", "aria-label": "Colour tokens by" }, this.buttons)),
      this.legend, this.text, this.said];
    this.drawn = 0;
    this.at = -1;
    this.#more();
    this.#turn(mode);
  }

  #more() {
    this.text.querySelector("button")?.remove();
    const some = this.tokens.slice(this.drawn, this.drawn + AT_ONCE);
    this.text.append(...some.map((token, at) => h("span", { class: `t h${heat(token.logprob)} v${this.hue(token.version)}`, "data-at": this.drawn + at }, token.text ?? `⟨${token.id}⟩`)));
    this.drawn += some.length;
    const left = this.tokens.length - this.drawn;
    if (left > 0) this.text.append(h("button", { type: "button", onclick: () => this.#more() }, `show ${count(Math.min(left, AT_ONCE))} of ${count(left)} more tokens`));
  }

  #turn(name) {
    mode = name;
    this.text.dataset.mode = name;
    this.buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.mode === name)));
    const first = { heat: ["likely", ...HEAT.map((nats, at) => [at + 1, nats])], version: [...new Set(this.tokens.map((token) => token.version))] }[name] ?? [];
    this.legend.hidden = name === "text";
    if (name === "heat") fill(this.legend, "−logprob, nats: ", h("span", { class: "t h0" }, "< 0.05"), HEAT.map((nats, at) => h("span", { class: `t h${at + 1}` }, `≥ ${nats}`)));
    if (name === "version") fill(this.legend, "weights of version: ", first.map((version) => h("span", { class: `t v${this.hue(version)}` }, version)));
    this.legend.dataset.mode = name;
  }

  #look(event) {
    const at = event.target.closest?.("[data-at]")?.dataset.at;
    if (at !== undefined) this.#pick(Number(at));
  }

  #key(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    this.#pick(Math.min(Math.max(this.at + by, 0), this.drawn - 1));
  }

  #pick(at) {
    if (!this.tokens[at]) return;
    this.text.querySelector(".picked")?.classList.remove("picked");
    this.text.querySelector(`[data-at="${at}"]`).classList.add("picked");
    this.at = at;
    const { id, text, logprob, version, oldest_kv: oldest } = this.tokens[at];
    const known = number(logprob);
    fill(this.said, h("b", {}, `token ${count(at + 1)} of ${count(this.tokens.length)}`), ` ${JSON.stringify(text ?? "")} · id ${id} · logprob ${known === null ? NONE : plain(known)}`,
      known === null ? "" : ` (${percent(Math.exp(known))})`, ` · version ${version}`, oldest !== null && oldest !== version ? `, keys from ${oldest}` : "");
  }
}

/** The class of a token's colour, by how surprising it was. */
function heat(logprob) {
  const known = number(logprob);
  return known === null ? "n" : HEAT.filter((nats) => -known >= nats).length;
}

function surprise(tokens) {
  const known = tokens.map((token) => number(token.logprob)).filter((logprob) => logprob !== null);
  return known.length ? `${plain(known.reduce((sum, logprob) => sum + logprob, 0) / known.length)} nats` : null;
}

function spans(found) {
  if (!found.length) return null;
  const named = (step, life) => (life ? `${step} (life ${life})` : String(step));
  return [h("h3", {}, "Spans"), grid("Which weights wrote how many tokens", [{ name: "version" }, { name: "oldest keys and values" }, { name: "tokens" }],
    found.map(([step, life, oldest, its, tokens]) => [named(step, life), named(oldest, its), count(tokens)]))];
}
