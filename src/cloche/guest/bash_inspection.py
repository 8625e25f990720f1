"""The variables of a shell: their names by `compgen`, their values by expansions that evaluate nothing.

A variable that refers to another (`declare -n`) is not expanded: its subscript could be a command.
"""

from __future__ import annotations

import os
import re
import shlex

from cloche.guest import wire

MAX_VARIABLES = 1000
MAX_PREVIEW = 200
_FIRST = 5  # elements of an array that are shown
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# The shell's own, of which some compute something when they are read.
_OWN = re.compile(
    "_|BASH.*|COMP_.*|COPROC|COLUMNS|DIRSTACK|EPOCH.*|EUID|FUNCNAME|GLOBIGNORE|GROUPS|HIST.*|HOSTNAME|HOSTTYPE|IFS|LINENO"
    "|LINES|MACHTYPE|MAILCHECK|MAPFILE|OLDPWD|OPT(ARG|ERR|IND)|OSTYPE|PIPESTATUS|PPID|PS[0-9]|PWD|RANDOM|READLINE_.*"
    "|SECONDS|SHELLOPTS|SHELL|SHLVL|SRANDOM|TERM|UID"
)


def answer(shell, report_fd: int, ask: object) -> tuple:
    """The frame that answers an `inspect`: header and body."""
    names = [name for name in _lines(shell, f"\\builtin compgen -v >&{report_fd}") if _is_shown(name)]
    arrays = set(_lines(shell, f"\\builtin compgen -A arrayvar >&{report_fd}"))
    # `set -u` makes an expansion of what has no value an error.
    (options,) = _lines(shell, f"\\builtin printf '%s\\n' \"$-\" >&{report_fd}") or [""]
    strict = ("\\builtin set +u\n", "\\builtin set -u\n") if "u" in options else ("", "")
    shown = names[:MAX_VARIABLES]
    told = _lines(shell, strict[0] + "".join(_question(name, report_fd) for name in shown) + strict[1])
    body = [each for line in told if (each := _variable(line, arrays)) and not _is_inherited(each)]
    return {"ev": "inspected", "ask": ask, "more": len(names) - len(shown)}, wire.encode_json(body)


def _lines(shell, script: str) -> list:
    return shell.ask(script).splitlines()


def _is_shown(name: str) -> bool:
    return bool(_NAME.match(name)) and not _OWN.fullmatch(name)


def _question(name: str, report_fd: int) -> str:
    """A line with the name, how many elements, how long, the begin of the value, the first elements."""
    values = f'"${{#{name}[@]}}" "${{#{name}}}" "${{{name}:0:{MAX_PREVIEW}}}" "${{{name}[*]:0:{_FIRST}}}"'
    known = f"\\builtin printf '{name} %d %d %q %q\\n' {values} >&{report_fd}"
    return f"[[ -R {name} ]] && \\builtin printf '{name}\\n' >&{report_fd} || {known}\n"


def _variable(line: str, arrays: set) -> dict | None:
    name, *values = line.split(" ", 3)
    if not _NAME.match(name):
        return None
    if len(values) < 3:
        return {"name": name, "type": "nameref", "preview": "<nameref>"}
    count, length, quoted = values
    if name in arrays or count != "1":
        return {"name": name, "type": "array", "length": int(count), "preview": _cut(f"({_last(quoted)})")}
    return {"name": name, "type": "string", "length": int(length), "preview": _cut(_first(quoted))}


def _first(quoted: str) -> str:
    """The first of two words as `printf %q` writes them, in quotes if it needs some."""
    found = re.match(r"\$'(?:[^'\\]|\\.)*'|''|(?:[^\s\\]|\\.)*", quoted)
    text = found.group() if found else ""
    return text if text.startswith("$'") else shlex.quote(re.sub(r"\\(.)", r"\1", text) if text != "''" else "")


def _last(quoted: str) -> str:
    begin = re.match(r"(?:\$'(?:[^'\\]|\\.)*'|''|(?:[^\s\\]|\\.)*) ", quoted)
    text = quoted[begin.end() :] if begin else ""
    return text if text.startswith("$'") else re.sub(r"\\(.)", r"\1", text) if text != "''" else ""


def _cut(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_PREVIEW else text[: MAX_PREVIEW - 1] + "…"


def _is_inherited(told: dict) -> bool:
    """Whether it is from the environment that the shell was given, and as it was there."""
    value = os.environ.get(told["name"])
    return value is not None and told["type"] == "string" and _cut(shlex.quote(value[:MAX_PREVIEW])) == told["preview"]
