"""A scripted leg in the words of Chat Completions."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

from tests.openai.upstream_parts import (
    ACTIONS,
    ChatDelta,
    Code,
    ContentFilter,
    Custom,
    Function,
    Garbage,
    IncompleteLength,
    Interleaved,
    NoFinish,
    Raw,
    Reasoning,
    Refusal,
    StreamError,
    Text,
    alternating,
    code_function,
    flat,
    has,
    new_id,
    pieces,
    usage_of,
)

CALLS = (Code, Function, Custom)


def frames(body: dict[str, Any], leg: list[Any]) -> Iterator[Any]:
    """The frames of a stream, and between them what the server should do."""
    chunk = _Chunks(body)
    yield chunk.of({"role": "assistant", "content": "", "refusal": None})
    for part in leg:
        yield from chunk.part(part)
        if isinstance(part, (Garbage, StreamError)):
            return
    if has(leg, NoFinish):
        return
    yield chunk.of({}, _finish(leg))
    if (body.get("stream_options") or {}).get("include_usage"):
        yield chunk.usage(leg)
    yield "data: [DONE]\n\n"


def _finish(leg: list[Any]) -> str:
    if has(leg, IncompleteLength):
        return "length"
    if has(leg, ContentFilter):
        return "content_filter"
    return "tool_calls" if any(isinstance(part, CALLS) for part in flat(leg)) else "stop"


class _Chunks:
    def __init__(self, body: dict[str, Any]):
        self._body = body
        self._with_usage = (body.get("stream_options") or {}).get("include_usage")
        self._head = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": body["model"],
            "service_tier": "default",
            "system_fingerprint": "fp_up",
        }
        self._indexes = itertools.count()

    def of(self, delta: dict[str, Any], finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        chunk = {**self._head, "choices": [choice]}
        return _frame({**chunk, "usage": None} if self._with_usage else chunk)

    def usage(self, leg: list[Any]) -> str:
        return _frame({**self._head, "choices": [], "usage": _usage(leg)})

    def part(self, part: Any) -> Iterator[Any]:
        match part:
            case Interleaved():
                yield from alternating([self.part(each) for each in part.parts])
            case Raw():
                yield part.text
            case Garbage():
                yield f"data: {part.text}\n\n"
            case StreamError():
                yield _frame({"error": part.body})
            case _ if isinstance(part, ACTIONS):
                yield part
            case _:
                yield from (self.of(delta) for delta in self._deltas(part))

    def _deltas(self, part: Any) -> Iterator[dict[str, Any]]:
        match part:
            case Text():
                yield from ({"content": piece} for piece in pieces(part.text, part.chunks))
            case Refusal():
                yield from ({"refusal": piece} for piece in pieces(part.text, part.chunks))
            case Reasoning():
                yield from ({part.key: piece} for piece in pieces(part.text, part.chunks))
            case ChatDelta():
                yield part.delta
            case Code() | Function() | Custom():
                yield from ({"tool_calls": [call]} for call in self._call_deltas(part))

    def _call_deltas(self, part: Code | Function | Custom) -> Iterator[dict[str, Any]]:
        index = next(self._indexes)
        kind, key, text = ("custom", "input", part.input) if isinstance(part, Custom) else _function_words(part)
        call = _call(self._body, part)
        yield {"index": index, **call, kind: {**call[kind], key: ""}}
        for piece in pieces(text, part.chunks):
            yield {"index": index, kind: {key: piece}}


def _function_words(part: Code | Function) -> tuple[str, str, str]:
    return "function", "arguments", part.arguments


def _call(body: dict[str, Any], part: Code | Function | Custom) -> dict[str, Any]:
    call_id = new_id("call_") if part.call_id is None else part.call_id
    named = {"id": call_id} if call_id else {}
    if isinstance(part, Custom):
        return {**named, "type": "custom", "custom": {"name": part.name, "input": part.input}}
    names = [tool.get("function", {}).get("name", "") for tool in body.get("tools") or []]
    name = code_function(names) if isinstance(part, Code) else part.name
    return {**named, "type": "function", "function": {"name": name, "arguments": part.arguments}}


def whole(body: dict[str, Any], leg: list[Any]) -> dict[str, Any]:
    """The answer without streaming."""
    said = list(flat(leg))
    message: dict[str, Any] = {"role": "assistant", "refusal": None, "annotations": []}
    message["content"] = "".join(part.text for part in said if isinstance(part, Text)) or None
    for part in said:
        if isinstance(part, Refusal):
            message["refusal"] = (message["refusal"] or "") + part.text
        elif isinstance(part, Reasoning):
            message[part.key] = message.get(part.key, "") + part.text
        elif isinstance(part, ChatDelta):
            message.update(part.delta)
    calls = [_call(body, part) for part in said if isinstance(part, CALLS)]
    if calls:
        message["tool_calls"] = calls
    errors = [part.body for part in said if isinstance(part, StreamError)]
    if errors:
        return {"error": errors[0]}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(leg)}
    return {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body["model"],
        "choices": [] if has(leg, NoFinish) else [choice],
        "usage": _usage(leg),
        "service_tier": "default",
        "system_fingerprint": "fp_up",
    }


def _usage(leg: list[Any]) -> dict[str, Any]:
    used = usage_of(leg)
    return {
        "prompt_tokens": used.input,
        "completion_tokens": used.output,
        "total_tokens": used.input + used.output,
        "prompt_tokens_details": {"cached_tokens": used.cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": used.reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _frame(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
