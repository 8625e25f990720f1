'use strict';
// The kernel of JavaScript and TypeScript: `node kernel.js TOKEN LANGUAGE`. See KERNEL in wire.py.

// A cell may have a variable of any of these names, and at its top level that is the global one.
const { process, Buffer, Object, Reflect, RegExp, Error, String, Number, Array, setImmediate } = globalThis;
const fs = require('fs');
const util = require('util');
const cells = require('./cells.js');
const inspection = require('./inspection.js');
const interrupts = require('./interrupts.js');
const network = require('./network.js');
const streams = require('./streams.js');
const { Channel } = require('./channel.js');
const { Screen, bundleOf, displayFor } = require('./show.js');
const { Written } = require('./written.js');

const DEFAULT_DISPLAY_BYTES = 32 << 20;
// Frames of the kernel in a stack, with all that called it; what awaits the program's own functions is kept.
const OWN_FILES = `node:vm:|node:internal/modules/typescript:|\\[await\\]|${__dirname}/`;
const OWN_FRAMES = new RegExp(`\\n {4}at [^\\n]*(?:${OWN_FILES})[^\\n]*(?:\\n {4}at (?!async )[^\\n]*)*`, 'g');
const MAX_CAUSES = 16;

const [, , token, language] = process.argv;
const channel = new Channel(token);
const screen = new Screen(channel);
const written = new Written();
let count = 0;
let current = null; // the run that is on

function execute(header, body) {
  count += 1;
  const run = { id: header.run, cpu: process.cpuUsage(), interrupted: false, leave: () => {} };
  current = run;
  listen();
  interrupts.forget();
  channel.send({ ev: 'started', run: run.id, count });
  score('1000');
  screen.start(run.id, header.display_bytes || DEFAULT_DISPLAY_BYTES);
  written.start();
  try {
    run.leave = enter(header);
    cells.settle();
    const { value, later } = cells.run(body.toString(), count, language, run);
    await_value(run, value, later);
  } catch (error) {
    fail(run, error);
  }
}

/** A promise as a cell's last value is waited for: what it comes to is the value. */
function await_value(run, value, later) {
  const given = (result) => (util.types.isPromise(result) ? result.then((one) => succeed(run, one)) : succeed(run, result));
  if (later) value.then((result) => given(result?.value)).catch((error) => fail(run, error));
  else if (util.types.isPromise(value)) given(value).catch((error) => fail(run, error));
  else succeed(run, value);
}

function succeed(run, value) {
  // A turn later, so that a rejection that nobody handled is this run's, and not the next one's.
  setImmediate(() => {
    if (current !== run) return;
    try {
      if (value !== undefined) screen.show(bundleOf(value), true);
    } catch (error) {
      return fail(run, error);
    }
    end(run, 'ok');
  });
}

function fail(run, error) {
  if (current !== run) return complain(error);
  if (interrupts.isInterrupt(error)) return interrupt();
  // A program that it waited for (execSync) has died of SIGINT. If that was the signal of an interrupt, and we have not
  // yet noticed our own, then the frame of it is here already: it is found when the loop has looked at everything.
  if (error?.signal === 'SIGINT' && typeof error.pid === 'number') afterALook(() => current === run && raise(run, error));
  else raise(run, error);
}

function raise(run, error) {
  const { name, value, traceback } = described(error);
  channel.post({ ev: 'raised', run: run.id, name, value }, Buffer.from(traceback));
  end(run, 'raised');
}

const afterALook = (step) => setImmediate(() => setImmediate(step));

function interrupt() {
  const run = current;
  if (run === null) return;
  run.interrupted = true;
  const value = 'the program was interrupted';
  channel.post({ ev: 'raised', run: run.id, name: 'Interrupted', value }, Buffer.from(`Interrupted: ${value}\n`));
  end(run, 'interrupted');
}

/** An interrupt that found the program waiting. Listeners that it has for the signal do not get that, but hear of it. */
function onInterrupt() {
  interrupt();
  process.emit('SIGINT', 'SIGINT', 2);
}

function end(run, outcome) {
  current = null;
  screen.stop();
  try {
    run.leave();
    for (const file of written.changed()) channel.send({ ev: 'wrote', run: run.id, file });
  } catch {
    // The directory that we came from is gone, or the program broke what we stand on: it is over all the same.
  }
  const { user, system } = process.cpuUsage(run.cpu);
  score('0');
  channel.post({ ev: 'ended', run: run.id, outcome, exit: null, cpu: (user + system) / 1e6, rss: peakBytes() });
}

