// The figures of a plan in one line, and how they differ from the plan that is kept beside.
import { element } from "./dom.js";
import { TEXTS } from "./texts.js";
import { changeText, countText, dollarsText, memoryText, rounded, secondsText, shareText } from "./units.js";

// [name in TEXTS.headline, value of an answer or undefined, text of a value]
const FIGURES = [
  ["step", ({ step }) => step?.step_s, secondsText],
  ["mfu", ({ step }) => step?.mfu, shareText],
  ["tokens", ({ step }) => step?.tokens_per_s_per_device, (value) => rounded(value, 4)],
  ["memory", (answer) => fullest(answer), memoryText],
  ["run", ({ step }) => step?.money?.run.seconds, secondsText],
  ["money", ({ step }) => step?.money?.run.usd ?? undefined, dollarsText],
  ["parameters", ({ job }) => job?.parameters, countText],
];

export function showHeadline(list, answer, beside) {
  list.replaceChildren(...FIGURES.map(([name, read, text]) => {
    const value = read(answer), other = beside ? read(beside) : undefined;
    const shown = [element("dd", {}, value === undefined ? "–" : text(value))];
    if (name === "memory" && answer.memory?.offered_bytes) {
      shown.push(element("dd", { class: "beside" }, TEXTS.headline.offered(memoryText(answer.memory.offered_bytes))));
    }
    if (other !== undefined) {
      const change = value === undefined ? "" : changeText(value, other) || TEXTS.headline.same;
      shown.push(element("dd", { class: "beside" }, element("span", {}, TEXTS.headline.beside(text === secondsText && value ? secondsText(other, value) : text(other))), change));
    }
    return element("div", { class: name === "memory" ? fitClass(answer) : "" }, element("dt", {}, TEXTS.headline[name]), shown);
  }));
}

// All that the process has on the fullest device, if it is predicted, else what the account adds up.
function fullest({ step, memory }) {
  if (step?.process_bytes) return step.process_bytes;
  return memory ? Math.max(...memory.ranks.map((rank) => rank.process_bytes)) : undefined;
}

const fitClass = ({ memory }) => (memory?.fits === false ? "bad" : memory?.fits ? "good" : "");
