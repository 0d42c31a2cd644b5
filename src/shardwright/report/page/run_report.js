// The report of a run: what was planned, what happened, and how far they are apart. Its data stand in the page.
import { lineChart } from "./charts.js";
import { byId, element, fill, table } from "./dom.js";
import { showMemory } from "./memory_view.js";
import { showMoney } from "./money_view.js";
import { showNodes, showTraffic } from "./nodes_view.js";
import { COMMA, say } from "./say.js";
import { showStep } from "./step_view.js";
import { showTimeline } from "./timeline_view.js";
import { bytesText, changeText, countText, memoryText, rounded, secondsText, shareText } from "./units.js";

const run = JSON.parse(byId("data").textContent);
const { card, parts, series } = run;
const CAUSES = {
  computing: say("computing"), pipeline: say("waiting: pipeline"), replicas: say("waiting: replicas"), tensor: say("waiting: tensor"),
  context: say("waiting: context"), experts: say("waiting: experts"),
};
const CAUSES_OF_SKIPS = {
  spike: say("a spike of the loss"), overflow: say("an overflow"), "not finite": say("not finite"), "no target": say("no token with a loss"),
};
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
    [say("steps done"), known(run.figures.steps, (steps) => say("{steps} of {all}", { steps: rounded(steps, 6), all: rounded(card.job.optimizer.steps, 6) }))],
    [say("loss, nats a token"), known(run.figures.loss, (value) => value.toFixed(4))],
    [say("held-out loss"), known(run.figures.held_out, (value) => value.toFixed(4))],
    [say("a step"), known(run.figures.step_s, secondsText), known(parts.step?.step_s, (value) => say("predicted {value}", { value: secondsText(value) }))],
    [say("tokens/s"), known(run.figures.tokens_per_s, (value) => rounded(value, 4))],
    ["MFU", known(run.figures.mfu, shareText), known(parts.step?.mfu, (value) => say("predicted {value}", { value: shareText(value) }))],
    [say("peak memory of a rank"), known(run.figures.peak_memory_bytes, memoryText)],
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
    ["loss", { title: say("Training and held-out text"), unit: say("nats a token"), text: (value) => rounded(value, 4),
      lines: [line(say("training"), "--compute", "loss"), ...Object.keys(series).filter((key) => key.startsWith("held_out"))
        .map((key, index) => line(heldOutName(key), index ? "--data" : "--tensor", key, true))] }],
    ["throughput", { title: say("Tokens a second, all ranks"), unit: say("tokens a second"), fromZero: true, lines: [line(say("tokens/s"), "--compute", "tokens_per_s")] }],
    ["throughput", { title: "MFU", unit: say("share of the peak"), text: shareText, fromZero: true, lines: [line("MFU", "--compute", "mfu")] }],
    ["throughput", { title: say("Parts of a step, mean of the ranks"), unit: say("share of the step"), text: shareText, fromZero: true, top: 1,
      lines: [line(say("computing"), "--compute", "compute_share"), line(say("communication that nothing hides"), "--tensor", "exposed_communication_share"),
        line(say("idle in the pipeline"), "--other", "pipeline_idle_share")] }],
    ["throughput", { title: say("Use of links"), unit: say("share of their bandwidth"), text: shareText, fromZero: true,
      lines: [line(say("inside nodes"), "--compute", "inside_link_use"), line(say("between nodes"), "--tensor", "between_link_use")] }],
    ["loss", { title: say("Norm of the gradient"), unit: say("norm"), text: (value) => rounded(value), fromZero: true, lines: [line(say("norm"), "--data", "grad_norm")] }],
    ["throughput", { title: say("Peak memory of the fullest rank"), unit: "GiB", fromZero: true, lines: [inGib(line(say("peak"), "--host", "peak_memory_bytes"))] }],
  ];
  for (const [id, chart] of charts) {
    const lines = chart.lines.filter(({ points }) => points.length);
    if (!lines.length) continue;
    byId(id).hidden = false;
    byId(id).querySelector(".body").append(lineChart({ ...chart, lines }));
  }
}

// The name of a line of held-out text: that of its set, if there are several.
function heldOutName(key) {
  const set = key.split(":")[1];
  return set ? say("held-out {set}", { set }) : say("held-out");
}

function inGib(line) {
  return { ...line, points: line.points.map(([step, bytes]) => [step, bytes / 2 ** 30]) };
}

// A name of the run's records, such as a kind of memory or a status, in the language of the page.
function nameOf(name) {
  return run.names[name] ?? name;
}

