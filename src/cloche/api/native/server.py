"""The server itself: who asks, what it is, which templates it has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.http import Stream
from cloche.api.native.context import Door, query_of, reply
from cloche.api.native.runs import event_stream
from cloche.engine.executions.context import LANGUAGES
from cloche.events import Event
from cloche.model import Template
from cloche.protocol import requests, responses
from cloche.telemetry import Entry, log
from cloche.templates import Catalogue


class Desk:
    def __init__(self, door: Door):
        self._door = door
        self._catalogue = Catalogue(door.config.data_dir, door.config.aliases)

    async def whoami(self, request: Request) -> Response:
        return reply(self._door.admit(request))

    async def info(self, request: Request) -> Response:
        self._door.admit(request)
        config = self._door.config
        about = responses.About(
            version=version("cloche"),
            languages=list(LANGUAGES),
            max_lifetime_seconds=config.lifetime.max_seconds,
            max_upload_bytes=config.server.upload_bytes,
            default_limits=config.limits.default,
            maximum_limits=config.limits.maximum,
        )
        return reply(about)

    async def usage(self, request: Request) -> Response:
        return reply(await self._door.engine.quotas.usage(self._door.admit(request).owner))

    async def templates(self, request: Request) -> Response:
        self._door.admit(request)
        return reply([_described(each) for each in await asyncio.to_thread(self._catalogue.list)])


def _described(template: Template) -> responses.TemplateInfo:
    """Without where it lies on the host."""
    return responses.TemplateInfo(
        name=template.name,
        version=template.version,
        python_version=template.python_version,
        packages=list(template.packages),
        limits=template.limits,
        network=None if template.network is None else requests.info_of(template.network),
        created_at=template.created_at,
        size_bytes=template.size_bytes,
    )


# What the server says about itself: why a sandbox ended, why a nursery failed. Never a program's output.

POLL_SECONDS = 0.25


class Logs:
    def __init__(self, door: Door):
        self._door = door

    async def recent(self, request: Request) -> Response:
        sandbox = self._asked(request)
        return reply([logged(each) for each in _about(sandbox, log.kept)])

    async def follow(self, request: Request) -> Stream:
        return event_stream(request, self._follow(self._asked(request)))

    async def _follow(self, sandbox: str | None) -> AsyncGenerator[Event, None]:
        """Ends with the server, so that it can."""
        yield responses.Watching()
        seen: Entry | None = None
        over = False
        while not over:
            await asyncio.sleep(POLL_SECONDS if seen else 0)
            over = self._door.engine.closing
            fresh = since(seen, log.kept)
            for entry in _about(sandbox, fresh):
                yield logged(entry)
            seen = fresh[-1] if fresh else seen

    def _asked(self, request: Request) -> str | None:
        if self._door.admit(request).role != "admin":
            raise errors.Forbidden("logs are for admins: use a key with that role")
        return query_of(request, requests.LogsQuery).sandbox


def since(seen: Entry | None, entries: list[Entry]) -> list[Entry]:
    """Those after the one that was seen last; all of them where that is gone already."""
    for at in range(len(entries) - 1, -1, -1):
        if entries[at] is seen:
            return entries[at + 1 :]
    return entries


def logged(entry: Entry) -> responses.Logged:
    return responses.Logged(at=entry.at, level=entry.level, event=entry.event, fields=entry.fields)


def _about(sandbox: str | None, entries: Iterable[Entry]) -> list[Entry]:
    return [each for each in entries if sandbox is None or each.fields.get("sandbox") == sandbox]
