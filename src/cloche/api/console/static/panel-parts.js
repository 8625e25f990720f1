// What the panels of the playground have in common: elements, icons, sizes, times, requests for bytes.

const SVG = "http://www.w3.org/2000/svg";
const STROKES = {
  run: "M5 3l8 5-8 5z",
  up: "M8 13V3.5M4 7l4-3.5L12 7",
  down: "M8 3v9.5M4 9l4 3.5L12 9",
  folder: "M2 4.5h4l1.5 2H14v6.5H2z",
  file: "M4 2h5l3 3v9H4zM9 2v3h3",
  link: "M6.5 9.5l3-3M7 4.5l1.5-1.5a2.8 2.8 0 0 1 4 4L11 8.5M9 11.5L7.5 13a2.8 2.8 0 0 1-4-4L5 7.5",
  upload: "M8 10.5V2.5M4.5 6L8 2.5 11.5 6M2.5 13.5h11",
  download: "M8 2.5v8M4.5 7L8 10.5 11.5 7M2.5 13.5h11",
  add: "M8 3v10M3 8h10",
  refresh: "M13 8a5 5 0 1 1-1.5-3.5L13 6M13 2.5V6H9.5",
  rename: "M3 13l.6-3L11 2.6 13.4 5 6 12.4z",
  remove: "M3 4.5h10M6.5 4.5V3h3v1.5M4.5 4.5l.5 9h6l.5-9M7 7v4M9 7v4",
  close: "M4 4l8 8M12 4l-8 8",
  stop: "M4.5 4.5h7v7h-7z",
  send: "M2.5 8L13.5 3 10 13.5 7.5 9z",
  cell: "M2.5 3.5h11v9h-11zM5 6.5l2 1.5-2 1.5M8.5 10h2.5",
  wider: "M5 4.5L1.5 8 5 11.5M1.5 8h5M11 4.5L14.5 8 11 11.5M14.5 8h-5",
};

/** An element. Attributes that begin with `on` are listeners, `class` and `data-*` as in HTML; children are text or nodes. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, value] of [["viewBox", "0 0 16 16"], ["class", "panel-icon"], ["aria-hidden", "true"]]) {
    svg.setAttribute(key, value);
  }
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", STROKES[name]);
  svg.append(path);
  return svg;
}

/** A button that is an icon; its label is for the pointer's hint and for screen readers. */
export function iconButton(name, label, onclick, more = {}) {
  return el("button", { type: "button", class: "panel-icon-button", title: label, "aria-label": label, onclick, ...more }, icon(name));
}

export function textButton(label, onclick, more = {}) {
  return el("button", { type: "button", class: "panel-button", onclick, ...more }, label);
}

export function sizeText(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  const units = ["kB", "MB", "GB", "TB"];
  let value = bytes;
  let unit = -1;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

const UNSEEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}]/gu;

/** A name from a sandbox, which may hold anything: what would not be seen, or would turn the text around, is written out. */
export function shownName(name) {
  return name.replace(UNSEEN, (each) => (each === "\n" ? "\\n" : `\\u${each.codePointAt(0).toString(16).padStart(4, "0")}`));
}

/** A moment for a narrow column: the time of day if it is today, else the day. */
export function timeText(seconds, now = new Date()) {
  const when = new Date(seconds * 1000);
  if (when.toDateString() === now.toDateString()) return when.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  const year = when.getFullYear() === now.getFullYear() ? undefined : "numeric";
  return when.toLocaleDateString([], { day: "numeric", month: "short", year });
}

export function timeElement(seconds) {
  const when = new Date(seconds * 1000);
  const known = !Number.isNaN(when.getTime());
  return el("time", known ? { datetime: when.toISOString(), title: when.toLocaleString() } : {}, known ? timeText(seconds) : "–");
}

/** Adds a style sheet that stands beside the modules, once. */
export function needStyles(name) {
  const href = new URL(name, import.meta.url).href;
  if (![...document.querySelectorAll("link[rel=stylesheet]")].some((link) => link.href.split("?")[0] === href)) {
    document.head.append(el("link", { rel: "stylesheet", href }));
  }
}

export function boxPath(sandbox, rest) {
  return `/api/v1/sandboxes/${encodeURIComponent(sandbox)}${rest}`;
}

/** What a failed answer says, in our own dialect or OpenAI's, else its status. */
export function messageOf(status, text) {
  try {
    return JSON.parse(text).error.message || `the server answered ${status}`;
  } catch {
    return status ? `the server answered ${status}` : "the connection to the server was lost";
  }
}

/** Calls `shown(true)` when the element comes into view in a page that is looked at, and `shown(false)` when it goes. */
export function whileVisible(element, shown) {
  let inView = false;
  let last = false;
  const tell = () => {
    const now = inView && !document.hidden;
    if (now !== last) shown((last = now));
  };
  new IntersectionObserver((entries) => {
    inView = entries[entries.length - 1].isIntersecting;
    tell();
  }).observe(element);
  document.addEventListener("visibilitychange", tell);
}

/** The same as `work`, but calls within `milliseconds` become one. */
export function soon(work, milliseconds) {
  let waiting = null;
  return () => {
    waiting ??= setTimeout(() => {
      waiting = null;
      work();
    }, milliseconds);
  };
}

const RAN = "cloche:ran";

/** Tells the other panels that something ran in the sandbox that is no cell of the notebook. */
export function tellRan() {
  document.dispatchEvent(new CustomEvent(RAN));
}

export function onRan(work) {
  document.addEventListener(RAN, work);
}

/** Asks in a dialog of ours. With `value` for a line of text; resolves to it (or true), or null if it was refused. */
export function ask(title, { detail = "", value, confirm = "OK", danger = false } = {}) {
  const input = value === undefined ? null : el("input", { class: "panel-input", value, "aria-label": title, autocomplete: "off", spellcheck: "false" });
  const yes = el("button", { type: "submit", class: danger ? "panel-button danger" : "panel-button primary", value: "yes" }, confirm);
  const no = el("button", { type: "submit", class: "panel-button", value: "no", formnovalidate: true }, "Cancel");
  const form = el("form", { method: "dialog" }, el("h2", {}, title), detail ? el("p", {}, detail) : null, input, el("div", { class: "panel-dialog-buttons" }, no, yes));
  const dialog = el("dialog", { class: "panel-dialog", "aria-label": title }, form);
  if (input) input.addEventListener("keydown", (event) => enterConfirms(event, yes));
  document.body.append(dialog);
  dialog.showModal();
  (input ?? (danger ? no : yes)).focus();
  input?.select();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes" ? (input ? input.value : true) : null);
    });
  });
}

function enterConfirms(event, yes) {
  if (event.key !== "Enter" || event.isComposing) return;
  event.preventDefault(); // or the form's first button, which refuses, would be taken
  yes.click();
}
