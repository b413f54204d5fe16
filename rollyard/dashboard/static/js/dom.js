// Elements. What is shown of a run is made of text nodes alone: nothing that a model wrote is ever read as markup.

/**
 * An element.
 *
 * @param {string} tag
 * @param {Object} props  `class`, `on...` for listeners, anything else is an attribute; null, undefined and false set none.
 * @param {...*} children  nodes, texts, numbers, or lists of them; null and false are left out.
 */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...nodes(children));
  return element;
}

/** Puts `children` in the place of all that an element has. */
export function fill(element, ...children) {
  element.replaceChildren(...nodes(children));
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

function nodes(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child))));
}

/** A list of terms, each with what it stands for: `[["tokens", "1,024"], ...]`. What is null has no line. */
export function facts(pairs, props = {}) {
  const lines = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "facts", ...props }, lines.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

/**
 * A table of numbers and texts.
 *
 * @param {string} label  its accessible name
 * @param {Array<{name: string, text?: boolean}>} columns  numbers stand at the right, texts at the left
 * @param {Array<Array>} rows
 */
export function grid(label, columns, rows) {
  const side = (column) => ({ class: column.text ? "text" : "number" });
  return h("table", { class: "grid", "aria-label": label },
    h("thead", {}, h("tr", {}, columns.map((column) => h("th", { scope: "col", ...side(column) }, column.name)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value, at) => h("td", side(columns[at]), value))))));
}
