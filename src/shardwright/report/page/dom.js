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

// A table from rows of cells, the first of which is its header. A cell is a text or an element.
export function table(rows, properties = {}) {
  const [header, ...body] = rows;
  const head = element("thead", {}, element("tr", {}, header.map((cell) => element("th", { scope: "col" }, cell))));
  const lines = body.map(([first, ...others]) =>
    element("tr", {}, element("th", { scope: "row" }, first), others.map((cell) => element("td", {}, cell))));
  const made = element("table", properties, head, element("tbody", {}, lines));
  return element("div", { class: "wide", tabIndex: 0, role: "group", "aria-label": properties["aria-label"] || say("table") }, made);
}

// The content of a section of the answers.
export function fill(id, small, ...children) {
  const section = byId(id);
  const note = section.querySelector("h2 small");
  if (note) setText(note, small);
  section.querySelector(".body").replaceChildren(...children.flat().filter(Boolean));
}
