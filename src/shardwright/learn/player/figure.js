"use strict";
// Puts a playable figure in place of each picture that has one. A frame is chosen by the controls; where there are moments,
// a button and the space bar play through them. All controls are the browser's own, so tab, arrows and touch work.
(() => {
  const { element } = playablePainters;
  const isNumber = (text) => /^[\d,.]+([KMG]iB)?$/.test(text);

  // A slider for numbers, a list for names. `changed` gets the number of the value.
  function control({ label, values, start }, changed) {
    if (!values.every(isNumber)) {
      const list = element("select", {}, values.map((value, number) => element("option", { value: number, selected: number === start }, value)));
      list.addEventListener("change", () => changed(Number(list.value)));
      return element("label", {}, element("span", {}, label), list);
    }
    const shown = element("output", {}, values[start]);
    const slider = element("input", { type: "range", min: 0, max: values.length - 1, value: start, "aria-valuetext": values[start] });
    slider.addEventListener("input", () => {
      shown.textContent = values[slider.value];
      slider.setAttribute("aria-valuetext", values[slider.value]);
      changed(Number(slider.value));
    });
    return element("label", {}, element("span", {}, label), slider, shown);
  }

  function show(image, figure, words) {
    const painter = playablePainters[figure.painter];
    const chosen = figure.controls.map((one) => one.start);
    let moment = 0, timer = 0;

    const place = element("div", { className: "playable-picture" });
    const numbers = element("dl", { "aria-live": "polite" });
    const command = element("code");
    const slider = element("input", { type: "range", min: 0 }), shown = element("output");
    const button = element("button", { type: "button" }, words.play);
    const controls = figure.controls.map((one, number) => control(one, (value) => { chosen[number] = value; renew(); }));
    const player = element("div", { className: "playable-player", hidden: !figure.steps }, button,
      element("label", {}, element("span", {}, figure.steps), slider, shown));
    const whole = element("figure", { className: "playable", "aria-label": figure.title },
      element("figcaption", {}, figure.title), element("div", { className: "playable-controls" }, controls), player, place, numbers,
      element("details", {}, element("summary", {}, words.command), element("pre", {}, command)));
    const frame = () => figure.frames[chosen.join("/")];
    const page = { words, title: figure.title, frames: Object.values(figure.frames), choose };

    function draw() {
      const { picture, fault } = frame();
      if (fault) {
        place.replaceChildren(element("p", { className: "playable-fault" }, words.refused + fault));
        return;
      }
      slider.value = moment;
      shown.textContent = painter.label(picture, moment, page);
      slider.setAttribute("aria-valuetext", shown.textContent);
      painter.draw(place, picture, moment, page);
    }

    function choose(number) {
      moment = number;
      draw();
    }

    // Another frame: its numbers, and its moments from their start.
    function renew() {
      pause();
      const { picture, numbers: pairs, command: line, fault } = frame();
      numbers.replaceChildren(...pairs.map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))));
      command.textContent = line;
      whole.querySelector("details").hidden = !line;
      button.disabled = slider.disabled = Boolean(fault);
      if (!fault) {
        const last = painter.moments(picture) - 1;
        slider.max = last;
        moment = painter.start(picture, moment);
      }
      draw();
    }

    function pause() {
      clearInterval(timer);
      timer = 0;
      button.textContent = words.play;
    }

    function play() {
      const last = Number(slider.max);
      if (moment >= last) choose(0);
      button.textContent = words.pause;
      timer = setInterval(() => {
        choose(moment + 1);
        if (moment >= last) pause();
      }, Math.min(900, Math.max(60, 9000 / last)));
    }

    const turn = () => (timer ? pause() : play());
    button.addEventListener("click", turn);
    slider.addEventListener("input", () => { pause(); choose(Number(slider.value)); });
    slider.addEventListener("keydown", (event) => {
      if (event.key !== " ") return;
      event.preventDefault();
      turn();
    });
    image.replaceWith(whole);
    renew();
    let width = whole.clientWidth;
    new ResizeObserver(() => {
      if (whole.clientWidth === width) return;
      width = whole.clientWidth;
      draw();
    }).observe(whole);
  }

  for (const image of document.querySelectorAll("img[data-figure]")) {
    const name = image.dataset.figure;
    show(image, window.playableFigures[name], window.playableFigures.words);
  }
})();
