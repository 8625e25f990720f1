// A connection to a terminal in a sandbox that takes no more than its reader can show.
//
// Where the browser has WebSocketStream nothing is read while the reader is behind: then the server stops reading, and
// the program waits. Where it has not (WebSocket gives out all that comes), what is beyond a bound is left out, and said.

const HIGH_WATER_BYTES = 256 * 1024; // that the reader has not shown yet
const MOST_BYTES = 4 * 1024 * 1024; // for a WebSocket, which cannot be stopped

/**
 * Opens a line. `reader` has `text(string)`, `bytes(Uint8Array, shown)`, which calls `shown` when they are on the screen,
 * `skipped(bytes)` and `closed()`.
 */
export async function openLine(path, reader) {
  const url = new URL(path, location.href);
  url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  return "WebSocketStream" in window ? StreamLine.open(url.href, reader) : SocketLine.open(url.href, reader);
}

class StreamLine {
  static async open(url, reader) {
    const stream = new WebSocketStream(url);
    const { readable, writable } = await stream.opened;
    const line = new StreamLine(stream, writable.getWriter());
    line.pump(readable.getReader(), reader);
    return line;
  }

  constructor(stream, writer) {
    this.stream = stream;
    this.writer = writer;
    this.behind = 0;
    this.caughtUp = null;
  }

  async pump(source, reader) {
    try {
      for (;;) {
        const { value, done } = await source.read();
        if (done) break;
        if (typeof value === "string") reader.text(value);
        else await this.pass(new Uint8Array(value), reader);
      }
    } catch {
      // The connection broke: whoever reads learns it below.
    }
    reader.closed();
  }

  async pass(bytes, reader) {
    this.behind += bytes.length;
    reader.bytes(bytes, () => {
      this.behind -= bytes.length;
      if (this.behind <= HIGH_WATER_BYTES) this.caughtUp?.();
    });
    if (this.behind > HIGH_WATER_BYTES) await new Promise((resolve) => (this.caughtUp = resolve));
  }

  send(message) {
    this.writer.write(message).catch(() => {}); // a line that is closed says so by `closed`
  }

  close() {
    this.stream.close();
  }
}

class SocketLine {
  static open(url, reader) {
    const socket = new WebSocket(url);
    socket.binaryType = "arraybuffer";
    const line = new SocketLine(socket);
    socket.addEventListener("message", (event) => line.take(event.data, reader));
    return new Promise((resolve, reject) => {
      socket.addEventListener("open", () => resolve(line));
      socket.addEventListener("close", () => {
        reject(new Error("the connection was refused"));
        reader.closed();
      });
    });
  }

  constructor(socket) {
    this.socket = socket;
    this.behind = 0;
    this.left = 0;
  }

  take(data, reader) {
    if (typeof data === "string") return reader.text(data);
    if (this.behind > MOST_BYTES) {
      this.left += data.byteLength;
      return undefined;
    }
    if (this.left) reader.skipped(this.left);
    this.left = 0;
    this.behind += data.byteLength;
    return reader.bytes(new Uint8Array(data), () => (this.behind -= data.byteLength));
  }

  send(message) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(message);
  }

  close() {
    this.socket.close();
  }
}
