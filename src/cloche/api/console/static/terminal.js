// One terminal: xterm on the screen, a shell in the sandbox, a line between them.
//
// What a program writes is hostile. It gets no clipboard, no title, no links; it can neither fill the memory of the
// page (the scrollback is bounded) nor keep it busy (the line waits until what came is shown).

import { boxPath } from "./panel-parts.js";
import { openLine } from "./terminal-line.js";
import { openStrictly, strictDocument } from "./terminal-styles.js";
import { FitAddon } from "./vendor/xterm-addon-fit-0.11.0/addon-fit.mjs";
import { Terminal as Xterm } from "./vendor/xterm-6.0.0/xterm.mjs";

const SCROLLBACK_LINES = 5000;
const PIECE_BYTES = 32 * 1024; // of a paste
const RETRY_SECONDS = [0.5, 1, 2, 4, 8];
const UNHEARD = [0, 1, 2, 7, 8, 9, 50, 52, 133, 777, 1337]; // titles, directories, links, notifications, fonts, clipboard, marks
const SHELL = { command: ["bash"], env: { TERM: "xterm-256color", COLORTERM: "truecolor" } };

export class Terminal {
  /** `told(state, message)`: starting, live, waiting, ended, lost. `leave()` is called when the keyboard is to go elsewhere. */
  constructor(element, playground, sandbox, { told, leave }) {
    this.element = element;
    this.playground = playground;
    this.sandbox = sandbox;
    this.told = told;
    this.process = null;
    this.line = null;
    this.over = false;
    this.xterm = screenOf(element);
    this.fitting = new FitAddon();
    this.xterm.loadAddon(this.fitting);
    openStrictly(this.xterm, element);
    this.listen(leave);
  }

  listen(leave) {
    for (const command of UNHEARD) this.xterm.parser.registerOscHandler(command, () => true);
    this.xterm.attachCustomKeyEventHandler((event) => !leaves(event, leave));
    this.xterm.onData((text) => this.type(new TextEncoder().encode(text)));
    this.xterm.onBinary((text) => this.type(Uint8Array.from(text, (each) => each.charCodeAt(0))));
    this.xterm.onResize(({ rows, cols }) => this.say({ type: "resize", rows, columns: cols }));
    this.watcher = new ResizeObserver(() => this.fit());
    this.watcher.observe(this.element);
  }

  fit() {
    if (this.element.clientWidth && this.element.clientHeight) this.fitting.fit();
  }

  focus() {
    this.xterm.focus();
  }

  set screenReader(on) {
    this.xterm.options.screenReaderMode = on;
  }

  paint() {
    this.xterm.options.theme = colours(this.element);
  }

  // -- the line

  async start() {
    this.told("starting", "Starting a shell…");
    this.fit();
    const { rows, cols } = this.xterm;
    try {
      await this.connect("/process?raw=true");
      this.say({ ...SHELL, terminal: { rows, columns: cols } });
    } catch {
      await this.explain();
    }
  }

  /** Goes on with a shell that runs. */
  async resume(process) {
    this.process = process;
    await this.retry(true);
  }

  async connect(path) {
    this.line = await openLine(`/ui${boxPath(this.sandbox, path)}`, {
      text: (text) => this.hear(text),
      bytes: (bytes, shown) => this.xterm.write(bytes, shown),
      skipped: (bytes) => this.xterm.write(`\r\n\x1b[2m(${bytes} bytes of output were left out)\x1b[0m\r\n`),
      closed: () => this.closed(),
    });
  }

  hear(text) {
    const event = JSON.parse(text);
    if (event.type === "attached") this.begin(event.id);
    else if (event.type === "exited") this.end(endingOf(event));
    else if (event.type === "error") this.end(event.error.message);
  }

  begin(process) {
    this.process = process;
    this.told("live", "");
    this.say({ type: "resize", rows: this.xterm.rows, columns: this.xterm.cols });
  }

  /** The first reason is the reason: a line that is used for a moment longer complains about that. */
  end(message) {
    if (this.over) return;
    this.over = true;
    this.told("ended", message);
  }

  closed() {
    this.line = null;
    if (!this.over && this.process) this.retry(false);
    else if (!this.over) this.explain();
  }

  async retry(anew) {
    this.told("waiting", "Connecting again…");
    for (const seconds of anew ? [0, ...RETRY_SECONDS] : RETRY_SECONDS) {
      await new Promise((resolve) => setTimeout(resolve, seconds * 1000));
      if (this.over || (await this.attach())) return;
    }
    this.told("lost", "The connection to the server was lost.");
  }

  /** Whether there is nothing more to try: it is attached, or has ended. */
  async attach() {
    try {
      const running = await this.playground.api(boxPath(this.sandbox, "/processes"));
      if (running.some((each) => each.id === this.process)) await this.connect(`/processes/${encodeURIComponent(this.process)}/attach?raw=true`);
      else this.end("The shell has ended.");
      return true;
    } catch (error) {
      if (error.status && error.status < 500) this.end(error.message);
      return this.over;
    }
  }

  /** A WebSocket that is refused does not say why; a request does. */
  async explain() {
    try {
      await this.playground.api(boxPath(this.sandbox, "/processes"));
      this.end("The terminal could not be opened: try again.");
    } catch (error) {
      this.end(error.message);
    }
  }

  say(message) {
    if (!this.over) this.line?.send(JSON.stringify(message));
  }

  type(bytes) {
    for (let at = 0; at < bytes.length; at += PIECE_BYTES) this.line?.send(bytes.slice(at, at + PIECE_BYTES));
  }

  /** Gives the screen back. The shell goes on. */
  detach() {
    this.over = true;
    this.watcher.disconnect();
    this.line?.close();
    this.xterm.dispose();
  }

  /** Ends the shell, too. */
  async close() {
    const running = !this.over && this.process;
    this.detach();
    if (running) await this.playground.api(boxPath(this.sandbox, `/processes/${encodeURIComponent(running)}`), { method: "DELETE" }).catch(() => {});
  }
}

function screenOf(element) {
  return new Xterm({
    documentOverride: strictDocument(),
    scrollback: SCROLLBACK_LINES,
    fontFamily: "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace",
    fontSize: 13,
    minimumContrastRatio: 4.5,
    cursorBlink: !matchMedia("(prefers-reduced-motion: reduce)").matches,
    theme: colours(element),
    linkHandler: { activate() {}, allowNonHttpProtocols: false },
  });
}

function colours(element) {
  const style = getComputedStyle(element);
  const selection = style.getPropertyValue("--terminal-selection").trim();
  return { background: style.backgroundColor, foreground: style.color, cursor: style.color, cursorAccent: style.backgroundColor, selectionBackground: selection || undefined };
}

/** Shift+F6 leaves: all other keys, Tab and Escape too, belong to the program. */
function leaves(event, leave) {
  if (event.key !== "F6" || !event.shiftKey) return false;
  event.preventDefault();
  if (event.type === "keydown") leave();
  return true;
}

function endingOf(exited) {
  if (exited.reason) return `The shell ended: ${exited.reason}`;
  return exited.signal ? `The shell was ended by signal ${exited.signal}.` : `The shell ended with exit code ${exited.exit_code}.`;
}