function showMeasured() {
  const { whole_step_s: step, time, memory_bytes: memory, axis_bytes: bytes } = run.compared || {};
  const rows = [[say("of rank 0"), say("predicted"), say("measured"), say("prediction")]];
  const add = (name, [predicted, measured], text, isExact) => rows.push([name, known(predicted, text) ?? "–", known(measured, text) ?? "–",
    predicted === null || measured === null ? "" : predicted === measured ? say("equal") : isExact ? say("differs by {value}", { value: text(Math.abs(predicted - measured)) }) : changeText(predicted, measured)]);
  if (run.compared) {
    add(say("a step"), step, secondsText);
    for (const [cause, pair] of Object.entries(time)) add(CAUSES[cause] ?? say("waiting: {cause}", { cause }), pair, secondsText);
    for (const [kind, pair] of Object.entries(memory)) add(say("{kind} in memory", { kind: nameOf(kind) }), pair, memoryText, true);
    for (const [axis, pair] of Object.entries(bytes)) add(say("bytes of a step on {axis}", { axis }), pair, bytesText, true);
  }
  for (const { place, link, share } of parts.links?.uses || []) {
    const measured = run.figures.link_use[place];
    if (known(measured, String) !== undefined) add(say("bandwidth in use {link}, all ranks", { link: link.name }), [share, measured], shareText);
  }
  const note = run.compared ? run.compared.time_not_predicted && say("Time is not predicted: {reason}.", { reason: run.compared.time_not_predicted })
    : say("The run did not come to its end, where rank 0 compares.");
  fill("measured", "", rows.length > 1 ? table(rows, { "aria-label": say("Predicted beside measured") }) : null,
    note ? element("p", { class: "quiet" }, note) : null);
}

function showProfiled() {
  const { step, ranks, seconds, rows } = run.profiled;
  const values = { step, ranks, seconds: secondsText(seconds) };
  const hasPrediction = rows.some((row) => row.predicted_s !== null);
  const header = [say("cause"), say("mean of the ranks"), say("of the step"), say("most of a rank"), ...(hasPrediction ? [say("predicted")] : [])];
  const cells = rows.map(({ cause, is_part: isPart, seconds: mean, most_seconds: most, predicted_s: predicted }) => [
    isPart ? element("span", { class: "part" }, cause) : cause, secondsText(mean), shareText(mean / seconds), secondsText(most),
    ...(hasPrediction ? [known(predicted, secondsText) ?? ""] : [])]);
  fill("profiled", ranks === 1 ? say("step {step}, 1 rank, {seconds}", values) : say("step {step}, {ranks} ranks, {seconds}", values),
    table([header, ...cells], { "aria-label": say("Causes of a profiled step's time") }));
}

function showExperts() {
  const picture = element("img", { src: `data:image/svg+xml;base64,${run.experts.picture}`, alt: run.experts.text });
  fill("experts", "", element("div", { class: "wide", tabIndex: 0, role: "group", "aria-label": say("Use of experts") }, picture),
    element("pre", { tabIndex: 0 }, run.experts.text));
}

function skippedSteps(skipped) {
  const steps = skipped.slice(0, 12).map(([step, cause]) => say("{step} ({cause})", { step, cause: CAUSES_OF_SKIPS[cause] ?? cause }));
  return [...steps, ...(skipped.length > 12 ? ["..."] : [])].join(COMMA);
}

function showHealth() {
  const { skipped, spikes, checkpoints, done_again: again, first_step: first } = run.health;
  const lines = [
    skipped.length ? say("{count} of the steps changed no weight: {steps}.", { count: skipped.length, steps: skippedSteps(skipped) })
      : say("Every step changed the weights."),
    spikes > 1 ? say("The loss left its band {spikes} times.", { spikes }) : spikes ? say("The loss left its band 1 time.")
      : say("The loss never left its band."),
    ...again.map((one) => say("Steps {first} to {last} were done twice, before and after a resume: their losses are {difference}.", {
      first: one.first, last: one.last, difference: one.bit_exact ? say("equal bit for bit")
        : say("different, by up to {difference} nats a token", { difference: rounded(one.largest_loss_difference) }) })),
    first > 1 ? say("The first step that is recorded is {first}.", { first }) : "",
  ];
  const rows = checkpoints.map(({ step, blocking_s: blocking, durable_s: durable }) => [say("step {step}", { step }), secondsText(blocking), secondsText(durable)]);
  fill("health", "", lines.filter(Boolean).map((line) => element("p", {}, line)),
    rows.length ? table([[say("checkpoint"), say("the run waited"), say("durable after")], ...rows], { "aria-label": say("Checkpoints") })
      : element("p", { class: "quiet" }, say("No checkpoint was written.")));
}

function showCard() {
  const rows = [
    [say("status"), nameOf(card.status)], [say("began"), card.began], [say("ended"), card.ended ?? "–"], [say("command"), card.command],
    [say("commit"), !card.commit ? say("not a checkout") : card.has_changes ? say("{commit}, with changes", card) : card.commit],
    [say("plan"), parts.job ? parts.job.words : ""], [say("ranks"), card.ranks.toLocaleString("en")], [say("parameters"), parts.job ? countText(parts.job.parameters) : ""],
    [say("job, SHA-256"), card.job_sha256], ...Object.entries(card.data).map(([path, digest]) => [say("tokens of {path}", { path }), digest]),
    ...Object.entries(card.versions), [say("system"), card.system], [say("device"), card.device || "–"],
  ];
  const list = element("dl", { class: "card" }, rows.filter(([, value]) => value).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
  const job = element("pre", { tabIndex: 0 }, JSON.stringify(card.job, null, 1));
  fill("card", say("also in report.json"), list, element("details", {}, element("summary", {}, say("Every field of the job")), job));
}
