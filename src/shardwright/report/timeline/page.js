"use strict";
// Zoom, pan, point and play. All canvases in `place` show the same stretch of time, [view.from, view.to]. Listeners
// outside of the canvases end with `signal`. With `isSeen` they are drawn in the next frame, else when they are seen.
// Returns functions: one draws all again, one says if some canvas is in sight.
function showTimelines(data, place, signal, isSeen = false) {
  const longest = Math.max(...data.sections.map(endOf)) || 1;
  const canvases = [...place.querySelectorAll("canvas")];
  const arrows = document.getElementById("arrows");
  const memory = document.getElementById("memory");
  // At first all timelines are seen whole, but for those that are far longer than most.
  const spans = data.sections.map(endOf).sort((a, b) => a - b);
  const home = Math.max(...spans.filter((span) => span <= 1.7 * spans[spans.length >> 1])) || longest;
  const view = { from: 0, to: home, memory: memory.checked, arrows: arrows.checked, hover: null, now: null };
  const painter = makePainter(data, view);
  const visible = new Set(isSeen ? canvases : []), inSight = new Set();  // the first are also a little out of sight
  let scheduled = false;

  function redraw() {
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => { scheduled = false; visible.forEach(painter.draw); });
  }
  function look(from, to) {
    const least = longest / 1e5, wide = Math.min(Math.max(to - from, least), longest);
    const start = Math.min(Math.max(from, 0), longest - wide);
    view.from = start;
    view.to = start + wide;
    redraw();
  }
  const player = makePlayer(data, view, canvases, { at: painter.at, look, redraw });
  const moves = { look, redraw, goHome: () => look(0, home), showAll: () => look(0, longest), longest };
  for (const canvas of canvases) listen(canvas, canvases.length > 1, data, view, { painter, player, moves });

  const redrawAll = () => { painter.readStyle(); canvases.forEach(painter.size); redraw(); };
  const on = (id, kind, act) => document.getElementById(id)?.addEventListener(kind, act, { signal });
  on("whole", "click", moves.showAll);
  on("play", "click", player.toggle);
  on("step-back", "click", () => player.step(-1));
  on("step-on", "click", () => player.step(1));
  const pace = document.getElementById("pace");
  player.setSeconds(Number(pace.value));
  on("pace", "change", () => player.setSeconds(Number(pace.value)));
  on("arrows", "change", () => { view.arrows = arrows.checked; redraw(); });
  on("memory", "change", () => { view.memory = memory.checked; redrawAll(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll, { signal });
  addEventListener("resize", redrawAll, { signal });
  addEventListener("beforeprint", () => canvases.forEach(painter.draw), { signal });
  addEventListener("keydown", (event) => {  // where nothing has the focus
    if (event.target === document.body && visible.size) playByKey(event, player);
  }, { signal });
  signal?.addEventListener("abort", player.pause);
  const observe = (seen, rootMargin, tell) => {
    const observer = new IntersectionObserver((entries) => {
      const isNew = entries.some(({ target, isIntersecting }) => isIntersecting && !seen.has(target));
      entries.forEach(({ target, isIntersecting }) => isIntersecting ? seen.add(target) : seen.delete(target));
      if (isNew) tell();
    }, { rootMargin });
    canvases.forEach((canvas) => observer.observe(canvas));
  };
  observe(visible, "300px", redraw);
  observe(inSight, "0px", () => {});
  redrawAll();
  return { redrawAll, isSeen: () => inSight.size > 0 };
}

// Space plays and pauses, arrows step. True if the key was one of them.
function playByKey(event, player) {
  const acts = { " ": player.toggle, ArrowRight: () => player.step(1), ArrowLeft: () => player.step(-1) };
  const act = acts[event.key];
  if (!act || event.shiftKey || event.ctrlKey || event.metaKey || event.altKey) return false;
  event.preventDefault();
  act();
  return true;
}

// Wheel, drag, point and keys on one canvas; of several, the wheel zooms the one that has the focus.
function listen(canvas, isOneOfMany, data, view, { painter, player, moves }) {
  const { find, scaleOf, timeAt } = painter, { look, redraw } = moves;
  const tip = document.getElementById("tip");
  let dragging = null;
  const fingers = new Map();  // by pointer: where it is; two of them zoom
  const zoom = (factor, centre) => look(centre - (centre - view.from) * factor, centre + (view.to - centre) * factor);

  canvas.addEventListener("wheel", (event) => {
    const ready = !isOneOfMany || document.activeElement === canvas || event.ctrlKey || event.metaKey;
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!ready || (event.deltaY > 0 && !sideways && view.to - view.from >= moves.longest)) return;
    event.preventDefault();
    if (sideways) look(view.from + event.deltaX / scaleOf(canvas), view.to + event.deltaX / scaleOf(canvas));
    else zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.004), timeAt(canvas, event.offsetX));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, event.offsetX);
    dragging = { at: event.clientX, from: view.from, to: view.to };
    canvas.classList.add("dragging");
  });
  canvas.addEventListener("pointermove", (event) => {
    if (fingers.size === 2 && fingers.has(event.pointerId)) {
      const apart = () => { const [one, other] = fingers.values(); return Math.max(8, Math.abs(one - other)); };
      const before = apart(), [one, other] = fingers.values();
      fingers.set(event.pointerId, event.offsetX);
      zoom(before / apart(), timeAt(canvas, (one + other) / 2));
      tip.hidden = true;
      return;
    }
    if (dragging) {
      fingers.set(event.pointerId, event.offsetX);
      const moved = (dragging.at - event.clientX) / scaleOf(canvas);
      look(dragging.from + moved, dragging.to + moved);
      tip.hidden = true;
      return;
    }
    point(event);
  });
  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    const block = find(canvas, event.clientX - box.left, event.clientY - box.top);
    const changed = block?.span !== view.hover?.span;
    view.hover = block;
    tell(tip, data, block, event);
    if (changed) redraw();
  };
  const drop = (event) => {
    const isTap = event.pointerType === "touch" && event.type === "pointerup" && dragging && Math.abs(event.clientX - dragging.at) < 6;
    fingers.delete(event.pointerId);
    dragging = null;  // also for a finger that stays: it would jump
    canvas.classList.remove("dragging");
    if (isTap) point(event);
  };
  canvas.addEventListener("pointerup", drop);
  canvas.addEventListener("pointercancel", drop);
  canvas.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "touch") return;  // a finger leaves after each tap
    view.hover = null;
    tip.hidden = true;
    redraw();
  });
  canvas.addEventListener("dblclick", moves.goHome);
  canvas.addEventListener("focus", () => isOneOfMany && canvas.classList.add("active"));
  canvas.addEventListener("blur", () => canvas.classList.remove("active"));
  canvas.addEventListener("keydown", (event) => {
    if (playByKey(event, player)) return;
    const wide = view.to - view.from, middle = (view.from + view.to) / 2;
    const acts = {
      "+": () => zoom(0.8, middle), "=": () => zoom(0.8, middle), "-": () => zoom(1.25, middle),
      ArrowLeft: () => look(view.from - wide / 10, view.to - wide / 10),
      ArrowRight: () => look(view.from + wide / 10, view.to + wide / 10),
      Home: moves.showAll, Escape: () => { player.clear(); canvas.blur(); },
    };
    if (acts[event.key]) { event.preventDefault(); acts[event.key](); }
  });
}

