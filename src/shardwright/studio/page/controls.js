// The controls: one for each field that the server describes, in groups. A control that the page has set, and that is
// not as in the job any more, is marked and has a button that takes it back.
import { element, setText } from "./dom.js";
import { TEXTS } from "./texts.js";
import { rounded } from "./units.js";

// `change(key, text, isStep)` is called with each new value; `isStep` is false while a slider moves.
export function buildControls(form, described, change) {
  const controls = [jobControl(described, change)];
  const isWide = matchMedia("(min-width: 900px)").matches;
  Object.entries(described.groups).forEach(([heading, group], number) => {
    const made = group.map((control) => fieldControl(control, described, change));
    const shown = number ? made : [controls[0], ...made];  // the job is in the first group
    controls.push(...made);
    const isOpen = isWide || !number || group.some((control) => control.key === "plan.tp");
    form.append(element("details", { open: isOpen }, element("summary", {}, heading), shown.map((control) => control.node)));
  });
  const others = otherFields(described, change);
  form.append(others.node);
  return (values, state) => {
    for (const control of controls) control.show(values, state);
    others.show(values, state, controls.map((control) => control.key));
  };
}

function jobControl(described, change) {
  const select = element("select", { id: "job" },
    element("option", { value: "" }, TEXTS.controls.ownFields),
    element("optgroup", { label: TEXTS.controls.jobs }, described.jobs.map((name) => element("option", { value: name }, name))),
    element("optgroup", { label: TEXTS.controls.models }, described.models.map((name) => element("option", { value: name }, name))));
  select.addEventListener("change", () => select.value && change("job", select.value, true));
  const node = element("div", { class: "control" }, element("label", { htmlFor: "job" }, TEXTS.controls.job), select);
  return { key: "job", node, show: (values, state) => { select.value = state.job || ""; } };
}

function fieldControl(control, described, change) {
  const id = control.key.replaceAll(".", "-");
  const set = (text, isStep = true) => change(control.key, text, isStep);
  const made = { choice: choiceInput, number: numberInput, switch: switchInput, slider: sliderInput }[control.kind](
    control, id, set);
  const back = element("button", { type: "button", class: "back", hidden: true, title: TEXTS.controls.back }, "↺");
  back.setAttribute("aria-label", TEXTS.controls.backOf(control.label));
  back.addEventListener("click", () => set(""));
  const unit = control.unit ? element("small", {}, control.unit) : null;
  const label = element("label", { htmlFor: id, title: control.meaning }, control.label, unit && " ", unit);
  const node = element("div", { class: `control ${control.kind}` }, label, made.nodes, back);
  const show = (values, state) => {
    const isSet = control.key in state;
    node.classList.toggle("set", isSet);
    back.hidden = !isSet;
    const usual = described.usual[values.device]?.[control.key];
    made.show(values[control.key] || usual || values[control.key]);
  };
  return { key: control.key, node, show };
}

function choiceInput(control, id, set) {
  const select = element("select", { id }, control.choices.map((name) => element("option", { value: name }, name)));
  select.addEventListener("change", () => set(select.value));
  const show = (value) => {
    const text = String(value);
    if (select.value === text) return;
    select.value = text;
    if (select.value === text) return;
    select.append(element("option", { value: text }, text));  // there was none
    select.value = text;
  };
  return { nodes: [select], show };
}

function switchInput(control, id, set) {
  const input = element("input", { type: "checkbox", id });
  input.addEventListener("change", () => set(String(input.checked)));
  return { nodes: [input], show: (value) => { input.checked = value === true; } };
}

// A number; arrows up and down double and halve a whole one.
function numberInput(control, id, set) {
  const input = element("input", { type: "number", id, min: control.least, step: control.whole ? 1 : 0.05 });
  if (control.most > control.least) input.max = control.most;
  input.addEventListener("change", () => input.value !== "" && set(input.value));
  input.addEventListener("keydown", (event) => {
    if (!control.whole || !["ArrowUp", "ArrowDown"].includes(event.key)) return;
    event.preventDefault();
    const next = event.key === "ArrowUp" ? 2 * input.value : Math.max(control.least, Math.floor(input.value / 2));
    if (next !== Number(input.value)) set(input.value = String(next));
  });
  return { nodes: [input], show: (value) => { if (value !== undefined && input.value !== String(value)) input.value = value; } };
}

