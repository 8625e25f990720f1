// A JSON value as a tree, whose branches are made when they are opened.

import { el } from "./panel-parts.js";

const SHOWN = 200; // children at once
const TEXT = 2000; // characters
const NAME = 200;

export function tree(value, name = null, isOpen = true) {
  if (value === null || typeof value !== "object") return leaf(value, name);
  const keys = Array.isArray(value) ? null : Object.keys(value);
  const summary = el("summary", {}, ...label(name), el("span", { class: "pg-json-count" }, keys ? `{${keys.length}}` : `[${value.length}]`));
  const branch = el("details", { class: "pg-json" }, summary);
  const fill = () => branch.children.length === 1 && more(branch, value, keys, 0);
  branch.addEventListener("toggle", fill);
  if (isOpen) {
    fill();
    branch.open = true;
  }
  return branch;
}

/** `keys` are those of an object; an array has none, and may have millions of values. */
function more(branch, value, keys, from) {
  const count = keys ? keys.length : value.length;
  for (let at = from; at < Math.min(from + SHOWN, count); at += 1) {
    const name = keys ? keys[at] : at;
    branch.append(tree(value[name], name, false));
  }
  const left = count - from - SHOWN;
  if (left <= 0) return;
  const next = el("button", { type: "button", class: "quiet" }, `${left} more`);
  next.addEventListener("click", () => {
    next.remove();
    more(branch, value, keys, from + SHOWN);
  });
  branch.append(next);
}

function label(name) {
  return name === null ? [] : [el("span", { class: "pg-json-name" }, String(name).slice(0, NAME)), ": "];
}

function leaf(value, name) {
  const text = JSON.stringify(value);
  const kind = value === null ? "null" : typeof value;
  const shown = text.length > TEXT ? `${text.slice(0, TEXT)}…` : text;
  return el("div", { class: "pg-json-leaf" }, ...label(name), el("span", { class: `pg-json-${kind}` }, shown));
}
