"""Checks answers against OpenAI's published schemas (`schemas/openai.json`, made by `tools/openai_schemas.py`).

`check(kind, value)` for one value, `Checked(transport)` for everything that a client of the SDK's receives.

Unions are decided by the `type` of the value, so that an error names the field that is wrong, and not all branches
that did not match.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
from jsonschema import Draft202012Validator, ValidationError, validators
from jsonschema.exceptions import best_match

DEFS: dict[str, Any] = json.loads(Path(__file__).with_name("schemas").joinpath("openai.json").read_text())["$defs"]

MAY_BE_NULL = [
    # OpenAI's own answers say null there, as recorded traffic shows, and its released clients expect that.
    ("ContainerListResource", "first_id", "last_id"),
    ("ContainerFileListResource", "first_id", "last_id"),
    ("ListFilesResponse", "first_id", "last_id"),
    ("ResponseItemList", "first_id", "last_id"),
    ("ConversationItemList", "first_id", "last_id"),
    ("OpenAIFile", "expires_at", "status_details"),
    ("ModelResponseProperties", "user"),
    ("Response", "usage"),  # before it is known
    ("CreateChatCompletionStreamResponse", "system_fingerprint"),
    ("CreateChatCompletionResponse", "system_fingerprint"),
]

KINDS = {
    # of a successful answer, by its path and method
    r"POST /v1/responses": "Response",
    r"GET /v1/responses/[^/]+": "Response",
    r"POST /v1/responses/[^/]+/cancel": "Response",
    r"GET /v1/responses/[^/]+/input_items": "ResponseItemList",
    r"POST /v1/responses/input_tokens": "TokenCountsResource",
    r"POST /v1/containers": "ContainerResource",
    r"GET /v1/containers": "ContainerListResource",
    r"GET /v1/containers/[^/]+": "ContainerResource",
    r"POST /v1/containers/[^/]+/files": "ContainerFileResource",
    r"GET /v1/containers/[^/]+/files": "ContainerFileListResource",
    r"GET /v1/containers/[^/]+/files/[^/]+": "ContainerFileResource",
    r"POST /v1/files": "OpenAIFile",
    r"GET /v1/files": "ListFilesResponse",
    r"GET /v1/files/[^/]+": "OpenAIFile",
    r"DELETE /v1/files/[^/]+": "DeleteFileResponse",
    r"POST /v1/chat/completions": "CreateChatCompletionResponse",
    r"POST /v1/conversations": "ConversationResource",
    r"(GET|POST) /v1/conversations/[^/]+": "ConversationResource",
    r"DELETE /v1/conversations/[^/]+": "DeletedConversationResource",
    r"(GET|POST) /v1/conversations/[^/]+/items": "ConversationItemList",
    r"GET /v1/conversations/[^/]+/items/[^/]+": "ConversationItem",
    r"DELETE /v1/conversations/[^/]+/items/[^/]+": "ConversationResource",
    r"GET /v1/models": "ListModelsResponse",
    r"GET /v1/models/.+": "Model",
}
EVENTS = {"Response": "ResponseStreamEvent", "CreateChatCompletionResponse": "CreateChatCompletionStreamResponse"}


def check(kind: str, value: Any) -> None:
    """Raises AssertionError that says where the value is not what OpenAI's schema of that name asks for."""
    error = best_match(_validator(kind).iter_errors(value))
    if error is not None:
        raise AssertionError(f"no {kind}: {error.json_path}: {error.message[:500]} (in {json.dumps(value)[:2000]})")


class Checked(httpx2.BaseTransport):
    """Hands requests on, and checks what comes back: whole answers at once, streams event by event as they pass."""

    def __init__(self, inner: httpx2.BaseTransport | None = None):
        self._inner = inner or httpx2.HTTPTransport()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = self._inner.handle_request(request)
        kind = kind_of(request.method, request.url.path) if response.status_code < 400 else "ErrorResponse"
        media_type = response.headers.get("content-type", "")
        if kind is None or not isinstance(response.stream, httpx2.SyncByteStream):
            return response
        if media_type.startswith("text/event-stream"):
            response.stream = _CheckedEvents(response.stream, EVENTS[kind])
        elif media_type.startswith("application/json"):
            check(kind, json.loads(response.read()))
        else:
            assert response.status_code < 400, f"an error as {media_type!r}"
        return response

    def close(self) -> None:
        self._inner.close()


