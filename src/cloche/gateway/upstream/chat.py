"""An upstream that speaks Chat Completions: `POST {base_url}/chat/completions`. Most servers of models do."""

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
from cloche.config.sections import Upstream as Settings
from cloche.gateway.events import CallIds, Happening
from cloche.gateway.items import PYTHON, Item, code_of
from cloche.gateway.upstream import Call
from cloche.gateway.upstream.chat_stream import ChatAnswer
from cloche.gateway.upstream.http import (
    END_SECONDS,
    USAGE_SECONDS,
    Answer,
    Recent,
    UpstreamServer,
    Waiting,
    answer_seconds,
    json_object,
)
from cloche.model import Struct

# A transcript as the messages of Chat Completions. Pure.
#
# message                     a message of that role; `developer` is `system`, which every server knows
# function_call               in `tool_calls` of the assistant's message
# function_call_output        a message of the role `tool`, right behind the calls, wherever it was in the transcript;
# its pictures follow in one of the user's, since a tool's can hold text only
# custom_tool_call, .._output the same: a custom tool is a function with one argument, `input`
# reasoning                   `reasoning_content` of a message with calls, in the turn that is not over: some models
# (DeepSeek's) refuse to go on without. What is older, or sealed, is left out
# all others                  left out: Chat has no words for them
#
# Servers differ in what they forgive, so nothing is sent that needs it: each call has an id of its own and exactly
# one
# output, arguments are a JSON object, texts are strings and not lists of parts.

Message = dict[str, Any]

NO_OUTPUT = "(no output)"
PDF = "data:application/pdf;"

_CALLS = frozenset({"function_call", "custom_tool_call"})
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
_ROLES = {"developer": "system", "system": "system", "assistant": "assistant"}


def messages(items: Iterable[Item], instructions: str | None = None, *, vision: bool = True) -> list[Message]:
    """The messages. `vision` is whether the model sees pictures; where not, a word stands for them."""
    listed = [{"type": "message", "role": "system", "content": instructions}] if instructions else []
    listed += items
    return _Conversation(listed, vision=vision).messages()


class _Conversation:
    def __init__(self, items: list[Item], *, vision: bool):
        self._items = items
        self._vision = vision
        self._messages: list[Message] = []
        self._said: list[str] = []  # by the assistant, in the message that is being put together
        self._thought: list[str] = []
        self._calls: list[Item] = []
        self._outputs = _outputs(items)
        self._ids = CallIds()
        self._last_user = max((at for at, item in enumerate(items) if _role(item) == "user"), default=-1)

    def messages(self) -> list[Message]:
        for at, item in enumerate(self._items):
            self._take(item, this_turn=at > self._last_user)
        self._end_assistant()
        self._add_orphans()
        return [_joined(message) for message in self._messages]

    def _take(self, item: Item, *, this_turn: bool) -> None:
        kind, role = item.get("type", "message"), _role(item)
        if kind in _CALLS:
            self._calls.append(item)
        elif kind == "reasoning" and this_turn:
            self._thought.append(_text_of_parts(item.get("content")))
        elif role == "assistant":
            self._said.append(_assistant_text(item.get("content")))
        elif kind in _OUTPUTS:
            self._end_assistant()
        elif role is not None:
            self._end_assistant()
            self._add(role, _content(item.get("content"), vision=self._vision))

    def _add(self, role: str, content: str | list[Item]) -> None:
        """Adds a message. Of those of the system, one after another, the texts are collected in one."""
        last = self._messages[-1] if self._messages else {}
        if not content:
            return
        if role != "system":
            self._messages.append({"role": role, "content": content})
        elif last.get("role") == "system":
            last["content"].append(_plain(content))
        else:
            self._messages.append({"role": role, "content": [_plain(content)]})

    def _end_assistant(self) -> None:
        """Adds the assistant's message and, if it calls tools, the outputs: they must follow at once."""
        said, thought, calls = self._said, self._thought, self._calls
        self._said, self._thought, self._calls = [], [], []
        text = "\n\n".join(each for each in said if each)
        if not text and not calls:
            return
        message: Message = {"role": "assistant", "content": text or None}
        if calls and any(thought):
            message["reasoning_content"] = "\n\n".join(each for each in thought if each)
        self._messages.append(message)
        if calls:
            self._add_calls(message, calls)

    def _add_calls(self, message: Message, calls: list[Item]) -> None:
        message["tool_calls"] = []
        pictures: list[Item] = []
        for call in calls:
            given = str(call.get("call_id") or "")
            id = self._ids.unique(given)
            message["tool_calls"].append({"id": id, "type": "function", "function": _function(call)})
            output = self._outputs[given].popleft() if self._outputs[given] else NO_OUTPUT
            self._messages.append({"role": "tool", "tool_call_id": id, "content": _output_text(output) or NO_OUTPUT})
            pictures += _pictures(output, vision=self._vision)
        if pictures:
            note = {"type": "text", "text": "The pictures that the tool has shown:"}
            self._messages.append({"role": "user", "content": [note, *pictures]})

    def _add_orphans(self) -> None:
        """Outputs of calls that are not in the transcript: nobody else could be told of them."""
        for waiting in self._outputs.values():
            for output in waiting:
                self._messages.append({"role": "user", "content": f"[Output of a tool]\n{_output_text(output)}"})


