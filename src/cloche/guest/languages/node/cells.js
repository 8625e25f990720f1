'use strict';
// What a cell means: its declarations outlive it, `await` and `import` work at its top level, its last value counts.
//
// Every cell is a script of the one global scope. `let`, `const` and `class` at its top level become `var`, so that a
// later cell may declare the name again; `import` statements become `await import()`. Lines keep their numbers.
// Behind every `await` stands a question: was the run that this belongs to interrupted? Else a loop that awaits would go
// on for ever, with nobody to stop it.

// A cell may have a variable of any of these names, and at its top level that is the global one.
const { process, Object, Math } = globalThis;
const fs = require('fs');
const path = require('path');
const url = require('url');
const util = require('util');
const vm = require('vm');
const { AsyncLocalStorage } = require('async_hooks');
const { createRequire, stripTypeScriptTypes } = require('module');
const { runMicrotasks } = require('internal/test/binding').internalBinding('task_queue');
const { Interrupted, interruptible } = require('./interrupts.js');

const MAX_PARSED = 4 << 20; // longer code runs as it is
const PARSING = {
  ecmaVersion: 'latest',
  sourceType: 'script',
  allowAwaitOutsideFunction: true,
  allowImportExportEverywhere: true,
  allowHashBang: true,
};
const META = '__cloche_import_meta__';
const GO_ON = '__cloche_go_on__';

let parser; // Node's own; loaded with the first cell

function tools() {
  parser ??= {
    acorn: require('internal/deps/acorn/acorn/dist/acorn'),
    walk: require('internal/deps/acorn/acorn-walk/dist/walk'),
    await: require('internal/repl/await').processTopLevelAwait,
  };
  return parser;
}

/** Runs a cell. Gives its value, or a promise of `{ value }` with `later` set. Throws what the cell throws.
 *
 * Once `owner.interrupted` is set, what the cell has started ends with Interrupted at its next `await`.
 */
function run(code, count, language, owner) {
  const javascript = language === 'typescript' ? withoutTypes(code) : code;
  const { text, names } = rewritten(javascript);
  const later = text.length <= MAX_PARSED && /\bawait\b/.test(text) ? awaited(text) : null;
  const script = new vm.Script(later ?? text, {
    filename: `[cell ${count}]`,
    importModuleDynamically: vm.constants.USE_MAIN_CONTEXT_DEFAULT_LOADER,
  });
  names.forEach(makeRoom);
  const value = runs.run(owner, () => interruptible(() => started(script)));
  return { value, later: later !== null };
}

/** What a cell does after an `await` that does not wait long belongs to it as well: SIGINT must end that, too. */
function started(script) {
  const value = script.runInThisContext();
  if (util.types.isPromise(value)) runMicrotasks();
  return value;
}

/** TypeScript as JavaScript: blanks for types; where that cannot be (enums, namespaces) generated code. */
function withoutTypes(code) {
  try {
    return stripTypeScriptTypes(code, { mode: 'strip' });
  } catch (error) {
    if (error.code !== 'ERR_UNSUPPORTED_TYPESCRIPT_SYNTAX') throw error;
    return stripTypeScriptTypes(code, { mode: 'transform' });
  }
}

function rewritten(code) {
  if (code.length > MAX_PARSED) return { text: code, names: [] };
  const literal = objectLiteral(code);
  const tree = literal ? null : parsed(code);
  if (!tree) return { text: literal ?? code, names: [] }; // V8 says what is wrong with it
  const edits = [];
  const names = [];
  for (const node of tree.body) rewriteStatement(node, code, edits, names);
  if (/import\s*\.\s*meta|\bawait\b/.test(code)) rewriteInside(tree, edits);
  return { text: applied(code, edits), names };
}

function parsed(code) {
  try {
    return tools().acorn.parse(code, PARSING);
  } catch {
    return null;
  }
}

