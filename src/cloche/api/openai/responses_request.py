"""Requests of the Responses API, decoded from JSON. Pure: the handler looks up everything in the store."""

from __future__ import annotations

import re
from typing import Any, get_args

import msgspec

from cloche.api.dialect import InvalidJson, decode_json
from cloche.api.openai.context import (
    MAX_INCLUDE,
    MAX_TOOLS,
    BadParameter,
    UpstreamOptions,
    check_item,
    check_item_lengths,
    check_length,
    check_model,
    check_tool,
)
from cloche.api.openai.context import convert_typed as convert_typed
from cloche.api.openai.context import missing_parameter as missing_parameter
from cloche.api.openai.network import decode_network
from cloche.gateway.items import Item
from cloche.gateway.request import CodeTool, MemoryTier
from cloche.model import Struct

INCLUDE_OUTPUTS = "code_interpreter_call.outputs"
INCLUDE_NEW_FILES = "code_interpreter_call.new_files"  # ours: cites every file that code made
MAX_FILE_IDS = 50

UPSTREAM_FIELDS = (
    "temperature top_p parallel_tool_calls reasoning text truncation service_tier safety_identifier prompt_cache_key "
    "prompt_cache_retention prompt_cache_options top_logprobs user metadata prompt moderation"
).split()

_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_NOT_UNICODE = "its text is not valid Unicode: it has half of a surrogate pair. Leave such characters out."


class ResponseRequest(Struct):
    """A request for a response."""

    model: str
    input: list[Item] = []
    instructions: str | None = None
    tools: list[Item] = []  # as they came: they are echoed
    code: CodeTool | None = None
    tool_choice: Any = "auto"
    include: tuple[str, ...] = ()
    max_tool_calls: int | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    options: dict[str, Any] = {}
    store: bool = True
    stream: bool = False
    background: bool = False
    previous_response_id: str | None = None
    conversation: str | None = None
    stream_outputs: bool = False  # ours: `stream_options.include_outputs` streams what code prints

    @property
    def with_outputs(self) -> bool:
        return INCLUDE_OUTPUTS in self.include

    @property
    def other_tools(self) -> list[Item]:
        """All tools but the code interpreter, for the upstream."""
        return [tool for tool in self.tools if tool.get("type") != "code_interpreter"]


class _ResponseBody(msgspec.Struct):
    """The fields checked by type; the others are checked by hand, or by the upstream."""

    model: str | None = None
    input: str | list[Any] | None = None
    instructions: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    include: list[str] | None = None
    max_tool_calls: int | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None


def decode_response(body: bytes) -> ResponseRequest:
    """Raises InvalidRequest in OpenAI's words."""
    raw = json_object(body)
    check_length(raw.get("tools"), MAX_TOOLS, "tools")
    check_length(raw.get("include"), MAX_INCLUDE, "include")
    check_item_lengths(raw.get("input"), "input")
    fields = convert_typed(raw, _ResponseBody)
    convert_typed(raw, UpstreamOptions)
    model = check_model(fields.model)
    for at, tool in enumerate(fields.tools or []):
        check_tool(tool, f"tools[{at}]")
    code_tools = [(at, tool) for at, tool in enumerate(fields.tools or []) if tool.get("type") == "code_interpreter"]
    if len(code_tools) > 1:
        raise BadParameter("Only one code_interpreter tool is possible.", f"tools[{code_tools[1][0]}]")
    conversation = fields.conversation.get("id") if isinstance(fields.conversation, dict) else fields.conversation
    if fields.conversation is not None and (not conversation or not isinstance(conversation, str)):
        raise BadParameter("Invalid 'conversation': expected its id, or an object with it.", "conversation")
    if fields.background and fields.store is False:
        raise BadParameter("A response with background=true is stored: 'store' cannot be false.", "store")
    if conversation and fields.previous_response_id:
        raise BadParameter(
            "Mutually exclusive parameters: 'conversation' and 'previous_response_id'.", "previous_response_id"
        )
    _check_counts(fields)
    for at, tool in enumerate(fields.tools or []):
        _check_shell_tool(at, tool)
    _check_choice(fields.tool_choice, "tool_choice", has_code=bool(code_tools))
    return ResponseRequest(
        model=model,
        input=input_items(fields.input),
        instructions=_check_instructions(fields.instructions),
        tools=fields.tools or [],
        code=_code_tool(*code_tools[0]) if code_tools else None,
        tool_choice="auto" if fields.tool_choice is None else fields.tool_choice,
        include=tuple(fields.include or ()),
        max_tool_calls=fields.max_tool_calls,
        max_output_tokens=fields.max_output_tokens,
        metadata=check_metadata(fields.metadata or {}),
        options=_upstream_options(raw, fields.include or []),
        store=fields.store is not False,
        stream=bool(fields.stream),
        background=bool(fields.background),
        previous_response_id=fields.previous_response_id,
        conversation=conversation,
        stream_outputs=bool((fields.stream_options or {}).get("include_outputs")),
    )


