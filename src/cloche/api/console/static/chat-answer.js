// One answer of a model, as it comes: what it thinks and says, the code that it runs, what that put out, and its files.

import { markdown } from "./chat-markdown.js";
import { boxPath, el, icon, shownName, tellRan, textButton } from "./panel-parts.js";
import { coloured } from "./playground-colours.js";
import { viewOf } from "./playground-results.js";
import { TextView, painting } from "./playground-text.js";

const FORMULA = /\$\$[\s\S]+?\$\$|\\\[[\s\S]+?\\\]|\\\([\s\S]+?\\\)|(?<![\\$\w])\$(?![\s$\d])[^$\n]{0,300}[^\s$\\]\$(?![\w$])/;
const FILE_LINK = /!?\[([^\]\n]{1,500})\]\(<?sandbox:[^)\n]{1,2000}\)/g;
const LONGEST_WITH_FORMULAS = 50_000; // characters
const PICTURE = /^data:(image\/(?:png|jpeg|gif|webp|svg\+xml));base64,/;
const MOST_FILES = 50;

/** Feed it the events of a stream. `id` is that of the response, once it is known. */
export class Answer {
  constructor(playground, sandbox) {
    this.element = el("article", { class: "chat-answer", "aria-label": "Answer" });
    this.waiting = el("p", { class: "chat-waiting" }, "Thinking…");
    this.element.append(this.waiting);
    Object.assign(this, { playground, sandbox, id: null, ended: false, parts: new Map() });
  }

  handle(event) {
    if (event.response?.id) this.id = event.response.id;
    if (event.type === "response.output_item.added") this.begin(event);
    else if (event.type === "response.output_item.done") this.finish(event);
    else if (event.type === "error") this.fail(event.error?.message ?? event.message);
    else if (event.type === "response.incomplete") this.note(incompleteText(event.response));
    else if (Object.hasOwn(DELTAS, event.type)) this.parts.get(event.output_index)?.[DELTAS[event.type]]?.(event);
    if (ENDS.has(event.type)) this.ended = true;
  }

  begin({ output_index: at, item }) {
    if (!Object.hasOwn(PARTS, item.type)) return;
    const part = PARTS[item.type](this);
    this.parts.set(at, part);
    this.waiting.before(part.element);
    this.waiting.hidden = true;
  }

  finish({ output_index: at, item }) {
    if (!this.parts.has(at)) this.begin({ output_index: at, item });
    this.parts.get(at)?.finish(item);
    this.waiting.hidden = false; // it goes on, until it says that it has ended
  }

  /** One that was given before, as the server has kept it. */
  replay(response) {
    Object.assign(this, { id: response.id, isPast: true });
    response.output.forEach((item, at) => this.finish({ output_index: at, item }));
    if (response.error) this.fail(response.error.message);
    else if (response.status !== "completed") this.note(incompleteText(response));
    this.close();
  }

  /** There will be no more. */
  close() {
    this.waiting.remove();
    for (const part of this.parts.values()) part.settle?.();
    if (!this.element.childElementCount) this.note("There was no answer.");
  }

  note(text) {
    if (text) this.element.append(el("p", { class: "panel-hint" }, text));
  }

  fail(text) {
    this.failed = true;
    this.element.append(el("p", { class: "panel-error", role: "alert" }, text || "The answer failed, and nobody said why."));
  }

  /** It is taken from the page. */
  drop() {
    for (const part of this.parts.values()) part.drop?.();
    this.element.remove();
  }
}

const ENDS = new Set(["response.completed", "response.incomplete", "response.failed"]);
const DELTAS = {
  "response.output_text.delta": "write",
  "response.refusal.delta": "write",
  "response.reasoning_text.delta": "write",
  "response.reasoning_summary_text.delta": "write",
  "response.code_interpreter_call_code.delta": "write",
  "response.code_interpreter_call.interpreting": "run",
  "response.code_interpreter_call_output.delta": "print",
};
const PARTS = {
  message: (answer) => new Said(answer),
  reasoning: () => new Thought(),
  code_interpreter_call: (answer) => new Code(answer),
};

function incompleteText(response) {
  if (response.status !== "incomplete") return "Stopped.";
  const reason = response.incomplete_details?.reason;
  return reason === "max_output_tokens" ? "It ends here: the model may not write more." : `It ends here: ${reason ?? "the model stopped"}.`;
}

/** A message. Formulas need the frame, all else is made of elements. */
class Said {
  constructor(answer) {
    this.answer = answer;
    this.text = "";
    this.shown = el("div", { class: "chat-said" });
    this.element = el("div", {}, this.shown);
  }

  write({ delta }) {
    this.text += delta;
    painting.ask(this);
  }

  paint() {
    if (this.frame) return;
    replaceChanged(this.shown, markdown(this.text, (path, label) => fileLink(this.answer.sandbox, path, label)));
  }

