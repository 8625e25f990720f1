// What can be done to a sandbox: on the list, and on its own page. The same buttons, dialogs and words.

import { api, confirmed, toast } from "./console.js";

const dialog = document.getElementById("renew");

function path(id, what) {
  return `/sandboxes/${encodeURIComponent(id)}/${what}`;
}

// How many minutes; null where it was cancelled.
function askMinutes(id) {
  dialog.querySelector("h2").textContent = `Renew ${id}`;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const onClose = () => resolve(dialog.returnValue === "yes" ? Number(dialog.querySelector("input").value) : null);
    dialog.addEventListener("close", onClose, { once: true });
  });
}

const ACTS = {
  pause: (id) => api(path(id, "pause"), { method: "POST" }),
  resume: (id) => api(path(id, "resume"), { method: "POST" }),
  async renew(id) {
    const minutes = await askMinutes(id);
    return minutes === null ? null : api(path(id, "renew"), { method: "POST", json: { minutes } });
  },
  async kill(id) {
    const question = `Kill ${id}? Its programs end at once, and its files are gone. This cannot be undone.`;
    return (await confirmed(question, { action: "Kill", danger: true })) ? api(path(id, "kill"), { method: "POST" }) : null;
  },
};

// Says what came of it. Whether it was done.
export async function attempt(work, button) {
  if (button) button.disabled = true;
  try {
    const told = await work();
    if (told) toast(told.said, "ok");
    return told !== null;
  } catch (error) {
    toast(error.message, "bad");
    return true; // things are not as the page shows them
  } finally {
    if (button) button.disabled = false;
  }
}

export async function killProcess(id, process) {
  const question = "Kill this process? It ends at once.";
  if (!(await confirmed(question, { action: "Kill", danger: true }))) return null;
  return api(path(id, `processes/${encodeURIComponent(process)}/kill`), { method: "POST" });
}

// `refreshed` is called when something was done.
export function startActs(refreshed) {
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if ("close" in button.dataset) button.closest("dialog").close();
    const act = ACTS[button.dataset.do];
    const id = button.closest("[data-id]")?.dataset.id;
    if (act && id && (await attempt(() => act(id), button))) refreshed();
  });
}
