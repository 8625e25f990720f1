"""A scripted leg in the words of the Responses API."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

from tests.openai.upstream_parts import (
    ACTIONS,
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
    UnknownItem,
    alternating,
    code_function,
    flat,
    has,
    new_id,
    pieces,
    usage_of,
)

Json = dict[str, Any]
ITEMS = (Text, Refusal, Code, Function, Custom, Reasoning, UnknownItem)


def frames(body: Json, leg: list[Any]) -> Iterator[Any]:
    """The frames of a stream, and between them what the server should do."""
    numbers = itertools.count()
    for each in _Answer(body, leg).events():
        if isinstance(each, dict):
            kind = each["type"]
            yield f"event: {kind}\ndata: {json.dumps({**each, 'sequence_number': next(numbers)})}\n\n"
        else:
            yield each


def whole(body: Json, leg: list[Any]) -> Json:
    """The answer without streaming."""
    answer = _Answer(body, leg)
    last: Json = {}
    for each in answer.events():
        if isinstance(each, dict) and "response" in each:
            last = each["response"]
    return last


class _Answer:
    def __init__(self, body: Json, leg: list[Any]):
        self._body = body
        self._leg = leg
        self._id = new_id("resp_")
        self._created = int(time.time())
        self._indexes = itertools.count()
        self._output: dict[int, Json] = {}
        items = [part for part in flat(leg) if isinstance(part, ITEMS)]
        cut = has(leg, IncompleteLength) or has(leg, ContentFilter)
        self._cut_off = items[-1] if items and cut else None

    def events(self) -> Iterator[Any]:
        yield {"type": "response.created", "response": self._response("in_progress")}
        yield {"type": "response.in_progress", "response": self._response("in_progress")}
        for part in self._leg:
            yield from self._part(part)
            if isinstance(part, (Garbage, StreamError)):
                return
        if not has(self._leg, NoFinish):
            status = "completed" if self._reason is None else "incomplete"
            yield {"type": f"response.{status}", "response": self._response(status)}

    @property
    def _reason(self) -> str | None:
        if has(self._leg, IncompleteLength):
            return "max_output_tokens"
        return "content_filter" if has(self._leg, ContentFilter) else None

    def _part(self, part: Any) -> Iterator[Any]:
        match part:
            case Interleaved():
                yield from alternating([self._part(each) for each in part.parts])
            case Raw():
                yield part.text
            case Garbage():
                yield f"event: response.output_text.delta\ndata: {part.text}\n\n"
            case StreamError():
                yield {"type": "error", "error": part.body}
                error = {"code": part.code or "server_error", "message": part.message}
                yield {"type": "response.failed", "response": self._response("failed", error)}
            case _ if isinstance(part, ACTIONS):
                yield part
            case _ if isinstance(part, ITEMS):
                yield from self._item(part)

    def _item(self, part: Any) -> Iterator[Json]:
        index = next(self._indexes)
        final = self._final(part)
        yield {"type": "response.output_item.added", "output_index": index, "item": _opening(final)}
        place = {"item_id": final["id"], "output_index": index}
        for event in _inner(part, final):
            yield {**event, **place}
        self._output[index] = final
        yield {"type": "response.output_item.done", "output_index": index, "item": final}

    def _final(self, part: Any) -> Json:
        status = "incomplete" if part is self._cut_off else "completed"
        match part:
            case Text():
                content = [{"type": "output_text", "text": part.text, "annotations": part.annotations, "logprobs": []}]
                return _message(content, status)
            case Refusal():
                return _message([{"type": "refusal", "refusal": part.text}], status)
            case Reasoning():
                return self._reasoning(part)
            case UnknownItem():
                return {"id": new_id("ws_"), "status": status, **part.item}
            case Custom():
                call = {"call_id": part.call_id or new_id("call_"), "name": part.name, "input": part.input}
                return {"id": new_id("ctc_"), "type": "custom_tool_call", "status": status, **call}
        names = [tool.get("name", "") for tool in self._body.get("tools") or [] if tool.get("type") == "function"]
        return {
            "id": new_id("fc_"),
            "type": "function_call",
            "status": status,
            "arguments": part.arguments,
            "call_id": new_id("call_") if part.call_id is None else part.call_id,
            "name": code_function(names) if isinstance(part, Code) else part.name,
        }

    def _reasoning(self, part: Reasoning) -> Json:
        item: Json = {"id": new_id("rs_"), "type": "reasoning", "summary": []}
        if part.summary:
            item["summary"] = [{"type": "summary_text", "text": part.summary}]
        if part.text:
            item["content"] = [{"type": "reasoning_text", "text": part.text}]
        if part.encrypted and "reasoning.encrypted_content" in (self._body.get("include") or []):
            item["encrypted_content"] = part.encrypted
        return item

    def _response(self, status: str, error: Json | None = None) -> Json:
        body = self._body
        over = status in ("completed", "incomplete")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": self._reason} if status == "incomplete" else None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "max_tool_calls": None,
            "metadata": body.get("metadata") or {},
            "model": body["model"],
            "output": [self._output[index] for index in sorted(self._output)] if over else [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": body.get("store", True),
            "temperature": 1.0,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools") or [],
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": self._usage() if over else None,
            "user": None,
        }

    def _usage(self) -> Json:
        used = usage_of(self._leg)
        return {
            "input_tokens": used.input,
            "input_tokens_details": {"cached_tokens": used.cached, "cache_write_tokens": 0},
            "output_tokens": used.output,
            "output_tokens_details": {"reasoning_tokens": used.reasoning},
            "total_tokens": used.input + used.output,
        }


def _message(content: list[Json], status: str) -> Json:
    return {"id": new_id("msg_"), "type": "message", "status": status, "content": content, "role": "assistant"}


def _opening(final: Json) -> Json:
    """The item when it is added: nothing is in it yet."""
    empty = {"content": [], "summary": [], "arguments": "", "input": ""}
    opening = {key: empty.get(key, value) for key, value in final.items()}
    if final["type"] == "reasoning":
        opening.pop("content", None)
    return {**opening, "status": "in_progress"} if "status" in final else opening


def _inner(part: Any, final: Json) -> Iterator[Json]:
    """The events between an item's added and done."""
    match part:
        case Text():
            yield from _text_events(part, final["content"][0])
        case Refusal():
            yield from _content_events("refusal", "refusal", final["content"][0], part)
        case Reasoning():
            yield from _reasoning_events(part, final)
        case UnknownItem():
            yield from ({"type": kind} for kind in part.events)
        case Custom():
            yield from _plain_events("response.custom_tool_call_input", "input", part.input, part)
        case Code() | Function():
            yield from _plain_events("response.function_call_arguments", "arguments", part.arguments, part)


