// The report of a run: what was planned, what happened, and how far they are apart. Its data stand in the page.
import { lineChart } from "./charts.js";
import { byId, element, fill, table } from "./dom.js";
import { showMemory } from "./memory_view.js";
import { showMoney } from "./money_view.js";
import { showNodes, showTraffic } from "./nodes_view.js";
import { showStep } from "./step_view.js";
import { showTimeline } from "./timeline_view.js";
import { bytesText, changeText, countText, memoryText, rounded, secondsText, shareText } from "./units.js";

const run = JSON.parse(byId("data").textContent);
const { card, parts, series } = run;
const show = (id, draw) => { byId(id).hidden = false; draw(); };

showFigures();
showMessages();
showCharts();
show("measured", showMeasured);
if (run.profiled) show("profiled", showProfiled);
if (parts.step) show("step", () => showStep(parts.step, null, run.words));
if (parts.memory) show("by-rank", () => showMemory(parts.memory, null));
if (parts.timeline) show("timeline", () => showTimeline(parts.timeline, run.performed));
if (parts.links?.ranks > 1) {
  show("nodes", () => showNodes(parts.links));
  show("traffic", () => showTraffic(parts.links, run.figures.link_use));
}
if (parts.step?.money) show("money", () => showMoney(parts.step, parts.job));
if (run.experts) show("experts", showExperts);
show("health", showHealth);
show("card", showCard);

function showFigures() {
  const figures = [
    ["steps done", run.figures.steps === null ? undefined : `${rounded(run.figures.steps, 6)} of ${rounded(card.job.optimizer.steps, 6)}`],
    ["loss, nats a token", known(run.figures.loss, (value) => value.toFixed(4))],
    ["held-out loss", known(run.figures.held_out, (value) => value.toFixed(4))],
    ["a step", known(run.figures.step_s, secondsText), known(parts.step?.step_s, (value) => `predicted ${secondsText(value)}`)],
    ["tokens/s", known(run.figures.tokens_per_s, (value) => rounded(value, 4))],
    ["MFU", known(run.figures.mfu, shareText), known(parts.step?.mfu, (value) => `predicted ${shareText(value)}`)],
    ["peak memory of a rank", known(run.figures.peak_memory_bytes, memoryText)],
  ];
  byId("headline").replaceChildren(...figures.map(([name, text, below]) => element("div", {}, element("dt", {}, name),
    element("dd", {}, text ?? "–"), below ? element("dd", { class: "beside" }, below) : null)));
}

function known(value, text) {
  return value === null || value === undefined ? undefined : text(value);
}

function showMessages() {
  const failure = card.failure ? [element("div", { class: "message bad" }, element("p", {}, card.failure))] : [];
  const lines = run.notes.map((note) => element("p", {}, note));
  byId("messages").replaceChildren(...failure, ...(lines.length ? [element("div", { class: "message" }, lines)] : []));
}

function showCharts() {
  const line = (name, colour, key, isDotted = false) => ({ name, colour, points: series[key] || [], isDotted });
  const charts = [
    ["loss", { title: "Training and held-out text", unit: "nats a token", text: (value) => rounded(value, 4),
      lines: [line("training", "--compute", "loss"), ...Object.keys(series).filter((key) => key.startsWith("held_out"))
        .map((key, index) => line(key.replace("_", "-").replace(":", " "), index ? "--data" : "--tensor", key, true))] }],
    ["throughput", { title: "Tokens a second, all ranks", unit: "tokens a second", fromZero: true, lines: [line("tokens/s", "--compute", "tokens_per_s")] }],
    ["throughput", { title: "MFU", unit: "share of the peak", text: shareText, fromZero: true, lines: [line("MFU", "--compute", "mfu")] }],
    ["throughput", { title: "Parts of a step, mean of the ranks", unit: "share of the step", text: shareText, fromZero: true, top: 1,
      lines: [line("computing", "--compute", "compute_share"), line("communication that nothing hides", "--tensor", "exposed_communication_share"),
        line("idle in the pipeline", "--other", "pipeline_idle_share")] }],
    ["throughput", { title: "Use of links", unit: "share of their bandwidth", text: shareText, fromZero: true,
      lines: [line("inside nodes", "--compute", "inside_link_use"), line("between nodes", "--tensor", "between_link_use")] }],
    ["loss", { title: "Norm of the gradient", unit: "norm", text: (value) => rounded(value), fromZero: true, lines: [line("norm", "--data", "grad_norm")] }],
    ["throughput", { title: "Peak memory of the fullest rank", unit: "GiB", fromZero: true, lines: [inGib(line("peak", "--host", "peak_memory_bytes"))] }],
  ];
  for (const [id, chart] of charts) {
    const lines = chart.lines.filter(({ points }) => points.length);
    if (!lines.length) continue;
    byId(id).hidden = false;
    byId(id).querySelector(".body").append(lineChart({ ...chart, lines }));
  }
}

function inGib(line) {
  return { ...line, points: line.points.map(([step, bytes]) => [step, bytes / 2 ** 30]) };
}

