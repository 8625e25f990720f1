"""An upstream with the Chat Completions API, as most model servers: `POST {base_url}/chat/completions`."""

from __future__ import annotations

import contextlib
import json
import re
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Iterable
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from cloche import errors
from cloche.config.sections import UpstreamConfig as Settings
from cloche.gateway.events import CallIds, TurnEvent
from cloche.gateway.items import PYTHON_FUNCTION, Item, extract_code
from cloche.gateway.upstream import ModelCall
from cloche.gateway.upstream.chat_stream import ChatStreamParser
from cloche.gateway.upstream.http import (
    END_SECONDS,
    USAGE_SECONDS,
    AnswerDeadline,
    RecentModels,
    UpstreamResponse,
    UpstreamServer,
    max_answer_seconds,
    parse_json_object,
)
from cloche.model import Struct

# Converts a transcript to the messages of Chat Completions. Pure.
#
#     message                     a message of that role; `developer` is `system`, which every server knows
#     function_call               in `tool_calls` of the assistant's message
#     function_call_output        a message of the role `tool`, right behind the calls, wherever it was in the
#                                 transcript; its pictures follow in a user message: tool messages hold text only
#     custom_tool_call, .._output the same: a custom tool is a function with one argument, `input`
#     reasoning                   `reasoning_content` of a message with calls, in the turn that is not over: some
#                                 models (DeepSeek's) refuse to go on without. Older or encrypted: left out
#     all others                  left out: Chat has no equivalent
#
# Servers differ in strictness, so the messages are always strict: each call has an id of its own and exactly
# one output, arguments are a JSON object, texts are strings and not lists of parts.

ChatMessage = dict[str, Any]

NO_OUTPUT = "(no output)"
PDF_DATA_PREFIX = "data:application/pdf;"

_CALLS = frozenset({"function_call", "custom_tool_call"})
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
_ROLES = {"developer": "system", "system": "system", "assistant": "assistant"}


def build_chat_messages(
    items: Iterable[Item], instructions: str | None = None, *, vision: bool = True
) -> list[ChatMessage]:
    """Returns the messages. `vision`: the model sees pictures; without it, a placeholder replaces them."""
    listed = [{"type": "message", "role": "system", "content": instructions}] if instructions else []
    listed += items
    return _ChatMessageBuilder(listed, vision=vision).messages()


class _ChatMessageBuilder:
    def __init__(self, items: list[Item], *, vision: bool):
        self._items = items
        self._vision = vision
        self._messages: list[ChatMessage] = []
        self._said: list[str] = []  # by the assistant, in the message that is being put together
        self._thought: list[str] = []
        self._calls: list[Item] = []
        self._outputs = _index_outputs(items)
        self._ids = CallIds()
        self._last_user = max((at for at, item in enumerate(items) if _chat_role(item) == "user"), default=-1)

    def messages(self) -> list[ChatMessage]:
        for at, item in enumerate(self._items):
            self._take_item(item, this_turn=at > self._last_user)
        self._flush_assistant()
        self._add_orphan_outputs()
        return [_join_system_texts(message) for message in self._messages]

    def _take_item(self, item: Item, *, this_turn: bool) -> None:
        kind, role = item.get("type", "message"), _chat_role(item)
        if kind in _CALLS:
            self._calls.append(item)
        elif kind == "reasoning" and this_turn:
            self._thought.append(_join_part_texts(item.get("content")))
        elif role == "assistant":
            self._said.append(_assistant_text(item.get("content")))
        elif kind in _OUTPUTS:
            self._flush_assistant()
        elif role is not None:
            self._flush_assistant()
            self._add_message(role, _convert_content(item.get("content"), vision=self._vision))

    def _add_message(self, role: str, content: str | list[Item]) -> None:
        """Adds a message. The texts of consecutive system messages are collected in one."""
        last = self._messages[-1] if self._messages else {}
        if not content:
            return
        if role != "system":
            self._messages.append({"role": role, "content": content})
        elif last.get("role") == "system":
            last["content"].append(_join_texts(content))
        else:
            self._messages.append({"role": role, "content": [_join_texts(content)]})

    def _flush_assistant(self) -> None:
        """Adds the assistant's message and, if it calls tools, the outputs: they must follow at once."""
        said, thought, calls = self._said, self._thought, self._calls
        self._said, self._thought, self._calls = [], [], []
        text = "\n\n".join(each for each in said if each)
        if not text and not calls:
            return
        message: ChatMessage = {"role": "assistant", "content": text or None}
        if calls and any(thought):
            message["reasoning_content"] = "\n\n".join(each for each in thought if each)
        self._messages.append(message)
        if calls:
            self._add_calls(message, calls)

    def _add_calls(self, message: ChatMessage, calls: list[Item]) -> None:
        message["tool_calls"] = []
        pictures: list[Item] = []
        for call in calls:
            given = str(call.get("call_id") or "")
            id = self._ids.make_unique(given)
            message["tool_calls"].append({"id": id, "type": "function", "function": _build_function(call)})
            output = self._outputs[given].popleft() if self._outputs[given] else NO_OUTPUT
            self._messages.append({"role": "tool", "tool_call_id": id, "content": _output_text(output) or NO_OUTPUT})
            pictures += _output_images(output, vision=self._vision)
        if pictures:
            note = {"type": "text", "text": "The pictures that the tool has shown:"}
            self._messages.append({"role": "user", "content": [note, *pictures]})

    def _add_orphan_outputs(self) -> None:
        """Adds outputs of calls that are not in the transcript, as messages of the user."""
        for waiting in self._outputs.values():
            for output in waiting:
                self._messages.append({"role": "user", "content": f"[Output of a tool]\n{_output_text(output)}"})