def _plain_events(kind: str, key: str, text: str, part: Any) -> Iterator[Json]:
    yield from ({"type": f"{kind}.delta", "delta": piece} for piece in pieces(text, part.chunks))
    yield {"type": f"{kind}.done", key: text}


def _text_events(part: Text, content: Json) -> Iterator[Json]:
    place = {"content_index": 0}
    yield {"type": "response.content_part.added", "part": {**content, "text": "", "annotations": []}, **place}
    for piece in pieces(part.text, part.chunks):
        yield {"type": "response.output_text.delta", "delta": piece, "logprobs": [], **place}
    for number, annotation in enumerate(part.annotations):
        added = {"annotation": annotation, "annotation_index": number}
        yield {"type": "response.output_text.annotation.added", **added, **place}
    yield {"type": "response.output_text.done", "text": part.text, "logprobs": [], **place}
    yield {"type": "response.content_part.done", "part": content, **place}


def _content_events(kind: str, key: str, content: Json, part: Any) -> Iterator[Json]:
    place = {"content_index": 0}
    yield {"type": "response.content_part.added", "part": {**content, key: ""}, **place}
    for piece in pieces(part.text, part.chunks):
        yield {"type": f"response.{kind}.delta", "delta": piece, **place}
    yield {"type": f"response.{kind}.done", key: part.text, **place}
    yield {"type": "response.content_part.done", "part": content, **place}


def _reasoning_events(part: Reasoning, final: Json) -> Iterator[Json]:
    if part.summary:
        place, summary = {"summary_index": 0}, final["summary"][0]
        yield {"type": "response.reasoning_summary_part.added", "part": {**summary, "text": ""}, **place}
        for piece in pieces(part.summary, part.chunks):
            yield {"type": "response.reasoning_summary_text.delta", "delta": piece, **place}
        yield {"type": "response.reasoning_summary_text.done", "text": part.summary, **place}
        yield {"type": "response.reasoning_summary_part.done", "part": summary, **place}
    if part.text:
        yield from _content_events("reasoning_text", "text", final["content"][0], part)
