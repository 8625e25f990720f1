"""The server itself: who asks, what it is, which templates it has."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response

from cloche.api.native.door import Door, reply
from cloche.engine.executions.context import LANGUAGES
from cloche.model import Template
from cloche.protocol import requests, responses
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
