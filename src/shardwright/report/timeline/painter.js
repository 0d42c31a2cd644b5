"use strict";
// Draws a timeline on a canvas. `state` is what is seen: from and to (a stretch of time), memory and arrows (switches),
// hover (the block that is pointed at, or null) and now (the time of the playhead, or null).
function makePainter(data, state) {
  // Lanes with labels of their own are many ranks of a stage: they are lower, and without curves.
  const DENSE = data.sections.some((section) => section.ranks.some((rank) => rank.label));
  const LEFT = DENSE ? 84 : 58, RIGHT = 12, TOP = 22, LANE = DENSE ? 16 : 28, WIRE = DENSE ? 3 : 5, CURVE = 22, GAP = DENSE ? 3 : 12;
  // Under a lane, for gathers, reductions and releases, where there are any.
  const STRIP = data.sections.some((section) => section.ranks.some((rank) => rank.moves.length)) ? 9 : 0;
  const BELOW = LANE + 2 + 2 * WIRE + STRIP;
  const FONT = getComputedStyle(document.body).fontFamily;
  const hasCurves = () => state.memory && !DENSE;
  const rowHeight = () => BELOW + (hasCurves() ? CURVE + 4 : 0) + GAP;
  const laneTop = (number) => TOP + number * rowHeight();
  const PARTS = ["data", "optimizer", "host", "other"];  // of what follows the actions of a step
  let style, scale;  // scale: pixels a unit of time, on the canvas that is drawn

  function readStyle() {
    const computed = getComputedStyle(document.documentElement);
    const read = (name) => computed.getPropertyValue("--" + name).trim();
    style = Object.fromEntries(
      ["card", "ink", "quiet", "line", "grid", "wait", "wire", "message", "curve", "input", "fill", "lane", "tensor", "accent",
        ...PARTS].map((n) => [n, read(n)]),
    );
  }

  const scaleOf = (canvas) => (canvas.clientWidth - LEFT - RIGHT) / (state.to - state.from);
  const x = (time) => LEFT + (time - state.from) * scale;
  const timeAt = (canvas, px) => state.from + (px - LEFT) / scaleOf(canvas);

  // Index of the first of some spans, sorted by time, that ends after a time.
  function firstAfter(spans, time) {
    let low = 0, high = spans.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[middle][1] > time) high = middle; else low = middle + 1;
    }
    return low;
  }

  function niceStep(least) {
    const power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= least * (1 - 1e-9));
  }

  const heightOf = (section) => TOP + section.ranks.length * rowHeight() - GAP + 6;

  // Gives a canvas its height, also one that is not drawn since nobody sees it.
  function size(canvas) {
    canvas.style.height = heightOf(data.sections[canvas.dataset.section]) + "px";
  }

  function draw(canvas) {
    const section = data.sections[canvas.dataset.section];
    const width = canvas.clientWidth, height = heightOf(section);
    const ratio = window.devicePixelRatio || 1;
    scale = scaleOf(canvas);
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    drawAxis(pen, canvas, width, height);
    section.ranks.forEach((rank, number) => {
      const top = TOP + number * rowHeight();
      pen.fillStyle = style.ink;
      pen.font = "12px " + FONT;
      pen.textAlign = "left";
      pen.textBaseline = "middle";
      if (rank.label) pen.font = "11px " + FONT;
      pen.fillText(laneName(data, section, number), 0, top + LANE / 2 + 0.5);
      if (hasCurves() && rank.alive.length) {
        pen.fillStyle = style.quiet;
        pen.font = "10.5px " + FONT;
        pen.fillText(data.words.keeps + " " + Math.max(...rank.alive.map((point) => point[1])), 0, top + rowHeight() - GAP - CURVE / 2);
      }
      pen.save();
      pen.beginPath();
      pen.rect(LEFT - 1, top - 2, width - LEFT - RIGHT + 2, rowHeight());
      pen.clip();
      drawLane(pen, canvas, section, rank, top);
      drawMoves(pen, canvas, rank, top + BELOW - STRIP);
      if (hasCurves()) drawCurves(pen, canvas, section, rank, top + BELOW + 4);
      pen.restore();
    });
    pen.save();
    pen.beginPath();
    pen.rect(LEFT - 1, 0, width - LEFT - RIGHT + 2, height);
    pen.clip();
    drawMessages(pen, canvas, section);
    if (state.now !== null) drawPlayhead(pen, canvas, width, height);
    pen.restore();
    pen.fillStyle = style.quiet; // there is more to the right, or to the left
    pen.font = "16px " + FONT;
    pen.textBaseline = "middle";
    section.ranks.forEach((rank, number) => {
      const middle = laneTop(number) + LANE / 2;
      if (endOf(section) > state.to * (1 + 1e-9)) pen.fillText("\u203a", width - RIGHT + 4, middle);
      if (state.from > 0) pen.fillText("\u2039", LEFT - 9, middle);
    });
  }

  function drawAxis(pen, canvas, width, height) {
    const step = niceStep(80 / scale);
    pen.font = "11px " + FONT;
    pen.textAlign = "left";
    pen.textBaseline = "alphabetic";
    pen.lineWidth = 1;
    for (let n = Math.ceil(state.from / step - 1e-9); n * step <= state.to + 1e-9; n++) {
      const at = Math.round(x(n * step)) + 0.5;
      pen.strokeStyle = style.grid;
      pen.beginPath();
      pen.moveTo(at, 4);
      pen.lineTo(at, height - 4);
      pen.stroke();
      pen.fillStyle = style.quiet;
      const label = `${short(n * step)} ${data.unit}`.trim();
      if (at + 4 + pen.measureText(label).width < width) pen.fillText(label, at + 4, 13);
    }
  }

  // A line at the time of the playhead, and a veil over what is later.
  function drawPlayhead(pen, canvas, width, height) {
    const at = x(state.now);
    pen.globalAlpha = 0.72;
    pen.fillStyle = style.card;
    pen.fillRect(Math.max(at, LEFT - 1), TOP - 4, width, height);
    pen.globalAlpha = 1;
    pen.strokeStyle = style.accent;
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(at, 2);
    pen.lineTo(at, height - 2);
    pen.stroke();
  }

  function hatch(pen, left, top, width, height, colour, distance) {
    if (width < 1) return;
    pen.save();
    pen.beginPath();
    pen.rect(left, top, width, height);
    pen.clip();
    pen.strokeStyle = colour;
    pen.lineWidth = 1.2;
    pen.beginPath();
    const first = Math.floor((left - height) / distance) * distance; // in step with time zero of the canvas
    for (let at = first; at < left + width; at += distance) {
      pen.moveTo(at, top + height);
      pen.lineTo(at + height, top);
    }
    pen.stroke();
    pen.restore();
  }

  function drawLane(pen, canvas, section, rank, top) {
    const end = x(section.makespan);
    for (const [from, to, part] of section.tail) {
      pen.fillStyle = style[part];
      pen.fillRect(x(from), top, Math.max(x(to) - x(from), 0.4), LANE);
    }
    pen.fillStyle = style.lane;
    pen.fillRect(x(0), top, end - x(0), LANE);
    for (let n = firstAfter(rank.idle, state.from); n < rank.idle.length && rank.idle[n][0] < state.to; n++) {
      const [from, to, cause] = rank.idle[n];
      const left = x(from), wide = x(to) - left;
      if (data.causes[cause] === "dependency") hatch(pen, left, top, wide, LANE, style.wait, 7);
      if (data.causes[cause] === "communication") hatch(pen, left, top, wide, LANE, style.wire, 5);
    }
    for (let n = firstAfter(rank.busy, state.from); n < rank.busy.length && rank.busy[n][0] < state.to; n++) {
      const [from, to, parts] = rank.busy[n];
      const left = x(from), right = x(to);
      const wide = right - left > 3 ? right - left - 1 : Math.max(right - left, 0.4);
      const high = LANE / parts.length;
      parts.forEach((part, index) => {
        const [ground, ink] = data.colours[part[0]];
        pen.fillStyle = ground;
        if (wide > 8) {
          const head = index === 0 ? 3 : 0, foot = index === parts.length - 1 ? 3 : 0;
          pen.beginPath();
          pen.roundRect(left, top + index * high, wide, high, [head, head, foot, foot]);
          pen.fill();
        } else {
          pen.fillRect(left, top + index * high, wide, high);
        }
        const share = section.exposed[part[1]]?.[part[2]];  // of communication that nothing hides
        if (share && wide > 2) {
          pen.fillStyle = style.tensor;
          pen.fillRect(left, top + (index + 1) * high - 3, wide * share, 3);
        }
        const text = part[1] === "S" ? "step" : String(part[3]);
        // The largest size that fits, or none.
        const fits = (size) => { pen.font = `600 ${size}px ${FONT}`; return pen.measureText(text).width + 3 < wide; };
        if (wide > 7 && (parts.length > 1 ? [10.5, 9, 8] : [12, 10.5, 9, 8]).some(fits)) {
          pen.fillStyle = ink;
          pen.textAlign = "center";
          pen.textBaseline = "middle";
          pen.fillText(text, left + wide / 2, top + (index + 0.5) * high + 0.5);
        }
      });
      if (state.hover && state.hover.canvas === canvas && state.hover.span === rank.busy[n]) {
        pen.strokeStyle = style.ink;
        pen.lineWidth = 1.5;
        pen.strokeRect(left + 0.75, top + 0.75, Math.max(wide - 1.5, 1), LANE - 1.5);
      }
    }
  }

  // Gathers and reductions are bars, releases ticks.
  function drawMoves(pen, canvas, rank, top) {
    for (const [from, to, [[colour]]] of rank.moves) {
      if (to < state.from || from > state.to) continue;
      const left = x(from);
      pen.fillStyle = data.colours[colour][0];
      pen.fillRect(left, top, Math.max(x(to) - left - 0.5, 1.5), STRIP - 3);
    }
  }

  // Activations alive, as steps; messages that wait in buffers and stage inputs that wait for their forward
  // to run again, on top of them in colours of their own.
  function drawCurves(pen, canvas, section, rank, top) {
    const most = section.most || (section.most = Math.max(
      1, ...section.ranks.flatMap((one) => one.alive.map((point) => point[1])),
      ...section.ranks.flatMap((one) => one.buffered.map((point) => point[1])),
      ...section.ranks.flatMap((one) => one.inputs.map((point) => point[1])),
    ));
    const stairs = (points, fill, stroke, dashes = []) => {
      const y = (count) => top + CURVE - (count / most) * CURVE;
      const line = new Path2D(), area = new Path2D();
      points.forEach(([time, count], index) => {
        const before = index ? points[index - 1][1] : 0;
        const left = x(time), right = x(index + 1 < points.length ? points[index + 1][0] : section.makespan);
        line.moveTo(left, y(before));
        line.lineTo(left, y(count));
        if (count) line.lineTo(right, y(count));
        if (!index) area.moveTo(left, y(0));
        area.lineTo(left, y(count));
        area.lineTo(right, y(count));
      });
      if (points.length) area.lineTo(x(section.makespan), y(0));
      pen.fillStyle = fill;
      pen.fill(area);
      pen.strokeStyle = stroke;
      pen.lineWidth = 1.2;
      pen.setLineDash(dashes);
      pen.stroke(line);
      pen.setLineDash([]);
    };
    stairs(rank.alive, style.fill, style.curve);
    stairs(rank.buffered, style.wire + "40", style.wire);
    stairs(rank.inputs, "transparent", style.input, [3, 2]);
  }

  // Each message is a thin bar under its sender while it is on its way; pointed at, also an arrow to its receiver.
  function drawMessages(pen, canvas, section) {
    for (const message of section.messages) {
      const [sender, receiver, backward, start, , arrived] = message;
      if (arrived < state.from || start > state.to) continue;
      const told = state.hover && state.hover.canvas === canvas && concerns(message);
      const left = x(start), right = x(arrived);
      const y = laneTop(sender) + LANE + 3 + backward * WIRE;
      pen.globalAlpha = told ? 1 : 0.55;
      pen.fillStyle = style.message;
      pen.fillRect(left - 0.75, y, Math.max(right - left, 1.5), 2.5);
      if (told || state.arrows) {
        pen.globalAlpha = told ? 1 : 0.45;
        arrow(pen, x(message[4]), right, sender, receiver, told ? 1.6 : 1);
      }
    }
    pen.globalAlpha = 1;
  }

  function arrow(pen, left, right, sender, receiver, width) {
    const down = receiver > sender;
    const from = laneTop(sender) + (down ? LANE : 0), to = laneTop(receiver) + (down ? 0 : LANE);
    const bend = (to - from) / 2;
    pen.strokeStyle = pen.fillStyle = style.message;
    pen.lineWidth = width;
    pen.beginPath();
    pen.moveTo(left, from);
    pen.bezierCurveTo(left, from + bend, right, to - bend, right, to);
    pen.stroke();
    const head = down ? -5 : 5;
    pen.beginPath();
    pen.moveTo(right, to);
    pen.lineTo(right - 3, to + head);
    pen.lineTo(right + 3, to + head);
    pen.fill();
  }

  // Whether a message comes from the block that is pointed at, or goes to it.
  function concerns([sender, receiver, backward, , , , stage, microbatch, step]) {
    const [, , parts, ownStep] = state.hover.span;
    return Array.isArray(parts) && step === ownStep && parts.some(([, letter, ownStage, ownMicrobatch]) => {
      const right = backward ? letter === "B" || letter === "I" : letter === "F";
      const made = ownStage === stage && state.hover.rank === sender;
      const taken = ownStage === stage + (backward ? -1 : 1) && state.hover.rank === receiver;
      return right && ownMicrobatch === microbatch && (made || taken);
    });
  }

  function at(spans, time) {
    const index = firstAfter(spans, time);
    return index < spans.length && spans[index][0] <= time ? spans[index] : null;
  }

  function find(canvas, px, py) {
    const section = data.sections[canvas.dataset.section];
    const number = Math.floor((py - TOP + 2) / rowHeight());
    if (px < LEFT || number < 0 || number >= section.ranks.length) return null;
    const time = timeAt(canvas, px), rank = section.ranks[number], inRow = py - laneTop(number);
    if (time < 0 || time > endOf(section) || inRow > rowHeight() - GAP + 4) return null;
    const onStrip = STRIP > 0 && inRow >= BELOW - STRIP && inRow < BELOW;
    const span = (onStrip && rank.moves.find(([from, to]) => from <= time && time < to)) || at(rank.busy, time) || at(rank.idle, time)
      || at(section.tail, time);
    return span && { canvas, section, span, rank: number, time, row: rank };
  }

  return { at, draw, find, readStyle, scaleOf, size, timeAt };
}

// The end of a step: of its actions, and of what follows them.
function endOf(section) {
  return section.tail.length ? section.tail.at(-1)[1] : section.makespan;
}

function short(value) {
  return String(+value.toPrecision(5));
}
