// Money, energy and time lost to failures; and what is unknown of them.
import { element, fill, table } from "./dom.js";
import { sentence } from "./say.js";
import { TEXTS } from "./texts.js";
import { countText, dollarsText, rounded, secondsText, shareText } from "./units.js";

export function showMoney(step, job) {
  if (!step?.money) {
    fill("money", "", element("p", { class: "quiet" }, step?.untimed ? sentence(step.untimed) : ""));
    return;
  }
  const { money, goodput } = step, texts = TEXTS.money;
  const reference = money["1e12_tokens"]; // null of adapters, which nobody trains on so many
  const many = reference && Math.abs(reference.seconds / money.run.seconds - 1) > 0.01 ? reference : null;
  const columns = [[texts.step, money.step, step.step_s], ...(many ? [[texts.tokens, many, many.seconds]] : []),
    [job ? texts.runOf(countText(job.tokens_of_run)) : texts.run, money.run, money.run.seconds]];
  const cells = [
    columns.map(([name]) => name),
    columns.map(([, , seconds]) => secondsText(seconds)),
    columns.map(([, cost]) => rounded(cost.device_hours)),
    columns.map(([, cost]) => dollarsText(cost.usd)),
    columns.map(([, cost]) => (cost.kwh === null ? texts.unknown : `${rounded(cost.kwh)} kWh`)),
  ];
  const notes = step.gaps.map(sentence);
  if (goodput) {
    notes.unshift(texts.goodput({
      training: shareText(goodput.training), interval: secondsText(goodput.interval_s), checkpoints: shareText(goodput.checkpoints),
      lost: shareText(goodput.lost_work), restarts: shareText(goodput.restarts),
    }), many ? texts.both : texts.runAlone);
  }
  const rows = cells.map((row, number) => [texts.rows[number], ...row]);
  fill("money", "", table(rows, { "aria-label": texts.table }), notes.map((note) => element("p", { class: "quiet" }, note)));
}
