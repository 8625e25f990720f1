// The files of the sandbox: a list with a path to go back by, uploads, a look into them.

import { toast } from "./console.js";
import { ask, boxPath, el, icon, iconButton, needStyles, onRan, shownName, sizeText, soon, timeElement, whileVisible } from "./panel-parts.js";
import { contentUrl, preview } from "./panel-files-preview.js";
import { Uploads, droppedFiles, join } from "./panel-files-upload.js";

const HOME = "/mnt/data";
const MAX_ROWS = 1000;
const SETTLE_MILLISECONDS = 400;

export function mount(element, playground) {
  needStyles("panels.css");
  const panel = new FilesPanel(element, playground);
  panel.listen();
  return panel;
}

class FilesPanel {
  constructor(element, playground) {
    this.element = element;
    this.playground = playground;
    this.directory = HOME;
    this.files = [];
    this.visible = false;
    this.stale = true;
    this.uploads = new Uploads(playground, (paths) => this.uploaded(paths));
    this.refreshSoon = soon(() => this.refresh(), SETTLE_MILLISECONDS);
    this.build();
  }

  build() {
    this.crumbs = el("nav", { class: "files-crumbs", "aria-label": "Directory" });
    this.picker = el("input", { type: "file", multiple: true, hidden: true, onchange: () => this.picked() });
    const tools = el(
      "div",
      { class: "panel-tools", role: "group", "aria-label": "Files" },
      iconButton("upload", "Upload files", () => this.picker.click()),
      iconButton("add", "New directory", () => this.makeDirectory()),
      iconButton("refresh", "Refresh", () => this.refresh()),
    );
    this.body = el("tbody");
    const names = ["Name", "Size", "Changed"].map((name) => el("th", { scope: "col" }, name));
    names.push(el("th", { scope: "col" }, el("span", { class: "visually-hidden" }, "Actions")));
    this.table = el("table", { class: "files-table" }, el("thead", {}, el("tr", {}, ...names)), this.body);
    this.note = el("p", { class: "panel-hint", role: "status" });
    this.element.classList.add("panel", "panel-files");
    this.element.replaceChildren(el("div", { class: "panel-bar" }, this.crumbs, tools), this.picker, this.uploads.element, el("div", { class: "panel-scroll" }, this.table, this.note));
    this.overlay = el("div", { class: "files-drop", hidden: true }, el("p", {}, icon("upload"), el("span", { class: "files-drop-where" })));
    document.body.append(this.overlay);
    this.showPath();
    this.say("Files that you upload, or that code writes, are shown here.");
  }

