'use strict';
// Which files below the data directory a cell made or changed.

// A cell may have a variable of any of these names, and at its top level that is the global one.
const { Number, String, Map } = globalThis;
const fs = require('fs');
const path = require('path');

const DATA_DIRECTORY = '/mnt/data';
const MAX_ENTRIES = 1000;
const NAMES = { 0: 'root', 1000: 'user' };

class Written {
  /** A cell begins: what was changed before, for instance uploaded, is not its doing. */
  start() {
    this._seen = new Map(files().map(([name, info]) => [name, key(info)]));
    this._full = this._seen.size >= MAX_ENTRIES;
  }

  /** FileInfo fields of regular files changed since `start`. */
  changed() {
    if (this._full) return []; // what `start` did not see cannot be told from what is new
    return files().filter(([name, info]) => this._seen.get(name) !== key(info)).map(fields);
  }
}

const key = (info) => `${info.mtimeNs} ${info.size} ${info.ino}`;

/** [path, stat] of regular files, no more than MAX_ENTRIES entries; symlinks are not followed. */
function files() {
  const found = [];
  const pending = [DATA_DIRECTORY];
  let left = MAX_ENTRIES;
  while (pending.length && left > 0) {
    for (const name of entries(pending.pop())) {
      if (left-- <= 0) break;
      const info = fs.lstatSync(name, { bigint: true, throwIfNoEntry: false });
      if (info?.isDirectory()) pending.push(name);
      else if (info?.isFile()) found.push([name, info]);
    }
  }
  return found;
}

function entries(directory) {
  try {
    return fs.readdirSync(directory).map((name) => path.join(directory, name));
  } catch {
    return [];
  }
}

function fields([name, info]) {
  return {
    path: name,
    name: path.basename(name),
    kind: 'file',
    size_bytes: Number(info.size),
    mode: Number(info.mode) & 0o7777,
    owner: NAMES[info.uid] ?? String(info.uid),
    group: NAMES[info.gid] ?? String(info.gid),
    modified_at: Number(info.mtimeNs) / 1e9,
  };
}

module.exports = { Written };
