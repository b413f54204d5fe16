// What devices and phases do, in the order in which one hides the other, each with its colour of the stylesheet.

export const ACTIVITIES = ["train", "generate", "eval", "tools", "score", "checkpoint", "sync", "prompts", "restart", "caller", "closing", "setup"];

/** The name of its colour in the stylesheet. */
export function colourOf(activity) {
  return ACTIVITIES.includes(activity) ? `a-${activity}` : "a-rest";
}

const ORDER = ["generate", "train", "sync", "score", "tools", "eval", "checkpoint", "setup", "unaccounted"];

/** Phases in the order in which they are shown: generation first, which is most of a run. */
export function ordered(names) {
  const place = (name) => (ORDER.includes(name) ? ORDER.indexOf(name) : ORDER.length - 1.5);
  return [...names].sort((one, other) => place(one) - place(other));
}
