// A chat beside the notebook: a model that has the notebook's sandbox as its code interpreter, through the gateway.

import { ask } from "./console.js";
import { Answer } from "./chat-answer.js";
import { keepTurns, keptTurns } from "./chat-keep.js";
import { markdown } from "./chat-markdown.js";
import { eventsOf } from "./chat-stream.js";
import { boxPath, el, icon, iconButton, needStyles, textButton } from "./panel-parts.js";

const { owner: OWNER } = document.getElementById("playground").dataset;
const ECHO = "cloche/echo";
const CHOSEN = "cloche.chat.model";
const MOST_TURNS = 100; // that are shown: the model still knows those before
const NEAR_PIXELS = 60; // from the end: still there
const SETTLE_MILLISECONDS = [0, 200, 500, 1000, 2000, 4000];
const EXAMPLE = "```python\nimport sys\nprint(sys.version)\n```";
const INSTRUCTIONS =
  "You help in a notebook. Your python tool is the notebook's own kernel: variables that the user's cells have bound are there, " +
  "and what you bind the user sees. Files are below /mnt/data; link those that you make as sandbox:/mnt/data/NAME. " +
  "Look at data before you answer questions about it. Be brief, and write Markdown.";

export async function mount(element, playground) {
  needStyles("panels.css");
  const panel = new ChatPanel(element, playground);
  await Promise.all([panel.loadModels(), panel.recall()]);
}

class ChatPanel {
  constructor(element, playground) {
    Object.assign(this, { element, playground, turns: [], previous: null, running: null, follows: true, scrollTop: 0 });
    this.build();
  }

  build() {
    this.model = el("select", { class: "panel-input chat-model", "aria-label": "Model", onchange: () => this.chooseModel() });
    this.anew = iconButton("add", "New conversation", () => this.reset());
    this.log = el("div", { class: "panel-scroll chat-log", role: "log", "aria-label": "Conversation", tabindex: "0" });
    this.empty = el("div", { class: "chat-empty" });
    this.field = el("textarea", { class: "chat-field", rows: "2", "aria-label": "Message", placeholder: "Ask about your data…", onkeydown: (event) => this.key(event) });
    this.send = el("button", { type: "submit", class: "panel-button primary", title: "Send (Enter)" }, icon("send"), "Send");
    this.stop = textButton("Stop", () => this.running?.abort(), { hidden: true });
    const hint = el("span", { class: "panel-hint" }, el("kbd", {}, "Shift"), "+", el("kbd", {}, "Enter"), " for a new line");
    this.form = el("form", { class: "chat-form", onsubmit: (event) => this.submit(event) }, this.field, el("div", { class: "chat-send" }, hint, this.stop, this.send));
    this.element.classList.add("panel", "panel-chat");
    this.element.replaceChildren(el("div", { class: "panel-bar" }, this.model, this.anew), this.log, this.form);
    this.log.append(this.empty);
    this.growing = new ResizeObserver(() => this.follow());
    this.log.addEventListener("scroll", () => this.scrolled());
  }

  // -- models

  async loadModels() {
    const kept = localStorage.getItem(CHOSEN);
    try {
      const names = (await this.playground.api("/v1/models")).data.map((each) => each.id);
      this.model.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
      this.model.value = names.includes(kept) ? kept : (names.find((name) => name !== ECHO) ?? ECHO);
      this.hasModels = names.some((name) => name !== ECHO);
    } catch (error) {
      this.model.replaceChildren(el("option", { value: ECHO }, ECHO));
      this.log.append(el("p", { class: "panel-error", role: "alert" }, `The models could not be listed: ${error.message}`));
    }
    this.showEmpty();
  }

  chooseModel() {
    localStorage.setItem(CHOSEN, this.model.value);
    this.showEmpty();
  }

  showEmpty() {
    this.empty.hidden = this.turns.length > 0;
    const hint = (text) => el("p", { class: "panel-hint" }, text);
    if (this.model.value !== ECHO) return this.empty.replaceChildren(hint("The model runs its code in this notebook's sandbox: it sees your variables and files, and you see its own."));
    const why = this.hasModels ? "cloche/echo is no model: it" : "No model is configured, so there is only cloche/echo. It is no model: it";
    const example = textButton("Try an example", () => this.fill(EXAMPLE));
    const parts = [hint(`${why} runs the fenced Python code of your message in this notebook's sandbox, and answers with the output.`), example];
    if (!this.hasModels) parts.push(hint("An operator adds models as [[upstream]] in cloche.toml."));
    return this.empty.replaceChildren(...parts);
  }

  fill(text) {
    this.field.value = text;
    this.grow();
    this.field.focus();
  }

  // -- a turn

