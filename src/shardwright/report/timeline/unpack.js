"use strict";
// Makes of the columns of packed_timeline.py the lists that painter.js draws. Of a rank: blocks [from, to, parts, step],
// whose parts are [colour, letter, stage, microbatch]; waits [from, to, cause]; curves of [time, count]. Messages are
// [sender, receiver, backward, start, sent, arrived, stage, microbatch, step]. A list is made when it is first read: nobody
// reads those of a timeline that is out of sight.
function unpackedTimelines(data) {
  return { ...data, sections: data.sections.map(unpackedSection) };
}

function unpackedSection(section) {
  const { tick, kinds, routes, lists, num_ranks: numRanks, messages, ...others } = section;
  const block = ({ from, to, kind, microbatch, second, step }) => (n) => {
    const parts = kinds[kind[n]].map(([colour, letter, stage], part) =>
      [colour, letter, stage, part ? second[n] : microbatch[n]]);
    return [from[n] * tick, to[n] * tick, parts, step ? step[n] : 0];
  };
  const wait = ({ from, to, cause }) => (n) => [from[n] * tick, to[n] * tick, cause[n]];
  const point = ({ at, count }) => (n) => [at[n] * tick, count[n]];
  const entryOf = { busy: block, idle: wait, moves: block, alive: point, buffered: point, inputs: point, gathered: point };
  const ranks = Array.from({ length: numRanks }, () => ({}));
  for (const [name, { lengths, ...packed }] of Object.entries(lists)) {
    const columns = makeWhenRead({}, "entry", () => entryOf[name](unpackedColumns(packed)));
    let first = 0;
    lengths.forEach((length, rank) => {
      const begin = first;
      makeWhenRead(ranks[rank], name, () => Array.from({ length }, (_, n) => columns.entry(begin + n)));
      first += length;
    });
  }
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

// Columns of numbers, by name, each of which is the bytes of a number and the base64 of all.
function unpackedColumns(packed) {
  const kinds = { 1: Int8Array, 2: Int16Array, 4: Int32Array };
  return Object.fromEntries(Object.entries(packed).map(([name, text]) => {
    const bytes = atob(text.slice(1)), column = new Uint8Array(bytes.length);
    for (let n = 0; n < bytes.length; n++) column[n] = bytes.charCodeAt(n);
    return [name, new kinds[text[0]](column.buffer)];
  }));
}
