// Inside the frame: an opaque origin without network. It draws what the page sends, and tells its height; nothing else.
(() => {
  const shown = document.getElementById("shown");
  const loaded = new Set();
  const draws = { html, svg, markdown, latex, plotly, vega, javascript };
  let told = 0;

  function fragment(source) {
    return document.createRange().createContextualFragment(source); // its scripts run, here and as nobody
  }

  function html(source) {
    shown.replaceChildren(fragment(source));
  }

  function svg(source) {
    shown.replaceChildren(fragment(source.replace(/^\s*<\?xml[^>]*\?>/, "").replace(/^\s*<!DOCTYPE[^>]*>/i, "")));
  }

  function javascript(source) {
    shown.replaceChildren();
    const script = document.createElement("script");
    script.textContent = source;
    shown.append(script);
  }

  /** Formulas are taken out before Markdown is read, which would take their signs for its own. */
  function markdown(source) {
    const kept = [];
    const keep = (whole, formula, display) => `\u0002${kept.push(typeset(formula, display, whole)) - 1}\u0003`;
    const masked = source
      .replace(/[\u0002\u0003]/g, "")
      .replace(/(```[\s\S]*?(?:```|$)|`[^`\n]*`)|\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\]|(?<![\\$])\$(?![\s$])([^$\n]*?[^\s$\\])\$(?!\d)|\\\(([\s\S]+?)\\\)/g, (whole, code, a, b, c, d) =>
        code !== undefined ? whole : keep(whole, a ?? b ?? c ?? d, a !== undefined || b !== undefined));
    const made = marked.parse(masked, { gfm: true });
    shown.className = "markdown";
    shown.replaceChildren(fragment(made.replace(/\u0002(\d+)\u0003/g, (_, index) => kept[Number(index)] ?? "")));
  }

  function typeset(formula, displayMode, whole) {
    try {
      return katex.renderToString(formula, { displayMode, throwOnError: true, trust: false, maxExpand: 1000, strict: false });
    } catch {
      return escaped(whole);
    }
  }

  function escaped(text) {
    const element = document.createElement("span");
    element.textContent = text;
    return element.innerHTML;
  }

  function latex(source) {
    const text = source.trim();
    const bare = text.match(/^\$\$([\s\S]*)\$\$$/) || text.match(/^\\\[([\s\S]*)\\\]$/);
    const inline = text.match(/^\$([^$]*)\$$/) || text.match(/^\\\(([\s\S]*)\\\)$/);
    if (bare || inline || /^\\begin\{/.test(text)) {
      shown.replaceChildren(fragment(typeset((bare || inline || [null, text])[1], !inline || /\\displaystyle/.test(text), text)));
    } else markdown(text);
  }

  async function plotly(figure) {
    shown.replaceChildren();
    shown.className = "light-only";
    const config = { displaylogo: false, ...figure.config, responsive: true };
    await Plotly.newPlot(shown, figure.data || [], figure.layout || {}, config);
    if (figure.frames) await Plotly.addFrames(shown, figure.frames);
  }

  async function vega(spec) {
    shown.replaceChildren();
    const theme = document.documentElement.dataset.theme === "dark" ? "dark" : undefined;
    const config = theme ? { background: "transparent" } : {};
    await vegaEmbed(shown, spec, { actions: false, theme, config, downloadFileName: "chart" });
  }

  function load(library) {
    if (loaded.has(library.name)) return;
    loaded.add(library.name);
    for (const [kind, texts] of [["style", library.styles], ["script", library.scripts]]) {
      for (const text of texts) {
        const element = document.createElement(kind);
        element.textContent = text;
        document.head.append(element);
      }
    }
  }

  async function draw(asked) {
    document.documentElement.dataset.theme = asked.dark ? "dark" : "light";
    try {
      asked.libraries.forEach(load);
      shown.className = "";
      await draws[asked.kind](asked.content);
    } catch (error) {
      say(`This could not be drawn: ${String(error && error.message).slice(0, 300)}`);
    }
    tell();
  }

  function say(text) {
    const note = document.createElement("p");
    note.className = "problem";
    note.textContent = text;
    shown.replaceChildren(note);
  }

  function tell() {
    const height = Math.ceil(document.documentElement.getBoundingClientRect().height);
    if (height === told) return;
    told = height;
    parent.postMessage(height, "*");
  }

  addEventListener("message", (event) => {
    if (event.source !== parent || !event.data) return;
    if (draws[event.data.kind]) draw(event.data);
    else if ("dark" in event.data) document.documentElement.dataset.theme = event.data.dark ? "dark" : "light";
  });

  // Nothing can be opened from here: a link says where it leads, and stays.
  addEventListener("click", (event) => {
    const link = event.target.closest && event.target.closest("a[href]");
    if (!link || link.getAttribute("href").startsWith("#")) return;
    event.preventDefault();
    link.title = link.href;
  });

  new ResizeObserver(() => requestAnimationFrame(tell)).observe(document.documentElement);
})();