def json_object(body: bytes) -> dict[str, Any]:
    """Raises InvalidRequest unless it is a JSON object, of no more values than can be decoded in a moment."""
    try:
        value = decode_json(body)
    except InvalidJson as error:
        if error.flaw == "complexity":
            raise BadParameter(f"The body of your request is too complex: {error.problem}.", None) from None
        why = _NOT_UNICODE if "surrogate" in error.detail or _HALF_PAIR.search(body) else error.detail
        raise BadParameter(f"We could not parse the JSON body of your request: {why}", None, "invalid_json") from None
    if not isinstance(value, dict):
        raise BadParameter("The body of your request must be a JSON object.", None, "invalid_json")
    return value


def input_items(value: str | list[Any] | None, param: str = "input") -> list[Item]:
    """The input as items. Raises InvalidRequest."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
    items = []
    for at, item in enumerate(value):
        if not isinstance(item, dict):
            raise BadParameter(
                f"Invalid type for '{param}[{at}]': expected an object.", f"{param}[{at}]", "invalid_type"
            )
        if "type" not in item and "role" not in item:
            raise missing_parameter(f"{param}[{at}].type")
        _check_no_code_tool(item.get("tools"), f"{param}[{at}].tools")
        items.append(item if "type" in item else {"type": "message", **item})
        check_item(items[-1], f"{param}[{at}]")
    return items


def _check_instructions(value: str | list[Any] | None) -> str | None:
    if isinstance(value, list):
        raise BadParameter("Invalid type for 'instructions': expected a string.", "instructions", "invalid_type")
    return value


def check_metadata(pairs: dict[str, str]) -> dict[str, str]:
    """Raises InvalidRequest."""
    if len(pairs) > 16:
        raise BadParameter("Invalid 'metadata': 16 pairs at most.", "metadata", "object_above_max_properties")
    for name, value in pairs.items():
        if len(name) > 64 or len(value) > 512:
            raise BadParameter(
                "Invalid 'metadata': names have 64 characters at most, values 512.",
                "metadata",
                "string_above_max_length",
            )
    return pairs


def _check_counts(fields: _ResponseBody) -> None:
    for name, least in (("max_tool_calls", 1), ("max_output_tokens", 16)):
        value = getattr(fields, name)
        if value is not None and value < least:
            raise BadParameter(
                f"Invalid '{name}': integer below minimum value. Expected a value >= {least}, but got {value} instead.",
                name,
                "integer_below_min_value",
            )


def _upstream_options(raw: dict[str, Any], include: list[str]) -> dict[str, Any]:
    """The options that only the upstream understands. Of `include`, all but this server's own values."""
    options = {name: raw[name] for name in UPSTREAM_FIELDS if raw.get(name) is not None}
    theirs = [each for each in include if not each.startswith("code_interpreter_call.")]
    return {**options, "include": theirs} if theirs else options