// A slider over powers, and the number itself beside it.
function sliderInput(control, id, set) {
  const number = numberInput(control, id, set);
  const slider = element("input", {
    type: "range", min: 0, max: 1, step: 0.001, "aria-label": TEXTS.controls.slider(control.label),
  });
  const span = Math.log(control.most / control.least);
  const valueAt = (place) => snapped(control.least * Math.exp(place * span), control.whole);
  slider.addEventListener("input", () => {
    const value = valueAt(Number(slider.value));
    number.show(value);
    set(String(value), false);
  });
  slider.addEventListener("change", () => set(String(valueAt(Number(slider.value)))));
  slider.addEventListener("keydown", (event) => {
    const way = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const value = Number(number.nodes[0].value);
    let place = Number(slider.value);
    while (place >= 0 && place <= 1 && valueAt(place) === value) place += 0.005 * way;
    set(String(valueAt(Math.min(1, Math.max(0, place)))));
  });
  const show = (value) => {
    number.show(value);
    if (document.activeElement !== slider || !slider.matches(":active")) slider.value = Math.log(value / control.least) / span;
  };
  return { nodes: [slider, ...number.nodes], show };
}

// Whole numbers are powers of two and one and a half of them, others have two digits.
function snapped(value, isWhole) {
  if (!isWhole) return Number(value.toPrecision(2));
  const power = 2 ** Math.floor(Math.log2(value));
  const near = [power, 1.5 * power, 2 * power].filter(Number.isInteger);
  return near.reduce((best, next) => (Math.abs(Math.log(next / value)) < Math.abs(Math.log(best / value)) ? next : best));
}

// Any other field of the job by its name, and those that are set.
function otherFields(described, change) {
  const names = element("datalist", { id: "fields" });
  const name = element("input", { id: "field", type: "text", placeholder: "plan.bucket_mib", spellcheck: false });
  name.setAttribute("list", "fields");
  // Its hundreds of names are made when it is used: a browser looks through all of a form after each change of a control.
  name.addEventListener("focus", () => names.append(...Object.keys(described.fields).map((key) => element("option", { value: key }))),
    { once: true });
  const value = element("input", { type: "text", "aria-label": TEXTS.controls.valueOf, placeholder: TEXTS.controls.value, spellcheck: false });
  const meaning = element("p", { class: "quiet" });
  const add = element("button", { type: "button" }, TEXTS.controls.set);
  const list = element("ul", {});
  const apply = () => {
    if (name.value && value.value) change(name.value.trim(), value.value.trim(), true);
  };
  add.addEventListener("click", apply);
  value.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); apply(); } });
  let values = {};
  name.addEventListener("input", () => {
    meaning.textContent = described.fields[name.value] || "";
    if (name.value in values) value.value = plainText(values[name.value]);
  });
  const summary = element("summary", {}, TEXTS.controls.others);
  const line = element("div", { class: "control other" }, element("label", { htmlFor: "field" }, TEXTS.controls.field), name, value, add);
  const node = element("details", { class: "others" }, summary, names, line, meaning, list);
  const show = (shown, state, known) => {
    values = shown;
    const set = Object.entries(state).filter(([key]) => key.includes(".") && !known.includes(key));
    setText(summary, set.length ? TEXTS.controls.othersSet(rounded(set.length)) : TEXTS.controls.others);
    list.replaceChildren(...set.map(([key, text]) => {
      const back = element("button", { type: "button", class: "back", "aria-label": TEXTS.controls.backOf(key) }, "↺");
      back.addEventListener("click", () => change(key, "", true));
      return element("li", { title: described.fields[key] || "" }, `${key} = ${text} `, back);
    }));
  };
  return { node, show };
}

const plainText = (value) => (typeof value === "string" ? value : JSON.stringify(value));
