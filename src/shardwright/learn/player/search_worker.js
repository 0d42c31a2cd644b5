"use strict";
// The search of the site, in place of the theme's: it ranks sections as `shardwright learn WORDS` does, and its words and
// weights are sent with the index (learn/site_search.py). The theme sends { type: 0 } with the index and { type: 2 } with
// a question, and reads { type: 1 } as ready and { type: 3 } as the answer.
const SETUP = 0, READY = 1, QUERY = 2, RESULT = 3;
const LATIN = "[a-z0-9][a-z0-9.+/^-]*";
const HAN = "[\\u4e00-\\u9fff]+";
let tables, documents, sections, index, asking, isCase, chinese;

function plain(word) {
  return word.replace(/[.+/^-]+$/, "");
}

function stem(word) {
  const least = tables.short_word;
  if (word.length <= least || !/^[a-z]+$/.test(word)) return word;
  const ending = tables.endings.find(
    (one) => word.endsWith(one) && word.length - one.length >= least && !word.endsWith("ss"),
  );
  return ending === undefined ? word : word.slice(0, -ending.length);
}

// Words of a text with their weights, as learn/asked_words.py cuts them.
function words(text) {
  const all = [];
  for (const latin of text.match(new RegExp(LATIN, "g")) ?? []) {
    const word = plain(latin), share = isCase.test(word) ? tables.of_a_case : 1;
    all.push([stem(word), share]);
    const parts = word.split(/[-/]/);
    for (const part of parts) {
      if (parts.length > 1 && part && !asking.has(part)) all.push([stem(part), tables.part * share]);
    }
  }
  for (const run of text.match(new RegExp(HAN, "g")) ?? []) {
    for (let at = 0; at + 1 < run.length; at++) all.push([run.slice(at, at + 2), 1]);
    for (const one of run) all.push([one, run.length > 1 ? tables.character : 1]);
  }
  return all;
}

function named(phrase) {
  return words(phrase).filter(([, share]) => share > tables.character).map(([word]) => word);
}

function about(question) {
  const without = question.replace(new RegExp(tables.asking_chinese, "g"), " ");
  const parts = without.match(new RegExp(`${LATIN}|${HAN}`, "g")) ?? [];
  return parts.filter((part) => !asking.has(plain(part))).join(" ");
}

function has(question, phrase) {
  const escaped = phrase.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&");
  return new RegExp(`(?<![a-z0-9])${escaped}(?![a-z0-9])`).test(question);
}

function asked(typed) {
  const question = typed.toLowerCase(), weights = new Map();
  const told = about(question) || question;
  const known = new Set(chinese.filter((phrase) => told.includes(phrase)).flatMap(named));
  for (const [word, weight] of words(told)) {
    const unknown = word.length > 1 && new RegExp(`^${HAN}$`).test(word) && !known.has(word);
    weights.set(word, Math.max(weights.get(word) ?? 0, weight * (unknown ? tables.unknown : 1)));
  }
  const same = [];
  for (const row of tables.same) {
    const phrase = row.filter((one) => has(question, one)).sort((one, other) => one.length - other.length).at(-1);
    if (phrase !== undefined) same.push([named(phrase), row.filter((one) => one !== phrase).map(named)]);
  }
  return { weights, same, isDefinition: new RegExp(tables.definition).test(question) };
}

function counted(text) {
  const counts = new Map();
  for (const [word] of words(text.toLowerCase())) counts.set(word, (counts.get(word) ?? 0) + 1);
  return counts;
}