def _joined(message: Message) -> Message:
    return {**message, "content": "\n\n".join(message["content"])} if message["role"] == "system" else message


def _outputs(items: Iterable[Item]) -> defaultdict[str, deque[Any]]:
    """By the call's id, in their order: of calls with the same id, the first has the first output."""
    found: defaultdict[str, deque[Any]] = defaultdict(deque)
    for item in items:
        if item.get("type") in _OUTPUTS:
            found[str(item.get("call_id") or "")].append(item.get("output"))
    return found


def _role(item: Item) -> str | None:
    """The role of a message; None of what is none."""
    if item.get("type", "message") != "message":
        return None
    return _ROLES.get(str(item.get("role")), "user")


def _function(call: Item) -> Item:
    name = str(call.get("name") or "unknown")
    if call["type"] == "custom_tool_call":
        return {"name": name, "arguments": json.dumps({"input": str(call.get("input") or "")})}
    return {"name": name, "arguments": _object(name, str(call.get("arguments") or ""))}


def _object(name: str, arguments: str) -> str:
    """The arguments, made a JSON object where a model had sent none: templates of many servers parse them."""
    try:
        if isinstance(json.loads(arguments or "{}"), dict):
            return arguments or "{}"
    except (ValueError, RecursionError):
        pass
    if name.startswith(PYTHON):
        return json.dumps({"code": code_of(arguments)})
    return json.dumps({"arguments": arguments})


# -- content


def _content(content: Any, *, vision: bool) -> str | list[Item]:
    """A string where there is text only."""
    if isinstance(content, str):
        return content
    parts = [_part(part, vision=vision) for part in content or () if isinstance(part, dict)]
    return _plain(parts) if all(part["type"] == "text" for part in parts) else parts


def _part(part: Item, *, vision: bool) -> Item:
    match part.get("type"):
        case "input_image":
            return _image(part) if vision and part.get("image_url") else _note("image", part)
        case "input_file" if vision and str(part.get("file_data")).startswith(PDF):
            return {"type": "file", "file": {"filename": _name(part), "file_data": part["file_data"]}}
        case "input_file":
            return _note("file", part)
        case "input_audio" if isinstance(part.get("input_audio"), dict):
            return {"type": "input_audio", "input_audio": part["input_audio"]}
        case _:
            return {"type": "text", "text": str(part.get("text") or part.get("refusal") or "")}


def _image(part: Item) -> Item:
    shown = {"url": part["image_url"]}
    if part.get("detail") in ("low", "high"):
        shown["detail"] = part["detail"]
    return {"type": "image_url", "image_url": shown}


def _note(what: str, part: Item) -> Item:
    named = part.get("filename") or part.get("file_id") or part.get("file_url") or ""
    return {"type": "text", "text": f"[{what} {named}]" if named else f"[{what}]"}


def _name(part: Item) -> str:
    return str(part.get("filename") or "file.pdf")


