"""An upstream that has a Responses API of its own: `POST {base_url}/responses`."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncGenerator
from typing import Any

from msgspec.structs import replace

from cloche import errors
from cloche.config.sections import Upstream as Settings
from cloche.gateway.events import Happening
from cloche.gateway.items import PYTHON, Item, is_ours
from cloche.gateway.upstream import Call
from cloche.gateway.upstream.http import (
    END_SECONDS,
    Answer,
    Recent,
    UpstreamServer,
    Waiting,
    answer_seconds,
    json_object,
)
from cloche.gateway.upstream.responses_stream import LegEvents
from cloche.model import Struct

# What a Responses upstream is asked, as JSON. Pure.
#
# It keeps nothing (`store: false`), so it is sent the whole transcript each time, with the reasoning that only it can
# read. The code interpreter never gets there: not as a tool, not as a choice, not as an item.

NATIVE = "code_interpreter"
ENCRYPTED = "reasoning.encrypted_content"
LEAST_OUTPUT_TOKENS = 16

OPTIONS = frozenset(
    "temperature top_p parallel_tool_calls reasoning text truncation service_tier safety_identifier prompt_cache_key "
    "prompt_cache_retention prompt_cache_options top_logprobs user prompt moderation".split()
)
"""`metadata` is not among them: it is the client's own, and may hold what is nobody else's business."""

_NULL_SAYS_SOMETHING = frozenset({"result"})  # of an image that could not be made


def body_of(call: Call, *, model: str, stream: bool, encrypted: bool = True, reasoning: bool = True) -> dict[str, Any]:
    """`encrypted` is whether the model can give its reasoning away, `reasoning` whether it is given what it gave.

    Raises InvalidRequest where code would run there.
    """
    body: dict[str, Any] = {name: value for name, value in call.options.items() if name in OPTIONS}
    body |= {
        "model": model,
        "input": [each for item in call.items if reasoning or not _is_encrypted(item) for each in sent(item)],
        "store": False,
        "stream": stream,
        "include": [*included(call), *([ENCRYPTED] if encrypted else [])],
    }
    if call.tools or "prompt" in body:  # a stored prompt may have tools of its own, unless a request has some
        body["tools"] = [_harmless(tool) for tool in call.tools]
    if call.tools:
        body["tool_choice"] = _harmless_choice(call.tool_choice)
    for name in ("instructions", "max_tool_calls"):
        if getattr(call, name) is not None:
            body[name] = getattr(call, name)
    if call.max_output_tokens is not None:
        body["max_output_tokens"] = max(call.max_output_tokens, LEAST_OUTPUT_TOKENS)
    return body


def sent(item: Item) -> list[Item]:
    """An item of a transcript as the upstream accepts it: none, one or two."""
    match item.get("type", "message"):
        case "code_interpreter_call":
            return _as_function(item)
        case "reasoning":
            return _reasoning(item)
        case "compaction" if is_ours(item.get("id")):
            return [_without_nulls({**item, "id": None})]
        case "message":
            return [_message(item)]
        case _:
            return [_without_nulls(_harmless(item))]


def included(call: Call) -> list[str]:
    """What the client wants included, and only the upstream can."""
    asked = [each for each in call.options.get("include") or [] if isinstance(each, str)]
    return list(dict.fromkeys(each for each in asked if not each.startswith(NATIVE) and each != ENCRYPTED))


def _harmless(tool: Item) -> Item:
    """The same tool, or item. This is the last door: behind it code would run on somebody else's machine."""
    inner = tool.get("tools")
    for each in inner if isinstance(inner, list) else []:
        _harmless(each if isinstance(each, dict) else {})
    if str(tool.get("type", "")).startswith(NATIVE):
        raise errors.InvalidRequest("The code interpreter is not an upstream's tool: its code runs here")
    return tool


def _harmless_choice(choice: Any) -> Any:
    if isinstance(choice, dict):
        _harmless(choice)
    return choice


def _as_function(item: Item) -> list[Item]:
    """Code that ran, as the model knows it: a call of a function, and what came of it."""
    call_id = str(item.get("call_id") or item.get("id") or "call_code")[:64]
    arguments = json.dumps({"code": item.get("code") or ""})
    outputs = item.get("outputs")
    logs = [str(each.get("logs", "")) for each in outputs if isinstance(each, dict)] if outputs else []
    output = "".join(logs) or "(its output was not kept)"
    return [
        {"type": "function_call", "call_id": call_id, "name": PYTHON, "arguments": arguments},
        {"type": "function_call_output", "call_id": call_id, "output": output},
    ]


