// The playground: a notebook on a live sandbox. This module puts its parts together, and wires the buttons.

import { api, ask, confirmed, toast } from "./console.js";
import { Box, spanText } from "./playground-box.js";
import { examples } from "./playground-examples.js";
import { fill, notebookOf, readNotebook, save } from "./playground-ipynb.js";
import { bringBack, forgetKept, keep, recalled } from "./playground-keep.js";
import { Notebook } from "./playground-notebook.js";
import { mountPanels } from "./playground-panels.js";
import { boxPath, el } from "./panel-parts.js";

const root = document.getElementById("playground");
const { owner } = root.dataset;
const part = (name) => document.getElementById(`pg-${name}`);

const box = new Box({
  template: () => part("template").value,
  seconds: Number(root.dataset.seconds),
  isBusy: () => notebook.isBusy,
  adopt: () => notebook.adopt(),
});
const notebook = new Notebook({ box, tabs: part("contexts"), place: part("cells"), said: part("said"), refresh });

/** What panels work with: see playground-panels.js. */
const playground = {
  api,
  get sandbox() {
    return box.id;
  },
  get context() {
    return notebook.chosen?.context ?? null;
  },
  ensure: () => box.ensure(),
  onSandboxChange: (hear) => box.changed.add(hear),
  onContextChange: (hear) => notebook.contextListeners.add(hear),
  onRunEnded: (hear) => notebook.runListeners.add(hear),
  insertCell(code, language = notebook.chosen.language) {
    const sheet = sheetOf(language);
    const free = sheet.chosen?.kind === "code" && !sheet.chosen.code.trim();
    const cell = free ? sheet.chosen : sheet.add({ at: sheet.chosen });
    cell.editor.code = code;
    cell.editor.focus();
    refresh();
    return cell;
  },
  run(code) {
    const sheet = notebook.chosen;
    return sheet.run(playground.insertCell(code, sheet.language));
  },
};

const beginning = examples(notebook, (code) => playground.insertCell(code, "python"));
part("keys").before(beginning.line);

function sheetOf(language) {
  const { chosen, sheets } = notebook;
  const found = chosen.language === language ? chosen : sheets.find((sheet) => sheet.language === language);
  const sheet = found ?? notebook.add({ language });
  if (sheet !== chosen) notebook.choose(sheet);
  return sheet;
}

// -- how it stands

function refresh() {
  const sheet = notebook.chosen;
  if (!sheet) return;
  beginning.look();
  const { last, problem } = sheet.marks;
  part("stop").disabled = !sheet.isBusy;
  part("undo").disabled = sheet.isBusy || !last;
  part("undo").title = last ? "Take the variables back to before the last run. Files stay as they are" : problem;
  part("close-context").hidden = notebook.sheets.length < 2;
  for (const name of ["fork-sandbox", "history"]) part(name).disabled = !box.id;
}

function showState() {
  const state = part("state");
  if (state.textContent !== box.stateText) state.textContent = box.stateText;
  state.dataset.state = box.isLost ? "lost" : box.state;
  state.title = box.isLost ? "The server cannot be reached. It is tried again" : box.id ? `${box.id}, of ${box.info.template}` : "One is made when the first cell runs";
  part("new").hidden = !box.id;
  part("template").disabled = Boolean(box.id) || box.state === "starting";
  if (box.state === "paused") notify("This sandbox is paused. It is resumed when you run something.", { action: "Resume it", act: () => box.ensure() });
  else if (part("notice").dataset.about === "pause") part("notice").hidden = true;
  showDeadline();
  refresh();
}

function showDeadline() {
  const left = box.secondsLeft();
  const text = left === null || box.state !== "running" || box.isLost ? "" : `ends in ${spanText(left)}`;
  if (part("deadline").textContent !== text) part("deadline").textContent = text;
}

/** A line above the notebook, with something to do about it: `act` is a function or an address. */
function notify(text, { action = "", act = null } = {}) {
  const notice = part("notice");
  if (notice.dataset.text === text && !notice.hidden) return;
  Object.assign(notice.dataset, { text, about: box.state === "paused" ? "pause" : "" });
  const doing = typeof act === "string" ? el("a", { href: act, target: "_blank", rel: "noopener" }, action) : el("button", { type: "button", class: "small", onclick: attempt(act) }, action);
  const close = el("button", { type: "button", class: "quiet small", onclick: () => (notice.hidden = true) }, "Dismiss");
  notice.replaceChildren(el("span", {}, text), ...(act ? [doing] : []), close);
  notice.hidden = false;
}

function sandboxChanged(id) {
  const url = new URL(location.href);
  if (id) url.searchParams.set("sandbox", id);
  else url.searchParams.delete("sandbox");
  history.replaceState(null, "", url);
  if (id) part("notice").hidden = true;
  if (id && box.info.owner !== owner) notify(`This sandbox belongs to ${box.info.owner}, who sees what you run, write and say in it.`);
  if (box.state === "ended") tellEnd(box.last);
}

function tellEnd({ id, end_reason: reason }) {
  notify(`Sandbox ${id} has ended: ${reason || "its time was over"}. Its variables and files are gone. Your cells stay, and the next run begins with a new one.`);
}

// -- buttons

/** The same, but what goes wrong is told. */
function attempt(work) {
  return async (...given) => {
    try {
      await work(...given);
    } catch (error) {
      toast(error.message, "bad");
    }
  };
}

