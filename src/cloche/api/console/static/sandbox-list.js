// The list of sandboxes: what is asked for, which are chosen, and what is done to them.

import "./clock.js";
import { api, confirmed } from "./console.js";
import { fetchPart } from "./live.js";
import { attempt, startActs } from "./sandbox-acts.js";

const place = document.getElementById("sandbox-rows");
const filters = document.getElementById("sandbox-filters");
const bar = document.querySelector("[data-chosen]");
const TYPING_MILLISECONDS = 250;
const chosen = new Set(); // ids, also of rows that are on another page
let typing = 0;

// --- what is asked for

function refresh() {
  return fetchPart(place);
}

// Shows another part of the list, in place. The address says which, so that it can be kept and sent.
function go(address, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", address);
  place.dataset.liveUrl = address;
  return refresh();
}

function asked() {
  const query = new URLSearchParams(location.search);
  query.delete("page");
  for (const [name, value] of new FormData(filters)) {
    if (value) query.set(name, value);
    else query.delete(name);
  }
  return "/ui/sandboxes" + (query.size ? `?${query}` : "");
}

function onTyping() {
  clearTimeout(typing);
  typing = setTimeout(() => go(asked(), { replace: true }), TYPING_MILLISECONDS);
}

function onPopState() {
  const query = new URLSearchParams(location.search);
  for (const name of ["text", "owner", "template"]) {
    if (filters.elements[name]) filters.elements[name].value = query.get(name) ?? "";
  }
  place.dataset.liveUrl = location.pathname + location.search;
  refresh();
}

// --- which are chosen

function boxes() {
  return [...place.querySelectorAll("[data-pick]")];
}

function idOf(box) {
  return box.closest("tr").dataset.id;
}

function choose(box) {
  if (box.checked) chosen.add(idOf(box));
  else chosen.delete(idOf(box));
}

function showChosen() {
  const all = boxes();
  for (const box of all) box.checked = chosen.has(idOf(box));
  const whole = place.querySelector("[data-pick-all]");
  const count = all.filter((box) => box.checked).length;
  if (whole) {
    whole.checked = count > 0 && count === all.length;
    whole.indeterminate = count > 0 && count < all.length;
  }
  bar.hidden = chosen.size === 0;
  bar.querySelector("[data-chosen-count]").textContent = `${chosen.size} chosen`;
}

// One that has ended meanwhile cannot be killed any more.
function forgetEnded() {
  for (const row of place.querySelectorAll('tr[data-state="ended"]')) chosen.delete(row.dataset.id);
  showChosen();
}

function clear() {
  chosen.clear();
  showChosen();
}

async function killChosen(button) {
  const ids = [...chosen];
  const what = ids.length === 1 ? ids[0] : `${ids.length} sandboxes`;
  const question = `Kill ${what}? Their programs end at once, and their files are gone. This cannot be undone.`;
  if (!(await confirmed(question, { action: "Kill", danger: true }))) return;
  await attempt(() => api("/sandboxes/kill", { method: "POST", json: { ids } }), button);
  clear();
  refresh();
}

// --- the page

function onChange(event) {
  if (event.target.matches("[data-pick]")) choose(event.target);
  else if (event.target.matches("[data-pick-all]")) {
    for (const box of boxes()) choose(Object.assign(box, { checked: event.target.checked }));
  } else if (event.target.matches("#sandbox-filters select")) go(asked());
  else return;
  showChosen();
}

function onClick(event) {
  const link = event.target.closest("a[data-go]");
  if (link && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
    event.preventDefault();
    go(link.getAttribute("href"));
  } else if (event.target.closest("[data-kill-chosen]")) killChosen(event.target.closest("button"));
  else if (event.target.closest("[data-clear-chosen]")) clear();
}

function start() {
  document.addEventListener("click", onClick);
  document.addEventListener("change", onChange);
  filters.addEventListener("input", (event) => event.target.type === "search" && onTyping());
  filters.addEventListener("submit", (event) => {
    event.preventDefault();
    go(asked());
  });
  window.addEventListener("popstate", onPopState);
  place.addEventListener("htmx:afterSwap", forgetEnded);
  startActs(refresh);
  showChosen();
}

start();
