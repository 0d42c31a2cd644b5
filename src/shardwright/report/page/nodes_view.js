// The ranks in their nodes, coloured by their place on one axis, and the traffic of each axis over each kind of link; and
// all that crosses a link in a step.
import { element, fill, table } from "./dom.js";
import { sentences } from "./say.js";
import { TEXTS } from "./texts.js";
import { bytesText, rounded, secondsText, shareText } from "./units.js";

let chosen = "";  // the axis of the colours, kept from one plan to the next
let drawn = "";  // the places that are on the page

export function showNodes(links) {
  const places = JSON.stringify([links.places, links.axes, links.devices_per_node, links.domain, chosen]);
  if (places === drawn) return;
  drawn = places;
  const axes = Object.keys(links.axes);
  const axis = axes.includes(chosen) ? chosen : axes.includes("pp") ? "pp" : axes[0] || "pp";
  const select = element("select", {}, axes.map((name) => element("option", { value: name }, `${name}: ${TEXTS.nodes.axes[name] || name}`)));
  select.value = axis;
  select.addEventListener("change", () => { chosen = select.value; showNodes(links); });
  const grid = element("div", { class: "nodes" }, nodesOf(links).map((ranks, number) => nodeBox(links, ranks, number, axis)));
  const told = element("p", { class: "quiet" });
  const tell = (event) => point(grid, links, axis, told, event.target.closest("[data-rank]"));
  for (const kind of ["pointerover", "focusin"]) grid.addEventListener(kind, tell);
  grid.addEventListener("click", tell);
  tell({ target: grid.querySelector("[data-rank]") });
  const shown = links.places.length;
  const more = shown < links.ranks ? TEXTS.nodes.first({ shown: rounded(shown, 5), ranks: rounded(links.ranks, 5) }) : "";
  const label = element("label", {}, TEXTS.nodes.colours, select);
  fill("nodes", more, axes.length ? label : null, grid, told);
}

function nodesOf(links) {
  const nodes = [];
  for (let rank = 0; rank < links.places.length; rank += links.devices_per_node) {
    nodes.push(links.places.slice(rank, rank + links.devices_per_node).map((place, index) => [rank + index, place]));
  }
  return nodes;
}

function nodeBox(links, ranks, number, axis) {
  const cells = ranks.map(([rank, place]) => {
    const cell = element("i", { "data-rank": rank, title: placeText(links, rank, place) }, String(place[axis] ?? ""));
    cell.style.background = colourOf(place[axis] || 0, links.axes[axis] || 1);
    return cell;
  });
  return element("div", { class: "node" }, element("small", {}, `${links.domain} ${number}`), element("div", {}, cells));
}

const colourOf = (index, count) => `hsl(${Math.round((360 * index) / Math.max(count, 3) + 210) % 360} 62% ${index % 2 ? 62 : 72}%)`;

const placeText = (links, rank, place) =>
  TEXTS.nodes.place({ rank, places: Object.keys(links.axes).map((axis) => `${axis} ${place[axis]}`).join(", ") });

// Marks a rank's group on the axis: the ranks that differ from it on that axis alone. Says what the axis sends.
function point(grid, links, axis, told, cell) {
  if (!cell) return;
  const rank = Number(cell.dataset.rank), own = links.places[rank];
  let count = 0;
  for (const other of grid.querySelectorAll("[data-rank]")) {
    const place = links.places[Number(other.dataset.rank)];
    const isPeer = Object.keys(links.axes).every((name) => name === axis || place[name] === own[name]);
    other.classList.toggle("peer", isPeer);
    count += isPeer;
  }
  const nodes = new Set([...grid.querySelectorAll(".peer")].map((peer) => peer.closest(".node"))).size;
  const group = TEXTS.nodes.group({
    axis, size: links.axes[axis] || 1, count, nodes, domains: nodes === 1 ? links.domain : links.domains,
  });
  told.textContent = sentences(placeText(links, rank, own), group);
}

// With `measured`, { inside, between }, the shares of the links' bandwidth that a run used.
export function showTraffic(links, measured = {}) {
  const { uses, step_s: step } = links;
  const lines = uses.map(({ place, link, sent_bytes: sent, share }) => {
    const texts = [TEXTS.traffic.link({ name: links[place], sent: bytesText(sent), peak: bytesText(link.peak_bytes_per_s) })];
    if (step) texts.push(TEXTS.traffic.used(shareText(share)), TEXTS.traffic.busy(shareText(sent / link.reached_bytes_per_s / step)));
    if (known(measured[place])) texts.push(TEXTS.traffic.measured(shareText(measured[place])));
    const meter = element("div", { class: "bar meter" }, element("i", { class: "part-tensor" }));
    meter.firstChild.style.width = `${100 * Math.min(1, share || 0)}%`;
    return element("div", { class: "use" }, element("p", {}, texts.join("")), meter);
  });
  const header = [...TEXTS.traffic.columns, ...uses.flatMap(({ place }) => [links[place], ...(step ? [TEXTS.traffic.share] : [])]),
    TEXTS.traffic.takes, TEXTS.traffic.exposed];
  const rows = links.crossings.filter((crossing) => crossing.full_bytes > 1e5).map((crossing) => [
    crossing.phase, crossing.axis, crossing.kind.replaceAll("_", "-"), rounded(crossing.num_ranks, 5), rounded(crossing.calls, 5),
    ...uses.flatMap(({ place, link }) => onLink(crossing.sent[place], link, step)), optional(crossing.seconds), optional(crossing.exposed_s)]);
  const none = element("p", { class: "quiet" }, TEXTS.traffic.none);
  fill("traffic", TEXTS.traffic.rank(links.rank), lines,
    rows.length ? table([header, ...rows], { "aria-label": TEXTS.traffic.table }) : none);
}

// The cells of bytes on a link: their text, and their share of what the link could carry in the step.
function onLink(bytes, link, step) {
  return [bytesText(bytes), ...(step ? [shareText(bytes / link.peak_bytes_per_s / step)] : [])];
}

const known = (value) => value !== null && value !== undefined;

const optional = (seconds) => (seconds === null ? "–" : secondsText(seconds));
