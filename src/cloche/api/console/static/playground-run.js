// One run of a piece of code, over a WebSocket.
//
// Every event is handled before the next one is taken. So a page that is busy reads no further, the socket fills, the
// server waits, and at last the program does: nothing piles up here, however fast it writes.

import { socket } from "./console.js";
import { boxPath } from "./panel-parts.js";

const LOST = "The connection to the server was lost. What ran was interrupted.";

export class Run {
  /** `hear(event)` is called with each event. `ended` comes to {outcome, reason, seconds, exitCode, files}, always. */
  constructor(sandbox, context, code, hear) {
    Object.assign(this, { hear, files: [], isAccepted: false, isStopped: false, isOver: false });
    this.ended = new Promise((resolve) => (this.resolve = resolve));
    this.socket = socket(boxPath(sandbox, "/execute"));
    this.socket.addEventListener("open", () => this.socket.send(JSON.stringify({ code, context, input: true })));
    this.socket.addEventListener("message", (message) => this.take(JSON.parse(message.data)));
    this.socket.addEventListener("close", () => this.end({ outcome: "lost", reason: LOST }));
  }

  answer(text) {
    this.say({ type: "answer", text });
  }

  /** Again after a while: the server kills what does not obey. */
  interrupt() {
    this.isStopped = true;
    if (this.isAccepted) this.say({ type: "interrupt" });
  }

  say(message) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  take(event) {
    if (this.isOver) return;
    if (event.type === "accepted") this.start();
    else if (event.type === "error") this.end({ outcome: "failed", reason: event.error.message });
    else if (event.type === "ended") this.end(event);
    else if (event.type === "wrote") this.files.push(event.file);
    else this.hear(event);
  }

  start() {
    this.isAccepted = true;
    if (!this.isStopped) return this.say({ type: "start" });
    this.say({ type: "leave" });
    this.end({ outcome: "interrupted", reason: null });
  }

  end({ outcome, reason = null, usage, exit_code: exitCode = null }) {
    if (this.isOver) return;
    this.isOver = true;
    this.socket.close();
    this.resolve({ outcome, reason, exitCode, seconds: usage?.wall_seconds ?? null, files: this.files });
  }
}
