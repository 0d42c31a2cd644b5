"use strict";
// Painters of playable figures. Each has `moments(picture)`, how many there are to play through; `start(picture, moment)`,
// the one to begin with after `moment` of another frame; `label(picture, moment)`; and `draw(place, picture, moment, page)`,
// which fills an element. `page` has the words of the language, all frames, and `choose(moment)`. Nothing is computed
// here: amounts and times are data.
const playablePainters = (() => {
  const COLOURS = ["#3b82f6", "#e5484d", "#0f9d8a", "#f59f00", "#8b5cf6", "#d6409f", "#65a30d", "#0891b2"];
  const AXIS_COLOURS = ["#8b5cf6", "#0f9d8a", "#e5484d"];
  const SVG = "http://www.w3.org/2000/svg";

  function element(tag, properties = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name in made && !name.includes("-")) made[name] = value;
      else made.setAttribute(name, value);
    }
    made.append(...children.flat(Infinity));
    return made;
  }

  function vector(tag, attributes, text = "") {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.textContent = text;
    return made;
  }

  function legend(entries) {
    if (entries.length < 2) return "";
    const items = entries.map(([colour, name]) => element("span", {}, element("i", { style: `background: ${colour}` }), name));
    return element("div", { className: "playable-legend" }, items);
  }

  const endOf = (row) => (row.offset || 0) + row.parts.reduce((sum, part) => sum + part[1], 0);
  const longest = (picture) => Math.max(picture.limit?.amount || 0, ...(picture.rows || []).map(endOf));

  // Stacked bars. With a limit all frames have one scale, so that bars grow and shrink as the reader chooses.
  const bars = {
    moments: () => 0,
    start: () => 0,
    label: () => "",
    draw(place, picture, moment, page) {
      const pictures = picture.limit ? page.frames.map((frame) => frame.picture) : [picture];
      const most = Math.max(...pictures.map(longest));
      const share = (amount) => `${(100 * amount) / most}%`;
      const names = [...new Set(picture.rows.flatMap((row) => row.parts.filter((part) => part[1] > 0).map((part) => part[0])))];
      const colours = new Map(names.map((name, number) => [name, COLOURS[number % COLOURS.length]]));
      const rows = picture.rows.map((row) => {
        const parts = row.parts.filter((part) => part[1] > 0).map(([name, amount, text]) =>
          element("span", { style: `width: ${share(amount)}; background: ${colours.get(name)}`, title: `${name}: ${text}` }));
        const track = element("div", { className: "track" }, parts);
        if (row.offset) track.prepend(element("span", { style: `width: ${share(row.offset)}` }));
        if (picture.limit) track.append(element("b", { style: `left: ${share(picture.limit.amount)}` }));
        const over = picture.limit && endOf(row) > picture.limit.amount;
        return [element("div", { className: "label" }, row.label), track, element("div", { className: over ? "total over" : "total" }, row.total)];
      });
      const note = picture.limit ? element("p", { className: "limit" }, picture.limit.text) : "";
      place.replaceChildren(element("div", { className: "playable-bars" }, rows), legend([...colours].map(([name, colour]) => [colour, name])), note);
    },
  };

  // Computations of each rank over time; what has not begun at the moment is faint.
  const moments = new WeakMap();
  function endsOf(picture) {
    if (!moments.has(picture)) {
      moments.set(picture, [0, ...new Set(picture.ranks.flat().map((block) => block[1]))].sort((a, b) => a - b));
    }
    return moments.get(picture);
  }

  const timeline = {
    moments: (picture) => endsOf(picture).length,
    start: (picture) => endsOf(picture).length - 1,
    label: (picture, moment) => `${(endsOf(picture)[moment] / picture.ticks).toFixed(3)} ${picture.unit}`,
    draw(place, picture, moment, page) {
      const LEFT = 56, LANE = 24, PITCH = 30, TOP = 4;
      const width = Math.max(place.clientWidth, 640), height = TOP + PITCH * picture.ranks.length + 4;
      const scale = (width - LEFT - 4) / picture.end, now = endsOf(picture)[moment];
      const drawn = vector("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
      picture.ranks.forEach((blocks, rank) => {
        const top = TOP + rank * PITCH;
        drawn.append(vector("text", { x: 0, y: top + 16, class: "ink" }, `${page.words.rank} ${rank}`));
        drawn.append(vector("rect", { x: LEFT, y: top, width: picture.end * scale, height: LANE, class: "lane" }));
        for (const [from, to, number, name, half] of blocks) {
          const [colour, ink] = picture.colours[number];
          const x = LEFT + from * scale, wide = Math.max((to - from) * scale - 1, 0.5);
          const y = top + (half === 2 ? LANE / 2 : 0), high = half ? LANE / 2 : LANE;
          const group = vector("g", { opacity: from < now ? 1 : 0.12 });
          group.append(vector("rect", { x, y, width: wide, height: high, rx: wide > 8 ? 2 : 0, fill: colour }));
          const text = name < 0 ? "" : String(name), size = half ? 9 : 11;
          if (0.66 * size * text.length + 2 < wide) {
            group.append(vector("text", { x: x + wide / 2, y: y + high / 2 + size * 0.36, fill: ink, "font-size": size, "text-anchor": "middle" }, text));
          }
          drawn.append(group);
        }
      });
      const x = LEFT + now * scale;
      drawn.append(vector("line", { x1: x, x2: x, y1: 0, y2: height, class: "now" }));
      const left = place.firstChild?.scrollLeft || 0;
      const scrolled = element("div", { className: "wide", tabIndex: 0, role: "group", "aria-label": page.title }, drawn);
      const names = new Map(picture.colours.map(([colour, , name]) => [name, colour]));
      place.replaceChildren(scrolled, legend([...names].map(([name, colour]) => [colour, name])));
      scrolled.scrollLeft = left;
    },
  };

  // The pieces that each rank holds; those that have just arrived are framed, and messages are listed.
  const pieces = {
    moments: (picture) => picture.states.length,
    start: () => 0,
    label: (picture, moment, page) => (moment ? `${moment} / ${picture.moves.length}` : page.words.before),
    draw(place, picture, moment, page) {
      const moves = moment ? picture.moves[moment - 1] : [];
      const arrived = new Set(moves.flatMap(([, receiver, names]) => names.map((piece) => `${receiver}/${piece}`)));
      const rows = picture.states[moment].map((row, rank) => {
        const cells = row.map((cell, piece) => {
          const [name, share] = cell || ["", 0];
          const kind = `${cell ? (share === 1 ? "whole" : "piece") : "none"}${arrived.has(`${rank}/${piece}`) ? " new" : ""}`;
          return element("span", { className: kind, style: `--share: ${0.25 + 0.6 * share}` }, name);
        });
        return element("div", { className: "row" }, element("span", { className: "label" }, `${page.words.rank} ${rank}`), cells);
      });
      const texts = moves.map(([sender, receiver, names, adds]) =>
        element("span", {}, `${sender} → ${receiver}: ${names.join(" ")}${adds ? ` (${page.words.adds})` : ""}`));
      place.replaceChildren(element("div", { className: "playable-pieces" }, rows), element("div", { className: "playable-moves" }, texts));
    },
  };

  // Ranks on their nodes, coloured by stage; those that differ from one rank along one axis alone are framed.
  const ranks = {
    moments: (picture) => picture.places.length,
    start: (picture, moment) => Math.min(moment, picture.places.length - 1),
    label: (picture, moment) => String(moment),
    draw(place, picture, moment, page) {
      const own = picture.places[moment];
      const alongOf = (there) => {
        const axes = there.flatMap((at, axis) => (at === own[axis] ? [] : [axis]));
        return axes.length === 1 ? axes[0] : -1;
      };
      const lines = picture.axes.map(() => [moment]);
      const cells = picture.places.map((there, rank) => {
        const along = rank === moment ? -1 : alongOf(there);
        if (along >= 0) lines[along].push(rank);
        const frame = rank === moment ? "var(--md-default-fg-color)" : along >= 0 ? AXIS_COLOURS[along] : "transparent";
        const text = picture.axes.map((axis, number) => axis[0] + there[number]).join(" ");
        const style = `--stage: ${COLOURS[there[0] % COLOURS.length]}; outline-color: ${frame}`;
        const cell = element("button", { type: "button", tabIndex: -1, style, "aria-label": `${page.words.rank} ${rank}: ${text}` }, element("b", {}, String(rank)), text);
        cell.addEventListener("click", () => page.choose(rank));
        return cell;
      });
      const nodes = [];
      for (let first = 0; first < cells.length; first += picture.node) {
        const name = element("span", { className: "label" }, `${page.words.node} ${first / picture.node}`);
        nodes.push(element("div", { className: "node" }, name, cells.slice(first, first + picture.node)));
      }
      const names = picture.axes.map((axis, number) => [AXIS_COLOURS[number], `${axis}: ${lines[number].sort((a, b) => a - b).join(" ")}`]);
      place.replaceChildren(element("div", { className: "playable-nodes" }, nodes), legend(names));
    },
  };

  // The axes of a plan: the nodes that a line of ranks is on, and tracks of bytes and of seconds. All frames have one scale.
  const links = {
    moments: () => 0,
    start: () => 0,
    label: () => "",
    draw(place, picture, moment, page) {
      const lengthOf = (track) => track.parts.reduce((sum, [, amount]) => sum + amount, 0);
      const everyRow = page.frames.flatMap((frame) => frame.picture.rows || []);
      const rows = picture.rows.map((row) => {
        const colour = picture.kinds[row.kind][0];
        const nodes = row.nodes.map(([node, members]) => element("span", {},
          element("span", { className: "devices" }, Array.from({ length: picture.node }, (_, device) =>
            element("i", members.includes(device) ? { style: `background: ${colour}` } : {}))),
          `${page.words.node} ${node}`));
        const tracks = row.tracks.map((track, number) => {
          const most = Math.max(...everyRow.map((one) => lengthOf(one.tracks[number])));
          const parts = track.parts.map(([kind, amount]) =>
            element("span", { style: `width: ${(100 * amount) / most}%; background: ${picture.kinds[kind][0]}`, title: picture.kinds[kind][1] }));
          return [element("b", {}, track.text), element("div", { className: "track" }, parts)];
        });
        return element("div", { className: "row" }, element("div", { className: "name" }, element("b", {}, row.axis), row.texts.map((text) => element("div", {}, text))),
          element("div", { className: "nodes" }, nodes, row.more ? `+ ${row.more}` : ""), element("div", {}, tracks));
      });
      place.replaceChildren(element("div", { className: "playable-links" }, rows), legend(picture.kinds));
    },
  };

  // Attention scores of a sequence, a row for each query and a column for each key, with the rank that computes them: those of
  // the step are strong, those of earlier steps faint. Left and above are the ranks that hold queries and keys.
  const scores = {
    moments: (picture) => picture.steps.length,
    start: () => 0,
    label: (picture, moment) => `${moment + 1} / ${picture.steps.length}`,
    draw(place, picture, moment, page) {
      const CELL = 17, LEFT = 24, TOP = 40, { holders } = picture, side = LEFT + CELL * holders.length;
      const drawn = vector("svg", { width: side + 1, height: TOP + side - LEFT + 1, "aria-hidden": "true" });
      const cell = (x, y, rank, kind, named) => {
        const colour = COLOURS[rank % COLOURS.length];
        drawn.append(vector("rect", { x, y, width: CELL - 1, height: CELL - 1, class: kind, style: `--of: ${colour}` }));
        if (named) drawn.append(vector("text", { x: x + CELL / 2, y: y + CELL * 0.72, class: "ink", "text-anchor": "middle" }, String(rank)));
      };
      drawn.append(vector("text", { x: LEFT, y: 13, class: "ink" }, picture.axes));
      holders.forEach((rank, number) => {
        cell(LEFT + number * CELL, 19, rank, "holder", true);
        cell(0, TOP + number * CELL, rank, "holder", true);
        drawn.append(vector("rect", { x: LEFT, y: TOP + number * CELL, width: CELL * holders.length, height: CELL - 1, class: "lane" }));
      });
      picture.steps.slice(0, moment + 1).forEach((step, number) => step.cells.forEach(([query, key, rank]) =>
        cell(LEFT + key * CELL, TOP + query * CELL, rank, number === moment ? "strong" : "faint", number === moment)));
      const texts = picture.steps[moment].texts.map((text, rank) =>
        element("div", {}, element("i", { style: `background: ${COLOURS[rank % COLOURS.length]}` }), text));
      place.replaceChildren(element("div", { className: "playable-scores" },
        element("div", { className: "wide", tabIndex: 0, role: "group", "aria-label": page.title }, drawn),
        element("div", { className: "playable-legend" }, texts)));
    },
  };

  return { bars, timeline, pieces, ranks, links, scores, element };
})();
