// Where one is in the page: the part of its address after #, such as `#rollouts?sort=tokens&open=17.3`.

/** The view, and what is asked of it, as an address has them. */
export function here() {
  const [view, questions = ""] = location.hash.slice(1).split("?");
  return { view, questions: Object.fromEntries(new URLSearchParams(questions)) };
}

/** The address of a view. What is empty is left out. */
export function to(view, questions = {}) {
  const asked = new URLSearchParams(Object.entries(questions).filter(([, value]) => value !== undefined && value !== null && value !== ""));
  return `#${view}${asked.size ? `?${asked}` : ""}`;
}

/** Goes there. `quietly`: the way back leads past it. */
export function go(view, questions = {}, quietly = false) {
  const address = to(view, questions);
  if (address === location.hash) return;
  if (quietly) {
    history.replaceState(null, "", address);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = address;
  }
}