function described(error) {
  try {
    if (!util.types.isNativeError(error) && !(error instanceof Error)) {
      return { name: 'Uncaught', value: util.inspect(error), traceback: `Uncaught ${util.inspect(error)}\n` };
    }
    cleanStacks(error);
    // A stack without a frame, that of bad syntax, is put in brackets by `inspect`.
    const shown = /\n {4}at /.test(error.stack) ? util.inspect(error) : String(error.stack);
    return { name: String(error.name), value: String(error.message), traceback: `${shown}\n` };
  } catch {
    return { name: 'Error', value: 'an error that cannot be shown', traceback: 'an error that cannot be shown\n' };
  }
}

/** Takes the kernel's own frames out of an error's stack and out of those of its causes. */
function cleanStacks(error) {
  const pending = [error];
  for (let left = MAX_CAUSES; left > 0 && pending.length; left -= 1) {
    const one = pending.shift();
    if (!util.types.isNativeError(one)) continue;
    if (typeof one.stack === 'string') Reflect.set(one, 'stack', one.stack.replace(OWN_FRAMES, ''));
    pending.push(one.cause, ...(Array.isArray(one.errors) ? one.errors : []));
  }
}

/** An error of no run: what an earlier cell left behind has failed. The next run's reader sees it. */
function complain(error) {
  if (error instanceof interrupts.Interrupted) return; // as it was meant to
  fs.writeSync(2, `Uncaught ${described(error).traceback}`);
}

/** Nothing of the program's caught it. It fails the run that it belongs to; that of an earlier one is told. */
function onUncaught(error) {
  const run = cells.owner() ?? current;
  if (current !== null && !(error instanceof interrupts.Interrupted)) fail(run, error);
  else complain(error);
}

/** The cell's variables and directory, which last as long as it does: gives what ends them. */
function enter(header) {
  const env = header.env ?? {};
  const saved = Object.keys(env).map((name) => [name, process.env[name]]);
  const home = header.cwd ? process.cwd() : null;
  if (header.cwd) process.chdir(header.cwd);
  const inside = home && process.cwd();
  Object.assign(process.env, env);
  return () => {
    for (const [name, value] of saved) {
      if (value === undefined) delete process.env[name];
      else process.env[name] = value;
    }
    if (home && here() === inside) process.chdir(home);
  };
}

function here() {
  try {
    return process.cwd();
  } catch {
    return null;
  }
}

/** Since Node.js was started: what `getrusage` says has the process in it that we were before. */
function peakBytes() {
  try {
    return Number(/^VmHWM:\s+(\d+)/m.exec(fs.readFileSync('/proc/self/status', 'latin1'))[1]) * 1024;
  } catch {
    return 0;
  }
}

/** How willingly the system kills us when memory is short: first whoever executes. */
function score(value) {
  try {
    fs.writeFileSync('/proc/self/oom_score_adj', value);
  } catch {
    // Nothing depends on it.
  }
}

/** The program may remove listeners; ours come back with each cell. */
function listen() {
  const ours = [['uncaughtException', onUncaught], ['unhandledRejection', onUncaught]];
  for (const [event, listener] of ours) {
    if (!process.listeners(event).includes(listener)) process.on(event, listener);
  }
}

function onFrame(header, body) {
  if (header.do === 'execute') {
    execute(header, body);
  } else if (header.do === 'interrupt') {
    interrupts.expect();
    if (current?.id === header.run) onInterrupt();
  } else if (header.do === 'inspect') {
    const told = inspection.answer(header.ask);
    channel.send(told.header, Buffer.from(told.body));
  } else if (header.do === 'configure') {
    Object.assign(process.env, header.env ?? {});
    network.lookAgain(header.env ?? {});
    if (header.cwd) process.chdir(header.cwd);
  }
}

const display = displayFor(screen);
for (const [name, value] of [['display', display], ['$$', display]]) {
  Object.defineProperty(globalThis, name, { value, writable: true, configurable: true, enumerable: false });
}
process.argv = [process.execPath, '[cell]'];
process.execArgv = [];
Error.stackTraceLimit = 40; // ours are among them, and are taken out again
streams.provide();
listen();
channel.listen(onFrame);
channel.send({ ev: 'ready' });
setImmediate(() => cells.warm(language)); // while nobody waits, perhaps
