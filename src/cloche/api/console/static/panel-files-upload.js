// Uploads into a sandbox: a few at a time, each with its progress, and an end that says what went wrong.

import { headersOf } from "./console.js";
import { boxPath, el, iconButton, messageOf, shownName, sizeText } from "./panel-parts.js";

const AT_ONCE = 3;
const MAX_FILES = 2000; // of one drop: a directory may hold any number

/** A list of uploads. `ended(paths)` is called when none is left, with the paths that arrived. */
export class Uploads {
  constructor(playground, ended) {
    this.element = el("ul", { class: "files-uploads", "aria-label": "Uploads" });
    this.playground = playground;
    this.ended = ended;
    this.waiting = [];
    this.running = 0;
    this.arrived = [];
    this.limitBytes = null;
  }

  /** Files are `{file, name}`; a name may have directories in it. */
  async add(files, directory) {
    this.limitBytes ??= (await this.playground.api("/api/v1/info")).max_upload_bytes;
    const sandbox = await this.playground.ensure();
    for (const { file, name } of files) this.waiting.push(this.row(file, name, join(directory, name), sandbox));
    this.next();
  }

  row(file, name, path, sandbox) {
    const bar = el("progress", { max: 100, value: 0, "aria-label": `Upload of ${shownName(name)}` });
    const note = el("span", { class: "files-upload-note" }, sizeText(file.size));
    const upload = { file, name, path, sandbox, bar, note, cancelled: false };
    const cancel = iconButton("close", `Cancel the upload of ${shownName(name)}`, () => this.cancel(upload));
    upload.item = el("li", {}, el("span", { class: "files-upload-name" }, shownName(name)), bar, note, cancel);
    this.element.append(upload.item);
    return upload;
  }

  next() {
    while (this.running < AT_ONCE && this.waiting.length) {
      this.running += 1;
      this.send(this.waiting.shift()).finally(() => {
        this.running -= 1;
        this.next();
      });
    }
    if (!this.running && !this.waiting.length && this.arrived.length) this.ended(this.arrived.splice(0));
  }

  async send(upload) {
    if (upload.cancelled) return;
    if (upload.file.size > this.limitBytes) return fail(upload, `too large: the server takes ${sizeText(this.limitBytes)} at most`);
    try {
      await put(upload);
      this.arrived.push(upload.path);
      upload.item.remove();
    } catch (error) {
      fail(upload, error.message);
    }
  }

  cancel(upload) {
    upload.cancelled = true;
    upload.request?.abort();
    upload.item.remove();
  }
}

/** XMLHttpRequest, since fetch does not tell how much it has sent. */
function put(upload) {
  const request = (upload.request = new XMLHttpRequest());
  request.open("PUT", `/ui${boxPath(upload.sandbox, `/files/content?path=${encodeURIComponent(upload.path)}`)}`);
  const headers = headersOf({ "Content-Type": "application/octet-stream" });
  for (const [name, value] of Object.entries(headers)) request.setRequestHeader(name, value);
  request.upload.addEventListener("progress", (event) => {
    if (event.total) upload.bar.value = (100 * event.loaded) / event.total;
  });
  return new Promise((resolve, reject) => {
    request.addEventListener("load", () => (request.status < 300 ? resolve() : reject(new Error(messageOf(request.status, request.responseText)))));
    request.addEventListener("error", () => reject(new Error("the connection was lost; try again")));
    request.addEventListener("abort", () => reject(new Error("cancelled")));
    request.send(upload.file);
  });
}

function fail(upload, message) {
  upload.item.classList.add("failed");
  upload.bar.remove();
  upload.note.textContent = message;
  upload.note.setAttribute("role", "alert");
}

export function join(directory, name) {
  return `${directory.replace(/\/+$/, "")}/${name}`;
}

/** What a drop brought, directories walked through: `{file, name}` each. Throws Error if there are too many. */
export async function droppedFiles(transfer) {
  const entries = [...transfer.items].filter((item) => item.kind === "file").map((item) => item.webkitGetAsEntry?.() ?? item.getAsFile());
  const found = [];
  for (const entry of entries) if (entry) await gather(entry, "", found);
  return found;
}

async function gather(entry, prefix, found) {
  if (found.length >= MAX_FILES) throw new Error(`more than ${MAX_FILES} files at once: pack them into an archive`);
  if (entry instanceof File) found.push({ file: entry, name: prefix + entry.name });
  else if (entry.isFile) found.push({ file: await new Promise((resolve, reject) => entry.file(resolve, reject)), name: prefix + entry.name });
  else for (const child of await childrenOf(entry)) await gather(child, `${prefix}${entry.name}/`, found);
}

async function childrenOf(directory) {
  const reader = directory.createReader();
  const all = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length || all.length > MAX_FILES) return all;
    all.push(...some);
  }
}