// What each word is worth in each section that has it, as BM25 weighs it.
function begin({ config, docs }) {
  ({ tables } = config);
  documents = docs;
  asking = new Set(tables.asking);
  isCase = new RegExp(`^(?:${tables.case})$`);
  chinese = tables.same.flat().filter((phrase) => new RegExp(`^${HAN}$`).test(phrase));
  sections = docs.filter((doc) => doc.shares);
  const counts = sections.map(({ text }) => counted(text));
  const lengths = counts.map((count) => [...count.values()].reduce((sum, often) => sum + often, 0));
  const mean = lengths.reduce((sum, length) => sum + length, 0) / lengths.length;
  index = new Map();
  counts.forEach((count, number) => {
    const { title } = sections[number], told = about(title.toLowerCase());
    const size = (told.match(new RegExp(LATIN, "g")) ?? []).length + (told.match(/[\u4e00-\u9fff]/g) ?? []).length / 2;
    for (const word of counted(title).keys()) {
      count.set(word, (count.get(word) ?? 0) + (tables.in_heading * tables.words) / (tables.words + size));
    }
    const enough = tables.enough * (1 - tables.of_length + (tables.of_length * lengths[number]) / mean);
    for (const [word, often] of count) {
      if (!index.has(word)) index.set(word, new Map());
      index.get(word).set(number, often / (often + enough));
    }
  });
  for (const values of index.values()) {
    const rare = Math.log(1 + sections.length / values.size);
    for (const [number, value] of values) values.set(number, rare * value);
  }
}

// Words of the index for those of a question: one that it lacks, such as one half typed, stands for those it begins.
function knownWords(weights) {
  const known = new Map();
  for (const [word, weight] of weights) {
    const longer = (one) => one === word || (!index.has(word) && word.length >= tables.short_word && one.startsWith(word));
    for (const one of index.has(word) ? [word] : [...index.keys()].filter(longer)) {
      known.set(one, Math.max(known.get(one) ?? 0, weight));
    }
  }
  return known;
}

function score(number, known, { same, isDefinition }) {
  const value = (all) => all.reduce((sum, word) => sum + (index.get(word)?.get(number) ?? 0), 0) / Math.max(1, all.length);
  const covered = new Set([...known.keys()].filter((word) => index.get(word).has(number)));
  let sum = [...covered].reduce((all, word) => all + known.get(word) * index.get(word).get(number), 0);
  const more = new Map();
  for (const [own, others] of same) {
    const gain = (isDefinition ? 1 : tables.same_share) * Math.max(0, ...others.map(value)) - value(own);
    if (gain <= 0) continue;
    more.set(own.join(" "), Math.max(more.get(own.join(" ")) ?? 0, gain));
    own.filter((word) => known.has(word)).forEach((word) => covered.add(word));
  }
  for (const gain of more.values()) sum += gain;
  const total = [...known.values()].reduce((all, weight) => all + weight, 0);
  return total ? sum * (0.5 + [...covered].reduce((all, word) => all + known.get(word), 0) / total) : sum;
}

function ranked(typed) {
  const question = asked(typed), known = knownWords(question.weights);
  const scores = sections.map(({ shares }, number) => score(number, known, question) * shares[+question.isDefinition]);
  const best = new Map();
  sections.forEach(({ page, idea }, number) => {
    for (const name of [page, idea]) best.set(name, Math.max(best.get(name) ?? 0, scores[number]));
  });
  return sections
    .map((section, number) => ({
      section,
      sum: scores[number] && scores[number] + (section.place ? 0 : tables.of_page * best.get(section.page)),
    }))
    .filter(({ sum }) => sum)
    .sort((one, other) => other.sum - one.sum)
    .slice(0, tables.most);
}

// Results by page, the best first: a page, and its sections with the beginning of their text.
function answered(typed) {
  const pages = new Map();
  for (const { section, sum } of ranked(typed)) {
    const items = pages.get(section.page) ?? pages.set(section.page, []).get(section.page);
    items.push({ location: section.location, title: section.title, text: section.teaser, score: sum, terms: {} });
  }
  for (const [page, items] of pages) {
    const { location, title } = documents.find((doc) => doc.page === page && !doc.place);
    if (!items.some((item) => item.location === location)) items.push({ location, title, text: "", score: 0, terms: {} });
  }
  return [...pages.values()];
}

addEventListener("message", ({ data: { type, data } }) => {
  if (type === SETUP) {
    begin(data);
    postMessage({ type: READY });
  } else if (type === QUERY) postMessage({ type: RESULT, data: { items: answered(data) } });
});
