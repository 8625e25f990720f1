// A JSON value as a tree, whose branches are made when they are opened.

import { el } from "./panel-parts.js";

const SHOWN = 200; // children at once
const TEXT = 2000;

export function tree(value, name = null, isOpen = true) {
  if (value === null || typeof value !== "object") return leaf(value, name);
  const entries = Array.isArray(value) ? value.map((each, at) => [at, each]) : Object.entries(value);
  const summary = el("summary", {}, ...label(name), el("span", { class: "pg-json-count" }, countText(value, entries.length)));
  const branch = el("details", { class: "pg-json" }, summary);
  const fill = () => branch.children.length === 1 && more(branch, entries, 0);
  branch.addEventListener("toggle", fill);
  if (isOpen) {
    fill();
    branch.open = true;
  }
  return branch;
}

function countText(value, length) {
  return Array.isArray(value) ? `[${length}]` : `{${length}}`;
}

function more(branch, entries, from) {
  for (const [name, value] of entries.slice(from, from + SHOWN)) branch.append(tree(value, name, false));
  const left = entries.length - from - SHOWN;
  if (left <= 0) return;
  const next = el("button", { type: "button", class: "quiet" }, `${left} more`);
  next.addEventListener("click", () => {
    next.remove();
    more(branch, entries, from + SHOWN);
  });
  branch.append(next);
}

function label(name) {
  return name === null ? [] : [el("span", { class: "pg-json-name" }, String(name)), ": "];
}

function leaf(value, name) {
  const text = JSON.stringify(value);
  const kind = value === null ? "null" : typeof value;
  const shown = text.length > TEXT ? `${text.slice(0, TEXT)}…` : text;
  return el("div", { class: "pg-json-leaf" }, ...label(name), el("span", { class: `pg-json-${kind}` }, shown));
}
