// Sentences in the language of the page. A template is English, with the names of its values in braces; the translations
// of those that the page's modules say stand in the page. What follows a | tells a translator of which two meanings a word
// has one, and is not shown.
const phrases = JSON.parse(document.getElementById("phrases")?.textContent || "{}");

export function say(template, values = {}) {
  const text = (phrases[template] ?? template.split("|")[0]).replace(/\{(\w+)\}/g, (_, name) => values[name]);
  return text.replace(/([\u4e00-\u9fff]) (?=[\u4e00-\u9fff])/g, "$1");  // a value may end in Chinese
}

// Punctuation in the language of the page.
const isChinese = document.documentElement.lang === "zh";
export const COMMA = isChinese ? "\u3001" : ", ";
export const SEMICOLON = isChinese ? "\uff1b" : "; ";
const PERIOD = isChinese ? "\u3002" : ".";
const ends = (text) => (/[.:;,\u3002\uff0c\uff1a\uff1b]$/.test(text) ? text : `${text}${PERIOD}`);

// A note as a sentence, and texts as sentences one behind the other.
export const sentence = (note) => `${note[0].toUpperCase()}${ends(note.slice(1))}`;
export const sentences = (...texts) => texts.filter(Boolean).map(ends).join(isChinese ? "" : " ");
