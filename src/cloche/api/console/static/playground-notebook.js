// The notebook: its sheets, behind a tab each, and the sandbox that they share.

import { api, toast } from "./console.js";
import { DEFAULT, Sheet } from "./playground-sheet.js";
import { step } from "./playground-panels.js";
import { boxPath, el } from "./panel-parts.js";

export class Notebook {
  /** `tabs` and `place` are elements; `refresh()` is called whenever anything may look otherwise. */
  constructor({ box, tabs, place, said, refresh }) {
    Object.assign(this, { box, tabs, place, said, refresh, sheets: [], chosen: null });
    this.contextListeners = new Set();
    this.runListeners = new Set();
    tabs.addEventListener("keydown", (event) => this.key(event));
    box.changed.add((id) => this.sandboxChanged(id));
  }

  // -- what sheets say

  say(text, kind = "") {
    toast(text, kind);
  }

  changed(words) {
    if (words) this.said.textContent = words; // for those who do not see it
    this.paint();
    this.refresh();
  }

  ran({ outcome, files }) {
    for (const tell of this.runListeners) tell({ outcome, files });
  }

  contextChanged(sheet) {
    if (sheet === this.chosen) for (const tell of this.contextListeners) tell(sheet.context);
  }

  get isBusy() {
    return this.sheets.some((sheet) => sheet.isBusy);
  }

  // -- sheets

  /** A new sheet with an empty cell, unless it gets its cells from elsewhere. */
  add(about = {}, { isEmpty = true } = {}) {
    const language = about.language ?? "python";
    const sheet = new Sheet(this, { language, name: this.nameOf(language), ...about });
    this.sheets.push(sheet);
    this.place.append(sheet.element);
    if (isEmpty) sheet.add();
    this.choose(this.chosen ?? sheet);
    return sheet;
  }

  /** The context that every sandbox has is the first Python sheet's. */
  get first() {
    return this.sheets.find((sheet) => sheet.language === "python") ?? null;
  }

  nameOf(language) {
    const names = new Set(this.sheets.map((sheet) => sheet.name));
    for (let number = 1; ; number += 1) {
      const name = number === 1 ? language : `${language} ${number}`;
      if (!names.has(name)) return name;
    }
  }

  choose(sheet) {
    this.chosen = sheet;
    for (const each of this.sheets) each.element.hidden = each !== sheet;
    this.paint();
    this.refresh();
    this.contextChanged(sheet);
    if (this.box.state === "running") sheet.ensure().catch((error) => this.say(error.message, "bad"));
  }

  /** Takes a sheet away, and its context with it. */
  async close(sheet) {
    if (this.sheets.length === 1) return;
    sheet.stop();
    const at = this.sheets.indexOf(sheet);
    this.sheets.splice(at, 1);
    sheet.close();
    this.choose(this.sheets[Math.max(0, at - 1)]);
    if (sheet.context && sheet.context !== DEFAULT && this.box.id) await api(sheet.path(""), { method: "DELETE" });
  }

  clear() {
    while (this.sheets.length) this.sheets.pop().close();
    this.chosen = null;
  }

  sandboxChanged(id) {
    for (const sheet of this.sheets) sheet.lose();
    if (id && this.first) this.first.context = DEFAULT;
    if (this.chosen) this.contextChanged(this.chosen);
    this.changed(null);
  }

  /** A sheet whose context has the state of that one's, with the same cells. Raises ApiError. */
  async fork(sheet) {
    await this.box.ensure();
    await sheet.ensure();
    const [made] = await api(sheet.path("/fork"), { method: "POST", json: { count: 1 } });
    const copy = this.add({ language: sheet.language, context: made.id }, { isEmpty: false });
    for (const cell of sheet.cells) {
      const { code, kind, metadata, count, state } = cell;
      copy.add({ code, kind, metadata }).restore({ outputs: cell.output.recorded(), count, state: cell.run ? "idle" : state });
    }
    this.choose(copy);
    return copy;
  }

  // -- tabs

  paint() {
    const had = this.tabs.contains(document.activeElement);
    this.tabs.replaceChildren(...this.sheets.map((sheet) => this.tab(sheet)));
    if (had) this.tabs.querySelector("[aria-selected=true]").focus();
    this.place.setAttribute("aria-labelledby", `pg-tab-${this.sheets.indexOf(this.chosen)}`);
  }

  tab(sheet) {
    const is = sheet === this.chosen;
    const title = sheet.isBusy ? `${sheet.name}: something runs` : sheet.name;
    const tab = el("button", { type: "button", role: "tab", id: `pg-tab-${this.sheets.indexOf(sheet)}`, class: sheet.isBusy ? "pg-busy" : "", "aria-selected": String(is), "aria-controls": this.place.id, tabindex: is ? "0" : "-1", title }, sheet.name);
    tab.addEventListener("click", () => this.choose(sheet));
    return tab;
  }

  key(event) {
    const tabs = [...this.tabs.children];
    if (event.key === "Delete") return this.close(this.chosen).catch((error) => this.say(error.message, "bad"));
    step(event, tabs, (tab) => this.choose(this.sheets[tabs.indexOf(tab)]));
  }

  // -- a sandbox that there is

  /** Sheets for the contexts that the sandbox has, and cells for what ran in them. Raises ApiError. */
  async adopt() {
    const id = this.box.id;
    const [contexts, history] = await Promise.all([api(boxPath(id, "/contexts")), api(boxPath(id, "/history"))]);
    const known = new Map(contexts.map((context) => [context.id, context]));
    for (const sheet of this.sheets) if (sheet.wanted && known.has(sheet.wanted)) sheet.context = sheet.wanted;
    for (const sheet of this.sheets) known.delete(sheet.context);
    for (const context of known.values()) this.adoptContext(context, history.cells.filter((cell) => cell.context === context.id));
    this.contextChanged(this.chosen);
  }

  adoptContext({ id, language }, cells) {
    const sheet = this.add({ language, context: id }, { isEmpty: false });
    for (const { code, count, outputs, outcome } of cells) sheet.add({ code }).restore({ outputs, count, state: outcome ?? "idle" });
    sheet.add();
  }
}
