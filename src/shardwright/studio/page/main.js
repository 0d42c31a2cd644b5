// The page: its state, what a change of it asks of the server, and where the answers go.
import { buildControls } from "./controls.js";
import { byId, setText } from "./dom.js";
import { fillExports, saveExport, stateOf, takeFiles, textsOf } from "./files.js";
import { showHeadline } from "./headline.js";
import { showMemory } from "./memory_view.js";
import { place, showFaults, showMessage, showNotes } from "./messages.js";
import { showMoney } from "./money_view.js";
import { showNodes, showTraffic } from "./nodes_view.js";
import { searchBest, searchFitting } from "./search_view.js";
import { askControls, askParts } from "./server.js";
import { ofModel, readAddress, withField, withPlan, writeAddress } from "./state.js";
import { showStep } from "./step_view.js";
import { fillTexts, TEXTS } from "./texts.js";
import { showTimeline } from "./timeline_view.js";
import { wholeText } from "./units.js";

const QUICK = ["values", "job", "step", "memory"];
const SLOW = ["links", "timeline"];  // while a slider moves they are asked when it has rested for a moment
const QUIET_MS = 80;
const TOGETHER_MS = 60;  // parts that come within this time are shown at once: a frame takes a browser as long as a part
const BUSY_MS = 300;  // an answer that takes longer dims the figures before it

fillTexts(document);
const described = await askControls();
let page = readAddress(described.first);  // { state, beside }
let answer = {};  // parts of the answer to the state, by name
let besideAnswer = null;  // the same of the plan beside
const drawn = {};  // by part: the content that is on the screen, and that of the plan beside it
let asking = new AbortController();
let isUnwritten = false;  // the address is that of a state before
let frame = null;  // what the next frame shows: { names, painted }

const showControls = buildControls(byId("controls"), described, (key, text, isStep) => {
  const isModel = key === "job" && described.models.includes(text);
  if (key !== "job") go(withField(page.state, key, text, answer.values || {}), isStep);
  else go(isModel ? ofModel(text, answer.values || {}) : { job: text }, isStep);
});

// Goes to another state, of a step of its own in the browser's history unless a slider moves. The address is written
// when the answer is on the screen, since that takes a browser as long as a part of the answer.
function go(state, isStep = true) {
  if (isStep) write();
  page = { ...page, state };
  isUnwritten ||= isStep;
  refresh([], isStep);
}

function write() {
  if (isUnwritten) writeAddress(page);
  isUnwritten = false;
}

async function refresh(notes = [], isStep = true) {
  asking.abort();
  asking = new AbortController();
  const { signal } = asking;
  performance.mark("asked");
  delete document.body.dataset.shown;
  const busy = setTimeout(() => document.body.classList.add("busy"), BUSY_MS);
  signal.addEventListener("abort", () => clearTimeout(busy));
  const seen = showTogether(notes, signal, () => {
    clearTimeout(busy);
    document.body.classList.remove("busy");
  });
  try {
    if (page.beside && !besideAnswer) besideAnswer = await answerOf(page.beside, [...QUICK, ...SLOW], {}, signal, () => {});
    answer = await answerOf(page.state, isStep ? [...QUICK, ...SLOW] : QUICK, drawn, signal, seen);
    if (!answer.faults) {
      if (!isStep) {
        await new Promise((resolve) => setTimeout(resolve, QUIET_MS));
        if (signal.aborted) return;
        Object.assign(answer, await answerOf(page.state, SLOW, drawn, signal, seen));
      }
      if (answer.memory.fits === false) searchFitting(page.state, place(), (plan) => go({ ...page.state, ...plan }), signal);
    }
    await onScreen("shown");
    if (signal.aborted) return;
    write();
    document.body.dataset.shown = location.hash;  // all of this state is on the screen
  } catch (error) {
    if (error.name === "AbortError") return;
    write();
    clearTimeout(busy);
    document.body.classList.remove("busy");
    showFaults(error.faults || [TEXTS.messages.silent(error.message)], error.wayOut);
  }
}

// The parts of the answer to a state, each of which is told to `seen`. Of `known` parts, by name { content }, those that
// are the same are not sent again.
async function answerOf(state, wanted, known, signal, seen) {
  const parts = {};
  const keys = Object.fromEntries(Object.entries(known).flatMap(([part, { content }]) => (content?.key ? [[part, content.key]] : [])));
  for await (const { part, ...content } of askParts(state, wanted, keys, signal)) {
    const isKnown = content.key && content.key === keys[part];
    parts[part] = part === "values" ? content.values : part === "faults" ? content.faults : isKnown ? known[part].content : content;
    if (part === "faults") parts.way_out = content.way_out;
    if (signal.aborted) throw new DOMException("", "AbortError");
    seen(part, parts);
    if (wanted.every((name) => name in parts)) seen("", parts);
  }
  return parts;
}

