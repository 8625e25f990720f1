"""execd: what all of its handlers share. It takes the sandbox's own token only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cloche import errors
from cloche.api.dialect import (
    EVENTS_TYPE,
    SSE_HEADERS,
    Json,
    NotSupported,
    UnsupportedField,
    dialect_route,
    json_reply,
)
from cloche.api.http import Handler, StreamResponse, status_of
from cloche.api.opensandbox.context import OpenSandboxContext, error_reply
from cloche.api.opensandbox.lifecycle_schema import EXECD_PORT
from cloche.api.opensandbox.registry import SandboxState, stored_request_of
from cloche.api.requests import charge_sandbox_owner
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import encode_json
from cloche.model import MIB

T = TypeVar("T")

METRICS_SECONDS = 1.0
EXECD_PATH = f"/sandboxes/{{id}}/proxy/{EXECD_PORT}"


class ExecdPlane:
    """execd's entrance: its token, its errors, and its routes about the sandbox as a whole."""

    def __init__(self, api: OpenSandboxContext):
        self.api = api

    @property
    def routes(self) -> list[BaseRoute]:
        return [
            self.route("GET", "/ping", self.answer_ping),
            self.route("GET", "/metrics", self.show_metrics),
            self.route("GET", "/metrics/watch", self.watch_metrics),
        ]

    def route(self, method: str, path: str, handler: Handler) -> Route:
        return dialect_route(self, method, EXECD_PATH + path, handler)

    async def enter(self, request: Request) -> tuple[Sandbox, SandboxState]:
        """The sandbox, by its own execd token. Raises Unauthenticated, SandboxNotFound, Gone."""
        sandbox = await self.api.sandbox_by_token(request, "execd")
        charge_sandbox_owner(request.scope, sandbox)
        if renew_seconds := stored_request_of(sandbox.record.spec.notes).renew_seconds:
            sandbox.extend(renew_seconds)
        return sandbox, self.api.states.of(sandbox.id)

    async def json_body(self, request: Request, kind: type[T]) -> T:
        """The body's JSON as that type; an empty body is an empty object. Raises InvalidRequest, TooLarge."""
        return await self.api.json_body(request, kind)

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        if isinstance(error, errors.Unauthenticated):
            said = {"code": "UNAUTHORIZED", "message": str(error), "error": f"Unauthorized: {error}"}
            return json_reply(said, 401)
        status, code = _execd_status_and_code(error)
        return error_reply(status, code, str(error))

    async def answer_ping(self, request: Request) -> Response:
        await self.enter(request)
        return Response()

    async def show_metrics(self, request: Request) -> Response:
        sandbox, _ = await self.enter(request)
        return json_reply(await measure_sandbox(sandbox))

    async def watch_metrics(self, request: Request) -> Response:
        """A line of JSON every second."""
        sandbox, _ = await self.enter(request)
        return StreamResponse(
            _stream_metrics(sandbox), headers=SSE_HEADERS, media_type=EVENTS_TYPE, until=sandbox.wait_ended
        )


async def measure_sandbox(sandbox: Sandbox) -> Json:
    sample, limits = await sandbox.meter.latest_sample(), sandbox.limits
    return {
        "cpu_count": limits.cpus,
        "cpu_used_pct": min(round(sample.cpu_percent, 2), 100.0),
        "mem_total_mib": round(limits.memory_bytes / MIB, 2),
        "mem_used_mib": round(min(sample.memory_bytes, limits.memory_bytes) / MIB, 2),
        "timestamp": int(sample.at * 1000),
    }


async def _stream_metrics(sandbox: Sandbox) -> AsyncGenerator[bytes, None]:
    while sandbox.ending is None:
        yield encode_json(await measure_sandbox(sandbox)) + b"\n"
        await asyncio.sleep(METRICS_SECONDS)


class MissingQueryParameter(errors.InvalidRequest):
    """A required query parameter is missing."""


def require_query_parameter(request: Request, name: str) -> str:
    given = request.query_params.get(name)
    if not given:
        raise MissingQueryParameter(f"missing query parameter {name!r}")
    return given


def _execd_status_and_code(error: errors.ClocheError) -> tuple[int, str]:
    return next((found for kind, found in _STATUSES if isinstance(error, kind)), (status_of(error), _code_of(error)))


def _code_of(error: errors.ClocheError) -> str:
    if isinstance(error, errors.FileError):
        return "INVALID_FILE"
    return "INVALID_REQUEST_BODY" if isinstance(error, errors.InvalidRequest) else "RUNTIME_ERROR"


_STATUSES: tuple[tuple[type[errors.ClocheError], tuple[int, str]], ...] = (
    (NotSupported, (501, "NOT_SUPPORTED")),
    (UnsupportedField, (400, "NOT_SUPPORTED")),
    (MissingQueryParameter, (400, "MISSING_QUERY")),
    (errors.ContextNotFound, (404, "CONTEXT_NOT_FOUND")),
    (errors.SandboxNotFound, (404, "SANDBOX_NOT_FOUND")),
    (errors.Gone, (404, "SANDBOX_NOT_FOUND")),
    (errors.FileNotFound, (404, "FILE_NOT_FOUND")),
    (errors.NotFound, (404, "NOT_FOUND")),
    (errors.SandboxPaused, (409, "SANDBOX_PAUSED")),
    (errors.QuotaExceeded, (429, "RATE_LIMITED")),
    (errors.Busy, (503, "AT_CAPACITY")),
)
