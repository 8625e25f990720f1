// One sandbox: what can be done to it and to what runs in it.

import "./clock.js";
import { fetchPart } from "./live.js";
import { attempt, killProcess, startActs } from "./sandbox-acts.js";

const place = document.getElementById("sandbox-facts");

function refresh() {
  fetchPart(place);
}

async function onClick(event) {
  const button = event.target.closest("[data-kill-process]");
  if (!button) return;
  if (await attempt(() => killProcess(place.dataset.id, button.dataset.killProcess), button)) refresh();
}

document.addEventListener("click", onClick);
startActs(refresh);
