"""All tools by their names, and a call of one: whatever goes wrong is said in the answer."""

from __future__ import annotations

from typing import Any

from cloche import errors
from cloche.api.http import unforeseen
from cloche.mcp import tools_code, tools_commands, tools_files, tools_sandbox
from cloche.mcp.call import Answer, Call, Told, Tool
from cloche.mcp.content import text
from cloche.mcp.schemas import arguments_of, schema_of
from cloche.mcp.workspace import Workspace

TOOLS: tuple[Tool, ...] = tools_code.TOOLS + tools_commands.TOOLS + tools_files.TOOLS + tools_sandbox.TOOLS
BY_NAME = {tool.name: tool for tool in TOOLS}
ALL = frozenset(BY_NAME)

NO_TOOL = "there is no tool {name!r}; there are: {known}"
BEGIN_ANEW = "the next call begins in a new sandbox, without its files and variables"


def checked(names: frozenset[str]) -> frozenset[str]:
    """Raises InvalidRequest for names that no tool has."""
    unknown = sorted(names - ALL)
    if unknown:
        raise errors.InvalidRequest(NO_TOOL.format(name=unknown[0], known=", ".join(BY_NAME)))
    return names


def described(tool: Tool) -> dict[str, Any]:
    """As `tools/list` has it."""
    found: dict[str, Any] = {
        "name": tool.name,
        "title": tool.title,
        "description": tool.description,
        "inputSchema": schema_of(tool.takes),
        "annotations": {
            "title": tool.title,
            "readOnlyHint": tool.reads_only,
            "destructiveHint": tool.destroys,
            "idempotentHint": tool.repeats or tool.reads_only,
            "openWorldHint": False,
        },
    }
    return {**found, "outputSchema": schema_of(tool.gives)} if tool.gives is not None else found


async def call_tool(workspace: Workspace, told: Told, name: str, arguments: dict[str, Any] | None) -> Answer:
    """Raises InvalidRequest where there is no such tool. What else goes wrong is an answer that says so."""
    tool = BY_NAME.get(name)
    if tool is None or name not in workspace.tools:
        raise errors.InvalidRequest(NO_TOOL.format(name=name[:100], known=", ".join(sorted(workspace.tools))))
    try:
        return await tool.call(Call(workspace, told), arguments_of(tool.takes, arguments))
    except (errors.Gone, errors.SandboxNotFound) as error:
        ended = await workspace.has_lost_its_sandbox()
        return failed(error, BEGIN_ANEW if ended else "")
    except errors.ClocheError as error:
        return failed(error)
    except Exception as error:  # noqa: BLE001 - the dialect's edge
        return failed(unforeseen(error, f"mcp {name}"))


def failed(error: errors.ClocheError, more: str = "") -> Answer:
    """What is said of a fault of ours, or of the request: never of the program's."""
    return Answer(text(f"{error.code}: {error}{f' ({more})' if more else ''}"), failed=True)
