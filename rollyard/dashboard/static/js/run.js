// The run as far as the page knows it: its overview, a row a step, and what is told while it goes on.

import { ask, Gone, problemOf, seldom } from "./api.js";

const RETRY_MS = 2000;
const OVERVIEW_MS = 2000; // between two looks at what no event tells

/**
 * Tells listeners with events: `overview`, `steps`, `live`, `connection`, and `changed` where lists, histograms or timelines may
 * have more to show.
 */
export class Run extends EventTarget {
  overview = null;
  steps = new Steps();
  live = null;
  connection = { state: "connecting", at: null }; // connecting, live, ended or gone; when something was heard last
  problem = ""; // why something cannot be shown
  #events = null;
  #look = seldom(OVERVIEW_MS, () => this.#again());

  get going() {
    return this.overview?.state === "running";
  }

  /** Reads all, and listens while the run goes on. */
  async start() {
    try {
      await this.#read();
    } catch (error) {
      this.heard(error);
      setTimeout(() => this.start(), RETRY_MS);
      return;
    }
    this.heard(null);
    if (this.going) this.#listen();
    else this.#connected("ended");
  }

  /** Reads all again, as a person asks. */
  async refresh() {
    await this.#again();
    this.#tell("changed");
  }

  /** Notes what became of a question: null, or the error that came of it. */
  heard(error) {
    const problem = error && !(error instanceof Gone) ? error.message : "";
    const told = problem !== this.problem;
    this.problem = problem;
    if (error instanceof Gone) this.#connected("gone");
    else if (this.connection.state === "gone") this.#connected(this.going ? "live" : "ended");
    if (told) this.#tell("connection");
  }

  async #read() {
    const [overview, steps] = await Promise.all([ask("overview"), ask("steps")]);
    this.overview = overview;
    this.steps = new Steps(steps);
    this.#tell("overview");
    this.#tell("steps");
  }

  async #again() {
    try {
      const [overview, steps] = await Promise.all([ask("overview"), ask("steps", { after: this.steps.rows.at(-1)?.step })]);
      this.overview = overview;
      for (const row of new Steps(steps).rows) this.steps.add(row);
      this.#tell("overview");
      if (steps.rows.length) this.#tell("steps");
      this.heard(null);
    } catch (error) {
      this.heard(error);
    }
  }

  #listen() {
    const events = (this.#events = new EventSource(`api/live?after=${this.steps.rows.at(-1)?.step ?? 0}`));
    events.addEventListener("open", () => {
      const before = this.connection.state;
      this.#connected("live");
      if (before === "gone") this.refresh();
    });
    events.addEventListener("live", (event) => this.#lives(JSON.parse(event.data)));
    events.addEventListener("step", (event) => this.#stepped(JSON.parse(event.data)));
    events.addEventListener("problem", (event) => this.heard(new Error(problemOf(JSON.parse(event.data)))));
    events.addEventListener("again", () => this.#anew());
    events.addEventListener("end", (event) => this.#ended(JSON.parse(event.data)));
    events.addEventListener("error", () => {
      this.#connected("gone");
      if (events.readyState !== EventSource.CLOSED) return; // else the browser tries again by itself
      events.close();
      setTimeout(() => this.start(), RETRY_MS);
    });
  }

  #lives(told) {
    this.live = told;
    this.#connected("live");
    this.#tell("live");
    this.#look();
  }

  #stepped(row) {
    this.steps.add(row);
    this.#tell("steps");
    this.#tell("changed");
  }

  /** A new life of the run has begun. */
  async #anew() {
    await this.#read().then(() => this.heard(null), (error) => this.heard(error));
    this.#tell("changed");
  }

  async #ended({ state, cause }) {
    this.#events.close();
    this.live = null;
    await this.refresh();
    Object.assign(this.overview, { state, cause });
    if (this.connection.state !== "gone") this.#connected("ended");
    this.#tell("overview");
  }

  #connected(state) {
    const told = state !== this.connection.state;
    this.connection = { state, at: state === "gone" ? this.connection.at : Date.now() };
    if (told) this.#tell("connection");
  }

  #tell(what) {
    this.dispatchEvent(new Event(what));
  }
}

/** Share of the slots of all engines that hold a request, or null where there is none. */
export function busy({ engines }) {
  const sum = (name) => engines.reduce((whole, engine) => whole + engine[name], 0);
  return sum("slots") ? sum("running") / sum("slots") : null;
}

/** Metrics, a column by its name: `steps.column("reward_mean")` has a number a step, or null. */
export class Steps {
  rows = [];
  #names = new Set();

  constructor({ columns = [], rows = [] } = {}) {
    for (const row of rows) this.add(Object.fromEntries(columns.map((name, at) => [name, row[at]])));
  }

  /** One more step. One that was there already, of an earlier life, and all beyond it, are no more. */
  add(row) {
    while (this.rows.length && this.rows.at(-1).step >= row.step) this.rows.pop();
    this.rows.push(row);
    for (const name of Object.keys(row)) this.#names.add(name);
  }

  get length() {
    return this.rows.length;
  }

  get names() {
    return [...this.#names];
  }

  column(name) {
    return this.rows.map((row) => (typeof row[name] === "number" ? row[name] : null));
  }
}
