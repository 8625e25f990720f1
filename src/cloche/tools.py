"""Tools that live with a client and that code in a sandbox may call: what they are, and by which names.

A name of a tool can be anything; code knows it by an identifier. The rules are those of LibreChat's clients, which
tell their models the same: `-` and blanks become `_` (in bash `.` too), what no identifier can have is dropped, one
that would begin with a digit gets `_` before it, and one that cannot be a function's gets `_tool` behind it. Others
take the place of what was called so.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable
from typing import Any, Literal

from cloche import errors
from cloche.structs import Struct

ToolLanguage = Literal["python", "bash"]

LANGUAGES: tuple[ToolLanguage, ...] = ("python", "bash")
MAX_TOOLS = 100
MAX_NAME = 256
ERROR_NAME = "ToolExecutionError"

_BLANKS = {"python": re.compile(r"[-\s]"), "bash": re.compile(r"[-\s.]")}
_FOREIGN = re.compile(r"[^a-zA-Z0-9_]")
_BASH_WORDS = """
    if then else elif fi case esac for while until do done in function select time coproc
    alias bg bind break builtin caller cd command compgen complete compopt continue declare dirs disown echo enable eval
    exec exit export false fc fg getopts hash help history jobs kill let local logout mapfile popd printf pushd pwd read
    readarray readonly return set shift shopt source suspend test times trap true type typeset ulimit umask unalias
    unset wait
"""
_RESERVED = {
    "python": frozenset({*keyword.kwlist, ERROR_NAME, "asyncio"}),  # the last two every program with tools has
    "bash": frozenset(_BASH_WORDS.split()),
}
_OUR_OWN = {"python": re.compile(r"__.*__"), "bash": re.compile(r"_(ptc|cloche)_.*")}


class Tool(Struct):
    """What a program may call. `parameters` is a JSON schema of the object that it is called with."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class ToolCall(Struct):
    """One call of a program, which waits for its result. `id` is new in each run, from "call_001" on."""

    id: str
    name: str  # the tool's own
    input: dict[str, Any]


class ToolResult(Struct):
    """What a call came to: any JSON value, or, with `error`, why there is none."""

    call_id: str
    result: Any = None
    error: str | None = None


def identifier(name: str, language: ToolLanguage = "python") -> str:
    """What code calls the tool of that name by. Raises InvalidRequest where nothing of a name is left."""
    made = _FOREIGN.sub("", _BLANKS[language].sub("_", name))
    if not made:
        raise errors.InvalidRequest(f"a tool named {name!r} cannot be called: give it a name with letters or digits")
    if made[0].isdigit():
        made = f"_{made}"
    is_taken = made in _RESERVED[language] or _OUR_OWN[language].fullmatch(made) is not None
    return f"{made}_tool" if is_taken else made


def identifiers(tools: Iterable[Tool], language: ToolLanguage = "python") -> dict[str, Tool]:
    """Tools by what code calls them. Raises InvalidRequest for too many, and for two that would have one name."""
    known: dict[str, Tool] = {}
    for tool in tools:
        _check(tool)
        name = identifier(tool.name, language)
        if name in known:
            raise errors.InvalidRequest(
                f"the tools {known[name].name!r} and {tool.name!r} would both be called {name!r}: rename one"
            )
        known[name] = tool
    if len(known) > MAX_TOOLS:
        raise errors.InvalidRequest(f"a program can have {MAX_TOOLS} tools, not {len(known)}: offer it fewer")
    return known


def check_language(language: str) -> ToolLanguage:
    """Raises InvalidRequest for a language whose programs cannot call tools."""
    for known in LANGUAGES:
        if language == known:
            return known
    raise errors.InvalidRequest(f"programs in {language} cannot call tools: those in {' and '.join(LANGUAGES)} can")


def _check(tool: Tool) -> None:
    if not isinstance(tool.name, str) or "\0" in tool.name or len(tool.name) > MAX_NAME:
        raise errors.InvalidRequest(f"a tool needs a name of at most {MAX_NAME} characters, without NUL")
    if not isinstance(tool.description, str):
        raise errors.InvalidRequest(f"the description of the tool {tool.name!r} must be text")
    if not isinstance(tool.parameters, dict):
        raise errors.InvalidRequest(f"the parameters of the tool {tool.name!r} must be a JSON schema: an object")
