// Terminals in the sandbox, each behind a tab of its own. xterm is loaded when the first one is opened.

import { el, iconButton, needStyles, textButton, whileVisible } from "./panel-parts.js";

const MOST = 8;
const KEPT = "cloche.terminals.";

export function mount(element, playground) {
  needStyles("panels.css");
  needStyles("vendor/xterm-6.0.0/xterm.css");
  const panel = new TerminalPanel(element, playground);
  panel.listen();
  return panel;
}

class TerminalPanel {
  constructor(element, playground) {
    this.element = element;
    this.playground = playground;
    this.open = []; // {terminal, tab, place, note}
    this.chosen = null;
    this.count = 0;
    this.build();
  }

  build() {
    this.tabs = el("div", { class: "terminal-tabs", role: "tablist", "aria-label": "Terminals", onkeydown: (event) => this.step(event) });
    this.more = iconButton("add", "New terminal", () => this.add());
    this.shut = iconButton("close", "Close this terminal (Delete on its tab)", () => this.close(this.chosen));
    this.reader = textButton("Screen reader", () => this.read(this.reader.getAttribute("aria-pressed") !== "true"), { "aria-pressed": "false", title: "Reads what is written aloud to screen readers" });
    this.places = el("div", { class: "terminal-places" });
    this.status = el("div", { class: "terminal-status", role: "status" });
    this.begin = el("div", { class: "terminal-empty" }, el("p", { class: "panel-hint" }, "A shell in the sandbox: the same files, the same processes."), textButton("Open a terminal", () => this.add(), { class: "panel-button primary" }));
    const hint = el("p", { class: "terminal-keys" }, el("kbd", {}, "Shift"), "+", el("kbd", {}, "F6"), " leaves it");
    this.foot = el("div", { class: "terminal-foot" }, this.status, hint, this.reader);
    this.element.classList.add("panel", "panel-terminal");
    this.element.replaceChildren(el("div", { class: "panel-bar" }, this.tabs, this.more, this.shut), this.begin, this.places, this.foot);
    this.show();
  }

  listen() {
    this.playground.onSandboxChange(() => this.changeSandbox());
    whileVisible(this.element, (shown) => shown && this.chosen?.terminal.fit());
    const repaint = () => requestAnimationFrame(() => this.open.forEach(({ terminal }) => terminal.paint()));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
    new MutationObserver(repaint).observe(document.documentElement, { attributes: true });
    if (this.playground.sandbox) this.resume();
  }

  changeSandbox() {
    const sandbox = this.playground.sandbox;
    if (!sandbox) return; // it has ended, and each shell says so
    for (const each of this.open.filter(({ terminal }) => terminal.sandbox !== sandbox)) {
      each.terminal.detach();
      this.drop(each);
    }
    if (!this.open.length) this.resume();
  }

  // -- opening and closing

  /** Goes on with the shells that this browser tab had here before it was loaded again. */
  async resume() {
    for (const process of kept(this.playground.sandbox)) await this.add(process);
  }

  async add(process = null) {
    if (this.open.length >= MOST) return this.say(`There can be ${MOST} terminals: close one first.`);
    this.more.disabled = true;
    try {
      await this.playground.ensure();
      const { Terminal } = await import("./terminal.js");
      const each = this.make(Terminal);
      each.isWanted = !process; // who opens one types into it next
      if (process) await each.terminal.resume(process);
      else await each.terminal.start();
    } catch (error) {
      this.say(error.message);
    } finally {
      this.more.disabled = false;
    }
  }

  make(Terminal) {
    const name = `Terminal ${(this.count += 1)}`;
    const id = `terminal-${this.count}`;
    const place = el("div", { class: "terminal-place", id, role: "tabpanel", "aria-label": name });
    const tab = el("button", { type: "button", role: "tab", "aria-controls": id, onclick: () => this.choose(each, true) }, name);
    const each = { tab, place, state: "starting", note: "" };
    this.open.push(each);
    this.tabs.append(tab);
    this.places.append(place);
    this.choose(each, false);
    each.terminal = new Terminal(place, this.playground, this.playground.sandbox, { told: (state, note) => this.told(each, state, note), leave: () => tab.focus() });
    each.terminal.screenReader = this.reader.getAttribute("aria-pressed") === "true";
    return each;
  }

  async close(each) {
    const closing = each.terminal.close();
    this.drop(each);
    (this.chosen?.tab ?? this.more).focus();
    await closing;
  }

  drop(each) {
    this.open = this.open.filter((other) => other !== each);
    for (const part of [each.tab, each.place]) part.remove();
    this.keep();
    if (this.chosen === each) this.choose(this.open.at(-1) ?? null, false);
  }

  told(each, state, note) {
    Object.assign(each, { state, note });
    each.tab.dataset.state = state;
    this.keep();
    this.show();
    if (state === "live" && each === this.chosen && (each.isWanted || this.element.contains(document.activeElement))) each.terminal.focus();
    if (state === "live") each.isWanted = false;
  }

  keep() {
    const running = this.open.filter(({ terminal, state }) => terminal?.process && state !== "ended").map(({ terminal }) => terminal.process);
    if (this.playground.sandbox) sessionStorage.setItem(KEPT + this.playground.sandbox, JSON.stringify(running));
  }

  // -- which one is shown

  choose(each, focus) {
    this.chosen = each;
    this.show();
    if (!each) return;
    each.terminal?.fit();
    if (focus) each.terminal.focus();
  }

  show() {
    for (const each of this.open) {
      each.place.hidden = each !== this.chosen;
      each.tab.setAttribute("aria-selected", String(each === this.chosen));
      each.tab.tabIndex = each === this.chosen ? 0 : -1;
    }
    this.begin.hidden = this.open.length > 0;
    this.places.hidden = this.foot.hidden = this.shut.hidden = !this.open.length;
    this.say(this.chosen?.note ?? "");
    if (this.chosen?.state === "ended") this.status.append(textButton("New shell", () => this.again(this.chosen)));
    if (this.chosen?.state === "lost") this.status.append(textButton("Connect again", () => this.chosen.terminal.retry(true)));
  }

  async again(each) {
    each.terminal.detach();
    this.drop(each);
    await this.add();
  }

  say(text) {
    if (!this.open.length && text) this.begin.firstElementChild.textContent = text;
    this.status.textContent = text;
  }

  read(on) {
    this.reader.setAttribute("aria-pressed", String(on));
    for (const { terminal } of this.open) terminal.screenReader = on;
  }

  step(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const now = this.open.findIndex(({ tab }) => tab === document.activeElement);
    if (now >= 0 && event.key === "Delete") return this.close(this.open[now]);
    if (!by || now < 0) return undefined;
    event.preventDefault();
    const next = this.open[(now + by + this.open.length) % this.open.length];
    this.choose(next, false);
    return next.tab.focus();
  }
}

/** What this browser tab remembers is its own, and may be anything. */
function kept(sandbox) {
  try {
    const found = JSON.parse(sessionStorage.getItem(KEPT + sandbox) ?? "[]");
    return found.filter((each) => typeof each === "string").slice(0, MOST);
  } catch {
    return [];
  }
}
