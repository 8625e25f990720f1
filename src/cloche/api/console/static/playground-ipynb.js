// Sheets as Jupyter notebooks (nbformat 4.5), written and read.

import { LANGUAGES } from "./playground-languages.js";

const LARGEST_BYTES = 64 * 1024 * 1024;
const MOST_CELLS = 2000;
const KINDS = new Set(["code", "markdown", "raw"]);

/** The notebook of a sheet; with `outputs` as they are shown. */
export function notebookOf(sheet, { outputs = true } = {}) {
  const { kernelName, kernelTitle, extensions } = LANGUAGES[sheet.language];
  return {
    nbformat: 4,
    nbformat_minor: 5,
    metadata: {
      kernelspec: { name: kernelName, display_name: kernelTitle, language: sheet.language },
      language_info: { name: sheet.language, file_extension: `.${extensions[0]}` },
    },
    cells: sheet.cells.map((cell) => cellOf(cell, outputs)),
  };
}

function cellOf(cell, withOutputs) {
  const made = { cell_type: cell.kind, id: cell.id, metadata: cell.metadata, source: linesOf(cell.code) };
  if (cell.kind !== "code") return made;
  const outputs = withOutputs ? cell.output.recorded().map(cleaned) : [];
  return { ...made, execution_count: withOutputs ? cell.count : null, outputs };
}

function linesOf(text) {
  return text.match(/[^\n]*\n|[^\n]+$/g) ?? [];
}

/** What the format allows in a bundle: text, or any value under a MIME type of JSON. */
function cleaned(output) {
  if (!output.data) return output;
  const fits = ([mime, value]) => typeof value === "string" || /^application\/(.*\+)?json$/.test(mime);
  return { ...output, data: Object.fromEntries(Object.entries(output.data).filter(fits)) };
}

/** The notebook in a file: {language, isKnown, cells}. Raises an Error that says what is wrong with it. */
export async function readNotebook(file) {
  if (file.size > LARGEST_BYTES) throw new Error("it is larger than 64 MB");
  return parsed(await file.text());
}

export function parsed(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error("it is no JSON, so it is no notebook");
  }
  if (found?.nbformat !== 4 || !Array.isArray(found.cells)) throw new Error("it is no notebook of format 4, which Jupyter writes since 2015");
  const language = String(found.metadata?.kernelspec?.language ?? found.metadata?.language_info?.name ?? "python").toLowerCase();
  return { language, isKnown: Object.hasOwn(LANGUAGES, language), cells: found.cells.slice(0, MOST_CELLS).map(read) };
}

function read(cell) {
  const kind = KINDS.has(cell?.cell_type) ? cell.cell_type : "raw";
  const outputs = (Array.isArray(cell?.outputs) ? cell.outputs : []).filter(isOutput).map(whole);
  const count = Number.isInteger(cell?.execution_count) ? cell.execution_count : null;
  const metadata = isObject(cell?.metadata) ? cell.metadata : {};
  return { kind, code: text(cell?.source), outputs, count, metadata, state: stateOf(outputs, count) };
}

function stateOf(outputs, count) {
  if (outputs.some((output) => output.output_type === "error")) return "raised";
  return count === null ? "idle" : "ok";
}

function isOutput(output) {
  return isObject(output) && (["stream", "error"].includes(output.output_type) || isObject(output.data));
}

function whole(output) {
  if (output.output_type !== "error") return output;
  return { ...output, traceback: Array.isArray(output.traceback) ? output.traceback.map(String) : [] };
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function text(source) {
  return Array.isArray(source) ? source.map(String).join("") : String(source ?? "");
}

/** Puts these cells into a sheet, in place of an empty one. */
export function fill(sheet, cells) {
  const empty = sheet.cells.filter((cell) => !cell.code.trim());
  for (const { kind, code, outputs, count, metadata, state } of cells) {
    const cell = sheet.add({ kind, code, metadata });
    if (kind === "code") cell.restore({ outputs, count, state });
    else cell.render();
  }
  if (!cells.length) return;
  for (const cell of empty) {
    sheet.cells.splice(sheet.cells.indexOf(cell), 1);
    cell.close();
  }
  sheet.choose(sheet.cells[0]);
  sheet.number();
}

export function save(name, content, type = "application/x-ipynb+json") {
  const address = URL.createObjectURL(new Blob([content], { type }));
  const link = document.createElement("a");
  Object.assign(link, { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
