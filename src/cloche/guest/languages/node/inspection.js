'use strict';
// What a program's names are bound to, told without running any of the program's code: no getter, no trap of a Proxy, no
// method that it may have put in the place of the language's own. So everything is taken from here, as it was before the
// program, arrays are gone through by index, and what is told has no prototype (`JSON.stringify` asks those).

const { create, getOwnPropertyDescriptor, getOwnPropertyNames, getPrototypeOf, is, setPrototypeOf } = Object;
const objects = Object.prototype;
const { apply } = Reflect;
const { stringify } = JSON;
const { isArray } = Array;
const { now } = Date;
const { types } = require('util');
const isSafeInteger = Number.isSafeInteger;
const text = String;
const { slice, startsWith, isWellFormed, toWellFormed } = String.prototype;
const functionText = Function.prototype.toString;
const bigintText = BigInt.prototype.toString;
const getterOf = (prototype, name) => getOwnPropertyDescriptor(prototype, name).get;
const SIZES = {
  __proto__: null,
  Map: getterOf(Map.prototype, 'size'),
  Set: getterOf(Set.prototype, 'size'),
};
const TypedArray = getPrototypeOf(Uint8Array.prototype);
const typedLength = getterOf(TypedArray, 'length');
const typedBytes = getterOf(TypedArray, 'byteLength');
const bufferBytes = getterOf(ArrayBuffer.prototype, 'byteLength');
const dateTime = Date.prototype.getTime;
const dateText = Date.prototype.toISOString;

const MAX_VARIABLES = 1000;
const MAX_BYTES = 900 << 10;
const MAX_MILLISECONDS = 2000;
const MAX_NAME = 200;
const MAX_PREVIEW = 200;
const MAX_ITEMS = 50;
const MAX_DEPTH = 3;
const MANY_DIGITS = 10n ** 100n;
const OWN = { __proto__: null, require: 1, module: 1, exports: 1, __dirname: 1, __filename: 1, display: 1, $$: 1 };

const before = create(null); // the globals that were there before the program
for (const name of getOwnPropertyNames(globalThis)) before[name] = getOwnPropertyDescriptor(globalThis, name);

const bare = (fields) => setPrototypeOf(fields, null);

/** A frame's header and body. */
function answer(ask) {
  const until = now() + MAX_MILLISECONDS;
  const names = getOwnPropertyNames(globalThis);
  let body = '';
  let count = 0;
  let more = 0;
  for (let at = 0; at < names.length; at += 1) {
    const found = getOwnPropertyDescriptor(globalThis, names[at]);
    if (found === undefined || !isShown(names[at], found)) continue;
    const one = more || count >= MAX_VARIABLES || now() > until ? null : stringify(described(names[at], found));
    if (one === null || body.length + one.length > MAX_BYTES / 3) more += 1; // a character can be three bytes
    else {
      body += (count ? ',' : '') + one;
      count += 1;
    }
  }
  return { header: { ev: 'inspected', ask, more }, body: `[${body}]` };
}

function isShown(name, found) {
  if (OWN[name] || apply(startsWith, name, ['__cloche_'])) return false;
  const known = before[name];
  return known === undefined || known.get !== found.get || ('value' in found && !known.get && !is(known.value, found.value));
}

function described(name, found) {
  const told = bare({ name: short(name, MAX_NAME), kind: 'variable', type: 'accessor', preview: '<accessor>' });
  if (found.get || found.set) return told;
  const { value } = found;
  told.type = typeOf(value);
  if (typeof value === 'function') told.kind = isClass(value) ? 'class' : 'function';
  told.preview = short(shown(value, 0), MAX_PREVIEW);
  const length = lengthOf(value);
  if (length !== null) told.length = length;
  const bytes = bytesOf(value);
  if (bytes !== null) told.size_bytes = bytes;
  return told;
}

