// What a model says, as elements: the Markdown that models write, and no HTML at all.
//
// A model repeats what programs printed, so its text is as hostile as theirs: it becomes text nodes, and links only to
// the web and to files of the sandbox. However it is nested and however long it is, the work is bounded.

import { coloured } from "./playground-colours.js";
import { languageOfFence } from "./playground-languages.js";
import { el } from "./panel-parts.js";

const LONGEST = 200_000; // characters that are read as Markdown
const LONGEST_PARAGRAPH = 20_000;
const DEEPEST = 6;
const MOST_CELLS = 4000; // of one table

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+-]*)/;
const HEADING = /^ {0,3}(#{1,6}) +(\S.*)$/;
const RULE = /^ {0,3}(?:-{3,}|\*{3,}|_{3,})\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const DIVIDER = /^ {0,3}\|?(?: *:?-+:? *\|)* *:?-+:? *\|? *$/;
const INLINE = new RegExp(
  [
    /\\([!-/:-@[-`{-~])/, // 1: a sign that stands for itself
    /(`+)(?!`)([^\n]{0,400}?[^`\n])\2(?!`)/, // 3: code
    /\*\*(?=\S)([^\n]{0,400}?[^\s*])\*\*/, // 4: strong
    /(?<![*\w])\*(?=[^\s*])([^*\n]{0,400}?[^\s*])\*(?!\*)/, // 5: emphasis
    /(?<![\w_])_(?=[^\s_])([^_\n]{0,400}?[^\s_])_(?!\w)/, // 6: emphasis
    /~~(?=\S)([^~\n]{0,400}?[^\s~])~~/, // 7: struck out
    /!?\[([^\]\n]{0,500})\]\(\s*<?((?:sandbox:)[^)>\n]{1,2000}|[^\s)>]{1,2000})>?(?:\s+"[^"\n]*")?\s*\)/, // 8, 9: a link
    /(https?:\/\/[^\s<>"'`)\]]{1,2000})/, // 10: an address
  ]
    .map((each) => each.source)
    .join("|"),
  "gu",
);

/** Elements for a text. `fileLink(path, label)` makes a link to a file of the sandbox. */
export function markdown(text, fileLink) {
  if (text.length > LONGEST) return [el("p", { class: "chat-plain" }, text)];
  return blocks(text.replaceAll("\r\n", "\n").split("\n"), { fileLink, depth: 0 });
}

function blocks(lines, state) {
  if (state.depth > DEEPEST) return [el("p", {}, lines.join("\n"))];
  const made = [];
  let at = 0;
  while (at < lines.length) {
    const [element, next] = block(lines, at, state);
    if (element) made.push(element);
    at = next;
  }
  return made;
}

/** The block that begins there, and where the next one does. */
function block(lines, at, state) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  if (FENCE.test(line)) return fence(lines, at);
  const heading = HEADING.exec(line);
  if (heading) return [el("p", { class: "chat-heading", role: "heading", "aria-level": String(Math.min(6, heading[1].length + 2)) }, ...inline(heading[2].trimEnd(), state)), at + 1];
  if (RULE.test(line)) return [el("hr"), at + 1];
  if (QUOTE.test(line)) return quote(lines, at, state);
  if (ITEM.test(line)) return list(lines, at, state);
  if (isTable(lines, at)) return table(lines, at, state);
  return paragraph(lines, at, state);
}

function fence(lines, at) {
  const [, mark, info] = FENCE.exec(lines[at]);
  const isEnd = (line) => line.trim().startsWith(mark) && !line.trim().slice(mark.length).replaceAll(mark[0], "");
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const language = languageOfFence(info.toLowerCase());
  const code = el("code", {}, ...coloured(lines.slice(at + 1, end).join("\n"), language));
  return [el("pre", { class: "chat-fence", tabindex: "0" }, code), end + 1];
}

function quote(lines, at, state) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [el("blockquote", {}, ...blocks(inner, deeper(state))), end];
}