  key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return requestAnimationFrame(() => this.grow());
    event.preventDefault();
    return this.form.requestSubmit();
  }

  grow() {
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight + 2, 220)}px`;
  }

  submit(event) {
    event.preventDefault();
    const text = this.field.value.trim();
    if (!text || this.running) return;
    this.fill("");
    this.turn(text);
  }

  async turn(text) {
    const leaving = (this.running = new AbortController());
    const answer = new Answer(this.playground, this.playground.sandbox);
    this.add(text, answer);
    this.busy(true);
    try {
      await this.answer(text, answer, leaving.signal);
    } catch (error) {
      if (leaving.signal.aborted) answer.note("Stopped.");
      else answer.fail(await this.explained(error, answer.sandbox));
      if (!answer.id && !this.field.value) this.fill(text); // it was never asked: it can be sent again
    } finally {
      this.running = null;
      answer.close();
      this.busy(false);
      this.keep();
    }
  }

  async answer(text, answer, signal) {
    answer.sandbox = await this.playground.ensure();
    await this.settled();
    const response = await ask("/v1/responses", { method: "POST", json: this.request(text, answer.sandbox), signal });
    for await (const event of eventsOf(response)) {
      answer.handle(event);
      if (answer.id && answer.id !== this.previous?.id) this.goOn(answer.id);
    }
    this.previous = { ...this.previous, ended: true };
    if (!answer.ended) throw new Error("the connection to the server was lost; what it ran before stays");
  }

  /** The gateway knows no container that has ended, nor why; and none of others, where an admin may work by hand. */
  async explained(error, sandbox) {
    const info = error.status === 404 || error.status === 410 ? await this.playground.api(boxPath(sandbox, "")).catch(() => null) : null;
    if (info && info.state !== "ended" && error.message.startsWith("Container ")) return "This sandbox is another owner's: the chat works in your own only.";
    if (info?.state !== "ended") return error.message;
    return `The sandbox has ended: ${info.end_reason || "its time was over"}. Send your message again when there is a new one.`;
  }

  request(text, sandbox) {
    return {
      model: this.model.value,
      instructions: INSTRUCTIONS,
      input: text,
      previous_response_id: this.previous?.id ?? undefined,
      tools: [{ type: "code_interpreter", container: `cntr_${sandbox}` }],
      include: ["code_interpreter_call.outputs", "code_interpreter_call.new_files"],
      stream: true,
      stream_options: { include_outputs: true },
    };
  }

  /** The next question is about this answer. */
  goOn(id) {
    this.previous = { id, before: this.previous, ended: false };
    this.keep();
  }

  keep() {
    keepTurns(this.turns.map(({ text, answer }) => ({ text, id: answer.id })), OWNER);
  }

  /** Shows what this browser tab has asked before it was loaded again, as far as the server has it. */
  async recall() {
    const found = await Promise.all(keptTurns(OWNER).map(async ({ text, id }) => ({ text, response: await this.kept(id) })));
    for (const { text, response } of found.filter((each) => each.response)) {
      const container = response.tools[0]?.container ?? "";
      const answer = new Answer(this.playground, String(container).replace("cntr_", ""));
      this.add(text, answer);
      answer.replay(response);
      this.goOn(response.id);
    }
  }

  kept(id) {
    return this.playground.api(`/v1/responses/${encodeURIComponent(id)}`).catch(() => null);
  }

  /** An answer that was stopped ends a moment later, and only then can be gone on from. One that is not kept is left out. */
  async settled() {
    while (this.previous && !this.previous.ended) {
      const { id, before } = this.previous;
      this.previous = (await this.hasEnded(id)) ? { id, before, ended: true } : before;
    }
  }

  async hasEnded(id) {
    for (const milliseconds of SETTLE_MILLISECONDS) {
      await new Promise((resolve) => setTimeout(resolve, milliseconds));
      try {
        const { status } = await this.playground.api(`/v1/responses/${encodeURIComponent(id)}`);
        if (!["queued", "in_progress"].includes(status)) return true;
      } catch (error) {
        if (error.status !== 404) throw error;
      }
    }
    return false;
  }

  // -- what is shown

  add(text, answer) {
    const question = el("div", { class: "chat-question chat-said" }, ...markdown(text, (path, label) => label));
    this.turns.push({ text, question, answer });
    if (this.turns.length > MOST_TURNS) this.drop(this.turns.shift());
    this.empty.hidden = true;
    this.log.append(question, answer.element);
    this.growing.disconnect();
    this.growing.observe(answer.element);
    this.follows = true;
    this.follow();
  }

  drop(turn) {
    turn.question.remove();
    turn.answer.drop();
  }

  /** Stays at the end, unless somebody reads above it. */
  follow() {
    if (this.follows) this.log.scrollTop = this.log.scrollHeight;
  }

  /** What grows moves the end away, not the reader: only who goes up reads above. */
  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.log;
    if (scrollHeight - scrollTop - clientHeight < NEAR_PIXELS) this.follows = true;
    else if (scrollTop < this.scrollTop) this.follows = false;
    this.scrollTop = scrollTop;
  }

  busy(is) {
    this.send.hidden = is;
    this.stop.hidden = !is;
    this.log.setAttribute("aria-busy", String(is));
    this.anew.disabled = is;
  }

  reset() {
    for (const turn of this.turns.splice(0)) this.drop(turn);
    this.log.replaceChildren(this.empty);
    this.previous = null;
    this.keep();
    this.showEmpty();
    this.field.focus();
  }
}