function showMeasured() {
  const { whole_step_s: step, time, memory_bytes: memory, axis_bytes: bytes } = run.compared || {};
  const rows = [["of rank 0", "predicted", "measured", "prediction"]];
  const add = (name, [predicted, measured], text, isExact) => rows.push([name, known(predicted, text) ?? "–", known(measured, text) ?? "–",
    predicted === null || measured === null ? "" : predicted === measured ? "equal" : isExact ? `differs by ${text(Math.abs(predicted - measured))}` : changeText(predicted, measured)]);
  if (run.compared) {
    add("a step", step, secondsText);
    for (const [cause, pair] of Object.entries(time)) add(cause === "computing" ? cause : `waiting: ${cause}`, pair, secondsText);
    for (const [kind, pair] of Object.entries(memory)) add(`${kind} in memory`, pair, memoryText, true);
    for (const [axis, pair] of Object.entries(bytes)) add(`bytes of a step on ${axis}`, pair, bytesText, true);
  }
  for (const { place, link, share } of parts.links?.uses || []) {
    const measured = run.figures.link_use[place];
    if (known(measured, String) !== undefined) add(`bandwidth in use ${link.name}, all ranks`, [share, measured], shareText);
  }
  const note = run.compared ? run.compared.time_not_predicted && `Time is not predicted: ${run.compared.time_not_predicted}.`
    : "The run did not come to its end, where rank 0 compares.";
  fill("measured", "", rows.length > 1 ? table(rows, { "aria-label": "Predicted beside measured" }) : null,
    note ? element("p", { class: "quiet" }, note) : null);
}

function showProfiled() {
  const { step, ranks, seconds, rows } = run.profiled;
  const hasPrediction = rows.some((row) => row.predicted_s !== null);
  const header = ["cause", "mean of the ranks", "of the step", "most of a rank", ...(hasPrediction ? ["predicted"] : [])];
  const cells = rows.map(({ cause, is_part: isPart, seconds: mean, most_seconds: most, predicted_s: predicted }) => [
    isPart ? element("span", { class: "part" }, cause) : cause, secondsText(mean), shareText(mean / seconds), secondsText(most),
    ...(hasPrediction ? [known(predicted, secondsText) ?? ""] : [])]);
  fill("profiled", `step ${step}, ${ranks} rank${ranks === 1 ? "" : "s"}, ${secondsText(seconds)}`,
    table([header, ...cells], { "aria-label": "Causes of a profiled step's time" }));
}

function showExperts() {
  const picture = element("img", { src: `data:image/svg+xml;base64,${run.experts.picture}`, alt: run.experts.text });
  fill("experts", "", element("div", { class: "wide", tabIndex: 0, role: "group", "aria-label": "Use of experts" }, picture),
    element("pre", { tabIndex: 0 }, run.experts.text));
}

function showHealth() {
  const { skipped, spikes, checkpoints, done_again: again, first_step: first } = run.health;
  const lines = [
    skipped.length ? `${skipped.length} of the steps changed no weight: ${skipped.slice(0, 12).map(([step, cause]) => `${step} (${cause})`).join(", ")}${skipped.length > 12 ? ", ..." : ""}.`
      : "Every step changed the weights.",
    spikes ? `The loss left its band ${spikes} time${spikes === 1 ? "" : "s"}.` : "The loss never left its band.",
    ...again.map((one) => `Steps ${one.first} to ${one.last} were done twice, before and after a resume: their losses are ${
      one.bit_exact ? "equal bit for bit" : `different, by up to ${rounded(one.largest_loss_difference)} nats a token`}.`),
    first > 1 ? `The first step that is recorded is ${first}.` : "",
  ];
  const rows = checkpoints.map(({ step, blocking_s: blocking, durable_s: durable }) => [`step ${step}`, secondsText(blocking), secondsText(durable)]);
  fill("health", "", lines.filter(Boolean).map((line) => element("p", {}, line)),
    rows.length ? table([["checkpoint", "the run waited", "durable after"], ...rows], { "aria-label": "Checkpoints" })
      : element("p", { class: "quiet" }, "No checkpoint was written."));
}

function showCard() {
  const rows = [
    ["status", card.status], ["began", card.began], ["ended", card.ended ?? "–"], ["command", card.command],
    ["commit", card.commit ? `${card.commit}${card.has_changes ? ", with changes" : ""}` : "not a checkout"],
    ["plan", parts.job ? parts.job.words : ""], ["ranks", card.ranks.toLocaleString("en")], ["parameters", parts.job ? countText(parts.job.parameters) : ""],
    ["job, SHA-256", card.job_sha256], ...Object.entries(card.data).map(([path, digest]) => [`tokens of ${path}`, digest]),
    ...Object.entries(card.versions), ["system", card.system], ["device", card.device || "–"],
  ];
  const list = element("dl", { class: "card" }, rows.filter(([, value]) => value).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
  const job = element("pre", { tabIndex: 0 }, JSON.stringify(card.job, null, 1));
  fill("card", "also in report.json", list, element("details", {}, element("summary", {}, "Every field of the job"), job));
}