  finish(item) {
    const parts = item.content ?? [];
    this.text = parts.map((part) => part.text ?? part.refusal ?? "").join("\n\n");
    if (this.text.length < LONGEST_WITH_FORMULAS && FORMULA.test(this.text)) this.typeset();
    else painting.ask(this);
    const files = filesOf(parts.flatMap((part) => part.annotations ?? []));
    if (files.length) this.element.append(el("ul", { class: "chat-files", "aria-label": "Files" }, ...files));
  }

  /** Links to files lead nowhere in the frame: the files are listed below it. */
  typeset() {
    this.frame = viewOf({ "text/markdown": this.text.replace(FILE_LINK, "$1") });
    this.shown.replaceChildren(this.frame.element);
  }

  drop() {
    this.frame?.close();
  }
}

/** What is the same stays as it is, with what is selected in it. */
function replaceChanged(element, fresh) {
  let same = 0;
  while (same < fresh.length && element.children[same]?.isEqualNode(fresh[same])) same += 1;
  while (element.children.length > same) element.lastElementChild.remove();
  element.append(...fresh.slice(same));
}

function fileLink(sandbox, path, label) {
  const href = `/ui${boxPath(sandbox, `/files/content?path=${encodeURIComponent(path.toWellFormed())}`)}`;
  return el("a", { href, download: path.split("/").pop(), title: shownName(path) }, label);
}

/** Pictures that code has shown are in its output: of those that have no path there is no more to say. */
function filesOf(annotations) {
  const cited = annotations.filter((each) => each.type === "container_file_citation" && !each.filename.startsWith("cfile_"));
  const once = new Map(cited.map((each) => [each.file_id, each]));
  return [...once.values()].slice(0, MOST_FILES).map((each) => el("li", {}, citedLink(each)));
}

function citedLink({ container_id: container, file_id: file, filename }) {
  const href = `/ui/v1/containers/${encodeURIComponent(container)}/files/${encodeURIComponent(file)}/content`;
  return el("a", { class: "panel-button", href, download: filename }, icon("download"), el("bdi", {}, shownName(filename)));
}

class Thought {
  constructor() {
    this.text = "";
    this.body = el("p", { class: "chat-plain" });
    this.element = el("details", { class: "chat-thought", hidden: true }, el("summary", {}, "Thoughts"), this.body);
  }

  write({ delta }) {
    this.text += delta;
    painting.ask(this);
  }

  paint() {
    this.body.textContent = this.text;
    this.element.hidden = !this.text;
  }

  finish(item) {
    const told = [...(item.summary ?? []), ...(item.content ?? [])].map((part) => part.text ?? "").join("\n\n");
    if (told) this.text = told;
    painting.ask(this);
  }
}

class Code {
  constructor(answer) {
    this.answer = answer;
    this.code = "";
    this.views = [];
    this.source = el("code");
    this.state = el("span", { class: "chat-state" }, "writing");
    this.outputs = el("div", { class: "chat-outputs" });
    const insert = textButton("Put into a cell", () => answer.playground.insertCell(this.code, "python"));
    const head = el("summary", {}, el("span", {}, "Python"), this.state);
    const body = el("pre", { class: "chat-fence", tabindex: "0" }, this.source);
    this.element = el("div", { class: "chat-code" }, el("details", { open: true }, head, body, el("div", { class: "panel-actions" }, insert)), this.outputs);
  }

  write({ delta }) {
    this.code += delta;
    painting.ask(this);
  }

  paint() {
    this.source.replaceChildren(...coloured(this.code, "python"));
  }

  run() {
    this.say("running");
  }

  print({ delta, stream }) {
    this.printed ??= this.show(textView());
    this.printed.write(delta, stream);
  }

  finish(item) {
    this.code = item.code ?? this.code;
    painting.ask(this);
    this.say({ completed: "done", incomplete: "stopped", failed: "failed" }[item.status] ?? item.status);
    if (item.outputs) this.replace(item.outputs);
    if (!this.answer.isPast) tellRan();
  }

  /** The whole in place of what was streamed, in which pictures were missing. */
  replace(outputs) {
    if (this.printed && outputs.every((each) => each.type === "logs")) return;
    this.drop();
    this.outputs.replaceChildren();
    for (const each of outputs) {
      if (each.type === "logs") this.show(textView()).write(each.logs);
      else if (PICTURE.test(each.url)) this.show(pictureOf(each.url));
    }
  }

  show(view) {
    this.views.push(view);
    this.outputs.append(view.element);
    return view;
  }

  say(state) {
    this.state.textContent = state;
    this.state.dataset.state = state;
  }

  settle() {
    if (["writing", "running"].includes(this.state.textContent)) this.say("stopped");
  }

  drop() {
    for (const view of this.views.splice(0)) view.close?.();
  }
}

function textView() {
  return new TextView("chat-logs");
}

function pictureOf(url) {
  const [head, mime] = PICTURE.exec(url);
  const encoded = url.slice(head.length);
  return viewOf({ [mime]: mime === "image/svg+xml" ? textOf(encoded) : encoded });
}

function textOf(encoded) {
  return new TextDecoder().decode(Uint8Array.from(atob(encoded), (each) => each.charCodeAt(0)));
}