  listen() {
    this.playground.onSandboxChange(() => this.changeSandbox());
    this.playground.onRunEnded(() => this.refreshSoon());
    onRan(() => this.refreshSoon());
    whileVisible(this.element, (shown) => this.show(shown));
    for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
      document.addEventListener(kind, (event) => this.drag(kind, event));
    }
  }

  show(shown) {
    this.visible = shown;
    if (shown && this.stale) this.refresh();
    this.watch();
  }

  changeSandbox() {
    this.directory = HOME;
    this.refresh();
    this.watch();
  }

  // A watch holds a connection, of which a browser has six for a host: only a list that is looked at has one.
  watch() {
    this.changes?.close();
    this.changes = null;
    if (!this.visible || !this.playground.sandbox) return;
    this.changes = new EventSource(`/ui${boxPath(this.playground.sandbox, `/files/watch?path=${encodeURIComponent(this.directory)}`)}`);
    this.changes.addEventListener("change", () => this.refreshSoon());
  }

  async refresh() {
    this.showPath();
    if (!this.playground.sandbox) return this.fill([]);
    if (!this.visible) {
      this.stale = true;
      return;
    }
    this.stale = false;
    const directory = this.directory;
    try {
      const files = await this.playground.api(boxPath(this.playground.sandbox, `/files/list?path=${encodeURIComponent(directory)}`));
      if (directory === this.directory) this.fill(files);
    } catch (error) {
      this.told = null;
      this.body.replaceChildren();
      this.say(error.message, true);
    }
  }

  fill(files) {
    const told = JSON.stringify([this.playground.sandbox, files]);
    if (told === this.told) return; // somebody may be about to click there
    this.told = told;
    this.files = files;
    const sorted = [...files].sort((one, other) => isDirectory(other) - isDirectory(one) || one.name.localeCompare(other.name));
    const focused = this.body.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this.body.replaceChildren(...sorted.slice(0, MAX_ROWS).map((file) => this.row(file)));
    if (focused) [...this.body.querySelectorAll("[data-key]")].find((each) => each.dataset.key === focused)?.focus();
    this.table.hidden = !files.length;
    if (files.length > MAX_ROWS) this.say(`${files.length - MAX_ROWS} more are not listed: use the terminal.`);
    else this.say(files.length ? "" : "Nothing here yet. Drop files anywhere on the page, or write some from code.");
  }

  row(file) {
    const open = el("button", { type: "button", class: "files-name", title: shownName(file.path), "data-key": file.path, onclick: () => this.open(file) });
    open.append(icon(iconOf(file)), el("bdi", {}, shownName(file.name)));
    const size = isDirectory(file) ? "" : sizeText(file.size_bytes);
    const actions = el("div", { class: "files-actions" });
    if (!isDirectory(file)) actions.append(this.download(file));
    actions.append(
      iconButton("rename", `Rename ${shownName(file.name)}`, () => this.rename(file)),
      iconButton("remove", `Delete ${shownName(file.name)}`, () => this.remove(file)),
    );
    return el("tr", {}, el("td", {}, open), el("td", { class: "number" }, size), el("td", {}, timeElement(file.modified_at)), el("td", {}, actions));
  }

  download(file) {
    const href = contentUrl(this.playground.sandbox, file.path);
    const label = `Download ${shownName(file.name)}`;
    return el("a", { class: "panel-icon-button", href, download: file.name, title: label, "aria-label": label }, icon("download"));
  }

  open(file) {
    if (isDirectory(file)) this.go(file.leads_to?.path ?? file.path);
    else preview(this.playground, file);
  }

  go(directory) {
    this.directory = directory;
    this.refresh();
    this.watch();
  }

  showPath() {
    const parts = this.directory.split("/").filter(Boolean);
    const steps = [this.step("/", "/", !parts.length)];
    parts.forEach((part, at) => steps.push(this.step(part, `/${parts.slice(0, at + 1).join("/")}`, at === parts.length - 1)));
    this.crumbs.replaceChildren(el("ol", {}, ...steps));
  }

  step(name, path, here) {
    const button = el("button", { type: "button", title: shownName(path), "aria-current": here ? "location" : null, onclick: () => this.go(path) }, el("bdi", {}, shownName(name)));
    return el("li", {}, button);
  }

  say(text, wrong = false) {
    this.note.textContent = text;
    this.note.className = wrong ? "panel-error" : "panel-hint";
    this.note.hidden = !text;
  }

  /** Does something to the files, says what went wrong, and shows how they are then. */
  async change(path, json) {
    try {
      await this.playground.ensure();
      await this.playground.api(boxPath(this.playground.sandbox, path), { method: "POST", json });
    } catch (error) {
      toast(error.message, "bad");
    }
    await this.refresh();
  }

  async makeDirectory() {
    const name = await ask("New directory", { value: "", detail: `in ${shownName(this.directory)}`, confirm: "Make" });
    if (name) await this.change("/files/make_dir", { path: join(this.directory, name) });
  }

  async rename(file) {
    const name = await ask(`Rename ${shownName(file.name)}`, { value: file.name, confirm: "Rename" });
    if (!name || name === file.name) return;
    if (this.files.some((each) => each.name === name)) return toast(`There is a ${name} here already: choose another name, or delete that first.`, "bad");
    const to = name.startsWith("/") ? name : join(this.directory, name);
    await this.change("/files/move", { path: file.path, to });
  }

  async remove(file) {
    const detail = isDirectory(file) && !file.target ? "With everything that is in it. This cannot be undone." : "This cannot be undone.";
    if (await ask(`Delete ${shownName(file.name)}?`, { detail, confirm: "Delete", danger: true })) await this.change("/files/remove", { path: file.path });
  }

  // -- uploads

  async picked() {
    const files = [...this.picker.files].map((file) => ({ file, name: file.name }));
    this.picker.value = "";
    await this.upload(files);
  }

  async upload(files) {
    const taken = files.filter(({ name }) => this.files.some((each) => each.name === name.split("/")[0]));
    if (taken.length && !(await ask(question(taken), { detail: `in ${shownName(this.directory)}`, confirm: "Replace" }))) return;
    try {
      await this.uploads.add(files, this.directory);
    } catch (error) {
      toast(error.message, "bad");
    }
  }

  uploaded(paths) {
    toast(paths.length === 1 ? `Uploaded ${shownName(paths[0])}` : `Uploaded ${paths.length} files into ${this.directory}`);
    this.refresh();
  }

  drag(kind, event) {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault(); // or the browser would open the file in place of the page
    const over = kind === "dragover" || kind === "dragenter" || (kind === "dragleave" && event.relatedTarget !== null);
    this.overlay.hidden = !over;
    this.overlay.querySelector(".files-drop-where").textContent = `Drop to upload into ${shownName(this.directory)}`;
    if (kind === "drop") this.dropped(event.dataTransfer);
  }

  async dropped(transfer) {
    try {
      const files = await droppedFiles(transfer);
      if (!files.length) return;
      document.getElementById(this.element.getAttribute("aria-labelledby")).click(); // or nobody would see how far it is
      await this.upload(files);
    } catch (error) {
      toast(error.message, "bad");
    }
  }
}

function question(taken) {
  return taken.length === 1 ? `Replace ${shownName(taken[0].name.split("/")[0])}?` : `Replace ${taken.length} files?`;
}

function isDirectory(file) {
  return file.kind === "directory" || file.leads_to?.kind === "directory";
}

function iconOf(file) {
  if (file.kind === "symlink") return "link";
  return isDirectory(file) ? "folder" : "file";
}
