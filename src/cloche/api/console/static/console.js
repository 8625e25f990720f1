// What every page shares: asking the server, saying something, theme, keyboard, and time that goes by.

const csrf = document.querySelector("meta[name=csrf]")?.content ?? "";
let touchedAt = Date.now();

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
  }
}

// What a request of this page carries, where it is not made by `ask`.
export function headersOf(more = {}) {
  const away = Math.floor((Date.now() - touchedAt) / 1000);
  return { "X-Cloche-Csrf": csrf, "X-Cloche-Away": String(away), ...more };
}

export function goToLogin() {
  location.assign("/ui/login?next=" + encodeURIComponent(location.pathname + location.search));
}

async function errorOf(answer) {
  let told = null;
  try {
    told = (await answer.json()).error;
  } catch {
    // not an answer of ours
  }
  const message = typeof told === "string" ? told : told?.message;
  return new ApiError(answer.status, told?.code ?? "", message || `the server answered ${answer.status}`);
}

// The Response itself, for what is no JSON or is read as it comes. `path` is below /ui: "/api/v1/sandboxes".
export async function ask(path, { method = "GET", json, body, headers, signal } = {}) {
  const own = headersOf(json === undefined ? headers : { "Content-Type": "application/json", ...headers });
  const content = json === undefined ? body : JSON.stringify(json);
  let answer;
  try {
    answer = await fetch("/ui" + path, { method, headers: own, body: content, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "the server cannot be reached");
  }
  if (answer.status === 401) goToLogin();
  if (!answer.ok) throw await errorOf(answer);
  return answer;
}

// What the server answers, decoded from JSON; null for an empty answer. Throws ApiError with the server's message.
export async function api(path, options) {
  const answer = await ask(path, options);
  const text = await answer.text();
  if (!text) return null;
  return (answer.headers.get("content-type") ?? "").includes("json") ? JSON.parse(text) : text;
}

export function socket(path) {
  const url = new URL("/ui" + path, location.href);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  return new WebSocket(url);
}

// `kind` is "ok", "bad" or nothing.
export function toast(text, kind = "") {
  const place = document.getElementById("toasts");
  const line = document.createElement("div");
  line.className = `toast ${kind}`;
  line.textContent = text;
  place.append(line);
  while (place.children.length > 4) place.firstChild.remove();
  setTimeout(() => line.remove(), kind === "bad" ? 9000 : 5000);
}

// Asks in a dialog of the page; resolves to whether it was confirmed.
export function confirmed(question, { action = "Yes", danger = false } = {}) {
  const dialog = document.createElement("dialog");
  dialog.className = "dialog";
  const form = document.createElement("form");
  form.method = "dialog";
  const text = document.createElement("p");
  text.textContent = question;
  const row = document.createElement("div");
  row.className = "row end";
  row.append(button("Cancel", "quiet", ""), button(action, danger ? "danger" : "primary", "yes"));
  form.append(text, row);
  dialog.append(form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
  });
}

function button(text, kind, value) {
  const made = document.createElement("button");
  made.className = kind;
  made.value = value;
  made.textContent = text;
  return made;
}

// --- theme

const THEMES = ["system", "light", "dark"];

export function theme() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen) return chosen;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

function setTheme(name) {
  const root = document.documentElement;
  if (name === "system") delete root.dataset.theme;
  else root.dataset.theme = name;
  try {
    localStorage.setItem("cloche-theme", name);
  } catch {
    // it holds for this page only
  }
  nameTheme();
  document.dispatchEvent(new CustomEvent("cloche:theme", { detail: theme() }));
}

function nameTheme() {
  const name = document.documentElement.dataset.theme ?? "system";
  for (const each of document.querySelectorAll("[data-theme-switch]")) {
    each.setAttribute("aria-label", `Theme: ${name === "system" ? "as the system has it" : name}. Change it`);
    each.title = each.getAttribute("aria-label");
    each.textContent = { system: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[name];
  }
}

function nextTheme() {
  const now = document.documentElement.dataset.theme ?? "system";
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
}

// --- keyboard

let expectsPlace = false;

function isTyping(target) {
  return target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName) || target.closest?.(".xterm");
}

function onKey(event) {
  touchedAt = Date.now();
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
  if (expectsPlace) {
    expectsPlace = false;
    if (!/^[a-z]$/.test(event.key)) return;
    document.querySelector(`nav a[data-key="${event.key}"]`)?.click();
  } else if (event.key === "g") {
    expectsPlace = true;
    setTimeout(() => (expectsPlace = false), 1500);
  } else if (event.key === "?") {
    showShortcuts();
  } else if (event.key === "/") {
    const search = document.querySelector("input[type=search]");
    if (search) event.preventDefault();
    search?.focus();
  }
}

function showShortcuts() {
  if (document.querySelector("dialog.shortcuts")) return;
  const dialog = document.createElement("dialog");
  dialog.className = "dialog shortcuts";
  dialog.setAttribute("aria-label", "Keyboard shortcuts");
  const heading = document.createElement("h2");
  heading.textContent = "Keyboard shortcuts";
  const list = document.createElement("dl");
  const own = [...document.querySelectorAll("[data-shortcut]")].map((each) => each.dataset.shortcut.split("|"));
  for (const [keys, what] of [...placeShortcuts(), ["/", "Search in this page"], ["?", "This help"], ...own]) {
    list.append(shortcutTerm(keys), Object.assign(document.createElement("dd"), { textContent: what }));
  }
  const form = Object.assign(document.createElement("form"), { method: "dialog", className: "row end" });
  form.append(button("Close", "quiet", ""));
  dialog.append(heading, list, form);
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
}

function shortcutTerm(keys) {
  const term = document.createElement("dt");
  for (const key of keys.split(" ")) term.append(Object.assign(document.createElement("kbd"), { textContent: key }), " ");
  return term;
}

function placeShortcuts() {
  return [...document.querySelectorAll("nav a[data-key]")].map((each) => [`g ${each.dataset.key}`, each.textContent]);
}

// --- what goes on by itself

function toggleMenu(opener) {
  const open = opener.getAttribute("aria-expanded") !== "true";
  opener.setAttribute("aria-expanded", String(open));
  document.querySelector("header.side").classList.toggle("open", open);
}

function onClick(event) {
  touchedAt = Date.now();
  const target = event.target.closest("[data-theme-switch], [data-shortcuts], [data-menu]");
  if (!target) return;
  if ("themeSwitch" in target.dataset) nextTheme();
  else if ("shortcuts" in target.dataset) showShortcuts();
  else toggleMenu(target);
}

function onHtmxRequest(event) {
  Object.assign(event.detail.headers, headersOf());
}

function onHtmxError(event) {
  const answer = event.detail.xhr;
  if (answer?.status === 401) return;
  let message = "the server cannot be reached";
  try {
    if (answer?.status) message = JSON.parse(answer.responseText).error.message;
  } catch {
    message = `the server answered ${answer.status}`;
  }
  toast(message, "bad");
}

export function start() {
  document.addEventListener("keydown", onKey);
  document.addEventListener("click", onClick);
  document.addEventListener("pointermove", () => (touchedAt = Date.now()), { passive: true });
  document.addEventListener("htmx:configRequest", onHtmxRequest);
  document.addEventListener("htmx:responseError", onHtmxError);
  nameTheme();
}

start();
