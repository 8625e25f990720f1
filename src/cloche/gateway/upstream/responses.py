"""An upstream with the Responses API: `POST {base_url}/responses`."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncGenerator
from typing import Any

from msgspec.structs import replace

from cloche import errors
from cloche.config.sections import UpstreamConfig as Settings
from cloche.gateway.events import TurnEvent
from cloche.gateway.items import PYTHON_FUNCTION, Item, is_own_id
from cloche.gateway.upstream import ModelCall
from cloche.gateway.upstream.http import (
    END_SECONDS,
    AnswerDeadline,
    RecentModels,
    UpstreamResponse,
    UpstreamServer,
    max_answer_seconds,
    parse_json_object,
)
from cloche.gateway.upstream.responses_stream import ResponsesStreamParser
from cloche.model import Struct

# Builds the JSON body of a Responses request. Pure.
#
# The upstream stores nothing (`store: false`), so it is sent the whole transcript each time, with the reasoning
# that only it can read. The code interpreter is never sent: not as a tool, not as a choice, not as an item.

NATIVE_TOOL = "code_interpreter"
ENCRYPTED_INCLUDE = "reasoning.encrypted_content"
MIN_OUTPUT_TOKENS = 16

FORWARDED_OPTIONS = frozenset(
    "temperature top_p parallel_tool_calls reasoning text truncation service_tier safety_identifier prompt_cache_key "
    "prompt_cache_retention prompt_cache_options top_logprobs user prompt moderation".split()
)
"""`metadata` is not among them: it is private to the client."""

_MEANINGFUL_NULLS = frozenset({"result"})  # of an image that could not be made


def build_responses_body(
    call: ModelCall, *, model: str, stream: bool, encrypted: bool = True, reasoning: bool = True
) -> dict[str, Any]:
    """Returns the body. `encrypted`: request encrypted reasoning; `reasoning`: send encrypted reasoning back.

    Raises InvalidRequest where code would run at the upstream.
    """
    body: dict[str, Any] = {name: value for name, value in call.options.items() if name in FORWARDED_OPTIONS}
    body |= {
        "model": model,
        "input": [each for item in call.items if reasoning or not _is_encrypted(item) for each in convert_item(item)],
        "store": False,
        "stream": stream,
        "include": [*forwarded_includes(call), *([ENCRYPTED_INCLUDE] if encrypted else [])],
    }
    if call.tools or "prompt" in body:  # a stored prompt may have tools of its own, unless a request has some
        body["tools"] = [_refuse_native_tool(tool) for tool in call.tools]
    if call.tools:
        body["tool_choice"] = _refuse_native_choice(call.tool_choice)
    for name in ("instructions", "max_tool_calls"):
        if getattr(call, name) is not None:
            body[name] = getattr(call, name)
    if call.max_output_tokens is not None:
        body["max_output_tokens"] = max(call.max_output_tokens, MIN_OUTPUT_TOKENS)
    return body


def convert_item(item: Item) -> list[Item]:
    """Converts an item of a transcript to the items that the upstream accepts: none, one or two."""
    match item.get("type", "message"):
        case "code_interpreter_call":
            return _code_call_as_function(item)
        case "reasoning":
            return _convert_reasoning(item)
        case "compaction" if is_own_id(item.get("id")):
            return [_without_nulls({**item, "id": None})]
        case "message":
            return [_convert_message(item)]
        case _:
            return [_without_nulls(_refuse_native_tool(item))]


def forwarded_includes(call: ModelCall) -> list[str]:
    """Returns the includes of the client that only the upstream can provide."""
    asked = [each for each in call.options.get("include") or [] if isinstance(each, str)]
    return list(dict.fromkeys(each for each in asked if not each.startswith(NATIVE_TOOL) and each != ENCRYPTED_INCLUDE))


def _refuse_native_tool(tool: Item) -> Item:
    """Returns the tool or item.

    Raises InvalidRequest for a code interpreter: its code would run on another machine.
    """
    inner = tool.get("tools")
    for each in inner if isinstance(inner, list) else []:
        _refuse_native_tool(each if isinstance(each, dict) else {})
    if str(tool.get("type", "")).startswith(NATIVE_TOOL):
        raise errors.InvalidRequest("The code interpreter is not an upstream's tool: its code runs here")
    return tool


def _refuse_native_choice(choice: Any) -> Any:
    if isinstance(choice, dict):
        _refuse_native_tool(choice)
    return choice


def _code_call_as_function(item: Item) -> list[Item]:
    """Converts a code call for the model: a call of a function, and its output."""
    call_id = str(item.get("call_id") or item.get("id") or "call_code")[:64]
    arguments = json.dumps({"code": item.get("code") or ""})
    outputs = item.get("outputs")
    logs = [str(each.get("logs", "")) for each in outputs if isinstance(each, dict)] if outputs else []
    output = "".join(logs) or "(its output was not kept)"
    return [
        {"type": "function_call", "call_id": call_id, "name": PYTHON_FUNCTION, "arguments": arguments},
        {"type": "function_call_output", "call_id": call_id, "output": output},
    ]


def _convert_reasoning(item: Item) -> list[Item]:
    """Returns the item if it holds its reasoning itself, else nothing: the upstream does not store it by id.

    Encrypted reasoning goes with the id that the upstream gave it, or with none: another one is refused. Plain
    reasoning goes back to the server that sent it; another's may be refused.
    """
    ours = is_own_id(item.get("id"))
    if not item.get("encrypted_content") and (ours or not item.get("content")):
        return []
    kept = {"content": item.get("content") or None, "status": None, "id": None if ours else item.get("id")}
    return [{**_without_nulls({**item, **kept}), "summary": item.get("summary") or []}]


def _is_encrypted(item: Item) -> bool:
    return item.get("type") in ("reasoning", "compaction") and bool(item.get("encrypted_content"))


def _convert_message(item: Item) -> Item:
    content = item.get("content")
    if isinstance(content, list):
        item = {**item, "content": [_convert_part(part) for part in content]}
    return _without_nulls(item)


def _convert_part(part: Any) -> Any:
    """Removes citations of our containers, which an upstream does not know."""
    if not isinstance(part, dict) or part.get("type") != "output_text":
        return part
    cited = part.get("annotations")
    known = [each for each in cited if isinstance(each, dict) and "container_id" not in each] if cited else []
    return _without_nulls({**part, "annotations": known})


def _without_nulls(item: Item) -> Item:
    """Omits null fields: clients send items back with null for absent fields; upstreams expect them left out."""
    return {name: value for name, value in item.items() if value is not None or name in _MEANINGFUL_NULLS}


RESPONSES_PATH = "/responses"
RESPONSES_DONE = b"[DONE]"  # a word of the chat API, which some servers end these streams with too


class ResponsesUpstream:
    """Implements `ModelUpstream`."""

    def __init__(self, settings: Settings, server: UpstreamServer):
        self.vision = settings.vision
        self.server = server
        self._settings = settings
        self._plain: RecentModels[bool] = RecentModels()  # whether a model cannot give its reasoning away

    async def call_model(self, call: ModelCall) -> AsyncGenerator[TurnEvent, None]:
        model = self._settings.model or call.model
        way = _RequestVariant(model=model, encrypted=not self._plain.of(model))
        while True:
            silent = True
            try:
                async with contextlib.aclosing(self._request_once(call, way)) as turn_events:
                    async for turn_event in turn_events:
                        if silent:
                            self._remember_plain(call, way)
                        silent = False
                        yield turn_event
                return
            except errors.UpstreamFailed as error:
                other = _next_variant(way, error) if silent else None
                if other is None:
                    raise
                way = other

    async def models(self) -> Item:
        return await self.server.models()

    async def aclose(self) -> None:
        await self.server.aclose()

    async def _request_once(self, call: ModelCall, way: _RequestVariant) -> AsyncGenerator[TurnEvent, None]:
        body = build_responses_body(
            call, model=way.model, stream=self._settings.stream, encrypted=way.encrypted, reasoning=way.reasoning
        )
        waiting = AnswerDeadline(max_answer_seconds(self._settings.timeout_seconds))
        async with (
            self.server.post(RESPONSES_PATH, body, call.request_id) as answer,
            contextlib.aclosing(_read_events(answer, self.server.secret, waiting)) as turn_events,
        ):
            async for turn_event in turn_events:
                yield turn_event

    def _remember_plain(self, call: ModelCall, way: _RequestVariant) -> None:
        """Remembers a refusal for all clients, unless a client's own include may be the cause of it."""
        if not way.encrypted and not forwarded_includes(call):
            self._plain.keep(way.model, True)


