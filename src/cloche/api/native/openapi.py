"""The OpenAPI document, made from the table of operations and the messages themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from cloche.api.native.routes import BYTES, EVENTS, JSON, NOTEBOOK, Operation, SocketOperation
from cloche.protocol import PREFIX, responses

REFERENCE = "#/components/schemas/{name}"
_TEXTS = (BYTES, EVENTS, NOTEBOOK)


def document(version: str, operations: Iterable[Operation], sockets: Iterable[SocketOperation]) -> dict[str, Any]:
    """OpenAPI 3.1. A WebSocket is a GET that answers 101; its messages are in the components."""
    operations, sockets = list(operations), list(sockets)
    schemas = _Schemas([*_kinds(operations), *(each.first for each in sockets if each.first), responses.ToldEvent])
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(_named(each.path), {})[each.method.lower()] = _described(each, schemas)
    for socket in sockets:
        paths.setdefault(_named(socket.path), {})["get"] = _described_socket(socket, schemas)
    paths[PREFIX + "/openapi.json"] = {
        "get": {"summary": "This document.", "operationId": "openapi", "responses": {"200": _ok(JSON, {})}}
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Cloche", "version": version, "description": "Sealed, pre-warmed sandboxes."},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}},
        },
    }


class _Schemas:
    def __init__(self, kinds: Iterable[Any]):
        self._kinds = [*dict.fromkeys([*kinds, responses.Failure])]
        found, self.components = msgspec.json.schema_components(self._kinds, ref_template=REFERENCE)
        self._found = dict(zip(map(repr, self._kinds), found, strict=True))

    def of(self, kind: Any) -> Mapping[str, Any]:
        return self._found[repr(kind)]


def _kinds(operations: Iterable[Operation]) -> list[Any]:
    found = [kind for each in operations for kind in (each.body, each.answer)]
    return [kind for kind in found if kind is not None and kind not in _TEXTS]


def _described(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    told_: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.handler.__qualname__,
        "parameters": [*_path_parameters(operation.path), *_query_parameters(operation.query)],
        "responses": {str(operation.status): _answer(operation.answer, schemas), "default": _failure(schemas)},
    }
    if operation.body is not None:
        told_["requestBody"] = {"required": True, "content": _content(operation.body, schemas)}
    return told_


def _described_socket(socket: SocketOperation, schemas: _Schemas) -> dict[str, Any]:
    first = f" The first message is a {socket.first.__name__}." if socket.first else ""
    return {
        "summary": socket.summary,
        "description": f"A WebSocket.{first}",
        "operationId": f"socket.{socket.talk.__name__}",
        "parameters": [*_path_parameters(socket.path), *_query_parameters(socket.query)],
        "responses": {"101": {"description": "Messages, as JSON"}, "default": _failure(schemas)},
    }


def _named(path: str) -> str:
    """Without what only the router needs to know: `{ref:path}` is `{ref}`."""
    return PREFIX + re.sub(r"{(\w+):\w+}", r"{\1}", path)


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)(?::\w+)?}", path)
    ]


def _query_parameters(query: Any) -> list[dict[str, Any]]:
    if query is None:
        return []
    ((_, schema),) = msgspec.json.schema_components([query])[1].items()
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": each}
        for name, each in schema["properties"].items()
    ]


def _answer(kind: Any, schemas: _Schemas) -> dict[str, Any]:
    if kind is None:
        return {"description": "Done"}
    return {"description": "Done", "content": _content(kind, schemas)}


def _content(kind: Any, schemas: _Schemas) -> dict[str, Any]:
    if kind in (BYTES, NOTEBOOK):
        return {kind: {}}
    if kind == EVENTS:
        return {EVENTS: {"schema": {"type": "string"}}}
    return {JSON: {"schema": schemas.of(kind)}}


def _ok(media: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": "Done", "content": {media: {"schema": schema}}}


def _failure(schemas: _Schemas) -> dict[str, Any]:
    return {"description": "It could not be done", "content": {JSON: {"schema": schemas.of(responses.Failure)}}}
