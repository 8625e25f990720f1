'use strict';
// The program's process.stdout and process.stderr: written before `write` returns, so that marks stand where they belong.

// A cell may have a variable of any of these names, and at its top level that is the global one.
const { process, Buffer, Object, TypeError } = globalThis;
const util = require('util');
const { Writable } = require('stream');
const { writeFully } = require('./channel.js');

class Output extends Writable {
  constructor(fd) {
    super({ emitClose: false });
    this.fd = fd;
  }

  /** Keeps no state: an interrupt can come between any two steps, and what it leaves behind must still write. */
  write(chunk, encoding, done) {
    const last = typeof encoding === 'function' ? encoding : done;
    const data = typeof chunk === 'string' ? Buffer.from(chunk, typeof encoding === 'string' ? encoding : 'utf8') : chunk;
    if (!util.types.isUint8Array(data)) throw new TypeError('a stream can write strings and Uint8Arrays');
    let problem = null;
    try {
      writeFully(this.fd, data);
    } catch (error) {
      problem = error;
    }
    if (typeof last === 'function') process.nextTick(last, problem);
    return true;
  }

  /** Later cells need the stream: it takes the last words, and stays open. */
  end(chunk, encoding, done) {
    const last = [chunk, encoding, done].find((each) => typeof each === 'function');
    if (chunk !== undefined && chunk !== null && typeof chunk !== 'function') this.write(chunk, encoding);
    if (last) process.nextTick(last);
    return this;
  }

  destroy() {
    return this;
  }
}

function provide() {
  for (const [name, fd] of [['stdout', 1], ['stderr', 2]]) {
    const value = new Output(fd);
    Object.defineProperty(process, name, { value, writable: true, configurable: true, enumerable: true });
  }
}

module.exports = { provide };
