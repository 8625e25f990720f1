// Keys: adding, revoking, and how much they and their owners may use. All of it by `/admin`, as every admin has it.

import { api, toast } from "./console.js";

const DAY_SECONDS = 86400;
const UNITS = { "": 1, b: 1, k: 2 ** 10, kib: 2 ** 10, kb: 1e3, m: 2 ** 20, mib: 2 ** 20, mb: 1e6, g: 2 ** 30, gib: 2 ** 30, gb: 1e9, t: 2 ** 40, tib: 2 ** 40, tb: 1e12 };
const UNLIMITED = "unlimited";

const dialogs = Object.fromEntries(["add-key", "new-key", "quota", "rotate-key", "revoke-key"].map((id) => [id, document.getElementById(id)]));

// --- dialogs

function open(dialog) {
  say(dialog, "");
  dialog.showModal();
}

function say(dialog, problem) {
  const line = dialog.querySelector("[data-problem]");
  if (!line) return;
  line.hidden = !problem;
  line.textContent = problem;
}

// Runs `work` when the dialog's form is sent; it stays open, and says why, where that fails.
function onSend(dialog, work) {
  dialog.querySelector("form").addEventListener("submit", async (event) => {
    event.preventDefault();
    await attempt(dialog, () => work(new FormData(event.target)));
  });
}

async function attempt(dialog, work) {
  const buttons = [...dialog.querySelectorAll("button")];
  for (const each of buttons) each.disabled = true;
  try {
    await work();
    dialog.close();
    if (!dialogs["new-key"].open) refresh(); // else when that was read: who rotated their own key is logged out then
  } catch (error) {
    say(dialog, error.message);
  } finally {
    for (const each of buttons) each.disabled = false;
  }
}

function refresh() {
  window.htmx.ajax("GET", location.pathname + location.search, { target: "#key-rows", swap: "innerHTML" });
}

// --- adding

async function add(form) {
  const days = form.get("expires");
  const made = await api("/admin/keys", {
    method: "POST",
    json: {
      name: form.get("name").trim(),
      owner: form.get("owner").trim(),
      role: form.get("role"),
      expires_at: days ? Date.now() / 1000 + Number(days) * DAY_SECONDS : null,
    },
  });
  dialogs["add-key"].querySelector("form").reset();
  show(made);
}

function show(made) {
  dialogs["new-key"].querySelector("h2").textContent = `The new key of ${made.owner}${made.name ? `, ${made.name}` : ""}`;
  dialogs["new-key"].querySelector("[data-key]").textContent = made.key;
  dialogs["new-key"].querySelector("[data-copy]").textContent = "Copy";
  dialogs["new-key"].showModal();
}

// Erases the key at once: the dialog's "close" event comes only after the dialog is gone from the screen.
function eraseKey() {
  dialogs["new-key"].querySelector("[data-key]").textContent = "";
}

async function copy() {
  const code = dialogs["new-key"].querySelector("[data-key]");
  try {
    await navigator.clipboard.writeText(code.textContent);
    dialogs["new-key"].querySelector("[data-copy]").textContent = "Copied";
  } catch {
    document.getSelection().selectAllChildren(code); // without a secure origin there is no clipboard: by hand, then
    toast("Press Ctrl-C to copy it", "");
  }
}

// --- rotating and revoking

let meant = ""; // the id of the key that a dialog asks about

function askToEnd(dialog, verb, id, button) {
  meant = id;
  dialog.querySelector("h2").textContent = `${verb} the key ${button.dataset.whose}?`;
  dialog.querySelector("[data-own]").hidden = !("isOwn" in button.dataset);
  dialog.querySelector("form").reset();
  open(dialog);
}

async function rotate() {
  show(await api(`/admin/keys/${encodeURIComponent(meant)}/rotate`, { method: "POST", json: {} }));
}

