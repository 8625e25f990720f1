'use strict';
// Runs before a program that Node.js reads from its stdin. Whether that is a module or a script, Node.js finds out by
// itself; programs mix both, so what only scripts have is there in modules, too. Both find what is installed where the
// program runs, and both are the main program, by all the ways in which programs ask for that.
const Module = require('node:module');
const path = require('node:path');

const MODULE = '[eval1]'; // what import.meta.url ends with
const SCRIPT = 'main.js';

function become(main, name) {
  main.id = '.';
  main.path = process.cwd();
  main.filename = path.join(main.path, name);
  process.mainModule = main;
  process.argv[1] = main.filename;
  globalThis.__filename = main.filename;
  globalThis.__dirname = main.path;
}

// Before a script, Node.js compiles what gives it `module`, `require` and the like.
function beforeScript() {
  const compile = Module.prototype._compile;
  Module.prototype._compile = function (source, name, ...rest) {
    if (name !== '[stdin]-wrapper') return compile.call(this, source, name, ...rest);
    Module.prototype._compile = compile;
    become(this, SCRIPT);
    return compile.call(this, source, this.filename, ...rest);
  };
}

globalThis.require ??= Module.createRequire(process.cwd() + '/');
if (process.argv[1] === '-') { // and no worker or child of it, which has a file of its own
  globalThis.module = new Module('.');
  globalThis.exports = globalThis.module.exports;
  globalThis.require.main = globalThis.module;
  become(globalThis.module, MODULE);
  beforeScript();
}
