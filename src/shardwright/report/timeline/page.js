"use strict";
// Zoom, pan and point. All canvases in `place` show the same stretch of time, [view.from, view.to]. Listeners outside of
// the canvases end with `signal`.
function showTimelines(data, place, signal) {
  const longest = Math.max(...data.sections.map((section) => section.makespan)) || 1;
  const canvases = [...place.querySelectorAll("canvas")];
  const tip = document.getElementById("tip");
  const arrows = document.getElementById("arrows");
  const memory = document.getElementById("memory");
  // At first all timelines are seen whole, but for those that are far longer than most.
  const spans = data.sections.map((section) => section.makespan).sort((a, b) => a - b);
  const home = Math.max(...spans.filter((span) => span <= 1.7 * spans[spans.length >> 1])) || longest;
  const view = { from: 0, to: home, memory: memory.checked, arrows: arrows.checked, hover: null };
  const { draw, find, readStyle, scaleOf, timeAt } = makePainter(data, view);
  const visible = new Set();
  let dragging = null, scheduled = false;

  function schedule() {
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => { scheduled = false; visible.forEach(draw); });
  }

  const last = (points, time) => {
    let count = 0;
    for (const [from, next] of points) { if (from > time) break; count = next; }
    return count;
  };

  function tell(found, event) {
    if (!found) { tip.hidden = true; return; }
    const [from, to, what] = found.span;
    const lines = Array.isArray(what)
      ? what.map(([, letter, stage, microbatch]) => letter === "S" && stage < 0 ? `<b>${data.names.S}</b>`
        : microbatch < 0 ? `<b>${data.names[letter]}</b> of stage ${stage}` : `<b>${data.names[letter]}</b> of microbatch <b>${microbatch}</b>, stage ${stage}`)
      : [`<b>idle</b>: ${{
        "warm-up": "before its first computation", "drain": "after its last computation",
        "dependency": "another rank has yet to compute", "communication": "a message is on its way",
      }[data.causes[what]]} (${data.causes[what]})`];
    lines.push(`<div>rank ${found.rank}, ${short(from)} to ${short(to)}, takes ${short(to - from)}</div>`);
    const count = (points, noun) => {
      const most = last(points, found.time);
      return `${most} ${noun}${most === 1 ? "" : "s"}`;
    };
    lines.push(`<div>${count(found.row.alive, "activation")} kept, ${count(found.row.buffered, "message")} buffered</div>`);
    if (found.row.inputs.length) lines.push(`<div>${count(found.row.inputs, "stage input")} kept</div>`);
    if (found.row.gathered.length) lines.push(`<div>${count(found.row.gathered, "stage")} gathered</div>`);
    tip.innerHTML = lines.map((line) => line.startsWith("<div>") ? line : `<span>${line}</span><br>`).join("");
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8)) + "px";
    tip.style.top = (event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18) + "px";
  }

  function look(from, to) {
    const least = longest / 1e5, wide = Math.min(Math.max(to - from, least), longest);
    const start = Math.min(Math.max(from, 0), longest - wide);
    view.from = start;
    view.to = start + wide;
    schedule();
  }
  function zoom(factor, centre) {
    look(centre - (centre - view.from) * factor, centre + (view.to - centre) * factor);
  }

  for (const canvas of canvases) {
    canvas.addEventListener("wheel", (event) => {
      const ready = canvases.length === 1 || document.activeElement === canvas || event.ctrlKey || event.metaKey;
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (!ready || (event.deltaY > 0 && !sideways && view.to - view.from >= longest)) return;
      event.preventDefault();
      if (sideways) look(view.from + event.deltaX / scaleOf(canvas), view.to + event.deltaX / scaleOf(canvas));
      else zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.004), timeAt(canvas, event.offsetX));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      dragging = { at: event.clientX, from: view.from, to: view.to };
      canvas.classList.add("dragging");
    });
    canvas.addEventListener("pointermove", (event) => {
      if (dragging) {
        const moved = (dragging.at - event.clientX) / scaleOf(canvas);
        look(dragging.from + moved, dragging.to + moved);
        tip.hidden = true;
        return;
      }
      const box = canvas.getBoundingClientRect();
      const found = find(canvas, event.clientX - box.left, event.clientY - box.top);
      const changed = (found && found.span) !== (view.hover && view.hover.span);
      view.hover = found;
      tell(found, event);
      if (changed) schedule();
    });
    const drop = () => { dragging = null; canvas.classList.remove("dragging"); };
    canvas.addEventListener("pointerup", drop);
    canvas.addEventListener("pointercancel", drop);
    canvas.addEventListener("pointerleave", () => { view.hover = null; tip.hidden = true; schedule(); });
    canvas.addEventListener("dblclick", () => look(0, home));
    canvas.addEventListener("focus", () => canvases.length > 1 && canvas.classList.add("active"));
    canvas.addEventListener("blur", () => canvas.classList.remove("active"));
    canvas.addEventListener("keydown", (event) => {
      const wide = view.to - view.from, middle = (view.from + view.to) / 2;
      const moves = {
        "+": () => zoom(0.8, middle), "=": () => zoom(0.8, middle), "-": () => zoom(1.25, middle),
        ArrowLeft: () => look(view.from - wide / 10, view.to - wide / 10),
        ArrowRight: () => look(view.from + wide / 10, view.to + wide / 10),
        Home: () => look(0, longest), Escape: () => canvas.blur(),
      };
      if (moves[event.key]) { event.preventDefault(); moves[event.key](); }
    });
  }

  const redrawAll = () => { readStyle(); canvases.forEach(draw); };
  document.getElementById("whole").addEventListener("click", () => look(0, longest), { signal });
  arrows.addEventListener("change", () => { view.arrows = arrows.checked; schedule(); }, { signal });
  memory.addEventListener("change", () => { view.memory = memory.checked; redrawAll(); }, { signal });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll, { signal });
  addEventListener("resize", redrawAll, { signal });
  const seen = new IntersectionObserver((entries) => {
    entries.forEach((entry) => entry.isIntersecting ? visible.add(entry.target) : visible.delete(entry.target));
    schedule();
  }, { rootMargin: "300px" });
  canvases.forEach((canvas) => seen.observe(canvas));
  redrawAll();
}
