// xterm writes `<style>` elements and `style` attributes, which a page with a strict Content-Security-Policy ignores.
// Both have forms that the policy leaves to scripts of the page: adopted style sheets, and `element.style`.

/** A stand-in for a style element: its text is a style sheet of the document's for as long as it is there. */
function sheetElement() {
  const element = document.createElement("span");
  const sheet = new CSSStyleSheet();
  element.hidden = true;
  document.adoptedStyleSheets.push(sheet);
  Object.defineProperty(element, "textContent", { set: (text) => sheet.replaceSync(text) });
  element.remove = () => {
    document.adoptedStyleSheets = document.adoptedStyleSheets.filter((each) => each !== sheet);
    Element.prototype.remove.call(element);
  };
  return element;
}

/** The text of a line is in spans, which xterm makes with the window's document whichever it was given. */
HTMLSpanElement.prototype.setAttribute = function setAttribute(name, value) {
  if (name === "style") this.style.cssText = value;
  else Element.prototype.setAttribute.call(this, name, value);
};

function createElement(tag, options) {
  return tag === "style" ? sheetElement() : Document.prototype.createElement.call(document, tag, options);
}

/** The page's document, but for what it makes. xterm takes it as `documentOverride`. */
export function strictDocument() {
  return new Proxy(document, {
    get(target, name) {
      if (name === "createElement") return createElement;
      const value = Reflect.get(target, name, target);
      return typeof value === "function" ? value.bind(target) : value;
    },
  });
}

/** Opens a terminal. xterm's scroll bar asks the window's document in place of the one that was given: for as long as it opens, both are the same. */
export function openStrictly(terminal, element) {
  document.createElement = createElement;
  try {
    terminal.open(element);
  } finally {
    delete document.createElement;
  }
}
