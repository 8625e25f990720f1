"""Requests for a chat completion, from JSON to what a turn is asked. Pure.

What the Responses API has a word for is said in that word; everything else that a request holds is kept as it came in
`options["chat"]`, for upstreams that speak Chat themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cloche.api.openai.chat_messages import Message, items_of, messages_of, turn_of
from cloche.api.openai.context import MAX_TOOLS, BadParameter, check_length, check_lengths, check_model
from cloche.api.openai.network import network_of
from cloche.api.openai.responses_request import file_ids_of, json_object, memory_tier, missing, typed
from cloche.gateway import history
from cloche.gateway.items import Item
from cloche.gateway.request import Asked, CodeTool
from cloche.gateway.tools import python_name
from cloche.model import Struct
from cloche.store.gateway import ChatTurn

SESSION = "session_id"  # in a chat's metadata: requests of one session share a container
MAX_SESSION = 512
CODE = "code_interpreter"
CHAT = "chat"  # in `Asked.options`: what only Chat has a word for

_SAME = (
    "temperature top_p parallel_tool_calls service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "prompt_cache_options top_logprobs user moderation"
).split()
_READ = (
    "model messages tools tool_choice functions function_call stream stream_options n metadata store max_tokens "
    "max_completion_tokens response_format reasoning_effort verbosity logprobs max_tool_calls modalities audio"
).split()
_OUR_KEYS = ("code_interpreter_calls", "container_file_citations")
_LOGPROBS = "message.output_text.logprobs"


class ChatWanted(Struct):
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


class _Body(msgspec.Struct):
    model: str | None = None
    messages: list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


class _Options(msgspec.Struct):
    """What is checked before it is said in other words."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_tool_calls: int | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    logprobs: bool | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    functions: Any = None


def decode(body: bytes) -> ChatWanted:
    """What can be said of any request, also of one that is passed on as it is. Raises InvalidRequest."""
    raw = json_object(body)
    check_length(raw.get("tools"), MAX_TOOLS, "tools")
    check_lengths(raw.get("messages"), "messages")
    fields = typed(raw, _Body)
    model = check_model(fields.model)
    if not fields.messages:
        messages_of(fields.messages)  # it says how they are wrong
    session = _session((fields.metadata or {}).get(SESSION))
    code = _code_tool(fields.tools or [], session)
    if code is not None and fields.n not in (None, 1):
        raise BadParameter("Invalid 'n': with the code_interpreter tool there is one choice: leave 'n' out.", "n")
    return ChatWanted(
        raw=raw,
        model=model,
        code=code,
        stream=bool(fields.stream),
        include_usage=bool((fields.stream_options or {}).get("include_usage")),
    )


def conversation(wanted: ChatWanted) -> list[Message]:
    """Raises InvalidRequest."""
    return messages_of(wanted.raw.get("messages"))


def asked_of(wanted: ChatWanted, messages: list[Message], turns: Mapping[str, ChatTurn], max_bytes: int) -> Asked:
    """The turn that answers it. `turns` are those that are remembered, by the ids of their calls.

    `max_bytes` is for the output of code that the client gives back. Raises InvalidRequest.
    """
    raw, fields = wanted.raw, typed(wanted.raw, _Options)
    _check(raw, fields)
    tools = tools_of(raw.get("tools") or [])
    python = python_name(tools)
    items = items_of(messages, turns, python)
    return Asked(
        model=wanted.model,
        items=history.shown(items, python, max_bytes),
        code=wanted.code,
        known_container=_last_container(messages, turns),
        tools=tools,
        tool_choice=choice_of(raw.get("tool_choice")),
        max_tool_calls=fields.max_tool_calls,
        max_output_tokens=fields.max_completion_tokens or fields.max_tokens,
        options=_options(raw, fields),
    )


def _last_container(messages: list[Message], turns: Mapping[str, ChatTurn]) -> str | None:
    """Where code ran last in this conversation, as far as its messages tell."""
    last = None
    for message in messages:
        turn = turn_of(message, turns)
        last = (turn.container if turn is not None else history.container_of(message.items)) or last
    return last


def forwarded(wanted: ChatWanted) -> dict[str, Any]:
    """The request as it came, for an upstream of the same protocol; only our own keys are taken out of messages."""
    messages = [
        {name: value for name, value in each.items() if name not in _OUR_KEYS} if isinstance(each, dict) else each
        for each in wanted.raw["messages"]
    ]
    return {**wanted.raw, "messages": messages}


# -- tools


def tools_of(tools: list[Any]) -> list[Item]:
    """The client's own, flat as the Responses API has them. Raises InvalidRequest."""
    return [
        _tool(tool, f"tools[{at}]")
        for at, tool in enumerate(tools)
        if not (isinstance(tool, dict) and tool.get("type") == CODE)
    ]


