// Comma-separated values, as RFC 4180 has them: quotes, doubled quotes, line ends within quotes.

const MAX_ROWS = 201; // with the one of names
const MAX_COLUMNS = 60;
const MAX_CELL = 300; // characters

/** The first rows of a text, and whether there are more. */
export function delimited(text, delimiter) {
  const rows = [];
  let row = [];
  let at = 0;
  while (at < text.length && rows.length < MAX_ROWS) {
    const cell = text[at] === '"' ? quoted(text, at, delimiter) : bare(text, at, delimiter);
    if (row.length < MAX_COLUMNS) row.push(shorten(cell.value));
    at = cell.end;
    if (text[at] === delimiter && at < text.length) {
      at += 1;
      if (at < text.length) continue;
      row.push("");
    }
    at += text.startsWith("\r\n", at) ? 2 : 1;
    rows.push(row);
    row = [];
  }
  return { rows, more: at < text.length };
}

function quoted(text, start, delimiter) {
  let value = "";
  let at = start + 1;
  for (;;) {
    const close = text.indexOf('"', at);
    if (close < 0) return { value: value + text.slice(at), end: text.length };
    value += text.slice(at, close);
    if (text[close + 1] !== '"') {
      const rest = bare(text, close + 1, delimiter); // there is none, where whoever wrote it kept to the rules
      return { value: value + rest.value, end: rest.end };
    }
    value += '"';
    at = close + 2;
  }
}

function bare(text, start, delimiter) {
  let end = start;
  while (end < text.length && text[end] !== delimiter && text[end] !== "\n" && text[end] !== "\r") end += 1;
  return { value: text.slice(start, end), end };
}

function shorten(value) {
  return value.length > MAX_CELL ? `${value.slice(0, MAX_CELL)}…` : value;
}