class _CheckedEvents(httpx2.SyncByteStream):
    def __init__(self, inner: httpx2.SyncByteStream, kind: str):
        self._inner = inner
        self._kind = kind

    def __iter__(self) -> Iterator[bytes]:
        frames = Frames()
        for chunk in self._inner:
            for name, data in frames.feed(chunk):
                check_event(self._kind, name, data)
            yield chunk

    def close(self) -> None:
        self._inner.close()


class Frames:
    """Server-sent events out of chunks: their names, and their data if it is more than `[DONE]`."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[tuple[str | None, Any]]:
        *frames, self._rest = (self._rest + chunk).split(b"\n\n")
        for frame in frames:
            lines = [line.partition(b": ") for line in frame.split(b"\n") if not line.startswith(b":")]
            fields = {name.decode(): value for name, _, value in lines}
            if fields and fields["data"] != b"[DONE]":
                yield fields["event"].decode() if "event" in fields else None, json.loads(fields["data"])


def check_event(kind: str, name: str | None, data: Any) -> None:
    if kind == "ResponseStreamEvent":
        assert name == data["type"], f"the event {name} is of the type {data['type']}"
        check(kind, data)
    elif "error" in data:
        check("ErrorResponse", data)
    else:
        check(kind, data)


def kind_of(method: str, path: str) -> str | None:
    """The schema of the answer; None where OpenAI publishes none."""
    return next((kind for pattern, kind in KINDS.items() if re.fullmatch(pattern, f"{method} {path}")), None)


# -- the schemas, made ready


@cache
def _validator(kind: str) -> Any:
    return _Validator({"$ref": f"#/$defs/{kind}", "$defs": _prepared()})


def _validate_by_type(validator: Any, by_type: dict[str, Any], value: Any, schema: Any) -> Iterator[ValidationError]:
    named = value.get("type") if isinstance(value, dict) else None
    if isinstance(named, str) and named in by_type["types"]:
        yield from validator.descend(value, by_type["types"][named])
    elif not any(validator.evolve(schema=other).is_valid(value) for other in by_type["others"]):
        yield ValidationError(f"{json.dumps(value)[:200]} is of none of the types {', '.join(by_type['types'])}")


_Validator: Any = validators.extend(Draft202012Validator, {"byType": _validate_by_type})


@cache
def _prepared() -> dict[str, Any]:
    defs = {name: _by_type(schema) for name, schema in DEFS.items()}
    for name, *fields in MAY_BE_NULL:
        parts = [defs[name], *defs[name].get("allOf", [])]
        for properties in (part["properties"] for part in parts if "properties" in part):
            for field in properties.keys() & set(fields):
                properties[field] = {"anyOf": [properties[field], {"type": "null"}]}
    return defs


def _by_type(schema: Any) -> Any:
    """The schema with its unions of typed objects as a choice by that type. Overlaps do not matter to us."""
    if isinstance(schema, list):
        return [_by_type(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: _by_type(value) for key, value in schema.items() if key not in ("oneOf", "anyOf")}
    branches = [*schema.get("oneOf", []), *schema.get("anyOf", [])]
    return kept | _choice(branches) if branches else kept


def _choice(branches: list[Any]) -> dict[str, Any]:
    types: dict[str, list[Any]] = {}
    others = []
    for branch in branches:
        named = _types_of(branch)
        for name in named:
            types.setdefault(name, []).append(_by_type(branch))
        if not named:
            others.append(_by_type(branch))
    if len(types) < 2:
        return {"anyOf": [_by_type(branch) for branch in branches]}
    one_of_each = {name: each[0] if len(each) == 1 else {"anyOf": each} for name, each in types.items()}
    return {"byType": {"types": one_of_each, "others": others}}


def _types_of(schema: Any) -> list[str]:
    """The values of `type` by which one knows a branch."""
    schema = _deref(schema)
    parts = [schema, *map(_deref, schema.get("allOf", []))]
    found = [_deref(part["properties"]["type"]) for part in parts if "type" in part.get("properties", {})]
    if found and "enum" in found[0] and any("type" in part.get("required", []) for part in parts):
        return list(found[0]["enum"])
    nested = [_types_of(each) for key in ("allOf", "oneOf", "anyOf") for each in schema.get(key, [])]
    return [name for names in nested for name in names]


def _deref(schema: Any) -> Any:
    return _deref(DEFS[schema["$ref"].rpartition("/")[2]]) if "$ref" in schema else schema
