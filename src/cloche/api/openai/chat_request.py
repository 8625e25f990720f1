"""Requests for a chat completion, from JSON to a turn's request. Pure.

Fields with an equivalent in the Responses API are converted to it; all other fields are kept as they came in
`options["chat"]`, for upstreams that speak Chat themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cloche.api.openai.chat_messages import ChatMessage, decode_messages, message_items, remembered_turn
from cloche.api.openai.context import MAX_TOOLS, BadParameter, check_item_lengths, check_length, check_model
from cloche.api.openai.network import decode_network
from cloche.api.openai.responses_request import (
    convert_typed,
    decode_memory_tier,
    file_ids_of,
    json_object,
    missing_parameter,
)
from cloche.gateway import history
from cloche.gateway.items import Item
from cloche.gateway.request import CodeTool, TurnRequest
from cloche.gateway.tools import choose_python_name
from cloche.model import Struct
from cloche.store.gateway import StoredChatTurn

SESSION_KEY = "session_id"  # in a chat's metadata: requests of one session share a container
MAX_SESSION_CHARACTERS = 512
CODE_INTERPRETER = "code_interpreter"
CHAT_OPTIONS = "chat"  # in `Asked.options`: what only Chat has a word for

_SHARED_OPTIONS = (
    "temperature top_p parallel_tool_calls service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "prompt_cache_options top_logprobs user moderation"
).split()
_READ_FIELDS = (
    "model messages tools tool_choice functions function_call stream stream_options n metadata store max_tokens "
    "max_completion_tokens response_format reasoning_effort verbosity logprobs max_tool_calls modalities audio"
).split()
_OUR_KEYS = ("code_interpreter_calls", "container_file_citations")
_LOGPROBS = "message.output_text.logprobs"


class ChatRequest(Struct):
    """A request for a completion. `raw` is all of it."""

    raw: dict[str, Any]
    model: str
    code: CodeTool | None = None
    stream: bool = False
    include_usage: bool = False

    @property
    def wants_json(self) -> bool:
        """Whether the whole content must be one JSON value."""
        wanted = self.raw.get("response_format")
        return isinstance(wanted, dict) and wanted.get("type") in ("json_object", "json_schema")


class _ChatBody(msgspec.Struct):
    model: str | None = None
    messages: list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


class _ChatOptions(msgspec.Struct):
    """The fields that are checked before they are converted."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_tool_calls: int | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    logprobs: bool | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    functions: Any = None


def decode_chat(body: bytes) -> ChatRequest:
    """Checks that apply to every request, also to one that is forwarded as it is. Raises InvalidRequest."""
    raw = json_object(body)
    check_length(raw.get("tools"), MAX_TOOLS, "tools")
    check_item_lengths(raw.get("messages"), "messages")
    fields = convert_typed(raw, _ChatBody)
    model = check_model(fields.model)
    if not fields.messages:
        decode_messages(fields.messages)  # it says how they are wrong
    session = _session_id((fields.metadata or {}).get(SESSION_KEY))
    code = _code_tool(fields.tools or [], session)
    if code is not None and fields.n not in (None, 1):
        raise BadParameter("Invalid 'n': with the code_interpreter tool there is one choice: leave 'n' out.", "n")
    return ChatRequest(
        raw=raw,
        model=model,
        code=code,
        stream=bool(fields.stream),
        include_usage=bool((fields.stream_options or {}).get("include_usage")),
    )


def request_messages(request: ChatRequest) -> list[ChatMessage]:
    """Raises InvalidRequest."""
    return decode_messages(request.raw.get("messages"))


def chat_turn_request(
    request: ChatRequest, messages: list[ChatMessage], turns: Mapping[str, StoredChatTurn], max_bytes: int
) -> TurnRequest:
    """The turn that answers it. `turns` are the remembered ones, by the ids of their calls.

    `max_bytes` bounds the output of code that the client sends back. Raises InvalidRequest.
    """
    raw, fields = request.raw, convert_typed(request.raw, _ChatOptions)
    _check_options(raw, fields)
    tools = client_tools(raw.get("tools") or [])
    python = choose_python_name(tools)
    items = message_items(messages, turns, python)
    return TurnRequest(
        model=request.model,
        items=history.to_upstream_items(items, python, max_bytes),
        code=request.code,
        known_container=_last_container(messages, turns),
        tools=tools,
        tool_choice=convert_tool_choice(raw.get("tool_choice")),
        max_tool_calls=fields.max_tool_calls,
        max_output_tokens=fields.max_completion_tokens or fields.max_tokens,
        options=_turn_options(raw, fields),
    )


