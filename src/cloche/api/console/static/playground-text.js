// Text that programs write, as a terminal shows it: carriage returns, cursor moves, colours. However much comes, a
// bounded number of lines is kept, the first and the last ones, and the page is painted no more often than it can bear.

import { Style } from "./playground-ansi.js";

const HEAD_LINES = 400;
const TAIL_LINES = 1200;
const TAIL_CHARACTERS = 400_000;
const LINE_CHARACTERS = 4000;
const LARGE = 64 * 1024; // of a piece of text: what can only be dropped is not looked at
const CARRIED = 64; // characters of an escape sequence that is not whole yet
const SPECIAL = /[\n\r\b\x1b]/g;
const ESCAPE = /\x1b(?:\[([0-9;:?]*)[ -/]*([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-B]|[=>78cDEHM])/y;
const REST = 3; // frames: painting takes at most a quarter of the time

class Line {
  constructor() {
    this.runs = [];
    this.length = 0;
    this.node = null;
    this.dirty = true;
  }

  write(column, text, style) {
    this.dirty = true;
    if (column > this.length) this.append(" ".repeat(column - this.length), style.plain());
    if (column === this.length) return this.append(text, style);
    const [before, after] = [this.cut(0, column), this.cut(column + text.length, this.length)];
    this.runs = [...before, { text, style }, ...after];
    this.length = Math.max(this.length, column + text.length);
  }

  append(text, style) {
    const last = this.runs[this.runs.length - 1];
    if (last && last.style.key === style.key) last.text += text;
    else this.runs.push({ text, style });
    this.length += text.length;
  }

  cut(from, to) {
    const kept = [];
    let at = 0;
    for (const { text, style } of this.runs) {
      const part = text.slice(Math.max(0, from - at), Math.max(0, to - at));
      if (part) kept.push({ text: part, style });
      at += text.length;
    }
    return kept;
  }

  keep(from, to) {
    this.runs = this.cut(from, to);
    this.length = this.runs.reduce((sum, run) => sum + run.text.length, 0);
    this.dirty = true;
  }

  /** `end` is what follows it: nothing, if it is the last one. */
  paint(end) {
    this.dirty = false;
    this.node = this.node || document.createElement("span");
    const plain = this.runs.length === 1 && this.runs[0].style.key === "";
    if (plain || !this.runs.length) this.node.textContent = `${plain ? this.runs[0].text : ""}${end}`;
    else this.node.replaceChildren(...this.runs.map(({ text, style }) => style.dress(text)), end);
    return this.node;
  }
}

/** Where text is written to, and the element that shows it. */
export class TextView {
  constructor(className = "") {
    this.element = document.createElement("pre");
    this.element.className = `pg-text ${className}`;
    this.element.tabIndex = 0;
    this.element.setAttribute("role", "group");
    this.element.setAttribute("aria-label", "Output");
    this.note = document.createElement("span");
    this.note.className = "pg-dropped";
    this.reset();
  }

  reset() {
    Object.assign(this, { lines: [new Line()], row: 0, column: 0, carry: "", style: new Style(), tail: 0 });
    Object.assign(this, { dropped: 0, cutCharacters: 0 });
    this.element.replaceChildren();
  }

  write(text, stream = "stdout") {
    this.style = this.style.of(stream);
    this.read(this.skipped(this.carry + text));
    this.bound();
    painting.ask(this);
  }

  read(text) {
    this.carry = "";
    let at = 0;
    while (at < text.length) {
      SPECIAL.lastIndex = at;
      const found = SPECIAL.exec(text);
      const end = found ? found.index : text.length;
      if (end > at) this.put(text.slice(at, end));
      if (!found) return;
      at = text[end] === "\x1b" ? this.escape(text, end) : this.move(text, end);
    }
  }

  move(text, at) {
    if (text[at] === "\n") {
      this.row += 1;
      this.column = 0;
      if (this.row === this.lines.length) this.addLine();
    } else if (text[at] === "\r") this.column = 0;
    else this.column = Math.max(0, this.column - 1);
    return at + 1;
  }

  addLine() {
    if (this.lines.length > HEAD_LINES) this.tail += this.lines[this.lines.length - 1].length;
    this.lines[this.lines.length - 1].dirty = true; // it is the last one no more
    this.lines.push(new Line());
    if (this.lines.length >= HEAD_LINES + 2 * TAIL_LINES) this.bound();
  }

  put(text) {
    const fits = text.slice(0, Math.max(0, LINE_CHARACTERS - this.column));
    this.cutCharacters += text.length - fits.length;
    if (fits) this.lines[this.row].write(this.column, fits, this.style);
    this.column += fits.length;
  }

  escape(text, at) {
    ESCAPE.lastIndex = at;
    const found = ESCAPE.exec(text);
    if (found) {
      if (found[2]) this.control(found[2], (found[1] || "").split(/[;:]/).map(Number));
      return at + found[0].length;
    }
    if (text.length - at >= CARRIED) return at + 1; // it is no sequence that we know: the mark alone is left out
    this.carry = text.slice(at);
    return text.length;
  }

  control(kind, numbers) {
    const count = Math.min(Math.max(1, numbers[0] || 1), LINE_CHARACTERS);
    if (kind === "m") this.style = this.style.set(numbers);
    else if (kind === "A") this.row = Math.max(this.floor(), this.row - count);
    else if (kind === "B") this.row = Math.min(this.lines.length - 1, this.row + count);
    else if (kind === "C") this.column = Math.min(LINE_CHARACTERS, this.column + count);
    else if (kind === "D") this.column = Math.max(0, this.column - count);
    else if (kind === "G") this.column = count - 1;
    else if (kind === "K") this.erase(numbers[0] || 0);
    else if (kind === "J" && !numbers[0]) this.lines.slice(this.row + 1).forEach((line) => line.keep(0, 0)), this.erase(0);
  }

  floor() {
    return this.dropped ? Math.min(HEAD_LINES, this.lines.length - 1) : 0;
  }

  erase(kind) {
    const line = this.lines[this.row];
    if (kind === 0) line.keep(0, this.column);
    if (kind === 2) line.keep(0, 0);
  }

  /** Of a large piece only its end, when the first lines are there already. */
  skipped(text) {
    if (text.length < LARGE || this.lines.length <= HEAD_LINES) return text;
    let from = text.length;
    for (let line = 0; line <= TAIL_LINES && from > 0; line += 1) from = text.lastIndexOf("\n", from - 1);
    if (from <= 0) return text;
    this.dropped += count(text, "\n", from);
    return text.slice(from);
  }

  bound() {
    let from = Math.max(HEAD_LINES, this.lines.length - TAIL_LINES);
    let characters = this.tail;
    for (let at = HEAD_LINES; at < from; at += 1) characters -= this.lines[at].length;
    while (characters > TAIL_CHARACTERS && from < this.lines.length - 1) characters -= this.lines[from++].length;
    const excess = from - HEAD_LINES;
    if (excess <= 0) return;
    this.tail = characters;
    for (const line of this.lines.splice(HEAD_LINES, excess)) if (line.node) line.node.remove();
    this.row = Math.max(HEAD_LINES, this.row - excess);
    this.dropped += excess;
  }

  paint() {
    const follows = this.element.scrollHeight - this.element.scrollTop - this.element.clientHeight < 40;
    const fresh = document.createDocumentFragment();
    const last = this.lines[this.lines.length - 1];
    for (const line of this.lines) {
      if (!line.dirty) continue;
      const isNew = !line.node;
      line.paint(line === last ? "" : "\n");
      if (isNew) fresh.append(line.node);
    }
    this.element.append(fresh);
    this.paintNote();
    if (follows) this.element.scrollTop = this.element.scrollHeight;
  }

  paintNote() {
    const missing = [];
    if (this.dropped) missing.push(`${this.dropped.toLocaleString("en")} lines are not shown`);
    if (this.cutCharacters) missing.push(`${this.cutCharacters.toLocaleString("en")} characters of long lines are not shown`);
    if (!missing.length) return;
    this.note.textContent = `… ${missing.join(", ")} …\n`;
    const after = this.lines[Math.min(HEAD_LINES, this.lines.length) - 1].node;
    if (after.nextSibling !== this.note) after.after(this.note);
  }

  /** What is kept of it, in pieces of one stream each. */
  pieces() {
    const made = [];
    const add = (stream, text) => {
      const last = made[made.length - 1];
      if (last && last.stream === stream) last.text += text;
      else if (text) made.push({ stream, text });
    };
    this.lines.forEach((line, at) => {
      for (const { text, style } of line.runs) add(style.stream, text);
      if (at < this.lines.length - 1) add(made.length ? made[made.length - 1].stream : "stdout", "\n");
      if (at === HEAD_LINES - 1 && this.dropped) add("stderr", `… ${this.dropped} lines are not here …\n`);
    });
    return made;
  }
}

function count(text, mark, to) {
  let found = 0;
  for (let at = text.indexOf(mark); at !== -1 && at < to; at = text.indexOf(mark, at + 1)) found += 1;
  return found;
}

/** Paints what has changed once per frame, and rests for longer than it took. */
class Painting {
  constructor() {
    this.asked = new Set();
    this.waiting = false;
    this.notBefore = 0;
  }

  ask(view) {
    this.asked.add(view);
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame((now) => this.frame(now));
  }

  frame(now) {
    if (now < this.notBefore) return requestAnimationFrame((later) => this.frame(later));
    this.waiting = false;
    const begun = performance.now();
    const views = [...this.asked];
    this.asked.clear();
    for (const view of views) view.paint();
    const ended = performance.now();
    this.notBefore = ended + (ended - begun) * REST;
  }
}

export const painting = new Painting();
