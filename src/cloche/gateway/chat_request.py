"""What a Chat Completions upstream is asked, as JSON. Pure."""

from __future__ import annotations

from typing import Any

from cloche import errors
from cloche.gateway.chat_habits import Habit
from cloche.gateway.chat_messages import messages
from cloche.gateway.items import Item
from cloche.gateway.upstreams import Call

Body = dict[str, Any]

SAME_NAME = (
    "temperature top_p service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options user"
).split()
"""What both APIs call the same. `metadata` is not among them: it is the client's own, and nobody else's business."""

CUSTOM_PARAMETERS: Item = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The input of this tool, as it is."}},
    "required": ["input"],
    "additionalProperties": False,
}

_NOT_FROM_CLIENTS = frozenset({"model", "messages", "stream", "stream_options", "tools", "tool_choice", "n", "store"})


def body_of(call: Call, habit: Habit, *, model: str, vision: bool, stream: bool) -> Body:
    """Raises UpstreamFailed (400) for tools and options that Chat has no words for."""
    options = call.options
    body: Body = {name: value for name, value in _only_chat(options).items() if name not in _NOT_FROM_CLIENTS}
    body |= {name: options[name] for name in SAME_NAME if options.get(name) is not None}
    body |= {"model": model, "messages": messages(call.items, call.instructions, vision=vision)}
    body |= _tools(call) | _text(options) | _reasoning(options) | _logprobs(options)
    if call.max_output_tokens is not None:
        body[habit.limit_name] = call.max_output_tokens
    if stream:
        body["stream"] = True
        if habit.usage_in_stream:
            body["stream_options"] = {"include_usage": True}
    if options.get("prompt") is not None:
        raise _inexpressible("prompt", "a stored prompt: send its text as instructions")
    return body


def custom_tools(call: Call) -> frozenset[str]:
    """The names of those functions that stand for custom tools."""
    return frozenset(str(tool.get("name")) for tool in call.tools if tool.get("type") == "custom")


def _only_chat(options: dict[str, Any]) -> Body:
    given = options.get("chat")
    return given if isinstance(given, dict) else {}


def _tools(call: Call) -> Body:
    tools, choice = call.tools, call.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        # Few servers know such a choice; a tool that is not offered is not called anywhere.
        allowed = {each.get("name") for each in choice.get("tools") or [] if isinstance(each, dict)}
        tools = [tool for tool in tools if tool.get("name") in allowed]
        choice = choice.get("mode", "auto")
    if not tools:
        return {}
    body: Body = {"tools": [_tool(tool) for tool in tools]}
    if choice != "auto" and choice is not None:
        body["tool_choice"] = _choice(choice)
    if call.options.get("parallel_tool_calls") is not None:
        body["parallel_tool_calls"] = call.options["parallel_tool_calls"]
    return body


def _tool(tool: Item) -> Item:
    kind = tool.get("type")
    if kind == "custom":
        return {"type": "function", "function": {**_described(tool), "parameters": CUSTOM_PARAMETERS}}
    if kind != "function":
        raise _inexpressible("tools", f"tools of the type {str(kind)[:60]!r}")
    function = {**_described(tool), "parameters": tool.get("parameters") or {"type": "object", "properties": {}}}
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _described(tool: Item) -> Item:
    named = {"name": tool.get("name")}
    return {**named, "description": tool["description"]} if tool.get("description") else named


def _choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": choice.get("name")}}
    raise _inexpressible("tool_choice", "this choice")


def _text(options: dict[str, Any]) -> Body:
    text = options.get("text")
    if not isinstance(text, dict):
        return {}
    body: Body = {}
    if text.get("verbosity") is not None:
        body["verbosity"] = text["verbosity"]
    wanted = text.get("format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        schema = {name: value for name, value in wanted.items() if name != "type" and value is not None}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif isinstance(wanted, dict) and wanted.get("type") != "text":
        body["response_format"] = wanted
    return body


def _reasoning(options: dict[str, Any]) -> Body:
    reasoning = options.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    return {"reasoning_effort": effort} if effort is not None else {}


def _logprobs(options: dict[str, Any]) -> Body:
    most, included = options.get("top_logprobs"), options.get("include") or ()
    if most:
        return {"logprobs": True, "top_logprobs": most}
    return {"logprobs": True} if "message.output_text.logprobs" in included else {}


def _inexpressible(param: str, what: str) -> errors.UpstreamFailed:
    return errors.UpstreamFailed(
        f"The upstream of this model speaks Chat Completions, which does not know {what}",
        status=400,
        kind="invalid_request_error",
        reason="unsupported_parameter",
        param=param,
    )
