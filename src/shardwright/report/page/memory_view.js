// The memory of each pipeline rank's process, by kind, against that which its device shows.
import { element, fill, table } from "./dom.js";
import { TEXTS } from "./texts.js";
import { memoryText, shareText } from "./units.js";

const KINDS = Object.keys(TEXTS.memory.kinds);

// `memory` has ranks, each with its bytes by kind and of its process, and, if they are known, offered_bytes of a device or
// room_bytes, which it offers a plan.
export function showMemory(memory, beside) {
  const rows = [...memory.ranks.map((rank, number) => [String(number), rank]),
    ...(beside ? [[TEXTS.memory.beside, fullestRank(beside.ranks)]] : [])];
  const ranks = rows.map(([, rank]) => rank);
  const most = Math.max(memory.offered_bytes || memory.room_bytes || 0, ...ranks.map((rank) => rank.process_bytes));
  const shown = KINDS.filter((kind) => ranks.some((rank) => rank[`${kind}_bytes`] > 0));
  const onDevice = shown.filter((kind) => kind !== "host");
  const bars = rows.map(([label, rank]) => element("div", { class: "rank" },
    element("span", {}, label), bar(rank, onDevice, most, memory), element("b", {}, memoryText(rank.process_bytes))));
  const legend = element("p", { class: "keys" }, onDevice.map((kind) =>
    element("span", {}, element("i", { class: `swatch kind-${kind}` }), TEXTS.memory.kinds[kind])));
  const list = element("div", { class: memory.ranks.length > 16 ? "bars dense" : "bars" }, bars);
  const verdict = element("p", { class: memory.fits === false ? "bad" : "quiet" }, memory.verdict);
  fill("by-rank", "", verdict, legend, list, details(memory, shown));
}

// The table, which is made when it is opened.
function details(memory, shown) {
  const place = element("details", {}, element("summary", {}, TEXTS.memory.details));
  place.addEventListener("toggle", () => {
    if (place.querySelector("table")) return;
    const { rank, kinds, total, share } = TEXTS.memory, offered = memory.offered_bytes;
    const header = [rank, ...shown.map((kind) => kinds[kind]), total, ...(offered ? [share] : [])];
    const cells = memory.ranks.map((sizes, number) => [String(number), ...shown.map((kind) => memoryText(sizes[`${kind}_bytes`])),
      memoryText(sizes.process_bytes), ...(offered ? [shareText(sizes.process_bytes / offered)] : [])]);
    place.append(table([header, ...cells]));
  });
  return place;
}

function bar(rank, kinds, most, memory) {
  const pieces = kinds.map((kind) => {
    const bytes = rank[`${kind}_bytes`] || 0;
    const piece = element("i", { class: `kind-${kind}`, title: `${TEXTS.memory.kinds[kind]}: ${memoryText(bytes)}` });
    piece.style.width = `${(100 * bytes) / most}%`;
    return piece;
  });
  const line = element("div", { class: "bar" }, pieces);
  const limit = memory.offered_bytes || memory.room_bytes;
  if (limit) {
    const text = memory.offered_bytes ? TEXTS.memory.offered : TEXTS.memory.room;
    const mark = element("u", { title: text(memoryText(limit)) });
    mark.style.left = `calc(${Math.min(100, (100 * limit) / most)}% - 2px)`;
    line.append(mark);
  }
  return line;
}

const fullestRank = (ranks) => ranks.reduce((most, rank) => (rank.process_bytes > most.process_bytes ? rank : most));
