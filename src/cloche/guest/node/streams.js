'use strict';
// The program's process.stdout and process.stderr: written before `write` returns, so that marks stand where they belong.

// A cell may have a variable of any of these names, and at its top level that is the global one.
const { process, Object } = globalThis;
const { Writable } = require('stream');
const { writeFully } = require('./channel.js');

class Output extends Writable {
  constructor(fd) {
    super({ decodeStrings: true, emitClose: false });
    this.fd = fd;
  }

  _write(chunk, _encoding, done) {
    try {
      writeFully(this.fd, chunk);
      done();
    } catch (error) {
      done(error);
    }
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
