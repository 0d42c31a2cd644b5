// The ranks in their nodes, coloured by their place on one axis; and what crosses which link in a step.
import { element, fill, table } from "./dom.js";
import { bytesText, rounded, secondsText, shareText } from "./units.js";

const AXES = { pp: "pipeline stage", dp: "replica", cp: "context", ep: "expert", tp: "tensor" };
let chosen = "";  // the axis of the colours, kept from one plan to the next

export function showNodes(links) {
  const axes = Object.keys(links.axes);
  const axis = axes.includes(chosen) ? chosen : axes.includes("pp") ? "pp" : axes[0] || "pp";
  const select = element("select", {}, axes.map((name) => element("option", { value: name }, `${name}: ${AXES[name] || name}`)));
  select.value = axis;
  select.addEventListener("change", () => { chosen = select.value; showNodes(links); });
  const grid = element("div", { class: "nodes" }, nodesOf(links).map((ranks, number) => nodeBox(links, ranks, number, axis)));
  const told = element("p", { class: "quiet" });
  const tell = (event) => point(grid, links, axis, told, event.target.closest("[data-rank]"));
  for (const kind of ["pointerover", "focusin"]) grid.addEventListener(kind, tell);
  grid.addEventListener("click", tell);
  tell({ target: grid.querySelector("[data-rank]") });
  const shown = links.places.length;
  const more = shown < links.ranks ? `the first ${rounded(shown, 5)} of ${rounded(links.ranks, 5)} ranks` : "";
  const label = element("label", {}, "colours by ", select);
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
  `rank ${rank}: ${Object.keys(links.axes).map((axis) => `${axis} ${place[axis]}`).join(", ") || "alone"}`;

// Marks a rank's group on the axis: the ranks that differ from it on that axis alone.
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
  const inNodes = new Set([...grid.querySelectorAll(".peer")].map((peer) => peer.closest(".node"))).size;
  told.textContent = `${placeText(links, rank, own)}. Its ${axis} group, outlined, has ${links.axes[axis] || 1} ranks; `
    + `${count} of them are shown, in ${inNodes} ${links.domain}${inNodes === 1 ? "" : "s"}.`;
}

export function showTraffic(links) {
  const sums = { inside: 0, between: 0 };
  for (const crossing of links.crossings) for (const place of ["inside", "between"]) sums[place] += crossing.sent[place];
  const places = [["inside", links.inside], ["between", links.between]];
  const uses = links.links.map((link, number) => {
    const [place] = places[number] || places[0];
    const busy = links.step_s ? sums[place] / link.reached_bytes_per_s / links.step_s : null;
    const text = `${link.name}: ${bytesText(sums[place])} sent in a step, of a link of ${bytesText(link.peak_bytes_per_s)}/s`;
    const meter = element("div", { class: "bar meter" }, element("i", { class: "part-tensor" }));
    meter.firstChild.style.width = `${100 * Math.min(1, busy || 0)}%`;
    return element("div", { class: "use" }, element("p", {}, text, busy === null ? "" : `; busy ${shareText(busy)} of the step`), meter);
  });
  const header = ["when", "axis", "what", "ranks", "calls", links.inside, links.between, "takes", "not hidden"];
  const rows = links.crossings.filter((crossing) => crossing.full_bytes > 1e5).map((crossing) => [
    crossing.phase, crossing.axis, crossing.kind.replaceAll("_", "-"), rounded(crossing.num_ranks, 5), rounded(crossing.calls, 5),
    bytesText(crossing.sent.inside), bytesText(crossing.sent.between), optional(crossing.seconds), optional(crossing.exposed_s)]);
  const none = element("p", { class: "quiet" }, "Nothing crosses a link.");
  fill("traffic", `of rank ${links.rank}, which sets the pace`, uses,
    rows.length ? table([header, ...rows], { "aria-label": "Traffic by axis" }) : none);
}

const optional = (seconds) => (seconds === null ? "–" : secondsText(seconds));
