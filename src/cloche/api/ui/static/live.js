// Keeps parts of a page up to date, while somebody looks at them; and shows times as this browser has them.
//
// `data-live` is every how many seconds, `data-live-url` where the part comes from; `data-live-switch` of a checkbox
// names the part that it turns on and off. A form with `data-filters` is sent when one of its lists is changed.

function isOff(place) {
  const box = document.querySelector(`[data-live-switch="${CSS.escape(place.id)}"]`);
  return box !== null && !box.checked;
}

function isBusy(place) {
  const selection = document.getSelection();
  const selects = selection && !selection.isCollapsed && place.contains(selection.anchorNode);
  return selects || document.querySelector("dialog[open]") !== null;
}

function refresh(place) {
  if (document.hidden || isOff(place) || isBusy(place)) return;
  window.htmx.ajax("GET", place.dataset.liveUrl, { target: place, swap: "innerHTML" });
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
  document.addEventListener("htmx:afterSwap", (event) => localTimes(event.target));
  localTimes(document);
}

start();
