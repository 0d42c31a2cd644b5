// Printed text for narrow screens: paragraphs that the screen breaks into lines, and tables whose rows are stacked. Each line
// of the text is a paragraph or a row; rows have at least two blank columns between their cells.
import { element, table } from "./dom.js";

const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]/;
const DRAWN = /[\u2500-\u259f\u2800-\u28ff]/;  // lines, blocks and dots of a drawing
const LEAST_GAP = 2;  // blank columns between cells
const MOST_ALONE = 2;  // columns of a table that has no heading

// The elements of a text.
export function flowing(text) {
  return text.split(/\n{2,}/).flatMap((block) => {
    if (DRAWN.test(block)) return [element("pre", { tabindex: "0" }, block)];
    const lines = block.split("\n"), made = [];
    for (let from = 0; from < lines.length;) {
      const rows = rowsFrom(lines, from);
      if (rows.length > 1) made.push(tableOf(rows));
      else if (/^-{3,}$/.test(lines[from])) made.at(-1)?.classList.add("heading");
      else made.push(paragraph(lines[from]));
      from += Math.max(1, rows.length);
    }
    return made;
  });
}

// A line as a paragraph, as far to the right as it begins.
function paragraph(line) {
  const indent = line.length - line.trimStart().length;
  const made = element("p", {}, line.trim());
  made.style.marginLeft = `${Math.min(indent, 8)}ch`;
  return made;
}

// The rows of the table that begins at a line, as lists of cells; a single line is no table.
function rowsFrom(lines, from) {
  let blank = blanks(lines[from]), spans = spansOf(blank), to = from + 1;
  for (; to < lines.length; to += 1) {
    const both = common(blank, blanks(lines[to])), more = spansOf(both);
    if (more.length < Math.max(2, spans.length)) break;  // of another table
    [blank, spans] = [both, more];
  }
  if (to - from < 2) return [];
  const rows = lines.slice(from, to).map((line) => cellsOf(line, spans));
  return rows[0].filter(Boolean).length > 1 ? rows : [];  // else a line that stands above a table
}

// For each column of a line whether it is blank; a character of Chinese takes two.
function blanks(line) {
  return [...line].flatMap((character) => (WIDE.test(character) ? [false, false] : [character === " "]));
}

function common(one, other) {
  return Array.from({ length: Math.max(one.length, other.length) }, (_, place) => (one[place] ?? true) && (other[place] ?? true));
}

// Where cells begin and end, from blank columns: between two are as many as a gap has.
function spansOf(blank) {
  const spans = [];
  let begin = -1, end = -1;
  blank.forEach((isBlank, place) => {
    if (isBlank) return;
    if (begin >= 0 && place - end >= LEAST_GAP) {
      spans.push([begin, end]);
      begin = place;
    }
    if (begin < 0) begin = place;
    end = place + 1;
  });
  return begin < 0 ? spans : [...spans, [begin, end]];
}

function cellsOf(line, spans) {
  const characters = [...line].flatMap((character) => (WIDE.test(character) ? [character, ""] : [character]));
  return spans.map(([begin, end]) => characters.slice(begin, end).join("").trim());
}

// A table. Its first row is a heading if it has no name of its own, or no figures; another row without a name goes on with the
// one before it.
function tableOf([first, ...others]) {
  const rows = [];
  for (const row of others) {
    if (row[0] || !rows.length) rows.push(row);
    else rows[rows.length - 1] = rows.at(-1).map((cell, place) => [cell, row[place]].filter(Boolean).join(" "));
  }
  const isHeaded = !first[0] || (first.length > MOST_ALONE && !first.some((cell) => /^[\d$]/.test(cell)));
  return table(isHeaded ? [first, ...rows] : [null, first, ...rows]);
}