async function revoke(form) {
  const kill = form.get("kill") !== null;
  const told = await api(`/admin/keys/${encodeURIComponent(meant)}${kill ? "?kill=true" : ""}`, { method: "DELETE" });
  toast(kill ? `The key is revoked, and ${told.sandboxes_killed} of its sandboxes were ended` : "The key is revoked", "ok");
}

// --- quotas

let quotaPath = "";

async function askForQuota(button) {
  const dialog = dialogs.quota;
  quotaPath = button.dataset.quota;
  try {
    const [told, all] = await Promise.all([api(quotaPath), api("/admin/quotas")]);
    fill(dialog, told, "key_id" in told ? all.defaults.key : all.defaults.owner);
  } catch (error) {
    toast(error.message, "bad");
    return;
  }
  dialog.querySelector("h2").textContent = `Quota of ${button.dataset.whose}`;
  open(dialog);
}

function fill(dialog, told, defaults) {
  for (const field of dialog.querySelectorAll("[data-quota-field]")) {
    const name = field.dataset.quotaField;
    const input = field.querySelector("input");
    field.hidden = name === "stored_bytes" && "key_id" in told; // what is stored belongs to owners
    input.value = name in told.own ? written(name, told.own[name]) : "";
    input.placeholder = `default: ${written(name, defaults[name] ?? null)}`;
  }
}

function written(name, amount) {
  if (amount === null) return UNLIMITED;
  if (!name.endsWith("_bytes")) return String(amount);
  const unit = ["TiB", "GiB", "MiB", "KiB"].find((each) => amount > 0 && amount % UNITS[each.toLowerCase()] === 0);
  return unit ? `${amount / UNITS[unit.toLowerCase()]}${unit}` : String(amount);
}

function amountOf(name, title, text) {
  if (text.toLowerCase() === UNLIMITED) return null;
  const [, number, unit] = /^(\d+(?:\.\d+)?)\s*([a-z]*)$/i.exec(text) ?? [];
  const factor = name.endsWith("_bytes") ? UNITS[(unit ?? "").toLowerCase()] : unit ? undefined : 1;
  if (number === undefined || factor === undefined) {
    const like = name.endsWith("_bytes") ? ", such as 512MiB or 5GiB" : "";
    throw new Error(`${title}: ${text} is neither a number${like}, nor ${UNLIMITED}`);
  }
  return Number(number) * factor;
}

async function setQuota(form) {
  const own = {};
  for (const field of dialogs.quota.querySelectorAll("[data-quota-field]")) {
    const name = field.dataset.quotaField;
    const text = form.get(name).trim();
    if (text && !field.hidden) own[name] = amountOf(name, field.querySelector("label").textContent, text);
  }
  await api(quotaPath, { method: "PUT", json: own });
  toast("The quota is set", "ok");
}

async function resetQuota() {
  await api(quotaPath, { method: "DELETE" });
  toast("The defaults hold again", "ok");
}

// --- the page

function onClick(event) {
  const button = event.target.closest("button");
  if (!button) return;
  if ("addKey" in button.dataset) open(dialogs["add-key"]);
  else if ("close" in button.dataset) button.closest("dialog").close();
  else if ("copy" in button.dataset) copy();
  else if (button.dataset.rotate) askToEnd(dialogs["rotate-key"], "Rotate", button.dataset.rotate, button);
  else if (button.dataset.revoke) askToEnd(dialogs["revoke-key"], "Revoke", button.dataset.revoke, button);
  else if (button.dataset.quota) askForQuota(button);
  else if ("reset" in button.dataset) attempt(dialogs.quota, resetQuota);
}

function start() {
  document.addEventListener("click", onClick);
  dialogs["new-key"].querySelector("[data-close]").addEventListener("click", eraseKey);
  dialogs["new-key"].addEventListener("cancel", eraseKey); // by the Escape key
  dialogs["new-key"].addEventListener("close", refresh);
  onSend(dialogs["add-key"], add);
  onSend(dialogs["rotate-key"], rotate);
  onSend(dialogs["revoke-key"], revoke);
  onSend(dialogs.quota, setQuota);
}

start();
