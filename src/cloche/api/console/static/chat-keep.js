// The conversation of this browser tab, for when the page is loaded again: questions, and the ids of their answers, which
// the server has.

const KEPT = "cloche.chat.turns";
const MOST = 30;
const LONGEST = 20_000; // characters of a question

/** `turns` are `{text, id}`, the oldest first. `owner` is whose they are: who logs in after them does not get them. */
export function keepTurns(turns, owner) {
  const kept = turns.filter(({ id }) => id).slice(-MOST);
  sessionStorage.setItem(KEPT, JSON.stringify({ owner, turns: kept.map(({ text, id }) => ({ text: text.slice(0, LONGEST), id })) }));
}

/** What this tab remembers is its own, and may be anything. */
export function keptTurns(owner) {
  try {
    const found = JSON.parse(sessionStorage.getItem(KEPT));
    if (found.owner === owner) return found.turns.filter((each) => typeof each.text === "string" && typeof each.id === "string").slice(-MOST);
  } catch {
    // there is nothing, or it is not ours
  }
  sessionStorage.removeItem(KEPT);
  return [];
}