def _tool(tool: Any, param: str) -> Item:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in ("function", "custom"):
        raise BadParameter(
            f"Invalid value: {str(kind)[:100]!r}. Supported values are: 'function', 'custom' and 'code_interpreter'.",
            f"{param}.type",
        )
    about = tool.get(kind)
    if not isinstance(about, dict):
        raise missing(f"{param}.{kind}")
    if not isinstance(about.get("name"), str) or not about["name"]:
        raise missing(f"{param}.{kind}.name")
    if kind == "custom":
        return {"type": "custom", **about, **_format_of_custom(about)}
    return {"type": "function", **about, "parameters": about.get("parameters"), "strict": bool(about.get("strict"))}


def _format_of_custom(about: Item) -> Item:
    """A grammar is nested in Chat and flat in Responses."""
    wanted = about.get("format")
    if not isinstance(wanted, dict) or not isinstance(wanted.get("grammar"), dict):
        return {}
    return {"format": {"type": "grammar", **wanted["grammar"]}}


def choice_of(choice: Any) -> Any:
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
            return _allowed(choice)
    raise BadParameter(
        "Invalid value for 'tool_choice': expected 'none', 'auto', 'required', or an object of the type 'function', "
        "'custom', 'allowed_tools' or 'code_interpreter'.",
        "tool_choice",
    )


def _chosen_name(choice: Item, kind: str) -> str:
    about = choice.get(kind)
    name = about.get("name") if isinstance(about, dict) else None
    if not isinstance(name, str):
        raise missing(f"tool_choice.{kind}.name")
    return name


def _allowed(choice: Item) -> Item:
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
        raise missing("tool_choice.allowed_tools.tools")
    check_length(allowed["tools"], MAX_TOOLS, "tool_choice.allowed_tools.tools")
    if any(isinstance(each, dict) and each.get("type") == "allowed_tools" for each in allowed["tools"]):
        raise BadParameter("'allowed_tools' cannot be among allowed tools.", "tool_choice.allowed_tools.tools")
    tools = [choice_of(each) for each in allowed["tools"]]
    return {"type": "allowed_tools", "mode": allowed.get("mode") or "auto", "tools": tools}


def _code_tool(tools: list[Item], session: str | None) -> CodeTool | None:
    found = [(at, tool) for at, tool in enumerate(tools) if str(tool.get("type")).startswith(CODE)]
    for at, tool in found:
        if tool["type"] != CODE:  # whatever it may be elsewhere, code never runs there
            raise BadParameter(f"Invalid value for 'tools[{at}].type': did you mean '{CODE}'?", f"tools[{at}].type")
    if not found:
        return None
    if len(found) > 1:
        raise BadParameter("Only one code_interpreter tool is possible.", f"tools[{found[1][0]}]")
    at, tool = found[0]
    nested = tool.get("code_interpreter")
    if isinstance(nested, dict):
        return _container(nested.get("container"), f"tools[{at}].code_interpreter.container", session)
    return _container(tool.get("container"), f"tools[{at}].container", session)


def _container(container: Any, param: str, session: str | None) -> CodeTool:
    if isinstance(container, str):
        return CodeTool(container=container)
    if container is None:
        return CodeTool(session=session)
    if not isinstance(container, dict) or container.get("type") != "auto":
        raise BadParameter(f"Invalid value for '{param}': expected a container's id, or type 'auto'.", param)
    return CodeTool(
        file_ids=file_ids_of(container.get("file_ids"), f"{param}.file_ids"),
        memory=memory_tier(container.get("memory_limit"), f"{param}.memory_limit"),
        network=network_of(container.get("network_policy"), f"{param}.network_policy"),
        session=session,
    )


def _session(value: Any) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str) or len(value) > MAX_SESSION:
        raise BadParameter(
            f"Invalid 'metadata.session_id': expected a string of {MAX_SESSION} characters at most.",
            "metadata.session_id",
        )
    return value


# -- options


def _check(raw: dict[str, Any], fields: _Options) -> None:
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


def _options(raw: dict[str, Any], fields: _Options) -> dict[str, Any]:
    options = {name: raw[name] for name in _SAME if raw.get(name) is not None}
    if fields.reasoning_effort is not None:
        options["reasoning"] = {"effort": fields.reasoning_effort}
    text = _text_options(fields)
    if text:
        options["text"] = text
    if fields.logprobs:
        options["include"] = [_LOGPROBS]
    only_chat = {name: value for name, value in raw.items() if name not in _READ and name not in _SAME}
    if only_chat:
        options[CHAT] = only_chat
    return options


def _text_options(fields: _Options) -> dict[str, Any]:
    text: dict[str, Any] = {}
    if fields.response_format is not None:
        text["format"] = format_of(fields.response_format)
    if fields.verbosity is not None:
        text["verbosity"] = fields.verbosity
    return text


def format_of(wanted: Item) -> Item:
    """A `response_format` as the Responses API has it: flat. Raises InvalidRequest."""
    if wanted.get("type") != "json_schema":
        return wanted
    schema = wanted.get("json_schema")
    if not isinstance(schema, dict):
        raise missing("response_format.json_schema")
    return {"type": "json_schema", **schema}
