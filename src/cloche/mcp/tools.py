"""All tools by their names, and a call of one: every error becomes part of the result."""

from __future__ import annotations

from typing import Any

from cloche import errors
from cloche.api.http import log_internal_error
from cloche.mcp import tools_code, tools_commands, tools_files, tools_sandbox
from cloche.mcp.call import ClientChannel, McpTool, McpToolCall, McpToolResult
from cloche.mcp.content import text_block
from cloche.mcp.schemas import decode_arguments, tool_schema
from cloche.mcp.workspace import McpWorkspace

TOOLS: tuple[McpTool, ...] = tools_code.TOOLS + tools_commands.TOOLS + tools_files.TOOLS + tools_sandbox.TOOLS
TOOLS_BY_NAME = {tool.name: tool for tool in TOOLS}
ALL_TOOL_NAMES = frozenset(TOOLS_BY_NAME)

NO_TOOL_MESSAGE = "there is no tool {name!r}; there are: {known}"
NEW_SANDBOX_NOTE = "the next call begins in a new sandbox, without its files and variables"


def check_tool_names(names: frozenset[str]) -> frozenset[str]:
    """Returns the names. Raises InvalidRequest for unknown ones."""
    unknown = sorted(names - ALL_TOOL_NAMES)
    if unknown:
        raise errors.InvalidRequest(NO_TOOL_MESSAGE.format(name=unknown[0], known=", ".join(TOOLS_BY_NAME)))
    return names


def describe_tool(tool: McpTool) -> dict[str, Any]:
    """The tool's entry in `tools/list`."""
    found: dict[str, Any] = {
        "name": tool.name,
        "title": tool.title,
        "description": tool.description,
        "inputSchema": tool_schema(tool.takes),
        "annotations": {
            "title": tool.title,
            "readOnlyHint": tool.reads_only,
            "destructiveHint": tool.destroys,
            "idempotentHint": tool.repeats or tool.reads_only,
            "openWorldHint": False,
        },
    }
    return {**found, "outputSchema": tool_schema(tool.gives)} if tool.gives is not None else found


async def call_tool(
    workspace: McpWorkspace, told: ClientChannel, name: str, arguments: dict[str, Any] | None
) -> McpToolResult:
    """Calls a tool. Raises InvalidRequest where there is no such tool.

    Every other error becomes a failed result.
    """
    tool = TOOLS_BY_NAME.get(name)
    if tool is None or name not in workspace.tools:
        raise errors.InvalidRequest(NO_TOOL_MESSAGE.format(name=name[:100], known=", ".join(sorted(workspace.tools))))
    try:
        return await tool.call(McpToolCall(workspace, told), decode_arguments(tool.takes, arguments))
    except (errors.Gone, errors.SandboxNotFound) as error:
        ended = await workspace.drop_ended_sandbox()
        return failed_result(error, NEW_SANDBOX_NOTE if ended else "")
    except errors.ClocheError as error:
        return failed_result(error)
    except Exception as error:  # noqa: BLE001 - the dialect's edge
        return failed_result(log_internal_error(error, f"mcp {name}"))


def failed_result(error: errors.ClocheError, more: str = "") -> McpToolResult:
    """The result for an error of Cloche, or of the request: never of the program."""
    return McpToolResult(text_block(f"{error.code}: {error}{f' ({more})' if more else ''}"), failed=True)
