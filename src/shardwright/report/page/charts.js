// Line charts of a run: lines over steps, with units on both axes. A chart has the width of its place, and its values at
// the step under the pointer or finger in a line below.
import { element } from "./dom.js";
import { say } from "./say.js";
import { rounded } from "./units.js";

const HEIGHT = 220, LEFT = 58, RIGHT = 14, TOP = 24, BOTTOM = 34;
const SVG = element("div", { innerHTML: "<svg></svg>" }).firstChild.namespaceURI;

// `lines` are { name, colour, points: [[step, value], ...], isDotted }, sorted by step; `unit` is of values, written by
// `text`. With `fromZero` the axis begins at 0.
export function lineChart({ title, unit, lines, text = rounded, fromZero = false, top = 0 }) {
  const told = element("p", { class: "quiet told" }, say("{title}, by step", { title }));
  const place = element("div", { class: "chart", role: "img", "aria-label": say("{title} in {unit}, by step", { title, unit }) });
  const keys = element("p", { class: "keys" }, lines.map(({ name, colour }) => {
    const swatch = element("i", { class: "swatch" });
    swatch.style.background = `var(${colour})`;
    return element("span", {}, swatch, name);
  }));
  let drawn = null;
  const draw = () => {
    if (place.clientWidth) drawn = drawChart(place, { unit, lines, text, fromZero, top });
  };
  new ResizeObserver(draw).observe(place);
  place.addEventListener("pointermove", (event) => drawn && tell(event, place, told, drawn, lines, text));
  place.addEventListener("pointerdown", (event) => drawn && tell(event, place, told, drawn, lines, text));
  return element("figure", {}, element("figcaption", {}, title), keys, place, told);
}

function drawChart(place, { unit, lines, text, fromZero, top }) {
  const width = place.clientWidth;
  const points = lines.flatMap((line) => line.points);
  const steps = points.map(([step]) => step), values = points.map(([, value]) => value);
  const first = Math.min(...steps), last = Math.max(...steps, first + 1);
  const least = fromZero ? 0 : Math.min(...values), most = Math.max(...values, top);
  const step = niceStep((most - least || Math.abs(most) || 1) / 4);
  const low = Math.floor(least / step) * step, high = Math.max(Math.ceil(most / step) * step, low + step);
  const across = (x) => LEFT + ((x - first) / (last - first)) * (width - LEFT - RIGHT);
  const down = (y) => TOP + ((high - y) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const svg = node("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, "aria-hidden": "true" });
  for (let tick = 0; low + tick * step <= high + step / 1e6; tick++) {
    const y = down(low + tick * step);
    svg.append(node("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
    svg.append(label(LEFT - 6, y + 4, text(+(low + tick * step).toPrecision(12)), "end"));
  }
  const stepOfX = Math.max(1, niceStep((last - first) / Math.max(2, width / 110)));
  for (let x = Math.ceil(first / stepOfX) * stepOfX; x <= last; x += stepOfX) {
    svg.append(label(across(x), HEIGHT - BOTTOM + 16, x.toLocaleString("en"), "middle"));
  }
  svg.append(label(width - RIGHT, HEIGHT - 4, say("step|its number"), "end"), label(4, 11, unit, "start"));
  for (const line of lines) {
    const path = line.points.map(([x, y]) => `${across(x).toFixed(1)},${down(y).toFixed(1)}`).join(" ");
    if (line.isDotted || line.points.length === 1) {
      for (const [x, y] of line.points) svg.append(node("circle", { cx: across(x), cy: down(y), r: 3, style: `fill: var(${line.colour})` }));
    }
    if (line.points.length > 1) svg.append(node("polyline", { points: path, style: `stroke: var(${line.colour})` }));
  }
  const pointer = node("line", { class: "pointer", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(pointer);
  place.replaceChildren(svg);
  return { first, last, width, across, pointer };
}

function tell(event, place, told, { first, last, width, across, pointer }, lines, text) {
  const share = (event.clientX - place.getBoundingClientRect().left - LEFT) / (width - LEFT - RIGHT);
  const wanted = first + Math.max(0, Math.min(1, share)) * (last - first);
  const near = lines.map((line) => nearest(line.points, wanted));
  const step = near.reduce((one, [x]) => (Math.abs(x - wanted) < Math.abs(one - wanted) ? x : one), near[0][0]);
  pointer.setAttribute("x1", across(step));
  pointer.setAttribute("x2", across(step));
  pointer.setAttribute("visibility", "visible");
  const values = lines.map((line, index) => [line.name, near[index]]).filter(([, [x]]) => x === step);
  told.textContent = say("step {step}", { step: step.toLocaleString("en") }) + `: ${values.map(([name, [, value]]) => `${name} ${text(value)}`).join(", ")}`;
}

const nearest = (points, x) =>
  points.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best), points[0]);

// The least of 1, 2, 5, 10, ... (or 0.5, 0.2, ...) that is at least `least`.
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= least * (1 - 1e-9));
}

function node(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function label(x, y, words, anchor) {
  const made = node("text", { x, y, "text-anchor": anchor });
  made.textContent = words;
  return made;
}
