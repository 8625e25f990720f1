// Templates: pinning, removing, building, finding a package, and following a log.

import { api, confirmed, toast } from "./console.js";

const QUESTIONS = {
  remove: (shown) => `Remove ${shown}? No sandbox can be made from it any more. It can be built again from its recipe.`,
  "remove-built": (shown) => `Remove ${shown} with all its builds and tags? Sandboxes that were made from it go on.`,
};

function send(what, ref) {
  if (what === "remove-built") return api(`/templates/built/${encodeURIComponent(ref)}/remove`, { method: "POST" });
  return api(`/templates/${what}`, { method: "POST", json: { ref } });
}

async function act(button) {
  const { do: what, ref, shown } = button.dataset;
  const question = QUESTIONS[what]?.(shown);
  if (question && !(await confirmed(question, { action: "Remove", danger: true }))) return;
  button.disabled = true;
  try {
    toast((await send(what, ref)).said, "ok");
    refresh();
  } catch (error) {
    toast(error.message, "bad");
    button.disabled = false;
  }
}

function refresh() {
  if (document.getElementById("template-list")) {
    window.htmx.ajax("GET", location.pathname + location.search, { target: "#template-list", swap: "innerHTML" });
  } else {
    location.reload();
  }
}

async function build(event) {
  event.preventDefault();
  const form = event.target;
  const problem = form.querySelector("[data-problem]");
  const button = form.querySelector("button");
  problem.hidden = button.disabled = true;
  try {
    const { id } = await api("/templates/build", { method: "POST", json: { recipe: form.elements.recipe.value } });
    location.assign(`/ui/templates/builds/${id}`);
  } catch (error) {
    problem.textContent = error.message;
    problem.hidden = button.disabled = false;
  }
}

function filter(input) {
  const list = document.getElementById(input.dataset.filter);
  const wanted = input.value.trim().toLowerCase();
  let shown = 0;
  for (const item of list.children) {
    item.hidden = !item.textContent.toLowerCase().includes(wanted);
    if (!item.hidden) shown += 1;
  }
  document.getElementById(`${list.id}-none`).hidden = shown > 0;
}

// What somebody opened stays open when the list is replaced by a newer one.
function keepOpen(list) {
  const open = new Set();
  list.addEventListener("toggle", ({ target }) => (target.open ? open.add(target.id) : open.delete(target.id)), true);
  document.addEventListener("htmx:beforeSwap", () => {
    const before = [...open];
    document.addEventListener("htmx:afterSettle", () => before.forEach(reopen), { once: true });
  });
}

function reopen(id) {
  const details = document.getElementById(id);
  if (details) details.open = true;
}

// The newest line stays in sight, unless somebody scrolled away from it.
function follow(log) {
  let follows = true;
  const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 24;
  log.addEventListener("scroll", () => (follows = isAtEnd()), { passive: true });
  new MutationObserver(() => follows && log.scrollTo(0, log.scrollHeight)).observe(log, { childList: true });
  log.scrollTo(0, log.scrollHeight);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-do]");
  if (button) act(button);
});
document.querySelector("form[data-recipe]")?.addEventListener("submit", build);
for (const input of document.querySelectorAll("input[data-filter]")) input.addEventListener("input", () => filter(input));
for (const list of document.querySelectorAll("#template-list")) keepOpen(list);
for (const log of document.querySelectorAll("[data-follows]")) follow(log);
