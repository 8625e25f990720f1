// A cell: code and what it put out, or Markdown and how it looks.

import { Editor } from "./playground-editor.js";
import { LANGUAGES } from "./playground-languages.js";
import { Output } from "./playground-output.js";
import { el, icon } from "./panel-parts.js";

const MARKS = { waiting: "[…]", running: "[*]" };
const WORDS = {
  ok: "done", raised: "failed", interrupted: "stopped", timed_out: "ran into its time limit", out_of_memory: "ran out of memory",
  died: "died", failed: "did not run", lost: "lost", undone: "undone", waiting: "waits", running: "runs",
};
const HINTS = { markdown: "Markdown. Shift+Enter shows it", raw: "Text that is not run" };
let made = 0;

export class Cell {
  /** `sheet` is what it is in; `kind` is "code", "markdown" or "raw". */
  constructor(sheet, { code = "", kind = "code", metadata = {}, id = null } = {}) {
    made += 1;
    Object.assign(this, { sheet, kind, metadata, id: id ?? `cell-${made}`, count: null, state: "idle", run: null });
    this.output = new Output((text) => this.run?.answer(text), sheet.displays);
    this.editor = new Editor({ language: this.tongue, code, label: "Code", words: () => sheet.text, changed: () => this.edited() });
    this.build();
    this.show();
  }

  build() {
    this.mark = el("span", { class: "pg-count" });
    this.note = el("span", { class: "pg-took" });
    this.tools = el(
      "div",
      { class: "pg-tools", role: "group", "aria-label": "Cell" },
      this.tool("run", "Run this cell (Ctrl+Enter)", () => this.sheet.run(this)),
      this.tool("up", "Move up", () => this.sheet.move(this, -1)),
      this.tool("down", "Move down", () => this.sheet.move(this, 1)),
      (this.switch = el("button", { type: "button", class: "pg-tool pg-kind", onclick: () => this.turn() })),
      this.tool("remove", "Delete this cell", () => this.sheet.remove(this)),
    );
    this.main = el("div", { class: "pg-main" }, el("div", { class: "pg-code" }, this.editor.element, this.tools), this.output.element);
    this.element = el("div", { class: "pg-cell", role: "group", tabindex: "-1" }, el("div", { class: "pg-gutter" }, this.mark, this.note), this.main);
    this.element.addEventListener("focusin", () => this.sheet.choose(this));
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.main.addEventListener("dblclick", (event) => this.isShown && !this.output.element.contains(event.target) && this.edit());
  }

  tool(name, label, onclick) {
    return el("button", { type: "button", class: "pg-tool", title: label, "aria-label": label, onclick }, icon(name));
  }

  get code() {
    return this.editor.code;
  }

  get tongue() {
    return this.kind === "code" ? this.sheet.language : this.kind;
  }

  get isShown() {
    return this.element.classList.contains("pg-shown");
  }

  /** How it looks, after anything of it has changed. */
  show() {
    const [state, kind] = [this.state, this.kind];
    Object.assign(this.element.dataset, { state, kind });
    this.mark.textContent = kind === "code" ? MARKS[state] ?? `[${this.count ?? " "}]` : "";
    this.editor.area.placeholder = HINTS[this.tongue] ?? `${LANGUAGES[this.tongue]?.title}. Shift+Enter runs it`;
    this.switch.textContent = this.isShown ? "Edit" : kind === "code" ? "Markdown" : "Code";
    this.switch.title = this.isShown ? "Edit it again" : kind === "code" ? "Make it Markdown" : "Make it code";
  }

  name(number, count) {
    const words = WORDS[this.state];
    this.element.setAttribute("aria-label", `Cell ${number} of ${count}${words ? `, ${words}` : ""}`);
    this.editor.area.setAttribute("aria-label", `${this.kind === "code" ? "Code" : "Text"} of cell ${number}`);
  }

  // -- Markdown

  turn() {
    if (this.isShown) return this.edit();
    this.kind = this.kind === "code" ? "markdown" : "code";
    this.editor.speak(this.tongue);
    this.clear();
    this.editor.focus();
  }

