// A look into a file. What it holds is hostile: text becomes text nodes, pictures come from blob URLs, and what a
// browser would run is shown only in the frame that has no origin.

import { boxPath, el, icon, messageOf, shownName, sizeText, textButton } from "./panel-parts.js";
import { delimited } from "./panel-files-table.js";
import { coloured } from "./playground-colours.js";
import { languageOfFile } from "./playground-languages.js";
import { viewOf } from "./playground-results.js";

const TEXT_BYTES = 512 * 1024;
const PICTURE_BYTES = 20 * 1024 * 1024;
const NOTEBOOK_BYTES = 8 * 1024 * 1024;
const MAX_CELLS = 200;
const PICTURES = { png: "image/png", jpg: "image/jpeg", jpeg: "image/jpeg", gif: "image/gif", webp: "image/webp", bmp: "image/bmp", avif: "image/avif" };
const FRAMED = { html: "text/html", htm: "text/html", svg: "image/svg+xml", md: "text/markdown" };
const NO_PREVIEW = new Set(["pdf", "zip", "gz", "tar", "xz", "bz2", "7z", "whl", "parquet", "npy", "npz", "pkl", "xlsx", "docx", "pptx", "mp4", "mp3", "wav", "so", "pyc"]);

/** Opens a dialog with a look at the file, and gives it. */
export function preview(playground, file) {
  const name = shownName(file.name);
  const close = el("button", { type: "button", class: "panel-icon-button", "aria-label": "Close", title: "Close (Esc)", onclick: () => dialog.close() }, icon("close"));
  const actions = el("div", { class: "preview-actions" }, downloadLink(playground.sandbox, file, "Download"), close);
  const head = el("header", {}, el("h2", { title: shownName(file.path) }, el("bdi", {}, name)), el("span", { class: "preview-size" }, sizeText(file.size_bytes)), actions);
  const body = el("div", { class: "preview-body", tabindex: "0", role: "region", "aria-label": `Content of ${name}` }, el("p", { class: "panel-hint" }, "Loading…"));
  const dialog = el("dialog", { class: "panel-dialog preview", "aria-label": `Preview of ${name}` }, head, body);
  const leaving = new AbortController();
  dialog.addEventListener("close", () => {
    leaving.abort();
    dialog.remove();
  });
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
  fill(body, actions, playground, file, leaving.signal).catch((error) => {
    if (!leaving.signal.aborted) body.replaceChildren(el("p", { class: "panel-error", role: "alert" }, error.message));
  });
  return dialog;
}

export function downloadLink(sandbox, file, label) {
  const href = contentUrl(sandbox, file.path);
  return el("a", { class: "panel-button", href, download: file.name }, icon("download"), label);
}

export function contentUrl(sandbox, path) {
  return `/ui${boxPath(sandbox, `/files/content?path=${encodeURIComponent(path)}`)}`;
}

async function fill(body, actions, playground, file, signal) {
  const ending = file.name.includes(".") ? file.name.split(".").pop().toLowerCase() : "";
  const get = (limitBytes) => firstBytes(contentUrl(playground.sandbox, file.path), limitBytes, signal);
  if (NO_PREVIEW.has(ending)) return body.replaceChildren(el("p", { class: "panel-hint" }, `There is no preview of .${ending} files: download it to see it.`));
  if (Object.hasOwn(PICTURES, ending)) return showPicture(body, await get(PICTURE_BYTES), PICTURES[ending], signal);
  if (ending === "ipynb") return showNotebook(body, actions, playground, await get(NOTEBOOK_BYTES));
  const read = await get(TEXT_BYTES);
  const text = textOf(read.bytes, read.whole);
  if (text === null) return body.replaceChildren(el("p", { class: "panel-hint" }, "This is no text: download it to see it."));
  body.replaceChildren();
  if (ending === "csv" || ending === "tsv") body.append(...tableOf(text, ending === "tsv" ? "\t" : ",", read.whole));
  else if (Object.hasOwn(FRAMED, ending) && read.whole) showBoth(body, actions, text, FRAMED[ending], signal);
  else body.append(plain(text, languageOfFile(ending) ?? ""));
  if (!read.whole) body.prepend(el("p", { class: "panel-hint" }, `The first ${sizeText(TEXT_BYTES)} of ${sizeText(file.size_bytes)}.`));
}