/** `{a: 1}` alone is meant as an object, not as a block with a label. */
function objectLiteral(code) {
  if (!/^\s*\{/.test(code) || /;\s*$/.test(code)) return null;
  const wrapped = `(${code}\n)`;
  return parsed(wrapped) ? wrapped : null;
}

function awaited(text) {
  try {
    return tools().await(`${text}\n`);
  } catch {
    return null;
  }
}

function rewriteStatement(node, code, edits, names) {
  if (node.type === 'VariableDeclaration') {
    if (node.kind === 'let' || node.kind === 'const') edits.push([node.start, node.start + node.kind.length, 'var'.padEnd(node.kind.length)]);
    node.declarations.forEach((each) => collectNames(each.id, names));
  } else if (node.type === 'ClassDeclaration') {
    edits.push([node.start, node.start, `var ${node.id.name} = `], [node.end, node.end, ';']);
    names.push(node.id.name);
  } else if (node.type === 'FunctionDeclaration') {
    names.push(node.id.name);
  } else if (node.type === 'ImportDeclaration') {
    edits.push([node.start, node.end, importing(node, code, names)]);
  } else if (node.type.startsWith('Export')) {
    rewriteExport(node, code, edits, names);
  }
}

/** There is nobody to export to: what is declared stays, the rest of the statement goes. */
function rewriteExport(node, code, edits, names) {
  const declared = node.declaration;
  if (node.type === 'ExportNamedDeclaration' && declared) {
    edits.push([node.start, declared.start, ' '.repeat(declared.start - node.start)]);
    rewriteStatement(declared, code, edits, names);
  } else if (node.type === 'ExportDefaultDeclaration' && declared.id) {
    edits.push([node.start, declared.start, ' '.repeat(declared.start - node.start)]);
    rewriteStatement(declared, code, edits, names);
  } else if (node.type === 'ExportDefaultDeclaration') {
    edits.push([node.start, declared.start, '('], [declared.end, node.end, ');']);
  } else {
    edits.push([node.start, node.end, code.slice(node.start, node.end).replace(/[^\n]/g, ' ')]);
  }
}

function importing(node, code, names) {
  const attributes = (node.attributes ?? []).map((each) => `${code.slice(each.key.start, each.key.end)}: ${each.value.raw}`);
  const options = attributes.length ? `, { with: { ${attributes.join(', ')} } }` : '';
  const loaded = `await import(${node.source.raw}${options})`;
  const lines = '\n'.repeat(code.slice(node.start, node.end).split('\n').length - 1);
  const whole = node.specifiers.find((each) => each.type === 'ImportNamespaceSpecifier');
  const parts = node.specifiers.filter((each) => each !== whole).map((each) => importedPart(each, code));
  names.push(...node.specifiers.map((each) => each.local.name));
  if (!node.specifiers.length) return `${loaded};${lines}`;
  if (!whole) return `var { ${parts.join(', ')} } = ${loaded};${lines}`;
  const rest = parts.length ? ` var { ${parts.join(', ')} } = ${whole.local.name};` : '';
  return `var ${whole.local.name} = ${loaded};${rest}${lines}`;
}

function importedPart(node, code) {
  const name = node.type === 'ImportDefaultSpecifier' ? 'default' : code.slice(node.imported.start, node.imported.end);
  return `${name}: ${node.local.name}`;
}

/** What can stand anywhere in a cell, and not only at its top level. */
function rewriteInside(tree, edits) {
  tools().walk.full(tree, (node) => {
    if (node.type === 'MetaProperty' && node.meta.name === 'import') {
      edits.push([node.start, node.end, META]);
    } else if (node.type === 'AwaitExpression') {
      edits.push([node.start, node.start, `${GO_ON}(`], [node.end, node.end, ')']);
    } else if (node.type === 'ForOfStatement' && node.await && node.body.type === 'BlockStatement') {
      edits.push([node.body.start + 1, node.body.start + 1, ` ${GO_ON}();`]);
    }
  });
}

const runs = new AsyncLocalStorage(); // of whatever a run has started, the run

Object.defineProperty(globalThis, GO_ON, {
  value: (value) => {
    if (runs.getStore()?.interrupted) throw new Interrupted();
    return value;
  },
});

function collectNames(pattern, names) {
  if (!pattern) return;
  if (pattern.type === 'Identifier') names.push(pattern.name);
  else if (pattern.type === 'ObjectPattern') pattern.properties.forEach((each) => collectNames(each.value ?? each.argument, names));
  else if (pattern.type === 'ArrayPattern') pattern.elements.forEach((each) => collectNames(each, names));
  else collectNames(pattern.left ?? pattern.argument, names);
}

function applied(code, edits) {
  const pieces = [];
  let at = 0;
  edits.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  for (const [start, end, replacement] of edits) {
    pieces.push(code.slice(at, start), replacement);
    at = Math.max(at, end);
  }
  return pieces.join('') + code.slice(at);
}

/** Lets a cell declare a name that Node has as a global with a getter, such as `crypto`. */
function makeRoom(name) {
  const known = Object.getOwnPropertyDescriptor(globalThis, name);
  if (known && known.configurable && (known.get || !known.writable)) {
    Object.defineProperty(globalThis, name, { value: undefined, writable: true, configurable: true, enumerable: false });
  }
}

let current = { directory: null };

/** Gives cells what modules have: `require` and the rest, for the directory that they run in. */
function settle() {
  const directory = currentDirectory();
  if (directory === current.directory) return;
  const file = path.join(directory, '[cell]');
  const require = createRequire(file);
  const module = { id: '.', path: directory, filename: file, loaded: false, exports: {}, children: [], paths: [] };
  require.main = module;
  const meta = { url: url.pathToFileURL(file).href, dirname: directory, filename: file, resolve: import_resolve(require) };
  const globals = { require, module, exports: module.exports, __dirname: directory, __filename: file, [META]: meta };
  for (const [name, value] of Object.entries(globals)) offer(name, value);
  current = { directory, globals };
}

const import_resolve = (require) => (specifier) => {
  const found = require.resolve(specifier);
  return path.isAbsolute(found) ? url.pathToFileURL(found).href : found;
};

function offer(name, value) {
  const known = Object.getOwnPropertyDescriptor(globalThis, name);
  if (known && current.globals && known.value !== current.globals[name]) return; // the program has its own
  Object.defineProperty(globalThis, name, { value, writable: true, configurable: true, enumerable: false });
}

function currentDirectory() {
  try {
    return fs.realpathSync(process.cwd());
  } catch {
    return '/';
  }
}

/** Loads what the first cell needs. */
function warm(language) {
  rewritten(language === 'typescript' ? withoutTypes('let a: string') : 'let a');
}

/** The run that the code which asks belongs to, if that can be known. */
const owner = () => runs.getStore();

module.exports = { owner, run, settle, warm };
