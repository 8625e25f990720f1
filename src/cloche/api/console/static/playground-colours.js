// Syntax colours: source becomes spans. What is not known, or is too long, stays plain.

import { coloursOf } from "./playground-languages.js";

const LONGEST = 100_000; // characters
const NUMBER = "\\b(?:0[xX][\\da-fA-F_]+|0[bB][01_]+|0[oO][0-7_]+|\\d[\\d_]*(?:\\.[\\d_]*)?(?:[eE][+-]?\\d+)?)[jn]?";

const WORDS = {
  python: {
    keywords: "and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return try while with yield None True False",
    builtins: "abs all any bool bytes dict dir enumerate Exception filter float format getattr hasattr input int isinstance iter len list map max min next object open print property range repr reversed round self set setattr sorted str sum super tuple type zip",
  },
  javascript: {
    keywords: "as async await break case catch class const continue debugger default delete do else enum export extends finally for from function get if implements import in instanceof interface let namespace new of private protected public readonly return set static super switch this throw try type typeof var void while with yield null true false undefined",
    builtins: "Array BigInt Boolean Date Error JSON Map Math Number Object Promise Proxy Reflect RegExp Set String Symbol console display process require any boolean never number string unknown",
  },
  bash: {
    keywords: "case do done elif else esac fi for function if in select then until while time return break continue",
    builtins: "alias awk cat cd cp curl declare echo eval exec exit export find git grep head kill local ls mkdir mv pip printf pwd python read rm sed set sort source tail test touch trap tr uniq unset wc xargs",
  },
};

const PYTHON = rules([
  ["comment", "#[^\\n]*"],
  ["string", "(?:[rRbBuUfFtT]{1,2})?(?:\"\"\"[\\s\\S]*?(?:\"\"\"|$(?![\\s\\S]))|'''[\\s\\S]*?(?:'''|$(?![\\s\\S])))"],
  ["string", "(?:\\b[rRbBuUfFtT]{1,2})?(?:\"(?:\\\\[\\s\\S]|[^\"\\\\\\n])*\"?|'(?:\\\\[\\s\\S]|[^'\\\\\\n])*'?)"],
  ["meta", "^[ \\t]*(?:%{1,2}|!)[^\\n]*"],
  ["meta", "@[A-Za-z_][\\w.]*"],
  ["number", NUMBER],
  ["name", "(?<=\\b(?:def|class)[ \\t]+)[^\\W\\d]\\w*"],
  ["keyword", words(WORDS.python.keywords)],
  ["builtin", words(WORDS.python.builtins)],
  ["skip", "[^\\W\\d]\\w*"],
]);

const JAVASCRIPT = rules([
  ["comment", "//[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$(?![\\s\\S]))"],
  ["string", "\"(?:\\\\[\\s\\S]|[^\"\\\\\\n])*\"?|'(?:\\\\[\\s\\S]|[^'\\\\\\n])*'?|`(?:\\\\[\\s\\S]|[^`\\\\])*`?"],
  ["number", NUMBER],
  ["name", "(?<=\\b(?:function|class)[ \\t]+)[\\w$]+"],
  ["keyword", words(WORDS.javascript.keywords)],
  ["builtin", words(WORDS.javascript.builtins)],
  ["skip", "[\\w$]+"],
]);

const BASH = rules([
  ["comment", "(?<![^\\s;&|(])#[^\\n]*"],
  ["string", "\"(?:\\\\[\\s\\S]|[^\"\\\\])*\"?|'[^']*'?"],
  ["meta", "\\$(?:\\{[^}\\n]*\\}?|\\w+|[@#?*!$-])"],
  ["keyword", "(?<![\\w-])" + words(WORDS.bash.keywords) + "(?![\\w-])"],
  ["builtin", "(?<![\\w./-])" + words(WORDS.bash.builtins) + "(?![\\w./-])"],
  ["skip", "[\\w./-]+"],
]);

const KNOWN = { python: PYTHON, javascript: JAVASCRIPT, bash: BASH };

function words(list) {
  return `\\b(?:${list.split(" ").join("|")})\\b`;
}

function rules(pairs) {
  const names = pairs.map(([name]) => name);
  return { names, pattern: new RegExp(pairs.map(([, source]) => `(${source})`).join("|"), "gmu") };
}

/** Nodes that show the code. */
export function coloured(code, language) {
  const known = KNOWN[coloursOf(language)];
  if (!known || code.length > LONGEST) return [code];
  const nodes = [];
  let at = 0;
  for (const match of code.matchAll(known.pattern)) {
    if (!match[0]) continue;
    const kind = known.names[match.slice(1).findIndex((group) => group !== undefined)];
    if (kind === "skip") continue;
    if (match.index > at) nodes.push(code.slice(at, match.index));
    nodes.push(span(kind, match[0]));
    at = match.index + match[0].length;
  }
  nodes.push(code.slice(at));
  return nodes;
}

function span(kind, text) {
  const element = document.createElement("span");
  element.className = `hl-${kind}`;
  element.textContent = text;
  return element;
}

/** The words that a language has of its own, for completion. */
export function wordsOf(language) {
  const lists = WORDS[coloursOf(language)];
  return lists ? `${lists.keywords} ${lists.builtins}`.split(" ") : [];
}
