// Copy buttons: `data-copy` names the element whose text is copied.

import { toast } from "./console.js";

const SHOWN_MILLISECONDS = 2000;

async function copy(button) {
  const source = document.getElementById(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(source.textContent);
  } catch {
    document.getSelection().selectAllChildren(source); // without a secure origin there is no clipboard: by hand, then
    toast("Press Ctrl-C to copy it", "");
    return;
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), SHOWN_MILLISECONDS);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-copy]");
  if (button?.dataset.copy) copy(button);
});