def _join_system_texts(message: ChatMessage) -> ChatMessage:
    return {**message, "content": "\n\n".join(message["content"])} if message["role"] == "system" else message


def _index_outputs(items: Iterable[Item]) -> defaultdict[str, deque[Any]]:
    """Indexes outputs by call id, in order: of calls with the same id, the first gets the first output."""
    found: defaultdict[str, deque[Any]] = defaultdict(deque)
    for item in items:
        if item.get("type") in _OUTPUTS:
            found[str(item.get("call_id") or "")].append(item.get("output"))
    return found


def _chat_role(item: Item) -> str | None:
    """Returns the role of a message; None for other items."""
    if item.get("type", "message") != "message":
        return None
    return _ROLES.get(str(item.get("role")), "user")


def _build_function(call: Item) -> Item:
    name = str(call.get("name") or "unknown")
    if call["type"] == "custom_tool_call":
        return {"name": name, "arguments": json.dumps({"input": str(call.get("input") or "")})}
    return {"name": name, "arguments": _ensure_json_object(name, str(call.get("arguments") or ""))}


def _ensure_json_object(name: str, arguments: str) -> str:
    """Returns the arguments as a JSON object, converting others: templates of many servers parse them."""
    try:
        if isinstance(json.loads(arguments or "{}"), dict):
            return arguments or "{}"
    except (ValueError, RecursionError):
        pass
    if name.startswith(PYTHON_FUNCTION):
        return json.dumps({"code": extract_code(arguments)})
    return json.dumps({"arguments": arguments})


# -- content


def _convert_content(content: Any, *, vision: bool) -> str | list[Item]:
    """Converts content to a string if there is text only, else to parts."""
    if isinstance(content, str):
        return content
    parts = [_convert_part(part, vision=vision) for part in content or () if isinstance(part, dict)]
    return _join_texts(parts) if all(part["type"] == "text" for part in parts) else parts


def _convert_part(part: Item, *, vision: bool) -> Item:
    match part.get("type"):
        case "input_image":
            return _convert_image(part) if vision and part.get("image_url") else _placeholder_text("image", part)
        case "input_file" if vision and str(part.get("file_data")).startswith(PDF_DATA_PREFIX):
            return {"type": "file", "file": {"filename": _file_name(part), "file_data": part["file_data"]}}
        case "input_file":
            return _placeholder_text("file", part)
        case "input_audio" if isinstance(part.get("input_audio"), dict):
            return {"type": "input_audio", "input_audio": part["input_audio"]}
        case _:
            return {"type": "text", "text": str(part.get("text") or part.get("refusal") or "")}


def _convert_image(part: Item) -> Item:
    shown = {"url": part["image_url"]}
    if part.get("detail") in ("low", "high"):
        shown["detail"] = part["detail"]
    return {"type": "image_url", "image_url": shown}