def _check_shell_tool(at: int, tool: Item) -> None:
    """Raises InvalidRequest for a shell tool with a remote environment."""
    environment = tool.get("environment")
    kind = environment.get("type") if isinstance(environment, dict) else None
    if tool["type"] == "shell" and kind != "local":
        raise BadParameter(
            "The shell tool has no container here: give it the environment {'type': 'local'} and run its commands "
            "yourself, or use the code_interpreter tool.",
            f"tools[{at}].environment",
        )


def _check_no_code_tool(tools: Any, param: str) -> None:
    """Raises InvalidRequest if an item brings the code interpreter: only the request's own `tools` can have it."""
    for at, tool in enumerate(tools if isinstance(tools, list) else []):
        if isinstance(tool, dict) and str(tool.get("type", "")).startswith("code_interpreter"):
            raise BadParameter("The code_interpreter tool must be in 'tools'.", f"{param}[{at}]")


def _check_choice(choice: Any, param: str, *, has_code: bool) -> None:
    if choice is None or choice in ("none", "auto", "required"):
        return
    if not isinstance(choice, dict) or not isinstance(choice.get("type"), str):
        raise BadParameter(
            f"Invalid value for '{param}': expected 'none', 'auto', 'required', or an object with a type.", param
        )
    check_tool(choice, param)
    if choice["type"].startswith("code_interpreter") and not has_code:
        raise BadParameter(f"Tool choice '{choice['type'][:100]}' not found in 'tools' parameter.", "tool_choice")
    if choice["type"] == "allowed_tools":
        _check_allowed(choice, param, has_code=has_code)


def _check_allowed(choice: Item, param: str, *, has_code: bool) -> None:
    if choice.get("mode") not in ("auto", "required"):
        raise BadParameter(f"Invalid value for '{param}.mode': expected 'auto' or 'required'.", f"{param}.mode")
    allowed = choice.get("tools")
    if not isinstance(allowed, list) or not all(isinstance(each, dict) for each in allowed):
        raise BadParameter(
            f"Invalid type for '{param}.tools': expected a list of tools.", f"{param}.tools", "invalid_type"
        )
    check_length(allowed, MAX_TOOLS, f"{param}.tools")
    for at, each in enumerate(allowed):
        if each.get("type") == "allowed_tools":
            raise BadParameter("'allowed_tools' cannot be among allowed tools.", f"{param}.tools[{at}]")
        _check_choice(each, f"{param}.tools[{at}]", has_code=has_code)


def _code_tool(at: int, tool: Item) -> CodeTool:
    param = f"tools[{at}].container"
    container = tool.get("container")
    if container is None:
        raise missing_parameter(param)
    if isinstance(container, str):
        return CodeTool(container=container)
    if not isinstance(container, dict) or container.get("type") != "auto":
        raise BadParameter(f"Invalid value for '{param}': expected a container's id, or type 'auto'.", param)
    return CodeTool(
        file_ids=file_ids_of(container.get("file_ids"), f"{param}.file_ids"),
        memory=decode_memory_tier(container.get("memory_limit"), f"{param}.memory_limit"),
        network=decode_network(container.get("network_policy"), f"{param}.network_policy"),
    )


def file_ids_of(value: Any, param: str) -> tuple[str, ...]:
    """Raises InvalidRequest."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise BadParameter(f"Invalid type for '{param}': expected a list of file ids.", param, "invalid_type")
    check_length(value, MAX_FILE_IDS, param)
    return tuple(dict.fromkeys(value))


def decode_memory_tier(value: Any, param: str) -> MemoryTier | None:
    """Raises InvalidRequest."""
    if value is None:
        return None
    if value not in get_args(MemoryTier):
        names = ", ".join(f"'{each}'" for each in get_args(MemoryTier))
        raise BadParameter(f"Invalid value: {str(value)[:100]!r}. Supported values are: {names}.", param)
    tier: MemoryTier = value
    return tier
