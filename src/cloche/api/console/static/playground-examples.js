// Something to begin with, for a notebook in which nothing is yet.

import { el } from "./panel-parts.js";

const EXAMPLES = {
  "a plot": "import numpy as np\nimport matplotlib.pyplot as plt\n\nx = np.linspace(0, 4 * np.pi, 400)\nplt.figure(figsize=(7, 3))\nplt.plot(x, np.sin(x) * np.exp(-x / 6))\nplt.title(\"A wave that fades\")\nplt.show()",
  "a table": "import pandas as pd\n\npd.DataFrame({\"city\": [\"Oslo\", \"Rome\", \"Lima\"], \"people\": [709_000, 2_873_000, 10_092_000]})",
  "a question": "name = input(\"Your name? \")\nprint(f\"Hello, {name}!\")",
};

/** A line with examples, which goes when the notebook has code in it. `insert(code)` takes one. */
export function examples(notebook, insert) {
  const buttons = Object.entries(EXAMPLES).map(([name, code]) => el("button", { type: "button", class: "quiet small", onclick: () => insert(code) }, name));
  const line = el("p", { class: "pg-examples" }, el("span", {}, "Begin with"), ...buttons);
  const look = () => (line.hidden = notebook.sheets.length > 1 || notebook.sheets.some((sheet) => sheet.language !== "python" || sheet.text.trim() !== ""));
  notebook.place.addEventListener("input", look);
  return { line, look };
}
