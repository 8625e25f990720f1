// Where code is written: a textarea, and behind it the same text with colours.

import { coloured } from "./playground-colours.js";
import { Completion, insert } from "./playground-completion.js";
import { LANGUAGES } from "./playground-languages.js";
import { el } from "./panel-parts.js";

const OPENS = { python: /[:([{]\s*(?:#.*)?$/, bash: /(?:\b(?:then|do|else)|\{)\s*$/ };

export class Editor {
  /** `words()` is text in which completions are looked for. */
  constructor({ language, code, label, words, changed }) {
    Object.assign(this, { language, changed, isAsked: false });
    this.back = el("pre", { class: "pg-back", "aria-hidden": "true" });
    this.area = el("textarea", { class: "pg-area", "aria-label": label, spellcheck: "false", autocapitalize: "off", autocomplete: "off", autocorrect: "off", rows: "1", wrap: "off" });
    this.completion = new Completion(this.area, words);
    this.element = el("div", { class: "pg-editor" }, el("div", { class: "pg-layers" }, this.back, this.area), this.completion.element);
    this.area.addEventListener("input", () => this.input());
    this.area.addEventListener("keydown", (event) => this.key(event));
    this.area.addEventListener("blur", () => this.completion.end());
    this.code = code;
  }

  get code() {
    return this.area.value;
  }

  set code(code) {
    this.area.value = code;
    this.paint();
  }

  speak(language) {
    this.language = language;
    this.paint();
  }

  focus() {
    this.area.focus();
  }

  input() {
    this.changed();
    if (this.isAsked) return;
    this.isAsked = true;
    requestAnimationFrame(() => this.paint());
  }

  paint() {
    this.isAsked = false;
    this.back.replaceChildren(...coloured(this.code, this.language), "\n");
  }

  key(event) {
    if (event.isComposing) return;
    if (this.completion.key(event)) return;
    const plain = !event.ctrlKey && !event.metaKey && !event.altKey;
    if (event.key === "Tab" && plain) this.tab(event);
    else if (event.key === "Enter" && plain && !event.shiftKey) this.newLine(event);
    else if (event.key === "/" && (event.ctrlKey || event.metaKey)) this.comment(event);
  }

  tab(event) {
    event.preventDefault();
    const { selectionStart: start, selectionEnd: end } = this.area;
    if (event.shiftKey) return this.changeLines((line) => line.replace(new RegExp(`^(?:\\t| {1,${this.unit.length}})`), ""));
    if (this.code.slice(start, end).includes("\n")) return this.changeLines((line) => (line ? this.unit + line : line));
    if (start !== end || !this.completion.begin(this.language)) this.insert(this.unit);
  }

  get unit() {
    return LANGUAGES[this.language]?.indent ?? "  ";
  }

  newLine(event) {
    event.preventDefault();
    const line = this.code.slice(0, this.area.selectionStart).split("\n").pop();
    const opens = (OPENS[this.language] ?? /[([{]\s*$/).test(line);
    this.insert(`\n${line.match(/^[ \t]*/)[0]}${opens ? this.unit : ""}`);
  }

  comment(event) {
    event.preventDefault();
    const mark = LANGUAGES[this.language]?.comment;
    if (!mark) return;
    const all = this.lines().text.split("\n").filter((line) => line.trim());
    const off = all.length > 0 && all.every((line) => line.trimStart().startsWith(mark));
    const without = new RegExp(`^([ \\t]*)${mark} ?`);
    this.changeLines((line) => (off ? line.replace(without, "$1") : line.trim() ? line.replace(/^[ \t]*/, `$&${mark} `) : line));
  }

  /** The whole lines that the selection touches. */
  lines() {
    const { selectionStart, selectionEnd } = this.area;
    const start = this.code.lastIndexOf("\n", selectionStart - 1) + 1;
    const found = this.code.indexOf("\n", Math.max(selectionStart, selectionEnd - 1));
    const end = found === -1 ? this.code.length : found;
    return { start, end, text: this.code.slice(start, end) };
  }

  changeLines(change) {
    const { selectionStart, selectionEnd } = this.area;
    const { start, end, text } = this.lines();
    const made = text.split("\n").map(change).join("\n");
    if (made === text) return;
    this.area.setSelectionRange(start, end);
    this.insert(made);
    if (selectionStart !== selectionEnd) this.area.setSelectionRange(start, start + made.length);
    else this.area.setSelectionRange(...Array(2).fill(Math.max(start, selectionStart + made.length - text.length)));
  }

  insert(text) {
    insert(this.area, text);
  }
}
