// The memory of each pipeline rank, by kind, against the room that its device has.
import { element, fill, table } from "./dom.js";
import { memoryText } from "./units.js";

const KINDS = ["parameters", "gradients", "optimizer", "activations", "buffers", "working", "host"];

export function showMemory(memory, beside) {
  const plans = [["", memory.ranks], ...(beside ? [["beside ", [fullestRank(beside.ranks)]]] : [])];
  const ranks = plans.flatMap(([, rows]) => rows);
  const most = Math.max(memory.device_bytes || 0, ...ranks.map((rank) => rank.total_bytes));
  const shown = KINDS.filter((kind) => ranks.some((rank) => rank[`${kind}_bytes`] > 0));
  const onDevice = shown.filter((kind) => kind !== "host");
  const rows = plans.flatMap(([name, list]) => list.map((rank, number) => {
    const label = name ? "beside" : String(number);
    return element("div", { class: "rank" },
      element("span", {}, label), bar(rank, onDevice, most, memory), element("b", {}, memoryText(rank.total_bytes)));
  }));
  const legend = element("p", { class: "keys" }, onDevice.map((kind) =>
    element("span", {}, element("i", { class: `swatch kind-${kind}` }), kind)));
  const header = ["pp rank", ...shown, "total on the device"];
  const cells = memory.ranks.map((rank, number) => [
    String(number), ...shown.map((kind) => memoryText(rank[`${kind}_bytes`])), memoryText(rank.total_bytes)]);
  const details = element("details", {}, element("summary", {}, "By rank and kind"), table([header, ...cells]));
  const bars = element("div", { class: memory.ranks.length > 16 ? "bars dense" : "bars" }, rows);
  fill("by-rank", "", element("p", { class: memory.fits === false ? "bad" : "quiet" }, memory.verdict), legend, bars, details);
}

function bar(rank, kinds, most, memory) {
  const pieces = kinds.map((kind) => {
    const piece = element("i", { class: `kind-${kind}`, title: `${kind}: ${memoryText(rank[`${kind}_bytes`])}` });
    piece.style.width = `${(100 * rank[`${kind}_bytes`]) / most}%`;
    return piece;
  });
  const line = element("div", { class: "bar" }, pieces);
  if (memory.room_bytes) {
    const room = element("u", { title: `a plan may fill ${memoryText(memory.room_bytes)}` });
    room.style.left = `${(100 * memory.room_bytes) / most}%`;
    line.append(room);
  }
  return line;
}

const fullestRank = (ranks) => ranks.reduce((most, rank) => (rank.total_bytes > most.total_bytes ? rank : most));
