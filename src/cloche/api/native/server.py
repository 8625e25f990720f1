"""The server itself: the caller's identity and usage, version and limits, templates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.dialect import json_reply
from cloche.api.http import StreamResponse
from cloche.api.native.context import NativeContext, decode_request_query
from cloche.api.native.runs import event_stream_response
from cloche.events import Event
from cloche.languages import LANGUAGE_NAMES
from cloche.model import Template
from cloche.protocol import requests, responses
from cloche.telemetry import LogEntry, log
from cloche.templates import Catalogue


class NativeServer:
    def __init__(self, api: NativeContext):
        self._api = api
        self._catalogue = Catalogue(api.config.data_dir, api.config.aliases)

    async def whoami(self, request: Request) -> Response:
        return json_reply(self._api.admit(request))

    async def info(self, request: Request) -> Response:
        self._api.admit(request)
        config = self._api.config
        about = responses.AboutResponse(
            version=version("cloche"),
            languages=list(LANGUAGE_NAMES),
            max_lifetime_seconds=config.lifetime.max_seconds,
            max_upload_bytes=config.server.upload_bytes,
            default_limits=config.limits.default,
            maximum_limits=config.limits.maximum,
        )
        return json_reply(about)

    async def usage(self, request: Request) -> Response:
        return json_reply(await self._api.engine.quotas.usage(self._api.owner(request)))

    async def templates(self, request: Request) -> Response:
        self._api.admit(request)
        return json_reply([_encode_template(each) for each in await asyncio.to_thread(self._catalogue.list)])


def _encode_template(template: Template) -> responses.TemplateInfo:
    """The template, without its path on the host."""
    return responses.TemplateInfo(
        name=template.name,
        version=template.version,
        python_version=template.python_version,
        packages=list(template.packages),
        limits=template.limits,
        network=None if template.network is None else requests.policy_to_info(template.network),
        created_at=template.created_at,
        size_bytes=template.size_bytes,
    )


# The server's own events: ends of sandboxes, failures of nurseries. Never a program's output.

POLL_SECONDS = 0.25


class NativeLogs:
    def __init__(self, api: NativeContext):
        self._api = api

    async def recent(self, request: Request) -> Response:
        sandbox = self._requested_sandbox(request)
        return json_reply([encode_log_entry(each) for each in _entries_about_sandbox(sandbox, log.kept)])

    async def follow(self, request: Request) -> StreamResponse:
        return event_stream_response(request, self._stream_log_entries(self._requested_sandbox(request)))

    async def _stream_log_entries(self, sandbox: str | None) -> AsyncGenerator[Event, None]:
        """Ends with the server, so as not to delay its shutdown."""
        yield responses.WatchingMessage()
        seen: LogEntry | None = None
        over = False
        while not over:
            await asyncio.sleep(POLL_SECONDS if seen else 0)
            over = self._api.engine.closing
            fresh = entries_after(seen, log.kept)
            for entry in _entries_about_sandbox(sandbox, fresh):
                yield encode_log_entry(entry)
            seen = fresh[-1] if fresh else seen

    def _requested_sandbox(self, request: Request) -> str | None:
        if self._api.admit(request).role != "admin":
            raise errors.Forbidden("logs are for admins: use a key with that role")
        return decode_request_query(request, requests.LogsQuery).sandbox


def entries_after(seen: LogEntry | None, entries: list[LogEntry]) -> list[LogEntry]:
    """The entries after `seen`; all entries if `seen` is no longer kept."""
    for at in range(len(entries) - 1, -1, -1):
        if entries[at] is seen:
            return entries[at + 1 :]
    return entries


def encode_log_entry(entry: LogEntry) -> responses.LogMessage:
    return responses.LogMessage(at=entry.at, level=entry.level, event=entry.event, fields=entry.fields)


def _entries_about_sandbox(sandbox: str | None, entries: Iterable[LogEntry]) -> list[LogEntry]:
    return [each for each in entries if sandbox is None or each.fields.get("sandbox") == sandbox]