/** Reads no more than it may: a file may grow, or claim any size. Throws Error with what the server says. */
async function firstBytes(url, limitBytes, signal) {
  const answer = await fetch(url, { signal });
  if (!answer.ok) throw new Error(messageOf(answer.status, await answer.text()));
  const reader = answer.body.getReader();
  const parts = [];
  let held = 0;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return { bytes: new Uint8Array(await new Blob(parts).arrayBuffer()), whole: true };
    parts.push(value.subarray(0, limitBytes - held));
    held += value.length;
    if (held > limitBytes) {
      await reader.cancel();
      return { bytes: new Uint8Array(await new Blob(parts).arrayBuffer()), whole: false };
    }
  }
}

/** Null if it is no text. A cut in the middle of a character is none. */
function textOf(bytes, whole) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes, { stream: !whole });
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

function plain(text, language = "") {
  return el("pre", { class: "preview-text" }, ...coloured(text, language));
}

async function showPicture(body, read, type, signal) {
  if (!read.whole) throw new Error(`Pictures of more than ${sizeText(PICTURE_BYTES)} are not shown: download it.`);
  const url = URL.createObjectURL(new Blob([read.bytes], { type }));
  signal.addEventListener("abort", () => URL.revokeObjectURL(url));
  const picture = el("img", { class: "preview-picture", src: url, alt: "The picture in this file" });
  picture.addEventListener("error", () => body.replaceChildren(el("p", { class: "panel-hint" }, "This is no picture that a browser can show.")));
  body.replaceChildren(picture);
}

function tableOf(text, delimiter, whole) {
  const { rows, more } = delimited(whole ? text : text.slice(0, text.lastIndexOf("\n") + 1), delimiter);
  if (!rows.length) return [el("p", { class: "panel-hint" }, "This file is empty.")];
  const head = el("thead", {}, el("tr", {}, ...rows[0].map((cell) => el("th", { scope: "col" }, cell))));
  const lines = rows.slice(1).map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, cell))));
  const table = el("table", { class: "preview-table" }, head, el("tbody", {}, ...lines));
  return [table, more || !whole ? el("p", { class: "panel-hint" }, `The first ${rows.length - 1} rows.`) : null].filter(Boolean);
}

/** The rendered form in the frame, and a switch to its source. */
function showBoth(body, actions, text, mime, signal) {
  const source = plain(text);
  const view = viewOf({ [mime]: text });
  const shown = el("div", { class: "preview-frame" }, view.element);
  signal.addEventListener("abort", () => view.close());
  source.hidden = true;
  const turn = textButton("Source", () => {
    source.hidden = !source.hidden;
    shown.hidden = !source.hidden;
    turn.textContent = source.hidden ? "Source" : "Rendered";
  });
  actions.prepend(turn);
  body.append(shown, source);
}

function showNotebook(body, actions, playground, read) {
  if (!read.whole) throw new Error(`Notebooks of more than ${sizeText(NOTEBOOK_BYTES)} are not shown: download it.`);
  const { cells, language } = cellsOf(read.bytes);
  body.replaceChildren(...cells.map((cell) => el("pre", { class: `preview-text preview-cell ${cell.kind}` }, cell.source)));
  if (!cells.length) body.append(el("p", { class: "panel-hint" }, "This notebook has no cells."));
  const code = cells.filter((cell) => cell.kind === "code");
  if (code.length) actions.prepend(textButton(`Open ${code.length} ${code.length === 1 ? "cell" : "cells"}`, () => openCells(body, playground, code, language)));
}

/** Throws Error if that is no notebook. */
function cellsOf(bytes) {
  try {
    const notebook = JSON.parse(new TextDecoder().decode(bytes));
    const cells = notebook.cells.slice(0, MAX_CELLS).map((cell) => ({
      kind: cell.cell_type === "code" ? "code" : "markdown",
      source: [cell.source].flat().map(String).join(""),
    }));
    return { cells, language: String(notebook.metadata?.kernelspec?.language ?? "python").toLowerCase() };
  } catch {
    throw new Error("This is no notebook that can be read: download it to see why.");
  }
}

function openCells(body, playground, cells, language) {
  for (const cell of cells) playground.insertCell(cell.source, language);
  body.closest("dialog").close();
}