// Says of a block what it is, when, and what its rank keeps then. `block` is null where there is none.
function tell(tip, data, block, event) {
  tip.hidden = !block;
  if (!block) return;
  const { words } = data, [from, to, what] = block.span, row = block.row;
  const lines = [["b", Array.isArray(what) ? spanText(data, block.span) : causeText(data, what)],
    ["div", filledWords(words.times, { lane: laneName(data, block.section, block.rank), from: short(from), to: short(to), takes: short(to - from) })],
    ["div", filledWords(words.kept, { activations: last(row.alive, block.time), messages: last(row.buffered, block.time) })]];
  if (row.inputs.length) lines.push(["div", filledWords(words.inputs, { count: last(row.inputs, block.time) })]);
  if (row.gathered.length) lines.push(["div", filledWords(words.gathered, { count: last(row.gathered, block.time) })]);
  tip.replaceChildren(...lines.map(([tag, text]) => Object.assign(document.createElement(tag), { textContent: text })));
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8)) + "px";
  tip.style.top = (event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18) + "px";
}

// The cause of a wait, which is a number, or the part of a step that follows its actions.
function causeText({ words, causes }, what) {
  return typeof what === "number" ? `${words.idle}: ${words[causes[what]]} (${causes[what]})` : words[what];
}

// The count of a curve at a time.
function last(points, time) {
  let count = 0;
  for (const [from, next] of points) { if (from > time) break; count = next; }
  return count;
}
