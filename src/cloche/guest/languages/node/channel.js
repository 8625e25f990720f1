'use strict';
// The kernel's end of its channel: frames, and the marks that order them among the output. See KERNEL in wire.py.

// A cell may have a variable of any of these names, and at its top level that is the global one.
const { process, Buffer, JSON, Int32Array, SharedArrayBuffer, Atomics } = globalThis;
const fs = require('fs');
const net = require('net');

const CHANNEL = 3;
const PIPES = [4, 5];
const MAX_HEADER = 4 << 20;
const asleep = new Int32Array(new SharedArrayBuffer(4));

/** Writes all of `data` before it returns. A descriptor may be non-blocking: a child that shares it can make it so. */
function writeFully(fd, data) {
  let at = 0;
  while (at < data.length) {
    try {
      at += fs.writeSync(fd, data, at);
    } catch (error) {
      if (error.code !== 'EAGAIN') throw error;
      Atomics.wait(asleep, 0, 0, 1);
    }
  }
}

class Channel {
  constructor(token) {
    this._token = token;
    this._mark = 0;
    this._chunks = [];
    this._size = 0;
    this._wanted = 8; // so many bytes, before there is anything to look at
  }

  /** Calls `onFrame(header, body)` for each frame from the host, and ends the process when the host is gone. */
  listen(onFrame) {
    const socket = new net.Socket({ fd: CHANNEL, readable: true, writable: false });
    socket.on('data', (data) => this._feed(data, onFrame));
    socket.on('end', () => process.reallyExit(0));
    socket.on('error', () => process.reallyExit(1));
  }

  /** Sends a frame that has no place in the order of the output. */
  send(header, body = Buffer.alloc(0)) {
    const head = Buffer.from(JSON.stringify(header));
    const prefix = Buffer.alloc(8);
    prefix.writeUInt32BE(head.length, 0);
    prefix.writeUInt32BE(body.length, 4);
    try {
      writeFully(CHANNEL, Buffer.concat([prefix, head, body]));
    } catch {
      process.reallyExit(1); // the host is gone, or the program closed our descriptor: nobody can be told
    }
  }

  /** Sends a frame behind a mark in both output pipes: what was written before it comes before it. */
  post(header, body) {
    this._mark += 1;
    const mark = Buffer.from(`\x1b]cloche;${this._token};${this._mark.toString(16).padStart(8, '0')}\x07`);
    for (const pipe of PIPES) {
      try {
        writeFully(pipe, mark);
      } catch {
        // Nobody reads that pipe any more.
      }
    }
    this.send({ ...header, mark: this._mark }, body);
  }

  _feed(data, onFrame) {
    this._chunks.push(data);
    this._size += data.length;
    while (this._size >= this._wanted) {
      const received = Buffer.concat(this._chunks);
      this._chunks = [received];
      const head = received.readUInt32BE(0);
      const end = 8 + head + received.readUInt32BE(4);
      if (head > MAX_HEADER) process.reallyExit(1);
      this._wanted = end;
      if (received.length < end) return;
      this._chunks = [received.subarray(end)];
      this._size = received.length - end;
      this._wanted = 8;
      onFrame(JSON.parse(received.toString('utf8', 8, 8 + head)), received.subarray(8 + head, end));
    }
  }
}

module.exports = { Channel, writeFully };
