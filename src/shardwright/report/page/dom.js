// Elements of the page.
import { say } from "./say.js";

export const byId = (id) => document.getElementById(id);

// An element with properties ("class" and "data-..." and "aria-..." as attributes) and children, which are elements or texts.
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made && !name.includes("-")) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

// Gives an element a text. One that it has already stays, for a new one would be laid out anew.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A table from rows of cells, the first of which is its header, or null if it has none. A cell is a text or an element; where
// rows are stacked, as on narrow screens, each cell shows the name of its column.
export function table(rows, properties = {}) {
  const [header, ...body] = rows;
  const columns = (header ?? []).map((cell) => (cell === "" ? element("td") : element("th", { scope: "col" }, cell)));
  const head = header && element("thead", {}, element("tr", {}, columns));
  const names = columns.map((cell) => cell.textContent);
  const lines = body.map(([first, ...others]) => element("tr", {},
    element("th", { scope: "row", "data-name": names[0] ?? "" }, first),
    others.map((cell, place) => element("td", { class: isLong(cell) ? "long" : "", "data-name": names[place + 1] ?? "" }, cell))));
  const made = element("table", properties, head ?? null, element("tbody", {}, lines));
  return element("div", { class: "wide", tabIndex: 0, role: "group", "aria-label": properties["aria-label"] || say("table") }, made);
}

const LONG = 24;  // characters of a cell that takes a line of its own where rows are stacked
const isLong = (cell) => typeof cell === "string" && cell.length > LONG;

// The content of a section of the answers.
export function fill(id, small, ...children) {
  const section = byId(id);
  const note = section.querySelector("h2 small");
  if (note) setText(note, small);
  section.querySelector(".body").replaceChildren(...children.flat().filter(Boolean));
}
