"use strict";
// Makes of the columns of packed_timeline.py the lists that painter.js draws. Of a rank: blocks [from, to, parts, step],
// whose parts are [colour, letter, stage, microbatch]; waits [from, to, cause]; curves of [time, count]. Messages are
// [sender, receiver, backward, start, sent, arrived, stage, microbatch, step].
function unpackedTimelines(data) {
  return { ...data, sections: data.sections.map(unpackedSection) };
}

function unpackedSection(section) {
  const { tick, kinds, routes } = section;
  const blocks = ({ from, long, kind, microbatch, second, step }) => {
    let start = 0;
    return from.map((change, n) => {
      start += change;
      const numbers = [microbatch[n], second?.[n]];
      const parts = kinds[kind[n]].map(([colour, letter, stage], part) => [colour, letter, stage, numbers[part]]);
      return [start * tick, (start + long[n]) * tick, parts, step?.[n] ?? 0];
    });
  };
  const waits = ({ from, long, cause }) => {
    let start = 0;
    return from.map((change, n) => {
      start += change;
      return [start * tick, (start + long[n]) * tick, cause[n]];
    });
  };
  const curve = ({ at, change }) => {
    let time = 0, count = 0;
    return at.map((passed, n) => [(time += passed) * tick, (count += change[n])]);
  };
  const ranks = section.ranks.map((rank) => ({
    busy: blocks(rank.busy), idle: waits(rank.idle), moves: blocks(rank.moves), alive: curve(rank.alive),
    buffered: curve(rank.buffered), inputs: curve(rank.inputs), gathered: curve(rank.gathered),
  }));
  return { ...section, ranks, messages: unpackedMessages(section.messages, routes, tick) };
}

function unpackedMessages({ from, sent, arrives, route, microbatch, step }, routes, tick) {
  let start = 0;
  return from.map((change, n) => {
    start += change;
    const [sender, receiver, backward, stage] = routes[route[n]], left = start + sent[n];
    return [sender, receiver, backward, start * tick, left * tick, (left + arrives[n]) * tick, stage, microbatch[n], step?.[n] ?? 0];
  });
}
