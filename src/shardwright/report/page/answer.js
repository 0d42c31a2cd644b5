// The answer of a command, as its --json has it, on a page: parts that a component of the planning page shows as it does
// there, and all others as lists and tables. Units are told by the ends of names: _s, _bytes, usd.
import { byId, element, fill, table } from "./dom.js";
import { flowing } from "./flowing.js";
import { showMemory } from "./memory_view.js";
import { showMoney } from "./money_view.js";
import { say } from "./say.js";
import { showStep } from "./step_view.js";
import { bytesText, countText, dollarsText, memoryText, rounded, secondsText, shareText } from "./units.js";

const { answer, text: printed, lines, words, fields, names } = JSON.parse(byId("data").textContent);
const MOST_COLUMNS = 14;
const MOST_CHARS = 24;  // of a figure at the top
const PLAN = /(^|\.)plan\.(dp|tp|pp|cp|ep|microbatch_size|schedule|zero|recompute)$/;
const TOLD = /(^|\.)(step_s|mfu|run\.(days|usd|kwh))$/;  // what plans are compared by
const SHARES = ["mfu", "hfu", "efficiency", "imbalance", "more_tokens"];
const BYTES = ["largest", "curve"];  // lists whose last value is bytes
const isList = Array.isArray(answer);
const shown = isList ? {} : { ...answer };

if (shown.time && shown.step_range_s) take("step", ["time", "step_range_s"], (value) => showStep(value, null, words));
if (Array.isArray(shown.memory) && shown.memory[0]?.total_bytes) {
  take("by-rank", ["memory"], (value) => showMemory({ ranks: value.memory.map((rank) => ({ ...rank, process_bytes: rank.total_bytes })),
    room_bytes: value.device_room_bytes, fits: value.fits, verdict: verdictOf(value.fits) }, null));
}
if (shown.money?.run && shown.gaps) take("money", ["money", "goodput", "gaps"], (value) => showMoney(value, null));
if (printed) {
  byId("printed").hidden = false;
  fill("printed", "", element("pre", { tabindex: "0", class: "printed" }, printed), element("div", { class: "flowing" }, flowing(lines || printed)));
}
showFigures();
for (const [key, value] of Object.entries(shown)) if (!isList && (value === null || value.length === 0)) delete shown[key];
byId("rest").hidden = !isList && !Object.keys(shown).length;
fill("rest", "", isList ? content("", answer, 3) : null, ...Object.entries(shown).map(([key, value]) => block(key, value, 3)));

// Shows parts of the answer by a component, and leaves them out below.
function take(id, keys, draw) {
  byId(id).hidden = false;
  draw(shown);
  for (const key of keys) delete shown[key];
}

function showFigures() {
  const small = Object.entries(shown).filter(([, value]) => !isLarge(value) && value !== null && value !== "" && String(value).length < MOST_CHARS);
  byId("headline").hidden = !small.length;
  byId("headline").replaceChildren(...small.map(([key, value]) => {
    const cluster = /^(cheapest|fastest|least_energy)$/.test(key) && answer.clusters?.[value];  // an index
    const text = cluster ? `${cluster.num_devices} ${cluster.device}` : Number.isInteger(value) && value >= 1e6 && !/_bytes$/.test(key) ? countText(value) : textOf(key, value);
    delete shown[key];
    return element("div", {}, element("dt", { title: fields[key] || "" }, nameOf(key)), element("dd", { title: cluster ? text : textOf(key, value) }, text));
  }));
}