def _placeholder_text(what: str, part: Item) -> Item:
    named = part.get("filename") or part.get("file_id") or part.get("file_url") or ""
    return {"type": "text", "text": f"[{what} {named}]" if named else f"[{what}]"}


def _file_name(part: Item) -> str:
    return str(part.get("filename") or "file.pdf")


def _join_texts(content: str | list[Item]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", f"[{part['type']}]")) for part in content)


def _assistant_text(content: Any) -> str:
    return _join_texts(_convert_content(content, vision=False))


def _join_part_texts(content: Any) -> str:
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _output_text(output: Any) -> str:
    if isinstance(output, list):
        return _join_texts([_convert_part(part, vision=False) for part in output if isinstance(part, dict)])
    return output if isinstance(output, str) else json.dumps(output)


def _output_images(output: Any, *, vision: bool) -> list[Item]:
    if not (vision and isinstance(output, list)):
        return []
    parts = [part for part in output if isinstance(part, dict) and part.get("type") == "input_image"]
    return [_convert_image(part) for part in parts if part.get("image_url")]


# Detects that an upstream does not know a field.
#
# Another request style helps then, but not for a bad value.

_UNKNOWN_FIELD = re.compile(
    r"unsupported|not support|n't support|unrecogni[sz]ed|unknown|unexpected|extra[ _](?:forbidden|inputs|fields)"
    r"|not permitted|additional propert|no such (?:parameter|field|argument)",
    re.IGNORECASE,
)


def refuses_field(error: errors.UpstreamFailed, field: str) -> bool:
    """Whether the error reports an unknown field. If the error names a parameter, that must be this field."""
    if error.status not in (400, 422) or not _UNKNOWN_FIELD.search(f"{error.reason} {error.kind} {error}"):
        return False
    return field in re.split(r"\W+", error.param or str(error))


# Request styles of an upstream's models: the fields that each one accepts, learned from its refusals.

TOKEN_LIMIT_FIELDS = ("max_tokens", "max_completion_tokens")
USAGE_FIELD = "stream_options"


class ChatRequestStyle(Struct):
    """The request style of one model. `limit_name` is its field for the maximum of output tokens."""

    limit_name: str
    usage_in_stream: bool = True


class ChatRequestStyles:
    """The request styles of one upstream's models.

    OpenAI's newer models refuse `max_tokens`; many other servers do not know `max_completion_tokens`, nor all of
    them `stream_options`. There is no way to query that, but a refusal names the field. A style learned from one
    client's request holds for all clients, so it counts only after the model has answered a request in that
    style.
    """

    def __init__(self, base_url: str):
        self._default = ChatRequestStyle(limit_name=TOKEN_LIMIT_FIELDS[_is_openai(base_url)])
        self._known: RecentModels[ChatRequestStyle] = RecentModels()

    def of(self, model: str) -> ChatRequestStyle:
        return self._known.of(model) or self._default

    def find_alternative(self, habit: ChatRequestStyle, error: errors.UpstreamFailed) -> ChatRequestStyle | None:
        """Returns another style if the error hints at one. It terminates: no style comes twice."""
        if habit.usage_in_stream and refuses_field(error, USAGE_FIELD):
            return replace(habit, usage_in_stream=False)
        if habit.limit_name == self._default.limit_name and refuses_field(error, habit.limit_name):
            return replace(habit, limit_name=TOKEN_LIMIT_FIELDS[1 - TOKEN_LIMIT_FIELDS.index(habit.limit_name)])
        return None

    def answered(self, model: str, habit: ChatRequestStyle) -> None:
        """Records that the model accepts this style."""
        if habit != self.of(model):
            self._known.keep(model, habit)


def _is_openai(base_url: str) -> bool:
    host = urlsplit(base_url).hostname or ""
    return host == "api.openai.com" or host.endswith((".openai.com", ".openai.azure.com"))


# Builds the JSON body of a Chat Completions request. Pure.

ChatBody = dict[str, Any]

SHARED_OPTIONS = (
    "temperature top_p service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options user"
).split()
"""Fields with the same name in both APIs. `metadata` is not among them: it is private to the client."""

CUSTOM_TOOL_PARAMETERS: Item = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The input of this tool, as it is."}},
    "required": ["input"],
    "additionalProperties": False,
}

