"""Tools as functions of bash: one JSON argument, the result as JSON on stdout, or a message on stderr and status 1.

A call opens a connection by bash's own /dev/tcp, so that it starts no program. What a shell hands over cannot contain
NUL, which therefore ends each field; nothing needs to be quoted.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from cloche import errors
from cloche.model import Tool

MAX_NAMED = 10  # of arguments that are missing
SHARED = "_cloche_call"  # by all of them
# The answer: "PLACE ok|error SIZE", a line feed, so many bytes. A short one is read by the shell, which reads byte by
# byte; else `cat` is worth its start. Everything is guarded against `set -e`, and the shell's own words have a `\` or a
# `builtin` against a program's aliases and functions.
_BODY = r"""{
    \builtin local LC_ALL=C IFS=' ' place verdict size answer='' out=1
    if [[ $# -gt 2 ]]; then
        \builtin printf '%s takes one argument, a JSON object; quote it\n' "$1" >&2
        \builtin return 1
    fi
    {
        if ! \builtin printf '%s\0' TOKEN 0 "$1" "${2-}" >&59 || ! \builtin read -r place verdict size <&59; then
            \builtin printf '%s: the tools are gone: nobody answers any more\n' "$1" >&58
            \builtin return 1
        fi
        [[ $verdict == ok ]] || out=58
        if [[ $size -gt 512 ]] && \builtin command cat <&59 >&"$out"; then :; else
            IFS='' \builtin read -r -d '' answer <&59 || :
            \builtin printf '%s' "$answer" >&"$out"
        fi
        [[ $verdict == ok ]] && \builtin return 0
        \builtin return 1
    } 58>&2 2>/dev/null 59<>/dev/tcp/127.0.0.1/PORT ||
        \builtin printf '%s' "${2-}" | \builtin command python3 -c CLIENT "$1"
}"""
# For a bash that was built without /dev/tcp.
_CLIENT = """
import os, socket, sys
given = sys.stdin.buffer.read()
with socket.create_connection(("127.0.0.1", PORT)) as line:
    line.sendall(b"\\0".join((b"TOKEN", b"0", os.fsencode(sys.argv[1]), given, b"")))
    answer = line.makefile("rb").read()
head, _, content = answer.partition(b"\\n")
success = head.split()[1:2] == [b"ok"]
out = sys.stdout if success else sys.stderr
out.buffer.write(content or b"the tools are gone: nobody answers any more\\n")
out.flush()
sys.exit(0 if success else 1)
"""


def check_arguments(tool: Tool, given: Mapping[str, Any]) -> None:
    """That a call has what it must have, which Python's functions know by themselves. Raises InvalidRequest."""
    required = tool.parameters.get("required")
    known = required if isinstance(required, list | tuple) else ()
    missing = [each for each in known if isinstance(each, str) and each not in given]
    if missing:
        example = ", ".join(f'"{each}": ..' for each in missing[:MAX_NAMED])
        raise errors.InvalidRequest(
            f"{tool.name} needs {{{example}}}: give it one JSON object as its argument. It reads no stdin"
        )


def exported(tools: Mapping[str, Tool], port: int, token: str) -> dict[str, str]:
    """Variables of the environment by which every bash that inherits them has the functions."""
    return {f"BASH_FUNC_{name}%%": f"() {body}" for name, body in _bodies(tools, port, token).items()}


def definitions(tools: Mapping[str, Tool], port: int, token: str) -> str:
    """A script that defines the functions, also for the shells that it starts."""
    bodies = _bodies(tools, port, token)
    defined = "\n".join(f"{name} () {body}" for name, body in bodies.items())
    return f"{defined}\n\\builtin export -f {' '.join(bodies)}\n"


def _bodies(tools: Mapping[str, Tool], port: int, token: str) -> dict[str, str]:
    """Each function's own is short: there may be many, and a program's environment has an end."""
    client = shlex.quote(_CLIENT.replace("PORT", str(port)).replace("TOKEN", token))
    shared = _BODY.replace("CLIENT", client).replace("PORT", str(port)).replace("TOKEN", token)
    own = {name: f'{{ {SHARED} {shlex.quote(tool.name)} "$@"; }}' for name, tool in tools.items()}
    return {SHARED: shared, **own}