// A function that shows the parts of an answer as they come: faults at once with what came before them, others together,
// at the latest when the first of them has waited so long. The name of the part is empty after the last one. `settle` is
// called when memory is shown.
function showTogether(notes, signal, settle) {
  let waiting = [], timer = 0;
  const showAll = (parts) => {
    clearTimeout(timer);
    timer = 0;
    const names = signal.aborted ? [] : waiting;
    waiting = [];
    for (const name of names) show(name, parts, notes);
    if (names.some((name) => name === "memory" || name === "faults")) settle();
  };
  return (part, parts) => {
    if (part) waiting.push(part);
    if (["", "faults"].includes(part)) showAll(parts);
    else if (!["values", "job"].includes(part) && !timer) timer = setTimeout(showAll, TOGETHER_MS, parts);
  };
}

// Shows one part of an answer, of which `parts` are known. What is on the screen already stays as it is.
function show(part, parts, notes) {
  const content = parts[part], beside = besideAnswer?.[part];
  const isShown = content?.key && drawn[part]?.content === content && drawn[part].beside === beside;
  if (!isShown) showPart(part, parts, notes);
  drawn[part] = { content, beside };
  if (part === "step" || part === "memory") showHeadline(byId("headline"), { memory: drawn.memory?.content, ...parts }, besideAnswer);
  onScreen(part);
}

// Marks the time at which what was shown is on the screen, and waits for it: benchmarks/studio.py reads the marks.
function onScreen(name) {
  frame ||= { names: [], painted: new Promise((resolve) => requestAnimationFrame(() => setTimeout(() => {
    for (const shown of frame.names) performance.mark(shown);
    frame = null;
    resolve();
  }))) };
  frame.names.push(name);
  return frame.painted;
}

function showPart(part, parts, notes) {
  document.body.classList.toggle("faulty", part === "faults");
  if (part === "values") showControls(parts.values, page.state);
  if (part === "faults") {
    if (!parts.values) showControls(answer.values || {}, page.state);
    showFaults(parts.faults, parts.way_out);
  }
  if (part === "job") {
    setText(byId("words"), TEXTS.plan({ ...parts.job, ranks: wholeText(parts.job.ranks) }));
    if (document.title !== TEXTS.pageTitle(parts.job)) document.title = TEXTS.pageTitle(parts.job);
    const told = notes.flatMap((note) => note.lines || note);
    showNotes([...notes, ...parts.job.notes.filter((note) => !told.includes(note))]);
  }
  if (part === "step") {
    showStep(parts.step, besideAnswer?.step, described.parts);
    showMoney(parts.step, parts.job);
  }
  if (part === "memory") showMemory(parts.memory, besideAnswer?.memory);
  if (part === "timeline") showTimeline(parts.timeline, besideAnswer?.timeline);
  if (part === "links") { showNodes(parts.links); showTraffic(parts.links); }
}

function keepBeside() {
  const isKept = page.beside !== null;
  write();
  page = { ...page, beside: isKept ? null : page.state };
  showKeep();
  besideAnswer = null;
  writeAddress(page);
  refresh();
}

function showKeep() {
  byId("keep").textContent = page.beside ? TEXTS.actions.drop : TEXTS.actions.keep;
}

// One click: the search, the recommended plan, and the plan before it beside.
function takeBest() {
  const before = page.state;
  const take = (plan) => {
    if (!page.beside) page = { ...page, beside: before };
    showKeep();
    go(withPlan(before, plan));
  };
  searchBest(before, take);
}

async function open(files) {
  const names = files.map((file) => file.name).join(", ");
  try {
    const texts = await textsOf(files);
    const { state, notes, system } = await stateOf(texts, "", answer.values || {});
    write();
    page = { state, beside: page.beside };
    writeAddress(page);
    const read = TEXTS.messages.read({ names, system });
    refresh([read, ...notes]);
  } catch (error) {
    showFaults(error.faults || [error.message], error.wayOut, TEXTS.messages.unread(names));
  }
}

async function save(to) {
  try {
    showMessage("note", ...await saveExport(page.state, to));
  } catch (error) {
    showFaults(error.faults || [error.message], error.wayOut, TEXTS.messages.unsaved);
  }
}

// The job or model as it was before it was changed by hand; fields of a file are those that the page began with.
function reset() {
  const { job } = page.state;
  if (described.models.includes(job)) go(ofModel(job, answer.values || {}));
  else go(job ? { job } : described.first);
}
const ACTIONS = { best: takeBest, keep: keepBeside, reset };
const KEYS = { b: "best", k: "keep", o: "open", r: "reset" };

for (const [id, act] of Object.entries(ACTIONS)) byId(id).addEventListener("click", act);
addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input, select, textarea") && !event.target.matches("[type=checkbox], [type=range]");
  if (!isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) byId(KEYS[event.key])?.click();
});
addEventListener("popstate", () => {
  page = readAddress(described.first);
  isUnwritten = false;
  besideAnswer = null;
  showKeep();
  refresh();
});
byId("controls").addEventListener("submit", (event) => event.preventDefault());
takeFiles(open);
fillExports(described, save);
showKeep();
refresh();