/** `number`, `Array`, `Point`: the name of an object's class, as far as it can be read. */
function typeOf(value) {
  if (value === null) return 'null';
  if (typeof value !== 'object') return typeof value;
  if (types.isProxy(value)) return 'Proxy';
  let prototype = getPrototypeOf(value);
  for (let left = 10; left > 0 && prototype !== null && !types.isProxy(prototype); left -= 1) {
    const maker = getOwnPropertyDescriptor(prototype, 'constructor')?.value;
    const name = typeof maker === 'function' && !types.isProxy(maker) && getOwnPropertyDescriptor(maker, 'name')?.value;
    if (typeof name === 'string' && name) return short(name, MAX_NAME);
    prototype = getPrototypeOf(prototype);
  }
  return 'object';
}

function isClass(value) {
  return !types.isProxy(value) && apply(startsWith, apply(functionText, value, []), ['class']);
}

function lengthOf(value) {
  if (typeof value === 'string') return value.length;
  if (typeof value !== 'object' || value === null || types.isProxy(value)) return null;
  if (isArray(value)) return getOwnPropertyDescriptor(value, 'length').value;
  if (types.isMap(value)) return apply(SIZES.Map, value, []);
  if (types.isSet(value)) return apply(SIZES.Set, value, []);
  return types.isTypedArray(value) ? apply(typedLength, value, []) : null;
}

function bytesOf(value) {
  if (typeof value !== 'object' || value === null || types.isProxy(value)) return null;
  if (types.isTypedArray(value)) return apply(typedBytes, value, []);
  return types.isArrayBuffer(value) ? apply(bufferBytes, value, []) : null;
}

function shown(value, depth) {
  if (typeof value === 'string') return stringify(short(value, MAX_PREVIEW));
  if (typeof value === 'bigint') return value > MANY_DIGITS || value < -MANY_DIGITS ? '<bigint>' : `${apply(bigintText, value, [])}n`;
  if (typeof value === 'function') return types.isProxy(value) ? '<Proxy>' : named(value);
  if (typeof value !== 'object' || value === null) return text(value); // a symbol, too
  if (types.isProxy(value)) return '<Proxy>';
  if (isArray(value)) return listed(value, depth);
  if (types.isDate(value)) return isSafeInteger(apply(dateTime, value, [])) ? apply(dateText, value, []) : 'Invalid Date';
  const type = typeOf(value);
  const plain = getPrototypeOf(value) === objects || getPrototypeOf(value) === null;
  return plain ? withFields(value, depth) : `<${type}>`;
}

function named(value) {
  const name = getOwnPropertyDescriptor(value, 'name')?.value;
  return `<${isClass(value) ? 'class' : 'function'}${typeof name === 'string' && name ? ` ${short(name, MAX_NAME)}` : ''}>`;
}

function listed(value, depth) {
  const length = lengthOf(value);
  if (depth >= MAX_DEPTH && length) return '[…]';
  let out = '';
  let at = 0;
  for (; at < length && at < MAX_ITEMS && out.length < MAX_PREVIEW; at += 1) {
    const found = getOwnPropertyDescriptor(value, at);
    out += (at ? ', ' : '') + (found === undefined ? '<empty>' : 'value' in found ? shown(found.value, depth + 1) : '<accessor>');
  }
  return `[${out}${at < length ? ', …' : ''}]`;
}

function withFields(value, depth) {
  const names = getOwnPropertyNames(value);
  if (depth >= MAX_DEPTH && names.length) return '{…}';
  let out = '';
  let at = 0;
  for (; at < names.length && at < MAX_ITEMS && out.length < MAX_PREVIEW; at += 1) {
    const found = getOwnPropertyDescriptor(value, names[at]);
    const one = found !== undefined && 'value' in found ? shown(found.value, depth + 1) : '<accessor>';
    out += `${at ? ', ' : ''}${short(names[at], 50)}: ${one}`;
  }
  return `{${out}${at < names.length ? ', …' : ''}}`;
}

/** So many characters of it, without halves of letters, which the host would not take. */
function short(value, most) {
  const cut = value.length > most ? `${apply(slice, value, [0, most - 1])}…` : value;
  return apply(isWellFormed, cut, []) ? cut : apply(toWellFormed, cut, []);
}

module.exports = { answer };
