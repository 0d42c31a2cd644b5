// The figures of a plan in one line, and how they differ from the plan that is kept beside.
import { element } from "./dom.js";
import { changeText, countText, dollarsText, memoryText, rounded, secondsText, shareText } from "./units.js";

// [name, value of an answer or undefined, text of a value]
const FIGURES = [
  ["step", ({ step }) => step?.step_s, secondsText],
  ["MFU", ({ step }) => step?.mfu, shareText],
  ["tokens/s/device", ({ step }) => step?.tokens_per_s_per_device, (value) => rounded(value, 4)],
  ["fullest device", (answer) => fullest(answer), memoryText],
  ["the run", ({ step }) => step?.money?.run.seconds, secondsText],
  ["its money", ({ step }) => step?.money?.run.usd ?? undefined, dollarsText],
  ["parameters", ({ job }) => job?.parameters, countText],
];

export function showHeadline(list, answer, beside) {
  list.replaceChildren(...FIGURES.map(([name, read, text]) => {
    const value = read(answer), other = beside ? read(beside) : undefined;
    const shown = [element("dd", {}, value === undefined ? "–" : text(value))];
    if (name === "fullest device" && answer.memory?.device_bytes) {
      shown.push(element("dd", { class: "beside" }, `of ${memoryText(answer.memory.device_bytes)}`));
    }
    if (other !== undefined) {
      const change = value === undefined ? "" : changeText(value, other);
      shown.push(element("dd", { class: "beside" }, element("span", {}, `beside ${text(other)} `), change || "the same"));
    }
    return element("div", { class: name === "fullest device" ? fitClass(answer) : "" }, element("dt", {}, name), shown);
  }));
}

// All that the process has on the fullest device, if it is predicted, else what the account adds up.
function fullest({ step, memory }) {
  if (step?.process_bytes) return step.process_bytes;
  return memory ? Math.max(...memory.ranks.map((rank) => rank.total_bytes)) : undefined;
}

const fitClass = ({ memory }) => (memory?.fits === false ? "bad" : memory?.fits ? "good" : "");
