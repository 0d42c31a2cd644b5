// The timeline of a step, drawn by painter.js and page.js; beside it, on the same scale, that of the plan that is kept
// beside, or another one with a `caption`. A lane is a pipeline rank, or each of its tensor ranks, or each replica of it.
import { byId, element, fill } from "./dom.js";
import { SEMICOLON, sentence } from "./say.js";
import { TEXTS } from "./texts.js";
import { shareText } from "./units.js";

const MOST_LANES = 64;
let listening = new AbortController();  // listeners of the timeline that is shown
let legend = "";
let lanes = "";  // the axis of which each rank has a lane of its own, kept from one plan to the next
let isAside = false;  // two timelines are side by side
let shown = null;  // the timelines on the page, by what draws them

export function showTimeline(timeline, beside) {
  const isSeen = shown?.isSeen();
  listening.abort();
  listening = new AbortController();
  byId("tip").hidden = true;
  if (!timeline || timeline.undrawn) {
    fill("timeline", "", element("p", { class: "quiet" }, timeline?.undrawn ? sentence(timeline.undrawn) : ""));
    return;
  }
  const isPair = beside && !beside.undrawn && beside.unit === timeline.unit;
  const axis = timeline.axes?.[lanes] > 1 ? lanes : "";
  const plans = isPair ? [timeline, beside] : [timeline];
  const [own, other] = plans.map(({ data }) => unpackedTimelines(data));
  const data = withLanes(isPair ? together(own, other) : own, plans, axis);
  const captions = isPair ? [beside.caption ? TEXTS.timeline.planned : TEXTS.timeline.first(timeline.shape),
    beside.caption || TEXTS.timeline.second(beside.shape)] : [""];
  const names = [TEXTS.timeline.own, beside?.caption || TEXTS.timeline.beside];
  const figures = data.sections.map((section, number) => element("div", {},
    captions[number] ? element("p", { class: "quiet" }, captions[number]) : null,
    element("canvas", { "data-section": number, tabIndex: 0, role: "img",
      "aria-label": TEXTS.timeline.canvas({ name: names[number], lanes: section.ranks.length }) })));
  showLegend((isPair && beside.legend.length > timeline.legend.length ? beside : timeline).legend);
  const bubble = timeline.bubble_share === null ? "" : TEXTS.timeline.bubble(shareText(timeline.bubble_share));
  const unit = timeline.unit === "s" ? TEXTS.timeline.seconds : TEXTS.timeline.forwards;
  const pair = element("div", { class: isAside ? "pair aside" : "pair" }, figures);
  const choices = element("p", { class: "choices" }, lanesChoice(timeline, beside, axis), isPair ? asideChoice(pair) : null);
  const few = axis && numShown(timeline, axis) < timeline.axes[axis]
    ? TEXTS.timeline.fewLanes({ shown: numShown(timeline, axis), size: timeline.axes[axis], axis: TEXTS.timeline.perAxis[axis] }) : "";
  fill("timeline", `${timeline.shape}${bubble}${SEMICOLON}${unit}`, choices, pair, element("p", { class: "quiet" }, `${few} ${timeline.note}`));
  shown = showTimelines(data, byId("timeline"), listening.signal, isSeen);
}

// The choice of what a lane is, if the plan has more ranks than those of a pipeline.
function lanesChoice(timeline, beside, axis) {
  const axes = Object.keys(TEXTS.timeline.perAxis).filter((name) => timeline.axes?.[name] > 1);
  if (!axes.length) return null;
  const select = element("select", {}, element("option", { value: "" }, TEXTS.timeline.perStage),
    axes.map((name) => element("option", { value: name }, TEXTS.timeline.perAxis[name])));
  select.value = axis;
  select.addEventListener("change", () => { lanes = select.value; showTimeline(timeline, beside); });
  return element("label", {}, TEXTS.timeline.lanes, select);
}

function asideChoice(pair) {
  const input = element("input", { type: "checkbox", checked: isAside });
  input.addEventListener("change", () => {
    isAside = input.checked;
    pair.classList.toggle("aside", isAside);
    shown.redrawAll();
  });
  return element("label", {}, input, TEXTS.timeline.aside);
}

// The number of ranks on an axis that have lanes: all, or as many as can be seen.
const numShown = ({ axes, data }, axis) =>
  Math.min(axes[axis] || 1, Math.max(2, Math.floor(MOST_LANES / data.sections[0].num_ranks)));

// The drawing with a lane for each rank on an axis. They do the same at the same time; each sends to its own neighbours.
function withLanes(data, plans, axis) {
  if (!axis) return data;
  const sections = data.sections.map((section, number) => {
    const count = plans[number].axes ? numShown(plans[number], axis) : 1;
    const ranks = section.ranks.flatMap((rank, stage) =>
      Array.from({ length: count }, (_, place) => ({ ...rank, label: `pp ${stage} ${axis} ${place}` })));
    const messages = section.messages.flatMap(([sender, receiver, ...others]) =>
      Array.from({ length: count }, (_, place) => [sender * count + place, receiver * count + place, ...others]));
    return { ...section, ranks, messages };
  });
  return { ...data, sections };
}

// The legend and its switches, which keep what they are set to.
function showLegend(html) {
  if (html === legend) return;
  const place = document.querySelector("#timeline .legends");
  const switches = ["arrows", "memory"].map((id) => byId(id)?.checked), pace = byId("pace")?.value;
  place.innerHTML = legend = html;
  ["arrows", "memory"].forEach((id, number) => {
    if (switches[number] !== undefined && byId(id)) byId(id).checked = switches[number];
  });
  if (pace) byId("pace").value = pace;
}

// Two drawings as one: blocks of the second refer to colours behind those of the first.
function together(first, second) {
  const shift = first.colours.length;
  const shifted = ([from, to, parts, ...others]) => [from, to, parts.map(([colour, ...part]) => [colour + shift, ...part]), ...others];
  const ranks = (section) => section.ranks.map((rank) => ({ ...rank, busy: rank.busy.map(shifted), moves: rank.moves.map(shifted) }));
  const sections = second.sections.map((section) => ({ ...section, ranks: ranks(section) }));
  return { ...first, sections: [...first.sections, ...sections], colours: [...first.colours, ...second.colours] };
}
