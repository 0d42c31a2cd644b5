// Faults, with their ways out, and notes.
import { byId, element } from "./dom.js";
import { sentence } from "./say.js";
import { TEXTS } from "./texts.js";

export function showFaults(faults, wayOut = "", heading = TEXTS.messages.faults(faults.length)) {
  const items = faults.map((fault) => element("li", {}, fault));
  show("bad", element("strong", {}, heading), element("ul", {}, items), wayOut && element("p", {}, wayOut));
}

export function showNotes(notes) {
  show("note", ...notes.map((note) => element("p", {}, sentence(note))));
}

// A message that goes with the next change.
export function showMessage(kind, ...texts) {
  show(kind, ...texts.map((text) => element("p", {}, text)));
}

export const place = () => byId("messages");

function show(kind, ...children) {
  const message = children.length ? [element("div", { class: `message ${kind}` }, children)] : [];
  byId("messages").replaceChildren(...message);
}