async function restart() {
  const sheet = notebook.chosen;
  if (!(await confirmed("Restart this context? All its variables are lost. Files stay.", { action: "Restart" }))) return;
  await sheet.restart();
  notebook.ran({ outcome: "restarted", files: [] });
  toast("The context has a new kernel.", "ok");
  refresh();
}

async function undo() {
  const sheet = notebook.chosen;
  await sheet.undo();
  notebook.ran({ outcome: "undone", files: [] });
  toast("Variables are as they were before the last run. Files stay as they are.", "ok");
  refresh();
}

async function forkSandbox() {
  const [made] = await api(boxPath(box.id, "/fork"), { method: "POST", json: { count: 1, timeout_seconds: box.seconds } });
  notify("A new sandbox has a copy of this one's files.", { action: "Open it in a new tab", act: `/ui/playground?sandbox=${encodeURIComponent(made.id)}` });
}

async function leave() {
  const ours = box.info?.metadata?.made_in === "playground";
  const question = ours ? "End this sandbox? Its variables and files are lost. Your cells stay, and the next run begins with a new one." : "Leave this sandbox? It goes on. Your cells stay, and the next run begins with a new one.";
  if (await confirmed(question, { action: ours ? "End it" : "Leave it", danger: ours })) await box.leave(ours);
}

function exportSheet() {
  const sheet = notebook.chosen;
  save(`${sheet.name.replaceAll(" ", "-")}.ipynb`, `${JSON.stringify(notebookOf(sheet), null, 1)}\n`);
}

async function exportHistory() {
  const sheet = notebook.chosen;
  save(`${sheet.name.replaceAll(" ", "-")}-history.ipynb`, await (await fetchNotebook(sheet)).blob());
}

async function fetchNotebook(sheet) {
  return ask(boxPath(box.id, `/notebook?context=${encodeURIComponent(await sheet.ensure())}`));
}

async function importFile() {
  const [file] = part("file").files;
  part("file").value = "";
  if (file) await open(file);
}

async function open(file) {
  let found;
  try {
    found = await readNotebook(file);
  } catch (error) {
    throw new Error(`${file.name} could not be opened: ${error.message}.`);
  }
  const { chosen } = notebook;
  const language = found.isKnown ? found.language : "python";
  const fits = chosen.language === language && chosen.cells.every((cell) => !cell.code.trim());
  const sheet = fits ? chosen : notebook.add({ language });
  fill(sheet, found.cells);
  notebook.choose(sheet);
  if (!found.isKnown) toast(`This notebook is written in ${found.language.slice(0, 40)}, which contexts here do not speak.`, "bad");
}

function addContext() {
  const language = part("language").value;
  part("language").value = "";
  if (!language) return;
  const sheet = notebook.add({ language });
  notebook.choose(sheet);
  sheet.cells[0].editor.focus();
}

function wire() {
  const does = {
    run: () => notebook.chosen.runAnd(notebook.chosen.chosen, "next"),
    "run-all": () => notebook.chosen.runAll(),
    stop: () => notebook.chosen.stop(),
    restart, undo,
    "fork-context": () => notebook.fork(notebook.chosen),
    "fork-sandbox": forkSandbox,
    export: exportSheet,
    history: exportHistory,
    import: () => part("file").click(),
    clear: () => notebook.chosen.clear(),
    new: leave,
    add: () => notebook.chosen.add().editor.focus(),
    "close-context": () => notebook.close(notebook.chosen),
  };
  for (const [name, work] of Object.entries(does)) part(name).addEventListener("click", attempt(work));
  part("file").addEventListener("change", attempt(importFile));
  part("language").addEventListener("change", addContext);
}

function wireMenu() {
  const menu = part("more");
  const close = () => (menu.open = false);
  document.addEventListener("click", (event) => (!menu.contains(event.target) || event.target.closest("button")) && close());
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    close();
    menu.querySelector("summary").focus();
  });
}

/** The panels stand below the bar, however high that is. */
function measureBar() {
  const bar = root.querySelector(".pg-bar");
  new ResizeObserver(() => root.style.setProperty("--pg-bar", `${bar.offsetHeight}px`)).observe(bar);
}

// -- the beginning

async function begin() {
  const found = recalled(owner);
  const asked = root.dataset.sandbox || found?.sandbox;
  const isSame = found && (!asked || asked === found.sandbox);
  if (isSame) bringBack(notebook, found);
  if (asked) await attach(asked);
  if (!notebook.sheets.length) notebook.add();
}

function keepWhileAway() {
  let isLeaving = false;
  document.querySelector("form[action='/ui/logout']")?.addEventListener("submit", () => (isLeaving = true));
  addEventListener("pagehide", () => (isLeaving ? forgetKept() : keep(notebook, owner)));
}

async function attach(id) {
  try {
    await box.attach(id);
  } catch (error) {
    notify(`Sandbox ${id} cannot be used: ${error.message}. The next run begins with a new one.`);
  }
}

wire();
wireMenu();
measureBar();
box.told.add(showState);
box.changed.add(sandboxChanged);
setInterval(showDeadline, 1000);
keepWhileAway();
begin().finally(() => {
  mountPanels(document.getElementById("panels"), playground);
  showState();
  root.dataset.ready = "yes"; // for tests, and for whoever scripts this page
});
