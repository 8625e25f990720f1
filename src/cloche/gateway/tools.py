"""Selects the tools and the tool choice of one model call."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

from cloche.gateway.items import PYTHON_FUNCTION, Item
from cloche.gateway.request import TurnRequest

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

MISTAKEN_PYTHON_NAMES = frozenset(
    {"python", "code_interpreter", "ipython", "python_interpreter", "execute_python", "run_python"}
)
"""What models call the function for code by mistake: names that they were trained on."""

PYTHON_DESCRIPTION = """\
Runs Python in a sandbox and gives back what it printed, the value of its last expression and the pictures it showed. \
State lasts between calls, as in a notebook. Files are below /mnt/data, the working directory: save there what the \
user should get, and link it in your answer as [name](sandbox:/mnt/data/name)."""

PYTHON_PARAMETERS: Item = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "The Python code to run."}},
    "required": ["code"],
    "additionalProperties": False,
}


def choose_python_name(tools: Iterable[Item]) -> str:
    """Returns the name of the code function: one that no tool of the client has."""
    taken = {tool.get("name") for tool in tools}
    name = PYTHON_FUNCTION
    while name in taken:
        name += "_interpreter" if name == PYTHON_FUNCTION else "_"
    return name


def is_mistaken_python_name(name: Any, tools: Iterable[Item]) -> bool:
    """Whether a call of that name is meant for the code function, and no tool of the client has the name."""
    return isinstance(name, str) and name in MISTAKEN_PYTHON_NAMES and all(tool.get("name") != name for tool in tools)


def select_tools(
    request: TurnRequest, python: str, *, has_code: bool, first: bool, may_run: bool, may_host: bool, notes: list[str]
) -> tuple[list[Item], Any]:
    """Returns the tools and the choice.

    A choice is forced in the first call only: else the model could never answer.

    `may_run` is whether code may still run, `may_host` whether the upstream may still use tools of its own.
    """
    choice = _convert_choice(request.tool_choice, python)
    if not first:
        choice = _unforce_choice(choice)
    tools = request.tools if may_host else [tool for tool in request.tools if tool.get("type") in CLIENT_TOOLS]
    if has_code and (may_run or not tools):
        # Without any tool, some upstreams refuse a transcript that has calls.
        tools = [*tools, _python_tool(python, notes)]
    if has_code and not may_run:
        choice = _exclude_python(choice, python) if len(tools) > 1 or tools[0].get("name") != python else "none"
    return tools, _restrict_choice(choice, tools)


def waits_for_client(item: Item) -> bool:
    """Whether an item is a call that the client answers."""
    return item.get("type") in CLIENT_CALLS or item.get("execution") == "client"


def is_hosted(item: Item) -> bool:
    """Whether an item is a call that the upstream has made by itself."""
    return str(item.get("type")).endswith("_call") and not waits_for_client(item)


def _python_tool(name: str, notes: list[str]) -> Item:
    description = "\n".join([PYTHON_DESCRIPTION, *notes])
    return {
        "type": "function",
        "name": name,
        "description": description,
        "parameters": PYTHON_PARAMETERS,
        "strict": False,
    }


def _convert_choice(choice: Any, python: str) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "code_interpreter":
        return {"type": "function", "name": python}
    if _is_allowed_tools(choice):
        return {**choice, "tools": [_convert_choice(each, python) for each in choice.get("tools", [])]}
    return choice


def _unforce_choice(choice: Any) -> Any:
    if _is_allowed_tools(choice):
        return {**choice, "mode": "auto"}
    return "none" if choice == "none" else "auto"


def _exclude_python(choice: Any, python: str) -> Any:
    """Returns the choice without the code function."""
    if not _is_allowed_tools(choice):
        return choice
    return {**choice, "tools": [each for each in choice["tools"] if each.get("name") != python]}


def _restrict_choice(choice: Any, tools: list[Item]) -> Any:
    """Restricts the choice to the offered tools: an upstream refuses a choice of other tools."""
    if not _is_allowed_tools(choice):
        return choice
    known = {names for tool in tools for names in product(*((None, name) for name in _tool_identity(tool)))}
    there = [each for each in choice["tools"] if isinstance(each, dict) and _tool_identity(each) in known]
    return {**choice, "tools": there} if there else "none"


def _tool_identity(tool: Item) -> tuple[str | None, ...]:
    """Returns the fields that identify a tool. A choice that omits one means all."""
    names = (tool.get(name) for name in ("type", "name", "server_label"))
    return tuple(name if name is None else str(name) for name in names)


def _is_allowed_tools(choice: Any) -> bool:
    return isinstance(choice, dict) and choice.get("type") == "allowed_tools"
