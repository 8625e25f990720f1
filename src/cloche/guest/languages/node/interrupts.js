'use strict';
// SIGINT ends what runs inside `interruptible`, and never anything else.
//
// Node.js has a thread that ends a script at SIGINT, and starts and stops it around each script. While it changes from
// one handler of the signal to the other SIGINT kills the process, and a signal that the thread had not come to when it
// was stopped ends the next script. So ours is started once and stays, and a run begins when it has nothing left to do.
// Whoever waits in the loop is told of an interrupt by a frame: see KERNEL in wire.py.

// A cell may have a variable of any of these names, and at its top level that is the global one.
const { process, Object, String, Error, Int32Array, SharedArrayBuffer, Atomics } = globalThis;
const fs = require('fs');
const vm = require('vm');
const { internalBinding } = require('internal/test/binding');

const { startSigintWatchdog, watchdogHasPendingSigint } = internalBinding('contextify');
const { Signal } = internalBinding('signal_wrap');
const SIGINT = 2;
const THREADS = '/proc/self/task';
const MAX_PAUSES = 1000; // of a millisecond each
const clock = new Int32Array(new SharedArrayBuffer(4));
const nothing = new vm.Script('0');

class Interrupted extends Error {
  name = 'Interrupted';

  constructor() {
    super('the program was interrupted');
  }
}

// With a handle that nobody knows of, listeners that the program adds and removes are never the first nor the last of
// the signal, and the handler of the signal stays the thread's.
const held = new Signal();
held.unref();
held.start(SIGINT);
const before = fs.readdirSync(THREADS);
startSigintWatchdog();
const main = String(process.pid);
const [thread] = fs.readdirSync(THREADS).filter((each) => !before.includes(each));

let announced = false;

/** The host says that it sends a signal: by the time that it sends anything else it has done so. */
function expect() {
  announced = true;
}

/** Forgets the signals that came before. */
function forget() {
  const under_way = announced ? signalIsUnderWay : () => isAwake(thread);
  for (let left = MAX_PAUSES; left > 0 && under_way(); left -= 1) Atomics.wait(clock, 0, 0, 1);
  announced = false;
  if (!watchdogHasPendingSigint()) return;
  try {
    nothing.runInThisContext({ breakOnSigint: true });
  } catch {
    // One more, just now.
  }
}

/** Of several signals in a row some come to whichever thread does not handle one already, when that comes to run. */
function signalIsUnderWay() {
  return fs.readdirSync(THREADS).some((each) => each !== main && isAwake(each) && (each === thread || hasSignal(each)));
}

/** A thread for which there is a signal does not sleep. */
const isAwake = (each) => /^State:\t[^S]/m.test(statusOf(each));

/** Whether SIGINT waits for it or another, or it handles one, and may not be interrupted by others. */
const hasSignal = (each) => /^(?:ShdPnd|SigBlk):\t[0-9a-f]*[2367abef]$/m.test(statusOf(each));

function statusOf(each) {
  try {
    return fs.readFileSync(`${THREADS}/${each}/status`, 'latin1');
  } catch {
    return ''; // it has ended
  }
}

let step = null;
const STEP = '__cloche_step__';
Object.defineProperty(globalThis, STEP, { value: () => step?.() });
const entrance = new vm.Script(`${STEP}()`, { filename: '[await]' });

/** What `work` returns. Throws what it throws, or an error that `isInterrupt` if there was a SIGINT since `forget`. */
function interruptible(work) {
  step = () => {
    step = null;
    if (watchdogHasPendingSigint()) throw new Interrupted();
    return work();
  };
  return entrance.runInThisContext({ breakOnSigint: true, displayErrors: false });
}

const isInterrupt = (error) => error instanceof Interrupted || error?.code === 'ERR_SCRIPT_EXECUTION_INTERRUPTED';

module.exports = { Interrupted, expect, forget, interruptible, isInterrupt };
