// Which of a result's forms is shown, and how. The order is Jupyter's: the richest first.

import { FrameView } from "./playground-frame.js";
import { tree } from "./playground-json.js";
import { TextView } from "./playground-text.js";
import { el } from "./panel-parts.js";

const LARGEST_IMAGE = 48 * 1024 * 1024; // characters of base64
const ORDER = [
  [/^application\/vnd\.plotly\.v1\+json$/, framed("plotly")],
  [/^application\/vnd\.vega(?:lite)?\.v\d+(?:\.\d+)*\+json$/, framed("vega")],
  [/^text\/html$/, framed("html")],
  [/^text\/markdown$/, framed("markdown")],
  [/^image\/svg\+xml$/, framed("svg")],
  [/^text\/latex$/, framed("latex")],
  [/^image\/(?:png|jpeg|gif|webp)$/, image],
  [/^application\/pdf$/, download],
  [/^application\/(?!vnd\.cloche\.|vnd\.jupyter\.widget)(?:[\w.-]+\+)?json$/, json],
  [/^application\/javascript$/, framed("javascript")],
  [/^text\/plain$/, text],
];

/** A view of the bundle: `element`, `mime`, `update(bundle)` (false where another view is needed) and `close()`. */
export function viewOf(bundle) {
  const mimes = Object.keys(bundle);
  for (const [pattern, make] of ORDER) {
    const mime = mimes.find((each) => pattern.test(each));
    if (mime !== undefined) return Object.assign(make(bundle[mime], mime), { mime });
  }
  return { element: el("p", { class: "pg-note" }, `A result of a kind that is not shown: ${mimes.slice(0, 5).join(", ").slice(0, 200)}`), update: () => false, close() {} };
}

function framed(kind) {
  return (content, mime) => {
    const view = new FrameView(kind, joined(content));
    return {
      element: view.element,
      close: () => view.close(),
      update: (bundle) => mime in bundle && (view.update(kind, joined(bundle[mime])), true),
    };
  };
}

function joined(content) {
  return Array.isArray(content) && content.every((line) => typeof line === "string") ? content.join("") : content;
}

function image(content, mime) {
  const picture = el("img", { class: "pg-image", alt: "Picture that the program drew" });
  let address = "";
  const show = (encoded) => {
    URL.revokeObjectURL(address);
    address = encoded.length > LARGEST_IMAGE ? "" : URL.createObjectURL(blobOf(encoded, mime));
    picture.src = address;
  };
  show(joined(content));
  return {
    element: picture,
    close: () => URL.revokeObjectURL(address),
    update: (bundle) => mime in bundle && (show(joined(bundle[mime])), true),
  };
}

function blobOf(encoded, mime) {
  try {
    const bytes = Uint8Array.from(atob(encoded.replace(/\s/g, "")), (character) => character.charCodeAt(0));
    return new Blob([bytes], { type: mime });
  } catch {
    return new Blob([], { type: mime });
  }
}

function download(content, mime) {
  const address = URL.createObjectURL(blobOf(joined(content), mime));
  const link = el("a", { href: address, download: "result.pdf", class: "pg-download" }, "Download the PDF");
  return { element: link, close: () => URL.revokeObjectURL(address), update: () => false };
}

function json(content) {
  return { element: el("div", { class: "pg-tree" }, tree(content)), close() {}, update: () => false };
}

function text(content) {
  const view = new TextView("pg-plain");
  view.write(String(joined(content)));
  return {
    element: view.element,
    close() {},
    update(bundle) {
      if (!("text/plain" in bundle) || viewKind(bundle) !== "text/plain") return false;
      view.reset();
      view.write(String(joined(bundle["text/plain"])));
      return true;
    },
  };
}

function viewKind(bundle) {
  const mimes = Object.keys(bundle);
  for (const [pattern] of ORDER) {
    const found = mimes.find((each) => pattern.test(each));
    if (found !== undefined) return found;
  }
  return null;
}