function list(lines, at, state) {
  const first = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(first[2]);
  const element = el(isOrdered ? "ol" : "ul", isOrdered ? { start: String(Number.parseInt(first[2], 10)) } : {});
  let next = at;
  while (next < lines.length) {
    const found = ITEM.exec(lines[next]);
    if (!found || /\d/.test(found[2]) !== isOrdered || RULE.test(lines[next])) break;
    const [item, end] = listItem(lines, next, found, state);
    element.append(item);
    next = end;
  }
  return [element, next];
}

/** An item goes on with lines that are indented, and with those that follow its text without an empty line between. */
function listItem(lines, at, found, state) {
  const width = Math.min(found[0].length, found[1].length + found[2].length + 4);
  const inner = [lines[at].slice(found[0].length)];
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const indent = lines[end].search(/\S/);
    if (indent >= 0 && indent < Math.min(width, 2) && (ITEM.test(lines[end]) || !lines[end - 1].trim() || startsBlock(lines[end]))) break;
    inner.push(lines[end].slice(Math.min(width, Math.max(indent, 0))));
  }
  const parts = blocks(inner, deeper(state));
  const isLine = parts.length && parts[0].tagName === "P" && !parts[0].className;
  return [el("li", {}, ...(isLine ? [...parts[0].childNodes, ...parts.slice(1)] : parts)), end];
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || RULE.test(line);
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].length < 1000 && lines[at + 1].includes("-") && DIVIDER.test(lines[at + 1]);
}

function table(lines, at, state) {
  const names = cells(lines[at]);
  const body = el("tbody");
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|") && body.childElementCount * names.length < MOST_CELLS; end += 1) {
    body.append(el("tr", {}, ...cells(lines[end]).slice(0, names.length).map((cell) => el("td", {}, ...inline(cell, state)))));
  }
  const head = el("thead", {}, el("tr", {}, ...names.map((cell) => el("th", { scope: "col" }, ...inline(cell, state)))));
  return [el("div", { class: "chat-table", tabindex: "0", role: "group", "aria-label": "Table" }, el("table", {}, head, body)), end];
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function paragraph(lines, at, state) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines[end]) && !ITEM.test(lines[end])) end += 1;
  return [el("p", {}, ...inline(lines.slice(at, end).join("\n"), state)), end];
}

// -- within a paragraph

function inline(text, state) {
  if (text.length > LONGEST_PARAGRAPH || state.depth > DEEPEST) return [text];
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > at) nodes.push(...broken(text.slice(at, match.index)));
    nodes.push(span(match, deeper(state)));
    at = match.index + match[0].length;
  }
  nodes.push(...broken(text.slice(at)));
  return nodes;
}

function span(match, state) {
  const [whole, sign, , code, strong, starred, lined, struck, label, target, address] = match;
  if (sign !== undefined) return sign;
  if (code !== undefined) return el("code", {}, code.trim() || code);
  if (strong !== undefined) return el("strong", {}, ...inline(strong, state));
  if (starred !== undefined || lined !== undefined) return el("em", {}, ...inline(starred ?? lined, state));
  if (struck !== undefined) return el("s", {}, ...inline(struck, state));
  if (address !== undefined) return webLink(address, address) ?? whole;
  if (target.startsWith("sandbox:/")) return state.fileLink(decoded(target.slice("sandbox:".length)), label || target);
  return webLink(target, label || target) ?? whole;
}

/** Null for an address that is none of the web's. */
function webLink(target, label) {
  const trimmed = target.replace(/[.,;:!?]+$/, "");
  if (!/^https?:\/\//i.test(trimmed) || !URL.canParse(trimmed)) return null;
  const { href } = new URL(trimmed);
  const link = el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href }, label === target ? trimmed : label);
  return label === target && trimmed !== target ? el("span", {}, link, target.slice(trimmed.length)) : link;
}

function decoded(path) {
  try {
    return decodeURIComponent(path.trim());
  } catch {
    return path.trim();
  }
}

function broken(text) {
  return text.split("\n").flatMap((line, at) => (at ? [el("br"), line] : [line]));
}

function deeper(state) {
  return { ...state, depth: state.depth + 1 };
}
