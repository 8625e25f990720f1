// A sheet: the cells of one context, which run one after the other. Several sheets run beside each other.

import { api } from "./console.js";
import { Cell } from "./playground-cell.js";
import { Marks } from "./playground-marks.js";
import { Run } from "./playground-run.js";
import { boxPath, el } from "./panel-parts.js";

export const DEFAULT = "default"; // the id of the context that every sandbox has, of Python

export class Sheet {
  /** `context` is its id, or null where there is none yet. `notebook` hears what happens: see playground-notebook.js. */
  constructor(notebook, { language = "python", name = language, context = null } = {}) {
    Object.assign(this, { notebook, language, name, context, cells: [], chosen: null, queue: [], running: null });
    Object.assign(this, { displays: new Map(), marks: new Marks(), isBusy: false, making: null, wanted: null });
    this.element = el("div", { class: "pg-sheet" });
  }

  /** All code of it, for completion. */
  get text() {
    return this.cells.map((cell) => cell.code).join("\n");
  }

  // -- cells

  /** A new cell behind `at`, or before it; without `at` at the end. */
  add({ at = null, before = false, ...about } = {}) {
    const cell = new Cell(this, about);
    const place = at ? this.cells.indexOf(at) + (before ? 0 : 1) : this.cells.length;
    this.cells.splice(place, 0, cell);
    this.element.insertBefore(cell.element, this.cells[place + 1]?.element ?? null);
    this.number();
    if (!this.chosen) this.choose(cell);
    return cell;
  }

  remove(cell) {
    const place = this.cells.indexOf(cell);
    if (cell.run || cell.state === "waiting") return this.notebook.say("A cell that runs cannot be deleted. Stop it first.", "bad");
    this.cells.splice(place, 1);
    cell.close();
    if (!this.cells.length) this.add();
    this.number();
    const next = this.cells[Math.min(place, this.cells.length - 1)];
    this.choose(next);
    next.element.focus();
  }

  move(cell, by) {
    const place = this.cells.indexOf(cell);
    const other = this.cells[place + by];
    if (!other) return;
    this.cells[place + by] = cell;
    this.cells[place] = other;
    if (by < 0) cell.element.after(other.element); // the other one moves: to move a frame is to load it again
    else cell.element.before(other.element);
    this.number();
  }

  step(cell, by) {
    this.cells[this.cells.indexOf(cell) + by]?.element.focus();
  }

  choose(cell) {
    if (this.chosen === cell) return;
    this.chosen?.element.classList.remove("pg-chosen");
    this.chosen = cell;
    cell.element.classList.add("pg-chosen");
  }

  number() {
    this.cells.forEach((cell, at) => cell.name(at + 1, this.cells.length));
  }

  told(cell, words) {
    const number = this.cells.indexOf(cell) + 1;
    cell.name(number, this.cells.length);
    this.notebook.changed(cell.state === "running" || cell.state === "waiting" ? null : `Cell ${number}: ${words}`);
  }

  clear() {
    for (const cell of this.cells) if (!cell.isShown) cell.clear();
  }

  close() {
    for (const cell of this.cells) cell.close();
    this.element.remove();
  }

  // -- running

  /** Runs that cell after those that wait; a promise of its outcome. */
  run(cell) {
    if (cell.kind !== "code") return Promise.resolve(cell.render());
    if (cell.run || cell.state === "waiting" || !cell.code.trim()) return Promise.resolve(null);
    return new Promise((resolve) => {
      this.queue.push({ cell, code: cell.code, resolve });
      cell.wait();
      this.work();
    });
  }

  /** Runs it and then goes on to the next, adds one behind it, or stays. */
  runAnd(cell, then) {
    this.run(cell);
    if (then === "stay") return;
    const last = this.cells[this.cells.length - 1] === cell;
    const next = then === "add" || last ? this.add({ at: cell }) : this.cells[this.cells.indexOf(cell) + 1];
    if (next.isShown) next.element.focus();
    else next.editor.focus();
  }

  runAll() {
    for (const cell of this.cells) if (cell.kind !== "markdown" || !cell.isShown) this.run(cell);
  }

  async work() {
    if (this.isBusy) return;
    this.isBusy = true;
    while (this.queue.length) {
      const { cell, code, resolve } = this.queue.shift();
      const end = await this.execute(cell, code);
      cell.finish(end);
      if (end.outcome !== "ok") this.giveUp();
      this.notebook.ran(end);
      resolve(end.outcome);
    }
    this.isBusy = false;
    this.notebook.changed(null);
  }

  /** What came of it. Never raises: what is wrong with the server is an outcome as well. */
  async execute(cell, code) {
    this.isStopped = false;
    try {
      const sandbox = await this.notebook.box.ensure();
      const context = await this.ensure();
      this.notebook.box.renew().catch(() => {}); // a run says itself what is wrong
      if (this.language === "python") await this.marks.keep(sandbox, context, cell);
      else this.marks.problem = "Undo is there for Python";
      if (this.isStopped) return { outcome: "interrupted", reason: null, seconds: null, files: [] };
      return await this.start(sandbox, context, cell, code);
    } catch (error) {
      return { outcome: "failed", reason: error.message, seconds: null, files: [] };
    } finally {
      this.running = null;
    }
  }

  async start(sandbox, context, cell, code) {
    this.running = new Run(sandbox, context, code, (event) => cell.hear(event));
    cell.begin(this.running);
    const end = await this.running.ended;
    if (end.outcome === "lost") end.reason = await this.notebook.box.problem(sandbox) ?? end.reason;
    if (!["ok", "raised", "interrupted"].includes(end.outcome)) this.notebook.box.look();
    return end;
  }

  /** Interrupts what runs; what waits does not run. */
  stop() {
    this.isStopped = true;
    this.giveUp();
    this.running?.interrupt();
  }

  giveUp() {
    for (const { cell, resolve } of this.queue.splice(0)) {
      cell.be("idle");
      resolve(null);
    }
  }

  // -- its context

  path(rest) {
    return boxPath(this.notebook.box.id, `/contexts/${encodeURIComponent(this.context)}${rest}`);
  }

  /** The id of its context, which is made if need be. Raises ApiError. */
  ensure() {
    if (this.context) return Promise.resolve(this.context);
    this.making ??= this.make().finally(() => (this.making = null));
    return this.making;
  }

  async make() {
    const sandbox = this.notebook.box.id;
    const made = await api(boxPath(sandbox, "/contexts"), { method: "POST", json: { language: this.language } });
    if (this.notebook.box.id === sandbox) this.context = made.id;
    this.notebook.contextChanged(this);
    return made.id;
  }

  /** The sandbox is gone, and its context with it. */
  lose() {
    this.wanted = this.context ?? this.wanted; // should the sandbox come back, from a pause
    this.context = null;
    this.marks.lost();
  }

  async restart() {
    this.giveUp();
    this.marks.lost();
    if (this.context && this.notebook.box.id) await api(this.path("/restart"), { method: "POST", json: {} });
  }

  async undo() {
    const cell = await this.marks.undo();
    if (this.cells.includes(cell) && !cell.run) cell.be("undone");
    return cell;
  }
}