_NOT_FROM_CLIENTS = frozenset({"model", "messages", "stream", "stream_options", "tools", "tool_choice", "n", "store"})


def build_chat_body(call: ModelCall, habit: ChatRequestStyle, *, model: str, vision: bool, stream: bool) -> ChatBody:
    """Returns the body. Raises UpstreamFailed (400) for tools and options without an equivalent in Chat."""
    options = call.options
    body: ChatBody = {
        name: value for name, value in _chat_only_options(options).items() if name not in _NOT_FROM_CLIENTS
    }
    body |= {name: options[name] for name in SHARED_OPTIONS if options.get(name) is not None}
    body |= {"model": model, "messages": build_chat_messages(call.items, call.instructions, vision=vision)}
    body |= (
        _convert_tools(call) | _convert_text_options(options) | _convert_reasoning(options) | _convert_logprobs(options)
    )
    if call.max_output_tokens is not None:
        body[habit.limit_name] = call.max_output_tokens
    if stream:
        body["stream"] = True
        if habit.usage_in_stream:
            body["stream_options"] = {"include_usage": True}
    if options.get("prompt") is not None:
        raise _unsupported_error("prompt", "a stored prompt: send its text as instructions")
    return body


def custom_tool_names(call: ModelCall) -> frozenset[str]:
    """Returns the names of the functions that represent custom tools."""
    return frozenset(str(tool.get("name")) for tool in call.tools if tool.get("type") == "custom")


def _chat_only_options(options: dict[str, Any]) -> ChatBody:
    given = options.get("chat")
    return given if isinstance(given, dict) else {}


def _convert_tools(call: ModelCall) -> ChatBody:
    tools, choice = call.tools, call.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        # Few servers know such a choice; a tool that is not offered is not called anywhere.
        allowed = {each.get("name") for each in choice.get("tools") or [] if isinstance(each, dict)}
        tools = [tool for tool in tools if tool.get("name") in allowed]
        choice = choice.get("mode", "auto")
    if not tools:
        return {}
    body: ChatBody = {"tools": [_convert_tool(tool) for tool in tools]}
    if choice != "auto" and choice is not None:
        body["tool_choice"] = _convert_choice(choice)
    if call.options.get("parallel_tool_calls") is not None:
        body["parallel_tool_calls"] = call.options["parallel_tool_calls"]
    return body


def _convert_tool(tool: Item) -> Item:
    kind = tool.get("type")
    if kind == "custom":
        return {"type": "function", "function": {**_describe_tool(tool), "parameters": CUSTOM_TOOL_PARAMETERS}}
    if kind != "function":
        raise _unsupported_error("tools", f"tools of the type {str(kind)[:60]!r}")
    function = {**_describe_tool(tool), "parameters": tool.get("parameters") or {"type": "object", "properties": {}}}
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _describe_tool(tool: Item) -> Item:
    named = {"name": tool.get("name")}
    return {**named, "description": tool["description"]} if tool.get("description") else named


def _convert_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": choice.get("name")}}
    raise _unsupported_error("tool_choice", "this choice")


