// The timeline of a step, drawn by painter.js and page.js; under it, on the same scale, that of the plan that is kept
// beside, or another one with a `caption`.
import { byId, element, fill } from "./dom.js";
import { shareText } from "./units.js";

let listening = new AbortController();  // listeners of the timeline that is shown
let legend = "";

export function showTimeline(timeline, beside) {
  listening.abort();
  listening = new AbortController();
  byId("tip").hidden = true;
  if (!timeline || timeline.undrawn) {
    fill("timeline", "", element("p", { class: "quiet" }, timeline?.undrawn || ""));
    return;
  }
  const isPair = beside && !beside.undrawn && beside.unit === timeline.unit;
  const data = isPair ? together(timeline.data, beside.data) : timeline.data;
  const names = ["Timeline of this plan", beside?.caption || "Timeline of the plan beside"];
  const canvases = data.sections.map((section, number) => element("canvas", {
    "data-section": number, tabIndex: 0, role: "img", "aria-label": `${names[number]}: ${section.ranks.length} ranks`,
  }));
  showLegend((isPair && beside.legend.length > timeline.legend.length ? beside : timeline).legend);
  const bubble = timeline.bubble_share === null ? "" : `, bubble ${shareText(timeline.bubble_share)} of the step`;
  const unit = timeline.unit === "s" ? "times are seconds" : "1 is a forward";
  const second = isPair ? [element("p", { class: "quiet" }, beside.caption || `Beside: ${beside.shape}`), canvases[1]] : [];
  const first = isPair && beside.caption ? element("p", { class: "quiet" }, "Planned") : null;
  fill("timeline", `${timeline.shape}${bubble}; ${unit}`, first, canvases[0], second, element("p", { class: "quiet" }, timeline.note));
  showTimelines(data, byId("timeline"), listening.signal);
}

// The legend and its switches, which keep what they are set to.
function showLegend(html) {
  if (html === legend) return;
  const place = document.querySelector("#timeline .legends");
  const switches = ["arrows", "memory"].map((id) => byId(id)?.checked);
  place.innerHTML = legend = html;
  ["arrows", "memory"].forEach((id, number) => {
    if (switches[number] !== undefined && byId(id)) byId(id).checked = switches[number];
  });
}

// Two drawings as one: blocks of the second refer to colours behind those of the first.
function together(first, second) {
  const shift = first.colours.length;
  const shifted = ([from, to, parts, ...others]) => [from, to, parts.map(([colour, ...part]) => [colour + shift, ...part]), ...others];
  const ranks = (section) => section.ranks.map((rank) => ({ ...rank, busy: rank.busy.map(shifted), moves: rank.moves.map(shifted) }));
  const sections = second.sections.map((section) => ({ ...section, ranks: ranks(section) }));
  return { ...first, sections: [...first.sections, ...sections], colours: [...first.colours, ...second.colours] };
}