def _plain(content: str | list[Item]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", f"[{part['type']}]")) for part in content)


def _assistant_text(content: Any) -> str:
    return _plain(_content(content, vision=False))


def _text_of_parts(content: Any) -> str:
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _output_text(output: Any) -> str:
    if isinstance(output, list):
        return _plain([_part(part, vision=False) for part in output if isinstance(part, dict)])
    return output if isinstance(output, str) else json.dumps(output)


def _pictures(output: Any, *, vision: bool) -> list[Item]:
    if not (vision and isinstance(output, list)):
        return []
    parts = [part for part in output if isinstance(part, dict) and part.get("type") == "input_image"]
    return [_image(part) for part in parts if part.get("image_url")]


# Whether an upstream refuses a field as such. Another way to ask helps then, and not if a value is what is wrong.

_AS_SUCH = re.compile(
    r"unsupported|not support|n't support|unrecogni[sz]ed|unknown|unexpected|extra[ _](?:forbidden|inputs|fields)"
    r"|not permitted|additional propert|no such (?:parameter|field|argument)",
    re.IGNORECASE,
)


def refuses(error: errors.UpstreamFailed, field: str) -> bool:
    """Whether the error says that there is no such field. If it names what it is about, that must be this field."""
    if error.status not in (400, 422) or not _AS_SUCH.search(f"{error.reason} {error.kind} {error}"):
        return False
    return field in re.split(r"\W+", error.param or str(error))


# What the models of an upstream do not put up with, learned from what they refuse.

LIMIT_NAMES = ("max_tokens", "max_completion_tokens")
USAGE = "stream_options"


class Habit(Struct):
    """How one model is asked. `limit_name` is what it calls the most tokens that it may write."""

    limit_name: str
    usage_in_stream: bool = True


class Habits:
    """Of one upstream's models.

    OpenAI's newer models refuse `max_tokens`; many other servers do not know `max_completion_tokens`, nor all of them
    `stream_options`. Which it is cannot be asked, but a refusal names the field. What one client's request teaches
    holds for all of them, so it counts only after the model has answered when it was asked so.
    """

    def __init__(self, base_url: str):
        self._default = Habit(limit_name=LIMIT_NAMES[_is_openai(base_url)])
        self._known: Recent[Habit] = Recent()

    def of(self, model: str) -> Habit:
        return self._known.of(model) or self._default

    def other(self, habit: Habit, error: errors.UpstreamFailed) -> Habit | None:
        """Another way to ask, if the error hints at one. It ends: no way comes twice."""
        if habit.usage_in_stream and refuses(error, USAGE):
            return replace(habit, usage_in_stream=False)
        if habit.limit_name == self._default.limit_name and refuses(error, habit.limit_name):
            return replace(habit, limit_name=LIMIT_NAMES[1 - LIMIT_NAMES.index(habit.limit_name)])
        return None

    def answered(self, model: str, habit: Habit) -> None:
        """The model puts up with this."""
        if habit != self.of(model):
            self._known.keep(model, habit)


def _is_openai(base_url: str) -> bool:
    host = urlsplit(base_url).hostname or ""
    return host == "api.openai.com" or host.endswith((".openai.com", ".openai.azure.com"))


# What a Chat Completions upstream is asked, as JSON. Pure.

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


PATH = "/chat/completions"
DONE = b"[DONE]"


class ChatUpstream:
    """See `Upstream`."""

    def __init__(self, settings: Settings, server: UpstreamServer):
        self.vision = settings.vision
        self.server = server
        self.streams = settings.stream
        self._settings = settings
        self._habits = Habits(settings.base_url)

    async def leg(self, call: Call) -> AsyncGenerator[Happening, None]:
        model = self._settings.model or call.model
        habit = self._habits.of(model)
        while True:
            silent = True
            try:
                async with contextlib.aclosing(self._ask(call, model, habit)) as happenings:
                    async for happening in happenings:
                        if silent:
                            self._habits.answered(model, habit)
                        silent = False
                        yield happening
                return
            except errors.UpstreamFailed as error:
                other = self._habits.other(habit, error) if silent else None
                if other is None:
                    raise
                habit = other

    async def _ask(self, call: Call, model: str, habit: Habit) -> AsyncGenerator[Happening, None]:
        body = body_of(call, habit, model=model, vision=self.vision, stream=self._settings.stream)
        said = ChatAnswer(custom_tools(call), self.server.secret)
        async with (
            self.server.post(PATH, body, call.request_id) as answer,
            contextlib.aclosing(_happenings(answer, said, self.waiting())) as happenings,
        ):
            async for happening in happenings:
                yield happening

    def waiting(self) -> Waiting:
        """The time that one answer may take."""
        return Waiting(answer_seconds(self._settings.timeout_seconds))

    def forward(self, body: dict[str, Any], request_id: str) -> contextlib.AbstractAsyncContextManager[Answer]:
        """A client's own request, passed on as it is; the model may have another name there.

        Raises UpstreamFailed, inside the block too.
        """
        return self.server.post(PATH, {**body, "model": self._settings.model or body.get("model")}, request_id)

    async def models(self) -> Item:
        return await self.server.models()

    async def aclose(self) -> None:
        await self.server.aclose()


async def _happenings(answer: Answer, said: ChatAnswer, waiting: Waiting) -> AsyncGenerator[Happening, None]:
    """Raises UpstreamFailed."""
    if answer.is_stream:
        async with contextlib.aclosing(chunks(answer, waiting)) as coming:
            async for chunk in coming:
                for happening in said.feed(chunk):
                    yield happening
    else:
        for happening in said.feed(await waiting.whole(answer.whole())):
            yield happening
    for happening in said.end():
        yield happening


async def chunks(answer: Answer, waiting: Waiting, choices: int = 1) -> AsyncGenerator[Item, None]:
    """The chunks of a stream, to its end: not all servers say so, or hang up. Raises UpstreamFailed.

    Once so many choices have finished, what may follow is not waited for any longer than it takes.
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
            if event.data.strip() == DONE:
                await waiting.last(events, END_SECONDS)  # the little that follows: its connection can be used again
                return
            chunk = json_object(event.data)
            finished |= _finished(chunk)
            counted = counted or isinstance(chunk.get("usage"), dict)
            yield chunk


def _finished(chunk: Item) -> set[int]:
    """The numbers of the choices that end with it."""
    choices = chunk.get("choices")
    ended = [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []
    indexes = [each.get("index") for each in ended if each.get("finish_reason")]
    return {index if isinstance(index, int) else 0 for index in indexes}
