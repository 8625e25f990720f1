'use strict';
// What a cell shows: values become MIME bundles, bundles become display frames.

// A cell may have a variable of any of these names, and at its top level that is the global one.
const { RangeError, Buffer, JSON, Object, Symbol, Set, Array, ArrayBuffer, String, Math } = globalThis;
const util = require('util');

// Written by tools/generate_tables.py.
const BINARY = new Set(['image/png', 'image/jpeg', 'image/gif', 'image/webp', 'application/pdf']);
const FRAME_BYTES = 48 << 20; // a frame's body stays below what the host accepts
const RUN_FACTOR = 2; // all displays of a run together: this many times what one part may have
const JSON_BYTES = 1 << 20;
const JSON_VALUES = 50_000;
const JUPYTER = Symbol.for('Jupyter.display');
// How a value says what it looks like: the names of ijavascript, of Python's, and plain ones.
const METHODS = [
  ['text/html', ['_toHtml', 'toHtml', '_repr_html_']],
  ['image/svg+xml', ['_toSvg', 'toSvg', '_repr_svg_']],
  ['image/png', ['_toPng', 'toPng', '_repr_png_']],
  ['image/jpeg', ['_toJpeg', 'toJpeg', '_repr_jpeg_']],
  ['text/markdown', ['_toMarkdown', 'toMarkdown', '_repr_markdown_']],
  ['text/latex', ['_toLatex', '_repr_latex_']],
];

class Screen {
  constructor(channel) {
    this._channel = channel;
    this._run = null;
  }

  start(run, partBytes) {
    this._run = run;
    this._partBytes = Math.min(partBytes, FRAME_BYTES);
    this._leftBytes = partBytes * RUN_FACTOR;
  }

  /** What is displayed from now on belongs to no run and is dropped. */
  stop() {
    this._run = null;
  }

  show(bundle, main = false) {
    if (this._run === null) return;
    const { parts, dropped } = this._fitting(bundle);
    if (parts.length) {
      const sizes = parts.map(([mime, data]) => [mime, data.length]);
      const header = { ev: 'display', run: this._run, main, id: null, update: false, parts: sizes };
      this._channel.post(header, Buffer.concat(parts.map(([, data]) => data)));
    }
    if (dropped) this._channel.send({ ev: 'truncated', run: this._run, stream: 'display', dropped });
  }

  _fitting(bundle) {
    const parts = [];
    let dropped = 0;
    let room = Math.min(this._leftBytes, FRAME_BYTES);
    for (const [mime, value] of Object.entries(bundle)) {
      const data = encoded(mime, value);
      if (data === null) continue;
      const limit = Math.max(Math.min(this._partBytes, room), 0);
      const kept = data.length <= limit ? data : mime === 'text/plain' ? wholeCharacters(data, limit) : null;
      dropped += data.length - (kept?.length ?? 0);
      if (!kept || (!kept.length && data.length)) continue;
      parts.push([mime, kept]);
      room -= kept.length;
      this._leftBytes -= kept.length;
    }
    return { parts, dropped };
  }
}

/** The first bytes of UTF-8 text, without half a character at the end. */
function wholeCharacters(data, limit) {
  let end = limit;
  while (end > 0 && (data[end] & 0xc0) === 0x80) end -= 1;
  return data.subarray(0, end);
}

/** The MIME bundle of a value. */
function bundleOf(value) {
  const told = told_by(value);
  const bundle = { 'text/plain': util.inspect(value, { maxStringLength: null }), ...told };
  if (isPlain(value) && !Object.keys(told).length && isSmall(value)) bundle['application/json'] = value;
  return bundle;
}

function told_by(value) {
  if (value === null || (typeof value !== 'object' && typeof value !== 'function')) return {};
  const whole = typeof value[JUPYTER] === 'function' ? value[JUPYTER]() : typeof value._toMime === 'function' ? value._toMime() : null;
  if (whole && typeof whole === 'object') return whole;
  const bundle = {};
  for (const [mime, names] of METHODS) {
    const name = names.find((each) => typeof value[each] === 'function');
    const shown = name && value[name]();
    if (shown !== undefined && shown !== null && shown !== '') bundle[mime] = shown;
  }
  return bundle;
}

/** Whether a value as JSON is worth its bytes beside the text. */
function isSmall(value) {
  let left = JSON_VALUES;
  const counted = (_, one) => {
    if ((left -= 1) < 0) throw new RangeError('too many values');
    return one;
  };
  try {
    return JSON.stringify(value, counted).length <= JSON_BYTES;
  } catch {
    return false;
  }
}

function isPlain(value) {
  if (Array.isArray(value)) return true;
  if (value === null || typeof value !== 'object' || util.types.isProxy(value)) return false;
  const prototype = Object.getPrototypeOf(value);
  return prototype === Object.prototype || prototype === null;
}

/** One part of a display as it is on the wire. null if `value` cannot be of that type. */
function encoded(mime, value) {
  if (BINARY.has(mime)) return bytesOf(value);
  if (mime.endsWith('json')) return asJson(value);
  if (ArrayBuffer.isView(value)) return Buffer.from(bytesOf(value).toString('base64'));
  return typeof value === 'string' ? Buffer.from(value) : asJson(value);
}

function bytesOf(value) {
  if (typeof value === 'string') return Buffer.from(value.replace(/^data:[^,]*;base64,/, ''), 'base64');
  if (value instanceof ArrayBuffer) return Buffer.from(value);
  return ArrayBuffer.isView(value) ? Buffer.from(value.buffer, value.byteOffset, value.byteLength) : null;
}

function asJson(value) {
  try {
    const text = JSON.stringify(value);
    return text === undefined ? null : Buffer.from(text);
  } catch {
    return null; // it refers to itself, or has a bigint
  }
}

/** `display(value)`, and `display.html(text)` and its like; `$$`, as ijavascript calls it, is the same. */
function displayFor(screen) {
  const display = (...values) => values.forEach((value) => screen.show(bundleOf(value)));
  const as = (mime) => (content) => screen.show({ [mime]: content });
  const ways = {
    text: (content) => screen.show({ 'text/plain': String(content) }),
    html: as('text/html'),
    svg: as('image/svg+xml'),
    png: as('image/png'),
    jpeg: as('image/jpeg'),
    markdown: as('text/markdown'),
    latex: as('text/latex'),
    json: as('application/json'),
    mime: (bundle) => screen.show({ ...bundle }),
  };
  return Object.assign(display, ways);
}

module.exports = { Screen, bundleOf, displayFor };