function verdictOf(fits) {
  return fits === null ? say("Nothing says if it fits: cluster.device is unknown.") : fits ? say("Every rank fits its device.") : say("It does not fit.");
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function isLarge(value) {
  return (typeof value === "object" && value !== null) || (typeof value === "string" && value.length > 60);
}

// What tells a key from another one with the same name, such as rank_s from rank_bytes.
function kindOf(key) {
  const isAlone = Object.keys(shown).every((other) => other === key || nameOf(other) !== nameOf(key));
  return isAlone ? "" : key.endsWith("_bytes") ? `, ${say("memory")}` : key.endsWith("_s") ? `, ${say("time")}` : "";
}

// A heading and what is below it.
function block(key, value, level) {
  const isPlan = key === "plan" && isObject(value);  // its fields are many, and most are as usual
  const heading = element(isPlan ? "summary" : `h${level}`, {}, nameOf(key), kindOf(key));
  return element(isPlan ? "details" : "div", { class: "block" }, heading, content(key, value, level));
}

function content(key, value, level) {
  if (!isLarge(value) || typeof value === "string") return element("p", {}, textOf(key, value));
  if (isObject(value)) return listOf(key, value, level);
  if (!value.length) return element("p", { class: "quiet" }, say("none"));
  if (value.every(isObject)) return tableOf(key, value);
  if (value.some(isLarge)) return element("ol", {}, value.map((one) => element("li", {}, Array.isArray(one) ? one.map((part) => (BYTES.includes(key) && part === one.at(-1) ? memoryText(part) : textOf(key, part))).join(", ") : textOf(key, one))));
  return element("p", {}, value.map((one) => textOf(key, one)).join(", "));
}

function listOf(key, value, level) {
  const entries = Object.entries(value);
  if (entries.length && entries.every(([, one]) => isObject(one))) {
    return tableOf(key, entries.map(([name, one]) => ({ entry: name, ...one })));
  }
  const small = entries.filter(([, one]) => !isLarge(one));
  const list = element("dl", { class: "card" }, small.map(([name, one]) =>
    element("div", {}, element("dt", {}, nameOf(name)), element("dd", {}, textOf(`${key}.${name}`, one)))));
  const large = entries.filter(([, one]) => isLarge(one)).map(([name, one]) => block(name, one, Math.min(6, level + 1)));
  return element("div", {}, small.length ? list : null, large);
}

// Rows as a table of what differs among them; what all share is a list below. Columns of plain values come first.
function tableOf(name, rows) {
  const flat = rows.map((row) => Object.fromEntries(flatten(row)));
  const keys = [...new Set(flat.flatMap(Object.keys))].sort((one, other) => weight(one, flat) - weight(other, flat));
  const text = (row, key) => (row[key] === undefined ? "–" : textOf(`${name}.${key}`, row[key]));
  const differs = (key) => rows.length === 1 || flat.some((row) => text(row, key) !== text(flat[0], key));
  const columns = keys.filter(differs), shared = keys.filter((key) => !differs(key));
  const tables = [columns.slice(0, MOST_COLUMNS), columns.slice(MOST_COLUMNS)].filter((some) => some.length).map((some) =>
    table([some.map((key) => headingOf(key, flat)), ...flat.map((row) => some.map((key) => cell(key, row[key], text(row, key))))], { "aria-label": nameOf(name) || say("table") }));
  const all = Object.fromEntries(stated(shared, flat[0]));
  return element("div", {}, tables[0] ?? null,
    tables[1] ? element("details", {}, element("summary", {}, say("More columns")), tables[1]) : null,
    Object.keys(all).length ? element("details", {}, element("summary", {}, say("The same in all rows")), listOf(name, all, 5)) : null);
}

// The name of a column, which stands above its texts as they are aligned.
function headingOf(key, rows) {
  const hasWords = rows.some((row) => typeof row[key] === "string" || Array.isArray(row[key]));
  return hasWords ? element("span", { class: "words" }, nameOf(key)) : nameOf(key);
}

function stated(keys, row) {
  return keys.map((key) => [key, row[key]]).filter(([, value]) => value !== null && value !== "");
}

// Where a column stands: what a plan is told by, plain values, then nested ones, then lists.
function weight(key, rows) {
  if (/^(name|device|num_devices)$/.test(key)) return -3;
  if (PLAN.test(key)) return -2;
  if (TOLD.test(key)) return -1;
  return (key.includes(".") ? 1 : 0) + (rows.some((row) => Array.isArray(row[key])) ? 2 : 0);
}

// A cell: texts are aligned as words, and rows within a row can be opened.
function cell(key, value, text) {
  if (Array.isArray(value) && value.some(isObject)) {
    return element("details", { class: "words" }, element("summary", {}, `${value.length}`), tableOf(key, value));
  }
  if (typeof value !== "string" && !Array.isArray(value)) return text;
  return element("span", { class: text.length > 24 ? "words long" : "words" }, text);
}

// Names of nested values are joined by a dot; lists of plain values are one value.
function flatten(value, before = "") {
  return Object.entries(value).flatMap(([key, one]) => (isObject(one) ? flatten(one, `${before}${key}.`) : [[before + key, one]]));
}

// The name of a value in the language of the page; a field of a job, and what has no name, as the answer writes it.
function nameOf(key) {
  return key.replace(/^(plan\.)+/, "").split(".").map((part) => names[part] ?? part.replace(/(?<!_per)_(s|bytes)$/, "").replaceAll("_", " ")).join(" ");
}

function textOf(key, value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? say("yes") : say("no");
  if (Array.isArray(value)) return value.map((one) => (isObject(one) ? flatten(one).map(([name, part]) => `${name} ${textOf(name, part)}`).join(" ") : textOf(key, one))).join(", ") || say("none");
  if (typeof value !== "number") return String(value);
  const name = key.split(".").at(-1), section = key.split(".").at(-2) || "";
  if (/bytes_per_s$/.test(name)) return `${bytesText(value)}/s`;
  if (SHARES.includes(name) || /share$|efficiency$/.test(name)) return shareText(value);
  if (section === "sent") return bytesText(value);
  if (/memory$/.test(section) || /(^|_)bytes$/.test(name)) return memoryText(value);
  if (/usd|^cost/.test(name)) return dollarsText(value);
  if (/kwh$/.test(name)) return `${rounded(value, 4)} kWh`;
  if (/hours$/.test(name)) return rounded(value, 4);
  if (/(?<!_per)_s$/.test(name) || name === "seconds" || section === "time" || section === "step") return secondsText(value);
  return Number.isInteger(value) ? value.toLocaleString("en") : rounded(value, 4);
}
