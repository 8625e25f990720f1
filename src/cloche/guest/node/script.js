'use strict';
// Runs before a program that Node.js reads from its stdin. Whether that is a module or a script, Node.js finds out by
// itself; programs mix both, so `require` is there in modules, too. Both find what is installed where the program runs.
globalThis.require ??= require('node:module').createRequire(process.cwd() + '/');
