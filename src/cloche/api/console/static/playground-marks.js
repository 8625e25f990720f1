// Undo: before each run of a Python context its state is kept, and can be gone back to. A few such marks stay.

import { api } from "./console.js";
import { boxPath } from "./panel-parts.js";

const KEPT = 4; // each keeps the memory that changed after it

export class Marks {
  constructor() {
    this.made = []; // {path, id, cell}, the oldest first
    this.problem = "Nothing to undo yet";
  }

  get last() {
    return this.made[this.made.length - 1] ?? null;
  }

  /** Keeps what is before that cell runs. Where the engine cannot, `problem` says why, and nothing older can be undone. */
  async keep(sandbox, context, cell) {
    const path = boxPath(sandbox, `/contexts/${encodeURIComponent(context)}`);
    try {
      const mark = await api(`${path}/checkpoints`, { method: "POST", json: {} });
      this.made.push({ path, id: mark.id, cell });
    } catch (error) { // the run itself tells of what concerns it as well
      this.forgetAll();
      this.problem = `The last run cannot be undone: ${error.message}`;
    }
    if (this.made.length > KEPT) forget(this.made.shift());
  }

  /** Goes back to before the last run; the cell that this undid. Raises ApiError. */
  async undo() {
    const { path, id, cell } = this.last;
    await api(`${path}/rollback`, { method: "POST", json: { checkpoint: id } });
    forget(this.made.pop());
    return cell;
  }

  forgetAll() {
    this.made.splice(0).forEach(forget);
    this.lost();
  }

  /** Of a kernel that is there no more. */
  lost() {
    this.made = [];
    this.problem = "Nothing to undo yet";
  }
}

function forget({ path, id }) {
  api(`${path}/checkpoints/${encodeURIComponent(id)}`, { method: "DELETE" }).catch(() => {}); // it ends with its kernel
}