def _reasoning(item: Item) -> list[Item]:
    """Nothing, unless the item itself says what was thought: nobody kept what its id stands for.

    What is encrypted goes with the id that the upstream gave it, or with none: another one is refused. What is plain
    goes back to the server that said it; another's may be refused.
    """
    ours = is_ours(item.get("id"))
    if not item.get("encrypted_content") and (ours or not item.get("content")):
        return []
    kept = {"content": item.get("content") or None, "status": None, "id": None if ours else item.get("id")}
    return [{**_without_nulls({**item, **kept}), "summary": item.get("summary") or []}]


def _is_encrypted(item: Item) -> bool:
    return item.get("type") in ("reasoning", "compaction") and bool(item.get("encrypted_content"))


def _message(item: Item) -> Item:
    content = item.get("content")
    if isinstance(content, list):
        item = {**item, "content": [_part(part) for part in content]}
    return _without_nulls(item)


def _part(part: Any) -> Any:
    """Citations of our containers mean nothing there."""
    if not isinstance(part, dict) or part.get("type") != "output_text":
        return part
    cited = part.get("annotations")
    known = [each for each in cited if isinstance(each, dict) and "container_id" not in each] if cited else []
    return _without_nulls({**part, "annotations": known})


def _without_nulls(item: Item) -> Item:
    """Clients send back what they were given, with null where nothing was; there, a field is left out instead."""
    return {name: value for name, value in item.items() if value is not None or name in _NULL_SAYS_SOMETHING}


PATH = "/responses"
DONE = b"[DONE]"  # a word of the chat API, which some servers end these streams with too


class ResponsesUpstream:
    """See `Upstream`."""

    def __init__(self, settings: Settings, server: UpstreamServer):
        self.vision = settings.vision
        self.server = server
        self._settings = settings
        self._plain: Recent[bool] = Recent()  # whether a model cannot give its reasoning away

    async def leg(self, call: Call) -> AsyncGenerator[Happening, None]:
        model = self._settings.model or call.model
        way = _Way(model=model, encrypted=not self._plain.of(model))
        while True:
            silent = True
            try:
                async with contextlib.aclosing(self._ask(call, way)) as happenings:
                    async for happening in happenings:
                        if silent:
                            self._remember(call, way)
                        silent = False
                        yield happening
                return
            except errors.UpstreamFailed as error:
                other = _other_way(way, error) if silent else None
                if other is None:
                    raise
                way = other

    async def models(self) -> Item:
        return await self.server.models()

    async def aclose(self) -> None:
        await self.server.aclose()

    async def _ask(self, call: Call, way: _Way) -> AsyncGenerator[Happening, None]:
        body = body_of(
            call, model=way.model, stream=self._settings.stream, encrypted=way.encrypted, reasoning=way.reasoning
        )
        waiting = Waiting(answer_seconds(self._settings.timeout_seconds))
        async with (
            self.server.post(PATH, body, call.request_id) as answer,
            contextlib.aclosing(_happenings(answer, self.server.secret, waiting)) as happenings,
        ):
            async for happening in happenings:
                yield happening

    def _remember(self, call: Call, way: _Way) -> None:
        """Holds for all clients: so not if what one of them wanted included may be what was refused."""
        if not way.encrypted and not included(call):
            self._plain.keep(way.model, True)


class _Way(Struct):
    """How a model is asked: see `body_of`."""

    model: str
    encrypted: bool = True
    reasoning: bool = True


def _other_way(way: _Way, error: errors.UpstreamFailed) -> _Way | None:
    """Another way to ask that a refusal hints at."""
    if error.status not in (400, 422):
        return None
    if way.encrypted and _is_about_include(error):
        return replace(way, encrypted=False)  # a model that does not reason, or a server that does not know the word
    if way.reasoning and error.reason == "invalid_encrypted_content":
        return replace(way, reasoning=False)  # what another server's model has thought
    return None


def _is_about_include(error: errors.UpstreamFailed) -> bool:
    if error.param:
        return not {"include", "encrypted_content"}.isdisjoint(re.split(r"\W+", error.param))
    message = str(error)
    return ("ncrypted" in message and "support" in message) or "'include'" in message or '"include"' in message


async def _happenings(answer: Answer, secret: str, waiting: Waiting) -> AsyncGenerator[Happening, None]:
    """Raises UpstreamFailed, also for a stream that has no end."""
    events = LegEvents(secret)
    if not answer.is_stream:
        for happening in events.end(await waiting.whole(answer.whole())):
            yield happening
        return
    async with contextlib.aclosing(answer.events()) as said:
        while (event := await waiting.next(said)) is not None and event.data != DONE:
            happenings = list(events.feed({"type": event.name or None, **json_object(event.data)}))
            if events.finished:
                await waiting.last(said, END_SECONDS)  # the little that follows: its connection can be used again
            for happening in happenings:
                yield happening
            if events.finished:
                return
    raise errors.UpstreamFailed("The upstream of this model broke off in the middle of its answer")
