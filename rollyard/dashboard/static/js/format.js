// Numbers as people read them, each with its unit. Nothing is shown as a number that is none.

export const NONE = "–";

const format = (options) => new Intl.NumberFormat("en-US", { roundingMode: "halfEven", ...options }); // as the terminal rounds
const whole = format({ maximumFractionDigits: 0 });
const compact = format({ notation: "compact", maximumSignificantDigits: 3 });
const digits = format({ maximumSignificantDigits: 4 });
const three = format({ minimumFractionDigits: 3, maximumFractionDigits: 3 });
const tenths = format({ minimumFractionDigits: 1, maximumFractionDigits: 1, useGrouping: false });

/** A finite number, or null: what is not finite is a text in the metrics. */
export function number(value) {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

const shown = (told) => (value) => (number(value) === null ? NONE : told(value).replace(/^-/, "−"));

/** 12,345 */
export const count = shown((value) => whole.format(value));
/** 12.3K */
export const short = shown((value) => (Math.abs(value) < 10000 ? whole.format(value) : compact.format(value)));
/** four digits: 0.01234 */
export const plain = shown((value) => digits.format(value));
/** 0.123 */
export const reward = shown((value) => three.format(value));
/** 12.3 % of a share */
export const percent = shown((value) => `${tenths.format(value * 100)} %`);
/** 1,234 tok/s */
export const rate = shown((value) => `${Math.abs(value) < 10 ? digits.format(value) : whole.format(value)} tok/s`);

/** Seconds: 1.25 ms, 12.3 s, 4 min 05 s, 3 h 12 min, 2 d 4 h. */
export const seconds = shown((value) => {
  const size = Math.abs(value);
  if (size < 1) return size === 0 ? "0 s" : size < 1e-3 ? `${(value * 1e6).toPrecision(3)} µs` : `${(value * 1e3).toPrecision(3)} ms`;
  if (size < 59.95) return `${value.toPrecision(3)} s`;
  const all = Math.round(value);
  const two = (part) => String(part).padStart(2, "0");
  if (all < 3600) return `${Math.floor(all / 60)} min ${two(all % 60)} s`;
  if (all < 86400) return `${Math.floor(all / 3600)} h ${two(Math.floor((all % 3600) / 60))} min`;
  return `${Math.floor(all / 86400)} d ${Math.floor((all % 86400) / 3600)} h`;
});

/** A moment of a timeline, `step` seconds from its neighbours on an axis. */
export function moment(value, step = 1) {
  const after = step >= 1 ? 0 : Math.min(6, Math.ceil(-Math.log10(step)));
  if (value < 60) return `${value.toFixed(after)} s`;
  const two = (part) => String(part).padStart(2, "0");
  const rest = (value % 60).toFixed(after).padStart(after ? after + 3 : 2, "0");
  if (value < 3600) return `${Math.floor(value / 60)}:${rest}`;
  return `${Math.floor(value / 3600)}:${two(Math.floor((value % 3600) / 60))}:${rest}`;
}

/** Time of day of unix seconds. */
export function clock(at) {
  return number(at) === null ? NONE : new Date(at * 1000).toLocaleString("sv-SE");
}

/** "3 groups", "1 group". */
export function many(value, what) {
  return `${count(value)} ${what}${value === 1 ? "" : "s"}`;
}

/** What stands in a config, as it would be written there. */
export function literal(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}
