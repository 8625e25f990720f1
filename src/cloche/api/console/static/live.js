// Keeps parts of a page up to date, while somebody looks at them; and shows times as this browser has them.
//
// `data-live` is every how many seconds, `data-live-url` where the part comes from; `data-live-switch` of a checkbox
// names the part that it turns on and off, `data-live-swap` how it is put in (with `morph:innerHTML` what has not changed
// stays, and with it focus and scrolling). A form with `data-filters` is sent when one of its lists is changed.

import { toast } from "./console.js";

function isOff(place) {
  const box = document.querySelector(`[data-live-switch="${CSS.escape(place.id)}"]`);
  return box !== null && !box.checked;
}

function isBusy(place) {
  const selection = document.getSelection();
  const selects = selection && !selection.isCollapsed && place.contains(selection.anchorNode);
  return selects || document.querySelector("dialog[open]") !== null;
}

// Now, whatever the switch says.
export function fetchPart(place) {
  return window.htmx.ajax("GET", place.dataset.liveUrl, {
    source: place,
    target: place,
    swap: place.dataset.liveSwap ?? "innerHTML",
  });
}

function refresh(place) {
  if (!document.hidden && !isOff(place) && !isBusy(place) && place.dataset.stale !== "gone") fetchPart(place);
}

// What is shown is old, since the server does not answer, or says that there is no such thing any more.
function onFailure(event) {
  const place = event.target.closest?.("[data-live]");
  if (!place) return;
  if (event.type === "htmx:sendError" && !("stale" in place.dataset)) toast("The server cannot be reached: what is shown is old", "bad");
  place.dataset.stale = event.detail.xhr?.status === 404 ? "gone" : "old";
}

function localTime(time) {
  const at = new Date(time.dateTime);
  if (Number.isNaN(at.getTime())) return;
  const today = at.toDateString() === new Date().toDateString();
  const day = today ? {} : { day: "numeric", month: "short" };
  const clock = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
  time.title = `${time.textContent.trim()} (UTC); shown as this browser's clock has it`.replace("UTC (UTC)", "UTC");
  time.textContent = at.toLocaleString(undefined, { ...day, ...clock });
  time.removeAttribute("data-time");
}

function localTimes(place) {
  for (const time of place.querySelectorAll("time[data-time]")) localTime(time);
}

function start() {
  for (const place of document.querySelectorAll("[data-live]")) {
    setInterval(() => refresh(place), Number(place.dataset.live) * 1000);
  }
  for (const form of document.querySelectorAll("form[data-filters]")) {
    form.addEventListener("change", (event) => event.target.matches("select, [data-sends]") && form.requestSubmit());
  }
  document.addEventListener("htmx:afterSwap", (event) => {
    delete event.target.dataset.stale;
    localTimes(event.target);
  });
  document.addEventListener("htmx:sendError", onFailure);
  document.addEventListener("htmx:responseError", onFailure);
  localTimes(document);
}

start();
