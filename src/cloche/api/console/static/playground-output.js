// What one cell has put out: text, results, an error, a question. Bounded, however much comes.

import { viewOf } from "./playground-results.js";
import { TextView } from "./playground-text.js";
import { el } from "./panel-parts.js";

const ITEMS = 200; // of one cell: of more, those in the middle make room
const FIRST = 100;
const RECORDED = 4 * 1024 * 1024; // characters of a bundle that an export still has

export class Output {
  /** `answer(text or null)` is called with what was typed for `input()`; `displays` are those of all cells, by id. */
  constructor(answer, displays) {
    this.element = el("div", { class: "pg-output" });
    this.answer = answer;
    this.displays = displays;
    this.reset();
  }

  reset() {
    for (const item of this.items || []) this.drop(item);
    Object.assign(this, { items: [], dropped: 0, isCleared: false, question: null, note: null });
    this.element.replaceChildren();
  }

  handle(event) {
    if (event.type === "cleared") return event.wait ? (this.isCleared = true) : this.reset();
    if (event.type === "display" && event.update) return this.update(event);
    if (this.isCleared && ["output", "display", "raised"].includes(event.type)) this.reset();
    const handler = HANDLERS[event.type];
    if (handler) this[handler](event);
  }

  write(event) {
    let last = this.items[this.items.length - 1];
    if (!last || last.kind !== "text") last = this.add({ kind: "text", view: new TextView() });
    last.view.write(event.text, event.stream);
  }

  display(event) {
    const item = this.add({ kind: "display", view: viewOf(event.data), bundle: event.data, main: event.main, count: this.count, id: event.id });
    if (event.id) this.displays.set(event.id, [...(this.displays.get(event.id) || []), { output: this, item }].slice(-50));
  }

  /** Replaces what is shown under that id, in whatever cell; at most once per frame. */
  update(event) {
    for (const { item } of this.displays.get(event.id) || []) {
      item.next = event.data;
      if (item.isAsked) continue;
      item.isAsked = true;
      requestAnimationFrame(() => replace(item));
    }
  }

  raised(event) {
    const trace = new TextView("pg-trace");
    trace.write(event.traceback || `${event.name}: ${event.value}`);
    const summary = el("summary", {}, el("strong", {}, bounded(event.name)), event.value ? `: ${bounded(event.value)}` : "");
    const element = el("details", { class: "pg-error" }, summary, trace.element);
    this.add({ kind: "error", view: { element, close() {} }, event });
  }

  say(text, kind = "") {
    this.add({ kind: "note", view: { element: el("p", { class: `pg-note ${kind}` }, text), close() {} } });
  }

  ask(event) {
    this.unask();
    const prompt = bounded(event.prompt);
    const field = el("input", { type: event.secret ? "password" : "text", class: "pg-input", autocomplete: "off", spellcheck: "false", "aria-label": prompt || "The program waits for a line" });
    const form = el("form", { class: "pg-question" }, el("span", { class: "pg-prompt" }, prompt), field, el("button", { type: "submit" }, "Send"));
    form.addEventListener("submit", (submitted) => {
      submitted.preventDefault();
      this.unask();
      this.write({ stream: "stdout", text: `${event.prompt}${event.secret ? "········" : field.value}\n` });
      this.answer(field.value);
    });
    field.addEventListener("keydown", (event) => {
      if (event.key !== "d" || !event.ctrlKey || field.value) return;
      event.preventDefault();
      this.unask();
      this.answer(null); // the end of the input, as in a terminal
    });
    this.question = form;
    this.element.append(form);
    field.focus();
  }

  unask() {
    if (this.question) this.question.remove();
    this.question = null;
  }

  add(item) {
    this.items.push(item);
    if (this.question) this.question.before(item.view.element);
    else this.element.append(item.view.element);
    if (this.items.length > ITEMS) this.makeRoom();
    return item;
  }

  makeRoom() {
    const [gone] = this.items.splice(FIRST, 1);
    this.drop(gone);
    gone.view.element.remove();
    this.dropped += 1;
    this.note = this.note || el("p", { class: "pg-note" });
    this.note.textContent = `${this.dropped.toLocaleString("en")} results are not shown`;
    this.items[FIRST - 1].view.element.after(this.note);
  }

  drop(item) {
    item.view.close?.();
    if (!item.id) return;
    const left = (this.displays.get(item.id) || []).filter((each) => each.item !== item);
    if (left.length) this.displays.set(item.id, left);
    else this.displays.delete(item.id);
  }

  /** As a notebook has it. */
  recorded() {
    return this.items.flatMap(record);
  }

  /** Shows what a notebook has. */
  restore(outputs) {
    for (const each of outputs) for (const event of eventsOf(each)) this.handle(event);
  }
}

const HANDLERS = { output: "write", display: "display", raised: "raised", input: "ask" };

function replace(item) {
  item.isAsked = false;
  item.bundle = item.next;
  if (item.view.update(item.bundle)) return;
  const fresh = viewOf(item.bundle);
  item.view.element.replaceWith(fresh.element);
  item.view.close?.();
  item.view = fresh;
}

/** To lay out a text of megabytes would take the page's time. */
function bounded(text) {
  return text.length > 600 ? `${text.slice(0, 600)}…` : text;
}

function record(item) {
  if (item.kind === "text") return item.view.pieces().map(({ stream, text }) => ({ output_type: "stream", name: stream, text }));
  if (item.kind === "error") return [errorRecord(item.event)];
  if (item.kind !== "display" || JSON.stringify(item.bundle).length > RECORDED) return [];
  const shown = { data: item.bundle, metadata: {} };
  if (item.main && item.count) return [{ output_type: "execute_result", execution_count: item.count, ...shown }];
  return [{ output_type: "display_data", ...shown }];
}

function errorRecord(event) {
  return { output_type: "error", ename: event.name, evalue: event.value, traceback: event.traceback.split("\n") };
}

function eventsOf(output) {
  const text = (value) => (Array.isArray(value) ? value.join("") : String(value ?? ""));
  if (output.output_type === "stream") return [{ type: "output", stream: output.name === "stderr" ? "stderr" : "stdout", text: text(output.text) }];
  if (output.output_type === "error") return [{ type: "raised", name: text(output.ename), value: text(output.evalue), traceback: (output.traceback || []).join("\n") }];
  if (!output.data || typeof output.data !== "object") return [];
  return [{ type: "display", data: output.data, main: output.output_type === "execute_result", id: null }];
}
