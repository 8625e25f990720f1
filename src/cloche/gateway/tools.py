"""Which tools a model is shown in a leg, and what it must choose."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

from cloche.gateway.items import PYTHON, Item
from cloche.gateway.request import Asked

CLIENT_CALLS = frozenset(
    {
        "function_call",
        "custom_tool_call",
        "computer_call",
        "local_shell_call",
        "shell_call",
        "apply_patch_call",
        "mcp_approval_request",
    }
)
"""Types of items that wait for the client: after them a turn ends."""

CLIENT_TOOLS = frozenset(
    "function custom namespace computer computer_use_preview local_shell shell apply_patch tool_search".split()
)
"""Types of tools that a client runs itself. All others are the upstream's own."""

OTHER_NAMES = frozenset({"python", "code_interpreter", "ipython", "python_interpreter", "execute_python", "run_python"})
"""What models call the function for code by mistake: names that they were trained on."""

DESCRIPTION = """\
Runs Python in a sandbox and gives back what it printed, the value of its last expression and the pictures it showed. \
State lasts between calls, as in a notebook. Files are below /mnt/data, the working directory: save there what the \
user should get, and link it in your answer as [name](sandbox:/mnt/data/name)."""

PARAMETERS: Item = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "The Python code to run."}},
    "required": ["code"],
    "additionalProperties": False,
}


def python_name(tools: Iterable[Item]) -> str:
    """The name of the function for code: one that no tool of the client's has."""
    taken = {tool.get("name") for tool in tools}
    name = PYTHON
    while name in taken:
        name += "_interpreter" if name == PYTHON else "_"
    return name


def means_python(name: Any, tools: Iterable[Item]) -> bool:
    """Whether a call of that name is one of the function for code, which the client has nothing of."""
    return isinstance(name, str) and name in OTHER_NAMES and all(tool.get("name") != name for tool in tools)


def tools_for(
    asked: Asked, python: str, *, has_code: bool, first: bool, may_run: bool, may_host: bool, notes: list[str]
) -> tuple[list[Item], Any]:
    """The tools, and the choice. It is forced in the first leg only: a model that must call could never answer.

    `may_run` is whether code may still run, `may_host` whether the upstream may still use tools of its own.
    """
    choice = _choice(asked.tool_choice, python)
    if not first:
        choice = _unforced(choice)
    tools = asked.tools if may_host else [tool for tool in asked.tools if tool.get("type") in CLIENT_TOOLS]
    if has_code and (may_run or not tools):
        # Without any tool, some upstreams refuse a transcript that has calls.
        tools = [*tools, _python_tool(python, notes)]
    if has_code and not may_run:
        choice = _without(choice, python) if len(tools) > 1 or tools[0].get("name") != python else "none"
    return tools, _possible(choice, tools)


def waits_for_client(item: Item) -> bool:
    """Whether an item is a call that the client answers."""
    return item.get("type") in CLIENT_CALLS or item.get("execution") == "client"


def is_hosted(item: Item) -> bool:
    """Whether an item is a call that the upstream has made by itself."""
    return str(item.get("type")).endswith("_call") and not waits_for_client(item)


def _python_tool(name: str, notes: list[str]) -> Item:
    description = "\n".join([DESCRIPTION, *notes])
    return {"type": "function", "name": name, "description": description, "parameters": PARAMETERS, "strict": False}


def _choice(choice: Any, python: str) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "code_interpreter":
        return {"type": "function", "name": python}
    if _is_allowed(choice):
        return {**choice, "tools": [_choice(each, python) for each in choice.get("tools", [])]}
    return choice


def _unforced(choice: Any) -> Any:
    if _is_allowed(choice):
        return {**choice, "mode": "auto"}
    return "none" if choice == "none" else "auto"


def _without(choice: Any, python: str) -> Any:
    """The same without the function for code."""
    if not _is_allowed(choice):
        return choice
    return {**choice, "tools": [each for each in choice["tools"] if each.get("name") != python]}


def _possible(choice: Any, tools: list[Item]) -> Any:
    """The same, as far as the tools are there: an upstream refuses a choice of what it was not shown."""
    if not _is_allowed(choice):
        return choice
    known = {names for tool in tools for names in product(*((None, name) for name in _names(tool)))}
    there = [each for each in choice["tools"] if isinstance(each, dict) and _names(each) in known]
    return {**choice, "tools": there} if there else "none"


def _names(tool: Item) -> tuple[str | None, ...]:
    """What tells it from others. A choice that leaves one out means all."""
    names = (tool.get(name) for name in ("type", "name", "server_label"))
    return tuple(name if name is None else str(name) for name in names)


def _is_allowed(choice: Any) -> bool:
    return isinstance(choice, dict) and choice.get("type") == "allowed_tools"
