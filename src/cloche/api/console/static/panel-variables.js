// What the names of the chosen context are bound to, as the server tells it between two runs.

import { boxPath, el, iconButton, needStyles, onRan, sizeText, soon, textButton, whileVisible } from "./panel-parts.js";

const SETTLE_MILLISECONDS = 150;
const SLOW_MILLISECONDS = 1000;
const FRAME_ROWS = 20;
const IDENTIFIER = /^[\p{L}_][\p{L}\p{N}_]*$/u;

export function mount(element, playground) {
  needStyles("panels.css");
  const panel = new VariablesPanel(element, playground);
  panel.listen();
  return panel;
}

class VariablesPanel {
  constructor(element, playground) {
    this.element = element;
    this.playground = playground;
    this.variables = [];
    this.more = 0;
    this.visible = false;
    this.asking = null;
    this.refreshSoon = soon(() => this.refresh(), SETTLE_MILLISECONDS);
    this.build();
  }

  build() {
    this.filter = el("input", { type: "search", class: "panel-input", placeholder: "Filter", "aria-label": "Filter variables by name or type", oninput: () => this.fill() });
    this.kinds = el("select", { class: "panel-input", "aria-label": "Which names", onchange: () => this.fill() });
    this.kinds.append(el("option", { value: "variable" }, "Values"), el("option", { value: "" }, "All names"));
    const refresh = iconButton("refresh", "Refresh", () => this.refresh());
    this.list = el("ul", { class: "variables", "aria-label": "Variables" });
    this.note = el("p", { class: "panel-hint", role: "status" });
    this.element.classList.add("panel", "panel-variables");
    this.element.replaceChildren(el("div", { class: "panel-bar" }, this.filter, this.kinds, refresh), el("div", { class: "panel-scroll" }, this.list, this.note));
    this.fill();
  }

  listen() {
    for (const listen of ["onSandboxChange", "onContextChange", "onRunEnded"]) this.playground[listen](() => this.refreshSoon());
    onRan(() => this.refreshSoon());
    whileVisible(this.element, (shown) => {
      this.visible = shown;
      if (shown) this.refresh();
    });
  }

  async refresh() {
    if (!this.visible) return;
    const { sandbox, context } = this.playground;
    if (!sandbox) return this.take([], 0);
    const asked = (this.asking = {}); // an answer to an older question is not shown
    const slow = setTimeout(() => this.asking === asked && this.say("Something runs: its names are told when it has ended."), SLOW_MILLISECONDS);
    try {
      const told = await this.playground.api(boxPath(sandbox, `/contexts/${encodeURIComponent(context || "default")}/variables`));
      if (this.asking === asked) this.take(told.variables, told.more);
    } catch (error) {
      if (this.asking === asked) this.fail(error.message);
    } finally {
      clearTimeout(slow);
    }
  }

  /** What is the same stays as it is: somebody may be about to click there. */
  take(variables, more) {
    const told = JSON.stringify(variables);
    if (told === this.told && more === this.more && this.list.childElementCount) return this.say(this.words);
    this.told = told;
    this.variables = variables;
    this.more = more;
    this.fill();
  }

  fail(message) {
    this.told = null;
    this.list.replaceChildren();
    this.say(message, true);
  }

  fill() {
    const open = new Set([...this.list.querySelectorAll("details[open]")].map((each) => each.dataset.name));
    const found = this.variables.filter((each) => this.wanted(each));
    const focused = document.activeElement.closest?.(".variables details")?.dataset.name;
    this.list.replaceChildren(...found.map((each) => this.row(each, open.has(each.name))));
    if (focused) [...this.list.querySelectorAll("details")].find((each) => each.dataset.name === focused)?.firstElementChild.focus();
    this.words = this.summary(found.length);
    this.say(this.words);
  }

  summary(count) {
    if (this.more) return `${this.more} more are not listed.`;
    if (count) return "";
    return this.variables.length ? "No name fits." : "Names that your code binds are shown here after each run.";
  }

  wanted(variable) {
    const sought = this.filter.value.trim().toLowerCase();
    const kind = this.kinds.value;
    return (!kind || variable.kind === kind) && (!sought || `${variable.name} ${variable.type}`.toLowerCase().includes(sought));
  }

  row(variable, open) {
    const summary = el(
      "summary",
      {},
      el("code", { class: "variable-name" }, variable.name),
      el("span", { class: "variable-type", title: variable.type }, variable.type.split(".").pop()),
      el("span", { class: "variable-measure" }, measure(variable)),
      el("span", { class: "variable-value" }, variable.preview.split("\n", 1)[0]),
    );
    const details = el("details", { "data-name": variable.name, open }, summary);
    details.addEventListener("toggle", () => details.open && details.childElementCount === 1 && details.append(this.detail(variable)));
    if (open) details.append(this.detail(variable));
    return el("li", {}, details);
  }

  detail(variable) {
    const facts = el("dl", { class: "variable-facts" });
    for (const [name, value] of factsOf(variable)) facts.append(el("dt", {}, name), el("dd", {}, value));
    const detail = el("div", { class: "variable-detail" }, facts);
    if (variable.preview) detail.append(el("pre", { class: "variable-preview" }, variable.preview));
    if (IDENTIFIER.test(variable.name)) detail.append(this.actions(variable));
    return detail;
  }

  actions(variable) {
    const insert = (code) => () => this.playground.insertCell(code, "python");
    const actions = el("div", { class: "panel-actions" }, textButton("Put into a cell", insert(variable.name)));
    if (variable.columns) {
      const head = `${variable.name}.head(${FRAME_ROWS})`;
      actions.append(textButton("Show the table", () => this.playground.run(head)), textButton("Describe", () => this.playground.run(`${variable.name}.describe()`)));
    }
    return actions;
  }

  say(text, wrong = false) {
    this.note.textContent = text;
    this.note.className = wrong ? "panel-error" : "panel-hint";
    this.note.hidden = !text;
  }
}

function measure(variable) {
  if (variable.shape) return variable.shape.join(" × ") || "scalar";
  return variable.length === null || variable.length === undefined ? "" : String(variable.length);
}

function factsOf(variable) {
  const facts = [["type", variable.type]];
  if (variable.shape) facts.push(["shape", measure(variable)]);
  else if (measure(variable)) facts.push(["length", measure(variable)]);
  if (variable.dtype) facts.push(["dtype", variable.dtype]);
  if (variable.columns) facts.push(["columns", variable.columns.join(", ")]);
  if (variable.size_bytes) facts.push(["memory", sizeText(variable.size_bytes)]);
  return facts;
}
