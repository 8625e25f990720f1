"""The OpenAPI document, generated from the table of operations and the message types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from cloche.api.dialect import EVENTS_TYPE, JSON_TYPE
from cloche.api.native.routes import BYTES_TYPE, NOTEBOOK_TYPE, Operation, SocketOperation
from cloche.protocol import API_PREFIX, responses

SCHEMA_REFERENCE = "#/components/schemas/{name}"
_TEXTS = (BYTES_TYPE, EVENTS_TYPE, NOTEBOOK_TYPE)


def openapi_document(
    version: str, operations: Iterable[Operation], sockets: Iterable[SocketOperation]
) -> dict[str, Any]:
    """OpenAPI 3.1. A WebSocket is a GET with status 101; its messages are in the components."""
    operations, sockets = list(operations), list(sockets)
    schemas = _ComponentSchemas(
        [*_message_types_of(operations), *(each.first for each in sockets if each.first), responses.EventMessage]
    )
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(_openapi_path(each.path), {})[each.method.lower()] = _describe_operation(each, schemas)
    for socket in sockets:
        paths.setdefault(_openapi_path(socket.path), {})["get"] = _describe_socket_operation(socket, schemas)
    paths[API_PREFIX + "/openapi.json"] = {
        "get": {
            "summary": "This document.",
            "operationId": "openapi",
            "responses": {"200": _schema_response(JSON_TYPE, {})},
        }
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


class _ComponentSchemas:
    def __init__(self, kinds: Iterable[Any]):
        self._kinds = [*dict.fromkeys([*kinds, responses.ErrorResponse])]
        found, self.components = msgspec.json.schema_components(self._kinds, ref_template=SCHEMA_REFERENCE)
        self._found = dict(zip(map(repr, self._kinds), found, strict=True))

    def of(self, kind: Any) -> Mapping[str, Any]:
        return self._found[repr(kind)]


def _message_types_of(operations: Iterable[Operation]) -> list[Any]:
    found = [kind for each in operations for kind in (each.body, each.answer)]
    return [kind for kind in found if kind is not None and kind not in _TEXTS]


def _describe_operation(operation: Operation, schemas: _ComponentSchemas) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.id,
        "parameters": [*_path_parameters(operation.path), *_query_parameters(operation.query)],
        "responses": {
            str(operation.status): _success_response(operation.answer, schemas),
            "default": _failure_response(schemas),
        },
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _body_content(operation.body, schemas)}
    return described


def _describe_socket_operation(socket: SocketOperation, schemas: _ComponentSchemas) -> dict[str, Any]:
    first = f" The first message is a {socket.first.__name__}." if socket.first else ""
    return {
        "summary": socket.summary,
        "description": f"A WebSocket.{first}",
        "operationId": f"socket.{socket.talk.__name__}",
        "parameters": [*_path_parameters(socket.path), *_query_parameters(socket.query)],
        "responses": {"101": {"description": "Messages, as JSON"}, "default": _failure_response(schemas)},
    }


def _openapi_path(path: str) -> str:
    """The path without the router's converters: `{ref:path}` is `{ref}`."""
    return API_PREFIX + re.sub(r"{(\w+):\w+}", r"{\1}", path)


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


def _success_response(kind: Any, schemas: _ComponentSchemas) -> dict[str, Any]:
    if kind is None:
        return {"description": "Done"}
    return {"description": "Done", "content": _body_content(kind, schemas)}


def _body_content(kind: Any, schemas: _ComponentSchemas) -> dict[str, Any]:
    if kind in (BYTES_TYPE, NOTEBOOK_TYPE):
        return {kind: {}}
    if kind == EVENTS_TYPE:
        return {EVENTS_TYPE: {"schema": {"type": "string"}}}
    return {JSON_TYPE: {"schema": schemas.of(kind)}}


def _schema_response(media: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": "Done", "content": {media: {"schema": schema}}}


def _failure_response(schemas: _ComponentSchemas) -> dict[str, Any]:
    return {
        "description": "It could not be done",
        "content": {JSON_TYPE: {"schema": schemas.of(responses.ErrorResponse)}},
    }