def _last_container(messages: list[ChatMessage], turns: Mapping[str, StoredChatTurn]) -> str | None:
    """The container of the last code in this conversation, as far as its messages show."""
    last = None
    for message in messages:
        turn = remembered_turn(message, turns)
        last = (turn.container if turn is not None else history.last_container(message.items)) or last
    return last


def forwarded_body(request: ChatRequest) -> dict[str, Any]:
    """The request as it came, for an upstream of the same protocol, without this server's own keys in messages."""
    messages = [
        {name: value for name, value in each.items() if name not in _OUR_KEYS} if isinstance(each, dict) else each
        for each in request.raw["messages"]
    ]
    return {**request.raw, "messages": messages}


# -- tools


def client_tools(tools: list[Any]) -> list[Item]:
    """The client's own tools, flat as the Responses API has them. Raises InvalidRequest."""
    return [
        _flatten_tool(tool, f"tools[{at}]")
        for at, tool in enumerate(tools)
        if not (isinstance(tool, dict) and tool.get("type") == CODE_INTERPRETER)
    ]


def _flatten_tool(tool: Any, param: str) -> Item:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in ("function", "custom"):
        raise BadParameter(
            f"Invalid value: {str(kind)[:100]!r}. Supported values are: 'function', 'custom' and 'code_interpreter'.",
            f"{param}.type",
        )
    about = tool.get(kind)
    if not isinstance(about, dict):
        raise missing_parameter(f"{param}.{kind}")
    if not isinstance(about.get("name"), str) or not about["name"]:
        raise missing_parameter(f"{param}.{kind}.name")
    if kind == "custom":
        return {"type": "custom", **about, **_custom_format(about)}
    return {"type": "function", **about, "parameters": about.get("parameters"), "strict": bool(about.get("strict"))}


def _custom_format(about: Item) -> Item:
    """A grammar is nested in Chat and flat in Responses."""
    wanted = about.get("format")
    if not isinstance(wanted, dict) or not isinstance(wanted.get("grammar"), dict):
        return {}
    return {"format": {"type": "grammar", **wanted["grammar"]}}


def convert_tool_choice(choice: Any) -> Any:
    """Raises InvalidRequest."""
    if choice is None:
        return "auto"
    if choice in ("none", "auto", "required"):
        return choice
    kind = choice.get("type") if isinstance(choice, dict) else None
    match kind:
        case "code_interpreter":
            return {"type": "code_interpreter"}
        case "function" | "custom":
            return {"type": kind, "name": _chosen_name(choice, kind)}
        case "allowed_tools":
            return _convert_allowed_tools(choice)
    raise BadParameter(
        "Invalid value for 'tool_choice': expected 'none', 'auto', 'required', or an object of the type 'function', "
        "'custom', 'allowed_tools' or 'code_interpreter'.",
        "tool_choice",
    )


def _chosen_name(choice: Item, kind: str) -> str:
    about = choice.get(kind)
    name = about.get("name") if isinstance(about, dict) else None
    if not isinstance(name, str):
        raise missing_parameter(f"tool_choice.{kind}.name")
    return name


def _convert_allowed_tools(choice: Item) -> Item:
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
        raise missing_parameter("tool_choice.allowed_tools.tools")
    check_length(allowed["tools"], MAX_TOOLS, "tool_choice.allowed_tools.tools")
    if any(isinstance(each, dict) and each.get("type") == "allowed_tools" for each in allowed["tools"]):
        raise BadParameter("'allowed_tools' cannot be among allowed tools.", "tool_choice.allowed_tools.tools")
    tools = [convert_tool_choice(each) for each in allowed["tools"]]
    return {"type": "allowed_tools", "mode": allowed.get("mode") or "auto", "tools": tools}


