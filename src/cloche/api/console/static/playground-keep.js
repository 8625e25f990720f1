// What is on the page survives a look at another one, and a reload: it is kept in the browser's tab.

import { fill, notebookOf, parsed } from "./playground-ipynb.js";

const KEY = "cloche.playground.notebook";
const LARGEST = 2_000_000; // characters; more is kept without its outputs

/** `owner` is whose it is: who logs in after them in this tab does not get it. */
export function keep(notebook, owner) {
  const about = (outputs) => JSON.stringify({ owner, sandbox: notebook.box.id, chosen: notebook.sheets.indexOf(notebook.chosen), sheets: notebook.sheets.map((sheet) => kept(sheet, outputs)) });
  try {
    const whole = about(true);
    sessionStorage.setItem(KEY, whole.length > LARGEST ? about(false) : whole);
  } catch {
    forgetKept(); // too much even so: an older state would be worse than none
  }
}

function kept(sheet, outputs) {
  return { language: sheet.language, name: sheet.name, context: sheet.context, notebook: JSON.stringify(notebookOf(sheet, { outputs })) };
}

/** {sandbox, chosen, sheets}, or null. */
export function recalled(owner) {
  try {
    const found = JSON.parse(sessionStorage.getItem(KEY));
    if (found?.owner === owner && found.sheets.length) return found;
  } catch {
    // it is not ours
  }
  forgetKept();
  return null;
}

export function forgetKept() {
  sessionStorage.removeItem(KEY);
}

/** Puts it on the page. `wanted` of a sheet is the context that it had. */
export function bringBack(notebook, found) {
  for (const { language, name, context, notebook: content } of found.sheets) {
    const sheet = notebook.add({ language, name }, { isEmpty: false });
    sheet.wanted = context;
    fill(sheet, parsed(content).cells);
    if (!sheet.cells.length) sheet.add();
  }
  notebook.choose(notebook.sheets[found.chosen] ?? notebook.sheets[0]);
}
