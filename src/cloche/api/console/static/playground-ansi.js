// The colours and weights that ANSI escape sequences ask for.

const WEIGHTS = { 1: "bold", 2: "dim", 3: "italic", 4: "underline", 7: "inverse", 9: "strike" };
const ENDS = { 22: ["bold", "dim"], 23: ["italic"], 24: ["underline"], 27: ["inverse"], 29: ["strike"] };
const STEPS = [0, 95, 135, 175, 215, 255];

/** How a piece of text looks. Never changed: `set` and `of` give others. */
export class Style {
  constructor(stream = "stdout", look = {}) {
    this.stream = stream;
    this.look = look;
    const parts = Object.entries(look).filter(([, value]) => value);
    this.key = parts.map(([name, value]) => `${name}=${value}`).sort().join(" ") + (stream === "stderr" ? " stderr" : "");
  }

  of(stream) {
    return stream === this.stream ? this : new Style(stream, this.look);
  }

  plain() {
    return new Style(this.stream);
  }

  set(numbers) {
    let look = { ...this.look };
    for (let at = 0; at < numbers.length; at += 1) {
      const number = numbers[at];
      if (number === 0) look = {};
      else if (number === 38 || number === 48) {
        const [colour, used] = extended(numbers, at + 1);
        look[number === 38 ? "front" : "back"] = colour;
        at += used;
      } else apply(look, number);
    }
    return new Style(this.stream, look);
  }

  dress(text) {
    const span = document.createElement("span");
    span.textContent = text;
    const classes = Object.keys(this.look).filter((name) => this.look[name] === true).map((name) => `ansi-${name}`);
    if (this.stream === "stderr") classes.push("pg-stderr");
    for (const side of ["front", "back"]) colour(span, classes, side, this.look[side]);
    span.className = classes.join(" ");
    return span;
  }
}

function colour(span, classes, side, value) {
  if (!value) return;
  if (!value.startsWith("rgb")) classes.push(`ansi-${side}-${value}`);
  else if (side === "front") span.style.color = value;
  else span.style.backgroundColor = value;
}

function apply(look, number) {
  if (WEIGHTS[number]) look[WEIGHTS[number]] = true;
  for (const name of ENDS[number] || []) look[name] = false;
  if (number >= 30 && number <= 37) look.front = String(number - 30);
  else if (number >= 90 && number <= 97) look.front = String(number - 82);
  else if (number >= 40 && number <= 47) look.back = String(number - 40);
  else if (number >= 100 && number <= 107) look.back = String(number - 92);
  else if (number === 39) look.front = null;
  else if (number === 49) look.back = null;
}

/** The colour of `5;N` or `2;R;G;B`, and how many numbers that took. */
function extended(numbers, at) {
  if (numbers[at] === 5) return [indexed(byte(numbers[at + 1])), 2];
  if (numbers[at] === 2) return [`rgb(${[1, 2, 3].map((step) => byte(numbers[at + step])).join(",")})`, 4];
  return [null, 1];
}

function indexed(number) {
  if (number < 16) return String(number);
  if (number >= 232) return `rgb(${Array(3).fill(8 + (number - 232) * 10).join(",")})`;
  const cube = number - 16;
  return `rgb(${[Math.floor(cube / 36), Math.floor(cube / 6) % 6, cube % 6].map((step) => STEPS[step]).join(",")})`;
}

function byte(value) {
  return Math.min(255, Math.max(0, Number.isFinite(value) ? value : 0));
}
