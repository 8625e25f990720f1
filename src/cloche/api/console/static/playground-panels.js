// The side panels: each is a module `panel-NAME.js` that is loaded when its tab is first chosen.
//
// It exports `mount(element, playground)`. `playground` is the object of playground.js:
//   sandbox            the id of the sandbox, or null while there is none
//   context            the id of the chosen context
//   api                console.js's
//   ensure()           a promise of the sandbox's id: one is made where there is none
//   onSandboxChange(f) calls f(id or null) whenever the sandbox is another one, or has ended (null)
//   onContextChange(f) calls f(id) whenever another context is chosen
//   onRunEnded(f)      calls f({outcome, files}) after each run; `files` are those that it wrote
//   insertCell(code, language)   a new cell behind the chosen one, in a context of that language
//   run(code)          runs code in a new cell of the chosen context; a promise of its outcome

import { toast } from "./console.js";
import { iconButton } from "./panel-parts.js";

const CHOSEN = "cloche.playground.panel";
const WIDE = "cloche.playground.wide";

export function mountPanels(root, playground) {
  const tabs = [...root.querySelectorAll("[role=tab]")];
  const choose = (tab) => show(tabs, tab, playground);
  for (const tab of tabs) tab.addEventListener("click", () => choose(tab));
  root.querySelector("[role=tablist]").addEventListener("keydown", (event) => step(event, tabs, choose));
  root.append(widener(root.parentElement));
  const kept = sessionStorage.getItem(CHOSEN);
  choose(tabs.find((tab) => tab.dataset.panel === kept) || tabs[0]);
  load(tabs.find((tab) => tab.dataset.panel === "files"), playground); // it takes what is dropped anywhere on the page
}

/** A switch that gives the panels more of the page than the notebook: a terminal of forty columns is hard to work in. */
function widener(body) {
  const button = iconButton("wider", "Wide panels", () => set(button.getAttribute("aria-pressed") !== "true"), { class: "panel-icon-button pg-widen" });
  const set = (wide) => {
    button.setAttribute("aria-pressed", String(wide));
    body.classList.toggle("pg-wide", wide);
    localStorage.setItem(WIDE, wide ? "yes" : "");
  };
  set(localStorage.getItem(WIDE) === "yes");
  return button;
}

export function step(event, tabs, choose) {
  const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -tabs.length, End: tabs.length };
  if (!(event.key in moves)) return;
  event.preventDefault();
  const now = tabs.indexOf(document.activeElement);
  const next = event.key === "Home" ? 0 : event.key === "End" ? tabs.length - 1 : (now + moves[event.key] + tabs.length) % tabs.length;
  tabs[next].focus();
  choose(tabs[next]);
}

async function show(tabs, chosen, playground) {
  for (const tab of tabs) {
    const is = tab === chosen;
    tab.setAttribute("aria-selected", String(is));
    tab.tabIndex = is ? 0 : -1;
    panelOf(tab).hidden = !is;
  }
  sessionStorage.setItem(CHOSEN, chosen.dataset.panel);
  await load(chosen, playground);
}

function panelOf(tab) {
  return document.getElementById(tab.getAttribute("aria-controls"));
}

async function load(tab, playground) {
  if (tab.dataset.loaded) return;
  tab.dataset.loaded = "yes";
  try {
    const panel = await import(`./panel-${tab.dataset.panel}.js`);
    await panel.mount(panelOf(tab), playground);
  } catch (error) {
    delete tab.dataset.loaded;
    toast(`The panel could not be opened: ${error.message}`, "bad");
  }
}
