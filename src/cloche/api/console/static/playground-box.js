// The sandbox that the page works in: made when it is first needed, renewed while somebody works in it, looked at now
// and then, so that the page says when it has ended and why.

import { api, ask, toast } from "./console.js";
import { boxPath } from "./panel-parts.js";

const LOOK_MILLISECONDS = 5000;
const IDLE_MILLISECONDS = 5 * 60_000; // without a key or click: it is no longer renewed, unless something runs
const WORDS = { none: "no sandbox yet", starting: "starting…", running: "running", paused: "paused", ended: "ended" };

export class Box {
  /** `template()` is what a new one is made of; `isBusy()` says whether something runs in it; `adopt()` looks what is in it. */
  constructor({ template, seconds, isBusy, adopt }) {
    Object.assign(this, { template, seconds, isBusy, adopt, info: null, last: null, coming: null, ahead: 0, isLost: false, touchedAt: Date.now() });
    this.state = "none";
    this.changed = new Set(); // called with its id, or null, whenever it is another one or has ended
    this.told = new Set(); // called whenever anything of it may have changed
    for (const kind of ["keydown", "pointerdown"]) document.addEventListener(kind, () => (this.touchedAt = Date.now()), { passive: true, capture: true });
    setInterval(() => this.look(), LOOK_MILLISECONDS);
    document.addEventListener("visibilitychange", () => this.look());
  }

  get id() {
    return this.info?.id ?? null;
  }

  get stateText() {
    return this.isLost ? "no connection" : WORDS[this.state];
  }

  /** Its id; it is made, or resumed, if need be. Raises ApiError. */
  ensure() {
    if (this.state === "running") return Promise.resolve(this.id);
    this.coming ??= this.bring().finally(() => (this.coming = null));
    return this.coming;
  }

  async bring() {
    const paused = this.state === "paused" ? this.id : null;
    this.say("starting");
    try {
      if (paused) await this.resume(paused);
      else this.begin(await this.inquire("/api/v1/sandboxes", { method: "POST", json: this.wish() }));
    } catch (error) {
      if (this.state === "starting") this.say(paused ? "paused" : "none");
      throw error;
    }
    return this.id;
  }

  /** Contexts may have ended with the pause. */
  async resume(id) {
    this.begin(await this.inquire(boxPath(id, "/resume"), { method: "POST", json: {} }));
    await this.adopt();
  }

  wish() {
    return { template: this.template(), timeout_seconds: this.seconds, metadata: { made_in: "playground" } };
  }

  /** One that there is. Raises ApiError if there is none of that id. */
  async attach(id) {
    const info = await this.inquire(boxPath(id, ""));
    if (info.state === "ended") return this.end(info);
    this.begin(info);
    if (info.state === "running") await this.adopt();
  }

  /** What the server says of a sandbox, and by which clock. */
  async inquire(path, options) {
    const answer = await ask(path, options);
    const then = Date.parse(answer.headers.get("date"));
    if (then) this.ahead = then - Date.now();
    return answer.json();
  }

  begin(info) {
    this.take(info);
    for (const tell of this.changed) tell(this.id);
  }

  take(info) {
    this.info = info;
    this.say(info.state);
  }

  end(info) {
    this.info = null;
    this.last = info;
    this.say("ended");
    for (const tell of this.changed) tell(null);
  }

  say(state, isLost = false) {
    Object.assign(this, { state, isLost });
    for (const tell of this.told) tell();
  }

  /** Forgets it, and ends it if told so. */
  async leave(kill) {
    const id = this.id;
    this.info = null;
    this.say("none");
    for (const tell of this.changed) tell(null);
    if (kill && id) await api(boxPath(id, ""), { method: "DELETE" });
  }

  /** How it is now. */
  async look() {
    if (!this.id || this.coming || (document.hidden && !this.isBusy())) return;
    const asked = this.id;
    try {
      const info = await this.inquire(boxPath(asked, ""));
      if (this.id !== asked || this.coming) return;
      if (info.state === "ended") return this.end(info);
      this.take(info);
      if (this.isBusy() || Date.now() - this.touchedAt < IDLE_MILLISECONDS) await this.renew();
    } catch (error) {
      if (error.status === 404 && this.id === asked) this.end({ id: asked, end_reason: "the server does not know it any more" });
      else if (error.status === 0) this.say(this.state, true);
      else toast(error.message, "bad");
    }
  }

  /** Why it cannot be used, or null: to a WebSocket that is refused, the browser does not say. */
  async problem(id) {
    try {
      await api(boxPath(id, "?running=true"));
      return null;
    } catch (error) {
      return error.status ? error.message : null;
    }
  }

  /** Gives it its time anew, where less than two thirds of that are left. Never less than it has. */
  async renew() {
    const { state, deadline_at: deadline } = this.info ?? {};
    if (state !== "running" || !deadline || this.secondsLeft() > (this.seconds * 2) / 3) return;
    const asked = this.id;
    const info = await api(boxPath(asked, "/renew"), { method: "POST", json: { seconds: this.seconds } });
    if (this.id === asked) this.take(info);
  }

  secondsLeft() {
    const deadline = this.info?.deadline_at;
    return deadline ? Math.max(0, deadline - (Date.now() + this.ahead) / 1000) : null;
  }
}

/** "29m", "45s", "3h 20m": as in lists of sandboxes, but calmer. */
export function spanText(seconds) {
  if (seconds < 90) return `${Math.round(seconds)}s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `${minutes}m` : `${Math.floor(minutes / 60)}h ${minutes % 60}m`;
}