def _convert_text_options(options: dict[str, Any]) -> ChatBody:
    text = options.get("text")
    if not isinstance(text, dict):
        return {}
    body: ChatBody = {}
    if text.get("verbosity") is not None:
        body["verbosity"] = text["verbosity"]
    wanted = text.get("format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        schema = {name: value for name, value in wanted.items() if name != "type" and value is not None}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif isinstance(wanted, dict) and wanted.get("type") != "text":
        body["response_format"] = wanted
    return body


def _convert_reasoning(options: dict[str, Any]) -> ChatBody:
    reasoning = options.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    return {"reasoning_effort": effort} if effort is not None else {}


def _convert_logprobs(options: dict[str, Any]) -> ChatBody:
    most, included = options.get("top_logprobs"), options.get("include") or ()
    if most:
        return {"logprobs": True, "top_logprobs": most}
    return {"logprobs": True} if "message.output_text.logprobs" in included else {}


def _unsupported_error(param: str, what: str) -> errors.UpstreamFailed:
    return errors.UpstreamFailed(
        f"The upstream of this model speaks Chat Completions, which does not know {what}",
        status=400,
        kind="invalid_request_error",
        reason="unsupported_parameter",
        param=param,
    )


CHAT_PATH = "/chat/completions"
CHAT_DONE = b"[DONE]"


class ChatUpstream:
    """Implements `ModelUpstream`."""

    def __init__(self, settings: Settings, server: UpstreamServer):
        self.vision = settings.vision
        self.server = server
        self.streams = settings.stream
        self._settings = settings
        self._habits = ChatRequestStyles(settings.base_url)

    async def call_model(self, call: ModelCall) -> AsyncGenerator[TurnEvent, None]:
        model = self._settings.model or call.model
        habit = self._habits.of(model)
        while True:
            silent = True
            try:
                async with contextlib.aclosing(self._request_once(call, model, habit)) as turn_events:
                    async for turn_event in turn_events:
                        if silent:
                            self._habits.answered(model, habit)
                        silent = False
                        yield turn_event
                return
            except errors.UpstreamFailed as error:
                other = self._habits.find_alternative(habit, error) if silent else None
                if other is None:
                    raise
                habit = other

    async def _request_once(
        self, call: ModelCall, model: str, habit: ChatRequestStyle
    ) -> AsyncGenerator[TurnEvent, None]:
        body = build_chat_body(call, habit, model=model, vision=self.vision, stream=self._settings.stream)
        said = ChatStreamParser(custom_tool_names(call), self.server.secret)
        async with (
            self.server.post(CHAT_PATH, body, call.request_id) as answer,
            contextlib.aclosing(_read_events(answer, said, self.waiting())) as turn_events,
        ):
            async for turn_event in turn_events:
                yield turn_event

    def waiting(self) -> AnswerDeadline:
        """Returns the deadline of one answer."""
        return AnswerDeadline(max_answer_seconds(self._settings.timeout_seconds))

    def forward_request(
        self, body: dict[str, Any], request_id: str
    ) -> contextlib.AbstractAsyncContextManager[UpstreamResponse]:
        """Forwards a client's own request as it is; the model may have another name at the upstream.

        Raises UpstreamFailed, inside the block too.
        """
        return self.server.post(CHAT_PATH, {**body, "model": self._settings.model or body.get("model")}, request_id)

    async def models(self) -> Item:
        return await self.server.models()

    async def aclose(self) -> None:
        await self.server.aclose()


async def _read_events(
    answer: UpstreamResponse, said: ChatStreamParser, waiting: AnswerDeadline
) -> AsyncGenerator[TurnEvent, None]:
    """Raises UpstreamFailed."""
    if answer.is_stream:
        async with contextlib.aclosing(read_chunks(answer, waiting)) as coming:
            async for chunk in coming:
                for turn_event in said.feed(chunk):
                    yield turn_event
    else:
        for turn_event in said.feed(await waiting.whole(answer.whole())):
            yield turn_event
    for turn_event in said.end():
        yield turn_event


async def read_chunks(
    answer: UpstreamResponse, waiting: AnswerDeadline, choices: int = 1
) -> AsyncGenerator[Item, None]:
    """Yields the chunks of a stream to its end, which not all servers mark. Raises UpstreamFailed.

    Once `choices` choices have finished, it waits only briefly for chunks that may follow.
    """
    finished: set[int] = set()
    counted = False
    async with contextlib.aclosing(answer.events()) as events:
        while True:
            if len(finished) >= choices:
                event = await waiting.last(events, END_SECONDS if counted else USAGE_SECONDS)
            else:
                event = await waiting.next(events)
            if event is None and not finished:
                raise errors.UpstreamFailed("The upstream of this model broke off in the middle of its answer")
            if event is None:
                return
            if event.data.strip() == CHAT_DONE:
                await waiting.last(events, END_SECONDS)  # the little that follows: its connection can be used again
                return
            chunk = parse_json_object(event.data)
            finished |= _finished_choices(chunk)
            counted = counted or isinstance(chunk.get("usage"), dict)
            yield chunk


def _finished_choices(chunk: Item) -> set[int]:
    """Returns the indexes of the choices that end with this chunk."""
    choices = chunk.get("choices")
    ended = [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []
    indexes = [each.get("index") for each in ended if each.get("finish_reason")]
    return {index if isinstance(index, int) else 0 for index in indexes}
