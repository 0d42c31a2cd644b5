// Faults, with their ways out, and notes.
import { byId, element } from "./dom.js";
import { sentence } from "./say.js";
import { TEXTS } from "./texts.js";

export function showFaults(faults, wayOut = "", heading = TEXTS.messages.faults(faults.length)) {
  const items = faults.map((fault) => element("li", {}, fault));
  show("bad", element("strong", {}, heading), element("ul", {}, items), wayOut && element("p", {}, wayOut));
}

// Notes are sentences, or groups { heading, lines, folded }.
export function showNotes(notes) {
  show("note", ...notes.map((note) => (note.lines ? group(note) : element("p", {}, sentence(note)))));
}

function group({ heading, lines, folded }) {
  if (!heading) return lines.map((line) => element("p", {}, sentence(line)));
  const items = element("ul", {}, lines.map((line) => element("li", {}, line)));
  return element("details", { open: !folded }, element("summary", {}, heading), items);
}

// A message that goes with the next change.
export function showMessage(kind, ...texts) {
  show(kind, ...texts.map((text) => element("p", {}, text)));
}

export const place = () => byId("messages");

function show(kind, ...children) {
  const message = children.length ? [element("div", { class: `message ${kind}` }, ...children.flat())] : [];
  byId("messages").replaceChildren(...message);
}
