// Money, energy and time lost to failures; and what is unknown of them.
import { element, fill, table } from "./dom.js";
import { countText, dollarsText, rounded, secondsText, shareText } from "./units.js";

export function showMoney(step, job) {
  if (!step?.money) {
    fill("money", "", element("p", { class: "quiet" }, step?.untimed || ""));
    return;
  }
  const { money, goodput } = step;
  const columns = [["a step", money.step, step.step_s], ["1e12 tokens", money["1e12_tokens"], money["1e12_tokens"].seconds],
    [job ? `the run, ${countText(job.tokens_of_run)} tokens` : "the run", money.run, money.run.seconds]];
  const rows = [
    ["of", ...columns.map(([name]) => name)],
    ["time", ...columns.map(([, , seconds]) => secondsText(seconds))],
    ["device-hours", ...columns.map(([, cost]) => rounded(cost.device_hours))],
    ["money", ...columns.map(([, cost]) => dollarsText(cost.usd))],
    ["energy", ...columns.map(([, cost]) => (cost.kwh === null ? "unknown" : `${rounded(cost.kwh)} kWh`))],
  ];
  const notes = step.gaps.map((gap) => `${gap[0].toUpperCase()}${gap.slice(1)}.`);
  if (goodput) {
    notes.unshift(`${shareText(goodput.training)} of the time trains, with a checkpoint every ${secondsText(goodput.interval_s)}, `
      + `which is best; checkpoints take ${shareText(goodput.checkpoints)}, lost work ${shareText(goodput.lost_work)} and restarts `
      + `${shareText(goodput.restarts)}. 1e12 tokens and the run have that in them.`);
  }
  fill("money", "", table(rows, { "aria-label": "Money" }), notes.map((note) => element("p", { class: "quiet" }, note)));
}
