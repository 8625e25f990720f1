"""What is asked of POST /exec/programmatic: a program with tools, or the results of the calls that it made. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cloche.api.librechat.names import shown
from cloche.api.librechat.replies import Refusal
from cloche.api.librechat.request import MAX_CODE_BYTES, Asked, decode_fields
from cloche.model import Struct, Tool, ToolLanguage, ToolResult, identifiers

MAX_RESULTS = 1000
MAX_TOOLS_BYTES = 4_000_000  # of what is said of all tools of a program
LEAST_SECONDS = 1.0  # what clients take for the least that a program can be given
_CALL_ID = re.compile(r"call_[0-9]{3,6}")
_LANGUAGES: dict[str, ToolLanguage] = {
    "python": "python",
    "py": "python",
    "python3": "python",
    "bash": "bash",
    "sh": "bash",
}


class Program(Struct):
    """A program to begin, and what it may call."""

    asked: Asked
    language: ToolLanguage
    tools: tuple[Tool, ...]


class Given(Struct):
    """What a client sent for one call. Two that mean the same have the same digest."""

    result: ToolResult
    bytes: int
    digest: str


def decode_program(given: Mapping[str, Any], max_tools: int) -> Program:
    """Raises Refusal (400, 413), and InvalidRequest for tools that cannot be called by their names."""
    language = _language(given.get("language") or given.get("lang") or "python")
    code = given.get("code")
    if not isinstance(code, str) or not code:
        raise Refusal(400, "Missing required field: code")
    size = len(code.encode("utf-8", "replace"))
    if size > MAX_CODE_BYTES:
        raise Refusal(413, f"Request too large: code has {size} bytes, {MAX_CODE_BYTES} are possible")
    asked = decode_fields(given, "bash" if language == "bash" else "py")
    if asked.timeout_seconds is not None:
        asked = msgspec.structs.replace(asked, timeout_seconds=max(asked.timeout_seconds, LEAST_SECONDS))
    tools = _tools(given.get("tools"), max_tools)
    identifiers(tools, language)
    return Program(asked=asked, language=language, tools=tools)


def decode_results(given: object) -> dict[str, Given]:
    """By call. Raises Refusal (400)."""
    if not isinstance(given, list):
        raise Refusal(400, "tool_results must be an array when continuation_token is provided")
    if not given:
        raise Refusal(400, "tool_results must be a non-empty array; send one result for each of the tool_calls")
    if len(given) > MAX_RESULTS:
        raise Refusal(400, f"tool_results has {len(given)} entries; there were never so many tool_calls")
    results = [_given(index, each) for index, each in enumerate(given)]
    by_call = {each.result.call_id: each for each in results}
    if len(by_call) != len(results):
        raise Refusal(400, "tool_results has two results for one call_id; send one for each of the tool_calls")
    return by_call


def _language(given: object) -> ToolLanguage:
    language = _LANGUAGES.get(given.strip().lower()) if isinstance(given, str) else None
    if language is None:
        raise Refusal(400, f'Unsupported language {shown(str(given))}; supported values are "python" and "bash"')
    return language


def _tools(given: object, max_tools: int) -> tuple[Tool, ...]:
    if not isinstance(given, list):
        raise Refusal(400, "Missing required field: tools (must be an array)")
    if len(given) > max_tools:
        raise Refusal(400, f"Too many tools provided ({len(given)}). Maximum is {max_tools}.")
    tools = tuple(_tool(index, each) for index, each in enumerate(given))
    size = len(msgspec.json.encode(tools))
    if size > MAX_TOOLS_BYTES:  # they are kept for as long as the program runs
        raise Refusal(413, f"Request too large: tools have {size} bytes, {MAX_TOOLS_BYTES} are possible")
    return tools


def _tool(index: int, given: object) -> Tool:
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise Refusal(400, f"tools[{index}] must be an object with a name")
    description, parameters = given.get("description"), given.get("parameters")
    return Tool(
        name=given["name"],
        description=description if isinstance(description, str) else "",
        parameters=parameters if isinstance(parameters, dict) else {},
    )


def _given(index: int, given: object) -> Given:
    if not isinstance(given, dict):
        raise Refusal(400, f"tool_results[{index}] must be an object with call_id, result and is_error")
    call_id, failed, message = given.get("call_id"), given.get("is_error", False), given.get("error_message")
    if not isinstance(call_id, str) or not _CALL_ID.fullmatch(call_id):
        raise Refusal(400, f"tool_results[{index}].call_id must be the id of one of the tool_calls, such as call_001")
    if failed is not None and not isinstance(failed, bool):
        raise Refusal(400, f"tool_results[{index}].is_error must be true or false")
    error = (message if isinstance(message, str) and message else "Tool execution failed") if failed else None
    content = msgspec.json.encode(None if failed else given.get("result"), order="sorted")
    digest = hashlib.sha256(content + b"\0" + (error or "").encode("utf-8", "replace"))
    # The program gets it as JSON. Until then it is kept as such: as objects it can be much larger.
    result = ToolResult(call_id=call_id, result=msgspec.Raw(content), error=error)
    return Given(result=result, bytes=len(content) + len(error or ""), digest=digest.hexdigest())


def missing_and_unknown(wanted: Sequence[str], given: Mapping[str, Given]) -> str:
    """What is wrong with results for these calls; empty if nothing is."""
    known = set(wanted)
    unknown = [id for id in given if id not in known]
    missing = [id for id in wanted if id not in given]
    if unknown:
        return f"tool_results has results of calls that were not issued with this token: {', '.join(unknown[:10])}"
    return f"tool_results has no result for {', '.join(missing[:10])}" if missing else ""
