// The search for the best plans, and its reasons. It can be stopped, and ends when another begins.
import { byId, element, table } from "./dom.js";
import { search } from "./server.js";
import { TEXTS } from "./texts.js";
import { memoryText, secondsText, shareText } from "./units.js";

let running = null;

// Searches, shows what comes, and calls `take(plan)` with the recommended plan, and with each that is chosen later. With
// `keep` fields of the plan that the page has set stay as they are.
export async function searchBest(state, take, keep = false) {
  running?.abort();
  running = new AbortController();
  const { signal } = running;
  const section = byId("search");
  const heading = element("h2", {}, TEXTS.search.title, element("small", { role: "status" }));
  const body = element("div", {});
  const stop = element("button", { type: "button" }, TEXTS.search.stop);
  stop.addEventListener("click", () => { running.abort(); section.hidden = true; });
  const set = Object.entries(state).filter(([key]) => key.startsWith("plan."));
  const again = element("button", { type: "button", hidden: keep || !set.length }, TEXTS.search.again);
  again.title = set.map(([key, text]) => `${key} = ${text}`).join(", ");
  again.addEventListener("click", () => searchBest(state, take, true));
  section.replaceChildren(element("div", { class: "actions" }, heading, again, stop), body);
  section.hidden = false;
  const status = heading.querySelector("small");
  try {
    for await (const part of search("best", state, signal, keep)) {
      if (part.seconds !== undefined) status.textContent = progress(body, part.seconds.toFixed(1));
      if (part.plans) showPlans(body, part.plans, take);
      if (part.reasons) body.append(reasons(part.reasons));
      if (part.faults) body.append(...part.faults.map((fault) => element("p", { class: "bad" }, fault)));
    }
    status.textContent = "";
  } catch (error) {
    if (error.name !== "AbortError") body.append(element("p", { class: "bad" }, error.message));
  }
  stop.textContent = TEXTS.search.close;
}

const progress = (body, seconds) => (body.childElementCount ? TEXTS.search.reasoning : TEXTS.search.searching)(seconds);

function showPlans(body, plans, take) {
  if (!plans.length) {
    body.append(element("p", { class: "bad" }, TEXTS.search.none));
    return;
  }
  const rows = plans.map((plan) => {
    const use = element("button", { type: "button" }, TEXTS.search.use);
    use.addEventListener("click", () => take(plan.state));
    return [element("span", {}, use, " ", plan.words, plan.recommended ? element("em", {}, TEXTS.search.recommended) : ""),
      secondsText(plan.step_s, plans[0].step_s), shareText(plan.mfu), memoryText(plan.process_bytes)];
  });
  body.append(table([TEXTS.search.columns, ...rows], { class: "plans", "aria-label": TEXTS.search.title.trim() }));
  take(plans[0].state);
}

function reasons(text) {
  const pre = element("pre", { tabIndex: 0 }, text);
  return element("details", {}, element("summary", {}, TEXTS.search.reasons), pre);
}

// The nearest plans that fit, as buttons.
export async function searchFitting(state, place, take, signal) {
  const line = element("p", { class: "quiet" }, TEXTS.search.looking);
  place.append(line);
  try {
    for await (const part of search("fitting", state, signal)) {
      if (part.seconds !== undefined) continue;
      if (part.faults) { line.textContent = part.faults.join("; "); continue; }
      if (!part.nearest?.length) { line.textContent = TEXTS.search.noneNear; continue; }
      line.replaceChildren(TEXTS.search.near, ...part.nearest.map((near) => {
        const text = `${Object.entries(near.state).map(([key, value]) => `${key.split(".").at(-1)} ${value}`).join(", ")} `;
        const use = element("button", { type: "button" }, `${text}(${memoryText(near.process_bytes)}, ${secondsText(near.step_s, part.nearest[0].step_s)})`);
        use.addEventListener("click", () => take(near.state));
        return use;
      }));
    }
  } catch (error) {
    if (error.name !== "AbortError") line.textContent = error.message;
  }
}