  /** Shows Markdown as it looks. */
  render() {
    this.output.reset();
    if (this.kind !== "markdown" || !this.code.trim()) return;
    this.output.handle({ type: "display", data: { "text/markdown": this.code } });
    this.element.classList.add("pg-shown");
    this.show();
  }

  edit() {
    if (this.isShown) this.output.reset();
    this.element.classList.remove("pg-shown");
    this.show();
    this.editor.focus();
  }

  // -- running

  wait() {
    this.note.textContent = "";
    this.be("waiting");
  }

  begin(run) {
    this.run = run;
    this.output.reset();
    this.element.classList.remove("pg-edited");
    this.be("running");
  }

  hear(event) {
    if (event.type === "started") this.count = this.output.count = event.count || null;
    else this.output.handle(event);
  }

  finish({ outcome, reason, seconds, exitCode }) {
    this.run = null;
    if (this.state === "waiting") this.output.reset(); // it never began
    this.output.unask();
    if (reason) this.output.say(sentence(reason), outcome === "ok" ? "" : "pg-bad");
    else if (outcome === "interrupted") this.output.say("Stopped.");
    if (exitCode) this.output.say(`It ended with exit code ${exitCode}.`);
    this.note.textContent = seconds === null ? "" : secondsText(seconds);
    this.be(outcome);
  }

  be(state) {
    this.state = state;
    this.show();
    this.sheet.told(this, WORDS[state]);
  }

  edited() {
    if (this.state === "ok" || this.state === "undone") this.element.classList.add("pg-edited");
  }

  /** Shows what ran earlier, or elsewhere. */
  restore({ outputs = [], count = null, state = "idle" }) {
    Object.assign(this, { count, state });
    this.output.count = count;
    this.output.restore(outputs);
    this.show();
  }

  clear() {
    this.output.reset();
    this.element.classList.remove("pg-shown");
    this.note.textContent = "";
    this.count = null;
    if (!this.run && this.state !== "waiting") this.state = "idle";
    this.show();
  }

  close() {
    this.output.reset();
    this.element.remove();
  }

  // -- keyboard

  key(event) {
    if (event.isComposing || event.defaultPrevented) return;
    const command = event.ctrlKey || event.metaKey;
    if (event.key === "Enter" && (event.shiftKey || command || event.altKey)) {
      if (event.target.closest(".pg-question")) return;
      event.preventDefault();
      this.sheet.runAnd(this, event.shiftKey ? "next" : event.altKey ? "add" : "stay");
    } else if (event.key === "Escape" && event.target !== this.element) this.element.focus();
    else if (event.target === this.element && !command && !event.altKey) this.command(event);
  }

  /** Keys while the cell itself is chosen, and nothing in it. */
  command(event) {
    const found = COMMANDS[event.key];
    if (!found || (event.key === "Tab" && event.shiftKey)) return;
    event.preventDefault();
    found(this, event);
  }
}

const COMMANDS = {
  Enter: (cell) => cell.edit(),
  Tab: (cell) => cell.tools.firstChild.focus(), // and not its text, where Tab means something else
  ArrowUp: (cell) => cell.sheet.step(cell, -1),
  ArrowDown: (cell) => cell.sheet.step(cell, 1),
  a: (cell) => cell.sheet.add({ at: cell, before: true }).editor.focus(),
  b: (cell) => cell.sheet.add({ at: cell }).editor.focus(),
  m: (cell) => cell.kind === "code" && cell.turn(),
  y: (cell) => cell.kind !== "code" && (cell.edit(), cell.turn()),
  d: (cell, event) => {
    if (event.timeStamp - (cell.pressed ?? -1000) < 700) cell.sheet.remove(cell);
    cell.pressed = event.timeStamp;
  },
};

function sentence(text) {
  const begun = text[0].toUpperCase() + text.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}

function secondsText(seconds) {
  if (seconds < 1) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  return seconds < 60 ? `${seconds.toFixed(1)} s` : `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}
