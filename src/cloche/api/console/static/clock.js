// Time that goes by on a page: `data-left` and `data-age` are seconds at the moment when the server wrote them.
//
// Reckoned from when they arrived, so that it does not matter what time this machine believes it is.

const UNITS = [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]];
const SOON_SECONDS = 60;
const arrivedAt = new WeakMap();

// The two largest units, as the server writes it: 5s, 3m 20s, 2h 1m.
export function duration(seconds) {
  let rest = Math.max(Math.floor(seconds), 0);
  const parts = [];
  for (const [unit, size] of UNITS) {
    const count = Math.floor(rest / size);
    rest -= count * size;
    if (count || parts.length || unit === "s") parts.push(`${count}${unit}`);
  }
  return parts.slice(0, 2).join(" ");
}

function passed(element) {
  return (performance.now() - (arrivedAt.get(element) ?? 0)) / 1000;
}

function show(element) {
  const left = "left" in element.dataset ? Number(element.dataset.left) - passed(element) : null;
  const text = left === null ? duration(Number(element.dataset.age) + passed(element)) : left > 0 ? duration(left) : "now";
  if (element.textContent !== text) element.textContent = text;
  if (left !== null) element.classList.toggle("soon", left < SOON_SECONDS);
}

function timed(place) {
  return place.querySelectorAll("[data-left], [data-age]");
}

function arrive(place) {
  for (const element of timed(place)) {
    arrivedAt.set(element, performance.now());
    show(element);
  }
}

function start() {
  arrive(document);
  document.addEventListener("htmx:afterSwap", (event) => arrive(event.target));
  setInterval(() => {
    if (!document.hidden) for (const element of timed(document)) show(element);
  }, 1000);
}

start();
