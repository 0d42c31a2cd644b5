// Sentences in the language of the page. A template is English, with the names of its values in braces; the translations
// of those that the page's modules say stand in the page.
const phrases = JSON.parse(document.getElementById("phrases")?.textContent || "{}");

export function say(template, values = {}) {
  return (phrases[template] ?? template).replace(/\{(\w+)\}/g, (_, name) => values[name]);
}
