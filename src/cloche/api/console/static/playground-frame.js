// What programs drew (HTML, SVG, Markdown, LaTeX, charts) is shown in frames of an opaque origin, and only there.
//
// A frame gets its content, and the libraries that it needs, by postMessage; it can load nothing. All that is taken
// from it is a number, its height. One that says too much, or goes somewhere else, is taken out.

import { el } from "./panel-parts.js";

const LARGEST = 8 * 1024 * 1024; // characters of what is drawn
const HIGHEST = 4000; // pixels
const MESSAGES_PER_SECOND = 120;
const CHANGES_PER_SECOND = 20;
const VENDOR = new URL("vendor/", import.meta.url);
const LIBRARIES = {
  katex: { scripts: ["katex-0.19.1/katex.min.js"], styles: ["katex-0.19.1/katex.min.css"] },
  marked: { scripts: ["marked-18.2.0/marked.umd.js"], styles: [] },
  plotly: { scripts: ["plotly-4.1.2/plotly.min.js"], styles: [] },
  vega: {
    scripts: ["vega-6.4.0/vega.min.js", "vega-lite-6.4.3/vega-lite.min.js", "vega-embed-7.3.0/vega-embed.min.js"],
    styles: [],
  },
};
const NEEDED = { markdown: ["katex", "marked"], latex: ["katex", "marked"], plotly: ["plotly"], vega: ["vega"] };
const INITIAL = { plotly: 470, vega: 320 };

const kept = new Map();
const frames = new Map(); // by the window of each

async function textOf(path) {
  const answer = await fetch(new URL(path, VENDOR));
  if (!answer.ok) throw new Error(`${path} is not there (${answer.status})`);
  return answer.text();
}

/** The style with its fonts in it: the frame cannot load them. */
async function styleOf(path) {
  const style = (await textOf(path)).replace(/,url\([^)]*\.(?:woff|ttf)\) format\("[a-z]+"\)/g, "");
  const folder = path.slice(0, path.lastIndexOf("/") + 1);
  const names = [...new Set([...style.matchAll(/url\(([^)]+\.woff2)\)/g)].map((match) => match[1]))];
  const fonts = await Promise.all(names.map((name) => fontOf(folder + name)));
  return names.reduce((made, name, at) => made.replaceAll(`url(${name})`, `url(${fonts[at]})`), style);
}

async function fontOf(path) {
  const blob = await (await fetch(new URL(path, VENDOR))).blob();
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.readAsDataURL(blob);
  });
}

async function fetched(name) {
  const [scripts, styles] = await Promise.all([
    Promise.all(LIBRARIES[name].scripts.map(textOf)),
    Promise.all(LIBRARIES[name].styles.map(styleOf)),
  ]);
  return { name, scripts, styles };
}

function library(name) {
  if (!kept.has(name)) {
    const coming = fetched(name);
    kept.set(name, coming);
    coming.catch(() => kept.delete(name));
  }
  return kept.get(name);
}

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen === "dark" || (chosen !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
}

export class FrameView {
  constructor(kind, content) {
    this.element = el("div", { class: `pg-frame pg-frame-${kind}` });
    this.element.style.minHeight = `${INITIAL[kind] || 24}px`;
    Object.assign(this, { kind, content, frame: null, isReady: false, window: null, said: [], changes: [], asked: false });
    seen.observe(this.element);
    views.set(this.element, this);
  }

  /** Something else in the same place. */
  update(kind, content) {
    Object.assign(this, { kind, content });
    if (!this.isReady || this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => this.draw());
  }

  /** When it comes into sight. */
  open() {
    seen.unobserve(this.element);
    if (size(this.content) > LARGEST) return this.give("This is too large to be drawn.");
    this.frame = el("iframe", { src: document.getElementById("playground").dataset.frame, sandbox: "allow-scripts", title: `Output (${this.kind})`, referrerpolicy: "no-referrer" });
    this.frame.addEventListener("load", () => this.arrived());
    this.element.append(this.frame);
  }

  arrived() {
    if (this.isReady) return this.give("This output tried to leave its frame, and was taken out.");
    this.isReady = true;
    this.window = this.frame.contentWindow;
    frames.set(this.window, this);
    this.draw();
  }

  async draw() {
    this.asked = false;
    const { kind, content } = this;
    try {
      const libraries = await Promise.all((NEEDED[kind] || []).map(library));
      if (this.window && kind === this.kind) this.window.postMessage({ kind, content, libraries, dark: isDark() }, "*");
    } catch (error) {
      this.give(`This could not be drawn: ${error.message}`);
    }
  }

  hear(data) {
    const now = performance.now();
    this.said = [...this.said.filter((time) => now - time < 1000), now];
    if (this.said.length > MESSAGES_PER_SECOND) return this.give("This output flooded the page with messages, and was taken out.");
    if (typeof data !== "number" || !Number.isFinite(data)) return;
    this.changes = this.changes.filter((time) => now - time < 1000);
    if (this.changes.length >= CHANGES_PER_SECOND) return;
    this.changes.push(now);
    this.frame.style.height = `${Math.min(Math.max(data, 16), HIGHEST)}px`;
    this.element.style.minHeight = "";
  }

  give(reason) {
    this.close();
    this.element.replaceChildren(el("p", { class: "pg-note" }, reason));
    this.element.style.minHeight = "";
  }

  close() {
    seen.unobserve(this.element);
    if (this.window) frames.delete(this.window);
    if (this.frame) this.frame.remove();
    this.window = null;
    this.isReady = true; // it draws nothing any more
  }
}

function size(content) {
  return typeof content === "string" ? content.length : JSON.stringify(content).length;
}

const views = new WeakMap();
const seen = new IntersectionObserver(
  (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => views.get(entry.target).open()),
  { rootMargin: "300px" },
);

addEventListener("message", (event) => {
  const view = event.source && frames.get(event.source);
  if (view && event.origin === "null") view.hear(event.data);
});

new MutationObserver(tellTheme).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tellTheme);

function tellTheme() {
  for (const view of frames.values()) {
    if (view.kind === "vega") view.draw();
    else view.window.postMessage({ dark: isDark() }, "*");
  }
}
