"use strict";
// Makes of the columns of packed_timeline.py the lists that painter.js draws. Of a rank: blocks [from, to, parts, step],
// whose parts are [colour, letter, stage, microbatch]; waits [from, to, cause]; curves of [time, count]. Messages are
// [sender, receiver, backward, start, sent, arrived, stage, microbatch, step]. A list is made when it is first read: nobody
// reads those of a timeline that is out of sight.
function unpackedTimelines(data) {
  return { ...data, sections: data.sections.map(unpackedSection) };
}

function unpackedSection(section) {
  const { tick, kinds, routes } = section;
  const blocks = (packed) => {
    const { from, to, kind, microbatch, second, step } = unpackedColumns(packed);
    return Array.from(from, (start, n) => {
      const parts = kinds[kind[n]].map(([colour, letter, stage], part) =>
        [colour, letter, stage, part ? second[n] : microbatch[n]]);
      return [start * tick, to[n] * tick, parts, step ? step[n] : 0];
    });
  };
  const waits = (packed) => {
    const { from, to, cause } = unpackedColumns(packed);
    return Array.from(from, (start, n) => [start * tick, to[n] * tick, cause[n]]);
  };
  const curve = (packed) => {
    const { at, count } = unpackedColumns(packed);
    return Array.from(at, (time, n) => [time * tick, count[n]]);
  };
  const listsOf = { busy: blocks, idle: waits, moves: blocks, alive: curve, buffered: curve, inputs: curve, gathered: curve };
  const ranks = section.ranks.map((rank) => {
    const lists = {};
    for (const [name, listOf] of Object.entries(listsOf)) makeWhenRead(lists, name, () => listOf(rank[name]));
    return lists;
  });
  const { messages, ...others } = section;
  return makeWhenRead({ ...others, ranks }, "messages", () => unpackedMessages(messages, routes, tick));
}

// Gives an object a property that is made when it is first read.
function makeWhenRead(object, name, make) {
  const get = () => {
    const value = make();
    Object.defineProperty(object, name, { value, enumerable: true });
    return value;
  };
  return Object.defineProperty(object, name, { get, enumerable: true, configurable: true });
}

function unpackedMessages(packed, routes, tick) {
  const { from, sent, arrives, route, microbatch, step } = unpackedColumns(packed);
  return Array.from(from, (start, n) => {
    const [sender, receiver, backward, stage] = routes[route[n]];
    return [sender, receiver, backward, start * tick, sent[n] * tick, arrives[n] * tick, stage, microbatch[n], step ? step[n] : 0];
  });
}

// Columns of 32-bit numbers, of which each is in base64, by name.
function unpackedColumns(packed) {
  return Object.fromEntries(Object.entries(packed).map(([name, text]) => {
    const bytes = atob(text), column = new Uint8Array(bytes.length);
    for (let n = 0; n < bytes.length; n++) column[n] = bytes.charCodeAt(n);
    return [name, new Int32Array(column.buffer)];
  }));
}
