// Tab after the beginning of a word: words of the notebook and of the language that begin so, one after the other.

import { wordsOf } from "./playground-colours.js";
import { el } from "./panel-parts.js";

const WORD = /[\p{L}_$][\p{L}\p{N}_$]*/gu;
const BEGUN = /[\p{L}_$][\p{L}\p{N}_$]*$/u;
const MOST = 12;
const SEARCHED = 200_000; // characters

export class Completion {
  constructor(area, words) {
    Object.assign(this, { area, words, offer: null });
    this.element = el("div", { class: "pg-complete", role: "status", hidden: true });
  }

  /** Whether there was something to complete. */
  begin(language) {
    const caret = this.area.selectionStart;
    const typed = this.area.value.slice(0, caret).match(BEGUN)?.[0];
    const found = typed ? matching(typed, this.words(), language) : [];
    if (!found.length) return false;
    this.offer = { start: caret - typed.length, typed, found, at: -1 };
    this.step(1);
    return true;
  }

  /** Whether the key was for this. Any other ends it. */
  key(event) {
    if (!this.offer) return false;
    if (["Shift", "Control", "Alt", "Meta"].includes(event.key)) return false;
    if (event.key === "Tab" && this.offer.found.length > 1) this.step(event.shiftKey ? -1 : 1);
    else if (event.key === "Escape") this.refuse();
    else return this.end();
    event.preventDefault();
    event.stopPropagation();
    return true;
  }

  step(by) {
    const { found } = this.offer;
    this.offer.at = (this.offer.at + by + found.length) % found.length;
    this.replace(found[this.offer.at]);
    this.element.replaceChildren(...found.map((word, at) => el(at === this.offer.at ? "mark" : "span", {}, word)));
    this.element.hidden = found.length === 1;
  }

  refuse() {
    this.replace(this.offer.typed);
    this.end();
  }

  replace(word) {
    this.area.setSelectionRange(this.offer.start, this.area.selectionStart);
    insert(this.area, word);
  }

  end() {
    this.offer = null;
    this.element.hidden = true;
    return false;
  }
}

function matching(typed, text, language) {
  const all = new Set(text.slice(0, SEARCHED).match(WORD) ?? []);
  for (const word of wordsOf(language)) all.add(word);
  return [...all].filter((word) => word.startsWith(typed) && word !== typed).sort().slice(0, MOST);
}

/** In place of the selection. By a command that the browser can undo, where it still has it. */
export function insert(area, text) {
  if (document.execCommand(text ? "insertText" : "delete", false, text)) return;
  area.setRangeText(text, area.selectionStart, area.selectionEnd, "end");
  area.dispatchEvent(new Event("input"));
}