class _RequestVariant(Struct):
    """A variant of the request: see `build_responses_body`."""

    model: str
    encrypted: bool = True
    reasoning: bool = True


def _next_variant(way: _RequestVariant, error: errors.UpstreamFailed) -> _RequestVariant | None:
    """Returns the next variant that a refusal hints at."""
    if error.status not in (400, 422):
        return None
    if way.encrypted and _is_about_include(error):
        return replace(way, encrypted=False)  # a model that does not reason, or a server that does not know the word
    if way.reasoning and error.reason == "invalid_encrypted_content":
        return replace(way, reasoning=False)  # reasoning of another server's model
    return None


def _is_about_include(error: errors.UpstreamFailed) -> bool:
    if error.param:
        return not {"include", "encrypted_content"}.isdisjoint(re.split(r"\W+", error.param))
    message = str(error)
    return ("ncrypted" in message and "support" in message) or "'include'" in message or '"include"' in message


async def _read_events(
    answer: UpstreamResponse, secret: str, waiting: AnswerDeadline
) -> AsyncGenerator[TurnEvent, None]:
    """Raises UpstreamFailed, also for a stream that breaks off."""
    events = ResponsesStreamParser(secret)
    if not answer.is_stream:
        for turn_event in events.end(await waiting.whole(answer.whole())):
            yield turn_event
        return
    async with contextlib.aclosing(answer.events()) as said:
        while (event := await waiting.next(said)) is not None and event.data != RESPONSES_DONE:
            turn_events = list(events.feed({"type": event.name or None, **parse_json_object(event.data)}))
            if events.finished:
                await waiting.last(said, END_SECONDS)  # the little that follows: its connection can be used again
            for turn_event in turn_events:
                yield turn_event
            if events.finished:
                return
    raise errors.UpstreamFailed("The upstream of this model broke off in the middle of its answer")
