// Questions to the server of this page. Answers come as lines of JSON, each as soon as it is known.

async function post(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw new Faults([await response.text()], "");
  return response;
}

// An answer that is one object.
async function answerTo(path, body) {
  const answer = await (await post(path, body)).json();
  if (answer.faults) throw new Faults(answer.faults, answer.way_out);
  return answer;
}

// Faults of what was asked, each a sentence, and a way out that they share.
export class Faults extends Error {
  constructor(faults, wayOut) {
    super(faults.join("; "));
    this.faults = faults;
    this.wayOut = wayOut;
  }
}

async function* lines(response) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let begun = [];  // pieces of a line without its end
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const [first, ...others] = decoder.decode(value, { stream: true }).split("\n");
    begun.push(first);
    for (const next of others) {
      yield JSON.parse(begun.join(""));
      begun = [next];
    }
  }
}

// The parts of the answer to a state: "values", "job", "step", "memory", "links", "timeline", or "faults". `known` are the keys
// of parts that the page has: such a part comes with its key alone, if it is the same.
export async function* askParts(state, wanted, known, signal) {
  yield* lines(await post("/plan", { state, wanted: wanted.join(","), known }, signal));
}

// The lines of a search: "best" plans, or the nearest that are "fitting". With `keep` the plan's fields of the state stay.
export async function* search(asks, state, signal, keep = false) {
  yield* lines(await post("/search", { asks, state, keep }, signal));
}

export const askControls = async () => (await fetch("/controls")).json();
export const readFiles = (files, system, state) => answerTo("/drop", { files, system, state });
export const exportPlan = (state, to) => answerTo("/export", { state, to });