def _code_tool(tools: list[Item], session: str | None) -> CodeTool | None:
    found = [(at, tool) for at, tool in enumerate(tools) if str(tool.get("type")).startswith(CODE_INTERPRETER)]
    for at, tool in found:
        if tool["type"] != CODE_INTERPRETER:  # whatever it may be elsewhere, code never runs there
            raise BadParameter(
                f"Invalid value for 'tools[{at}].type': did you mean '{CODE_INTERPRETER}'?", f"tools[{at}].type"
            )
    if not found:
        return None
    if len(found) > 1:
        raise BadParameter("Only one code_interpreter tool is possible.", f"tools[{found[1][0]}]")
    at, tool = found[0]
    nested = tool.get("code_interpreter")
    if isinstance(nested, dict):
        return _code_container(nested.get("container"), f"tools[{at}].code_interpreter.container", session)
    return _code_container(tool.get("container"), f"tools[{at}].container", session)


def _code_container(container: Any, param: str, session: str | None) -> CodeTool:
    if isinstance(container, str):
        return CodeTool(container=container)
    if container is None:
        return CodeTool(session=session)
    if not isinstance(container, dict) or container.get("type") != "auto":
        raise BadParameter(f"Invalid value for '{param}': expected a container's id, or type 'auto'.", param)
    return CodeTool(
        file_ids=file_ids_of(container.get("file_ids"), f"{param}.file_ids"),
        memory=decode_memory_tier(container.get("memory_limit"), f"{param}.memory_limit"),
        network=decode_network(container.get("network_policy"), f"{param}.network_policy"),
        session=session,
    )


def _session_id(value: Any) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str) or len(value) > MAX_SESSION_CHARACTERS:
        raise BadParameter(
            f"Invalid 'metadata.session_id': expected a string of {MAX_SESSION_CHARACTERS} characters at most.",
            "metadata.session_id",
        )
    return value


# -- options


def _check_options(raw: dict[str, Any], fields: _ChatOptions) -> None:
    for name in ("max_tokens", "max_completion_tokens", "max_tool_calls"):
        value = getattr(fields, name)
        if value is not None and value < 1:
            raise BadParameter(
                f"Invalid '{name}': integer below minimum value. Expected a value >= 1, but got {value} instead.",
                name,
                "integer_below_min_value",
            )
    if fields.functions is not None:
        raise BadParameter("'functions' is the old way to say it: put them in 'tools'.", "functions")
    if raw.get("n") not in (None, 1):
        raise BadParameter("Invalid 'n': this model gives one choice: leave 'n' out.", "n")
    if "audio" in (fields.modalities or ()):
        raise BadParameter("Audio output is not possible here: leave 'modalities' out.", "modalities")


def _turn_options(raw: dict[str, Any], fields: _ChatOptions) -> dict[str, Any]:
    options = {name: raw[name] for name in _SHARED_OPTIONS if raw.get(name) is not None}
    if fields.reasoning_effort is not None:
        options["reasoning"] = {"effort": fields.reasoning_effort}
    text = _text_options(fields)
    if text:
        options["text"] = text
    if fields.logprobs:
        options["include"] = [_LOGPROBS]
    only_chat = {name: value for name, value in raw.items() if name not in _READ_FIELDS and name not in _SHARED_OPTIONS}
    if only_chat:
        options[CHAT_OPTIONS] = only_chat
    return options


def _text_options(fields: _ChatOptions) -> dict[str, Any]:
    text: dict[str, Any] = {}
    if fields.response_format is not None:
        text["format"] = text_format(fields.response_format)
    if fields.verbosity is not None:
        text["verbosity"] = fields.verbosity
    return text


def text_format(wanted: Item) -> Item:
    """A `response_format` as the Responses API has it: flat. Raises InvalidRequest."""
    if wanted.get("type") != "json_schema":
        return wanted
    schema = wanted.get("json_schema")
    if not isinstance(schema, dict):
        raise missing_parameter("response_format.json_schema")
    return {"type": "json_schema", **schema}
