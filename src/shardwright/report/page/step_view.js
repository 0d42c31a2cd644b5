// A step as one bar, by cause; a second bar for the plan that is kept beside, on the same scale.
import { element, fill, table } from "./dom.js";
import { sentence } from "./say.js";
import { TEXTS } from "./texts.js";
import { secondsText, shareText } from "./units.js";

export function showStep(step, beside, parts) {
  if (!step || step.untimed) {
    fill("step", "", element("p", { class: "quiet" }, step?.untimed ? sentence(step.untimed) : ""));
    return;
  }
  const plans = [["", step], ...(beside?.step_s ? [[TEXTS.step.beside, beside]] : [])];
  const longest = Math.max(...plans.map(([, plan]) => plan.step_s));
  const shown = Object.keys(parts).filter((part) => plans.some(([, plan]) => plan.time[part] > 0.0005 * plan.step_s));
  const bars = plans.map(([name, plan]) => bar(name, plan, shown, parts, { longest, beside: step.step_s }));
  const header = [TEXTS.step.part, ...plans.flatMap(([name]) => [name || TEXTS.step.seconds, TEXTS.step.share])];
  const rows = shown.map((part) => [
    element("span", {}, element("i", { class: `swatch part-${part}` }), parts[part]),
    ...plans.flatMap(([, plan]) => [secondsText(plan.time[part]), shareText(plan.time[part] / plan.step_s)]),
  ]);
  const [low, high] = step.step_range_s;
  const range = TEXTS.step.range({ low: secondsText(low), high: secondsText(high, low), hfu: shareText(step.hfu) });
  fill("step", "", bars, table([header, ...rows], { "aria-label": TEXTS.step.table }), element("p", { class: "quiet" }, range));
}

// `longest` is the step of the longest bar, `beside` that of the first one.
function bar(name, plan, shown, parts, { longest, beside }) {
  const pieces = shown.map((part) => {
    const piece = element("i", {
      class: `part-${part}`, title: `${parts[part]}: ${secondsText(plan.time[part])}, ${shareText(plan.time[part] / plan.step_s)}`,
    });
    piece.style.width = `${(100 * plan.time[part]) / longest}%`;
    return piece;
  });
  const seconds = secondsText(plan.step_s, beside), label = TEXTS.step.bar({ beside: name, seconds });
  const line = element("div", { class: "bar", role: "img", "aria-label": label }, pieces);
  return element("div", { class: "whole" }, line, element("b", {}, `${seconds} ${name}`));
}
