// Files: those that are opened or dropped become the plan, and a plan is saved in any format.
import { byId, element } from "./dom.js";
import { showMessage } from "./messages.js";
import { exportPlan, readFiles } from "./server.js";
import { TEXTS } from "./texts.js";

const MOST_BYTES = 900_000;

// Calls `open(files)`.
export function takeFiles(open) {
  const input = byId("file"), shade = byId("shade");
  byId("open").addEventListener("click", () => input.click());
  input.addEventListener("change", () => { open([...input.files]); input.value = ""; });
  addEventListener("dragover", (event) => { event.preventDefault(); shade.hidden = false; });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) shade.hidden = true; });
  addEventListener("drop", (event) => {
    event.preventDefault();
    shade.hidden = true;
    if (event.dataTransfer.files.length) open([...event.dataTransfer.files]);
    else showMessage("bad", TEXTS.messages.nothing);
  });
}

export async function textsOf(files) {
  const names = files.map((file) => file.name).join(", "), most = MOST_BYTES.toLocaleString("en");
  const small = files.reduce((sum, file) => sum + file.size, 0) <= MOST_BYTES ? files : [];
  const texts = Object.fromEntries(await Promise.all(small.map(async (file) => [file.name, await file.text()])));
  const isLarge = !small.length || new Blob([JSON.stringify(texts)]).size > MOST_BYTES;
  if (isLarge) throw new Error(TEXTS.messages.large({ names, most }));
  return texts;
}

// The state that files describe, with notes about it. `values` say on which cluster a model is.
export async function stateOf(texts, system, values) {
  const hasDevice = values.device && values.device !== "unknown";
  const cluster = hasDevice ? { device: values.device, devices: String(values.devices) } : { device: "h100-sxm", devices: "64" };
  return readFiles(texts, system, cluster);
}

export function fillExports(described, save) {
  const select = byId("export");
  const options = (names) => Object.entries(names).map(([name, title]) => element("option", { value: name }, title));
  select.append(element("option", { value: "" }, TEXTS.actions.exportAs), element("optgroup", { label: TEXTS.actions.exportOwn }, options(described.formats)),
    element("optgroup", { label: TEXTS.actions.exportOthers }, options(described.systems)));
  select.addEventListener("change", () => {
    if (select.value) save(select.value);
    select.value = "";
  });
}

// Saves a plan's files, and returns notes about what was left out.
export async function saveExport(state, to) {
  const { files, notes } = await exportPlan(state, to);
  for (const [name, text] of Object.entries(files)) {
    const link = element("a", { href: URL.createObjectURL(new Blob([text], { type: "text/plain" })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }
  return [TEXTS.messages.saved(Object.keys(files).join(", ")), notes].filter(Boolean);
}
