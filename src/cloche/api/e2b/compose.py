"""`POST /files/compose`: a file made of others, which were uploaded one by one; they are gone then."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.e2b import envd_wire as wire
from cloche.api.e2b.replies import json_reply
from cloche.api.http import whole_body
from cloche.engine.sandboxes.files import Files
from cloche.model import MIB, User

MAX_SOURCES = 10_000


class Composition(msgspec.Struct):
    source_paths: list[str]
    destination: str
    username: str | None = None


def decoded(body: bytes) -> Composition:
    """Raises InvalidRequest."""
    try:
        asked = msgspec.json.decode(body, type=Composition)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise errors.InvalidRequest(f"invalid request body: {error}") from None
    if not 0 < len(asked.source_paths) <= MAX_SOURCES:
        raise errors.InvalidRequest(f"source_paths must not be empty, nor more than {MAX_SOURCES}")
    if not asked.destination:
        raise errors.InvalidRequest("destination is required")
    return asked


async def compose(request: Request) -> Response:
    asked = decoded(await whole_body(request, 64 * MIB))
    user = wire.user_named(asked.username, wire.default_user(request))
    files = request.scope["state"]["resident"].sandbox.files
    target = wire.absolute(asked.destination, user)
    sources = [wire.absolute(path, user) for path in asked.source_paths]
    if target in sources:
        raise errors.InvalidRequest("a source cannot be the same as the destination")
    info = await files.write(target, _joined(files, sources, user), user=wire.rights(user), owner=user)
    for source in sources:
        with contextlib.suppress(errors.FileNotFound):  # named twice
            await files.remove(source, user=wire.rights(user))
    return json_reply(wire.write_info(info))


async def _joined(files: Files, sources: list[str], user: User) -> AsyncGenerator[bytes, None]:
    for source in sources:
        async with contextlib.aclosing(await files.open_read(source, user=wire.rights(user))) as chunks:
            async for chunk in chunks:
                yield chunk
