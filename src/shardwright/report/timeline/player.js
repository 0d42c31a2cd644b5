"use strict";
// The playhead of timelines: it moves at a pace, or from one event to the next, and tells what happens at its time.
// `view.now` is that time, null if there is no playhead; `painter.at` finds the span of a lane at a time. `look` shows a
// stretch of time, `redraw` draws again.
function makePlayer(data, view, canvases, { at, look, redraw }) {
  const longest = Math.max(...data.sections.map(endOf)) || 1;
  const lines = canvases.map((canvas) => lineAfter(canvas));
  let frame = 0, before = 0, seconds = 20, moments = null;

  // Times at which something begins, and the end of each timeline.
  function events() {
    if (moments) return moments;
    const times = new Set(data.sections.map(endOf));
    for (const section of data.sections) for (const rank of section.ranks) for (const [from] of rank.busy) times.add(from);
    moments = Float64Array.from(times).sort();
    return moments;
  }

  function moveTo(time) {
    view.now = Math.min(Math.max(time, 0), longest);
    const wide = view.to - view.from;
    if (view.now < view.from || view.now > view.from + 0.95 * wide) look(view.now - 0.15 * wide, view.now + 0.85 * wide);
    tell();
    redraw();
  }

  function step(way) {
    pause();
    const times = events(), now = view.now ?? (way > 0 ? -1 : Infinity), least = longest * 1e-9;
    const next = way > 0 ? times.find((time) => time > now + least) : times.findLast((time) => time < now - least);
    if (next !== undefined) moveTo(next);
  }

  function tick(time) {
    const passed = before ? (time - before) / 1000 : 0;
    before = time;
    frame = requestAnimationFrame(tick);
    moveTo(view.now + (passed * longest) / seconds);
    if (view.now >= longest) pause();
  }

  function pause() {
    cancelAnimationFrame(frame);
    frame = before = 0;
    showState();
  }

  function toggle() {
    if (frame) { pause(); return; }
    if (view.now === null || view.now >= longest) view.now = 0;
    frame = requestAnimationFrame(tick);
    showState();
  }

  function clear() {
    pause();
    view.now = null;
    for (const line of lines) line.textContent = "";
    redraw();
  }

  function showState() {
    const button = document.getElementById("play");
    if (button) button.textContent = frame ? data.words.pause : data.words.play;
  }

  function tell() {
    data.sections.forEach((section, number) => {
      const busy = section.ranks.map((rank) => at(rank.busy, view.now));
      const waits = section.ranks.filter((rank, index) => !busy[index] && data.causes[at(rank.idle, view.now)?.[2]] === "communication");
      const numBusy = busy.filter(Boolean).length;
      const words = [filledWords(data.words.now, { time: `${short(view.now)} ${data.unit}`.trim(), busy: numBusy, lanes: busy.length,
        waiting: waits.length, idle: busy.length - numBusy - waits.length })];
      const begun = busy.flatMap((span, index) => (span && span[0] === view.now && span !== busy[index - 1]
        ? [`${laneName(data, section, index)}: ${spanText(data, span)}`] : []));
      if (begun.length) words.push(`${data.words.begins} ${begun.slice(0, 3).join("; ")}${begun.length > 3 ? "; ..." : ""}`);
      lines[number].textContent = words.join(" ");
    });
  }

  return { toggle, step, pause, clear, setSeconds: (value) => { seconds = value; } };
}

function lineAfter(canvas) {
  const line = document.createElement("p");
  line.className = "now";
  canvas.after(line);
  return line;
}

// A template with its fields, which are names in braces.
function filledWords(template, values) {
  return template.replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

// The parts of a block in words: "forward of microbatch 3, stage 1".
function spanText(data, [, , parts]) {
  return parts.map(([, letter, stage, microbatch]) => {
    const name = data.names[letter];
    if (microbatch < 0) return stage < 0 ? name : filledWords(data.words.ofStage, { name, stage });
    return filledWords(data.words.ofMicrobatch, { name, microbatch, stage });
  }).join(" + ");
}

function laneName(data, section, number) {
  return section.ranks[number].label ?? `${data.words.rank} ${number}`;
}
