"""Named volumes: made, listed and removed with a key; read and written with a token of the volume's own."""

from __future__ import annotations

import posixpath
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from cloche import errors
from cloche.api.auth import same, token_of
from cloche.api.e2b.context import Desk
from cloche.api.e2b.envd import BYTES_TYPE, small_or_streamed
from cloche.api.e2b.replies import is_worth_a_retry, json_reply, timestamp
from cloche.api.e2b.sandboxes_schema import decode, whole_number
from cloche.api.http import Edge, Handler, Stream, body_chunks, status_of
from cloche.engine.sandboxes.files import Files
from cloche.engine.sandboxes.volumes import PLACE
from cloche.model import FileInfo, Struct, check_mode
from cloche.store.volumes import VolumeRecord

# What E2B's clients say of volumes, and what they are told. Pure; raises InvalidRequest and InvalidPath.

MAX_ID = 4094  # of a user or group: so many a sandbox has
MAX_DEPTH = 64
_KINDS = {"other": "unknown"}
_IDS = {"root": 0, "user": 1000, "nobody": 65534, "nogroup": 65534}

Json = dict[str, Any]


class NewVolume(Struct):
    """The body of a creation."""

    name: str


class Metadata(Struct):
    """The body of a change; from a query, too."""

    uid: int | None = None
    gid: int | None = None
    mode: int | None = None

    @property
    def asks(self) -> bool:
        return (self.uid, self.gid, self.mode) != (None, None, None)


def wanted_name(body: bytes) -> str:
    return decode(body, NewVolume).name


def listed(volume: VolumeRecord) -> Json:
    return {"volumeID": volume.id, "name": volume.name}


def metadata(body: bytes) -> Metadata:
    return _checked(decode(body, Metadata))


def metadata_of(query: Mapping[str, str]) -> Metadata:
    """What a query asks for what it makes."""
    most = {"uid": MAX_ID, "gid": MAX_ID, "mode": 0o7777}
    asked = {name: whole_number(name, query.get(name), 0, number) for name, number in most.items()}
    return _checked(Metadata(**asked))


def _checked(asked: Metadata) -> Metadata:
    check_mode(asked.mode)
    for name, value in (("uid", asked.uid), ("gid", asked.gid)):
        if value is not None and not 0 <= value <= MAX_ID:
            raise errors.InvalidRequest(f"{name}: it must be a whole number from 0 to {MAX_ID}, not {value}")
    return asked


def depth_of(query: Mapping[str, str]) -> int:
    return whole_number("depth", query.get("depth"), 1, MAX_DEPTH) or 1


def place_of(query: Mapping[str, str]) -> str:
    """Where the vault has it. The root of a volume is `/`, and nothing lies above that."""
    path = query.get("path", "")
    if not path:
        raise errors.InvalidRequest("path: it is missing; / is the volume itself")
    inside = posixpath.normpath("/" + path).lstrip("/")
    return f"{PLACE}/{inside}" if inside else PLACE


def stat(info: FileInfo) -> Json:
    """Of the times of a file, only when it was changed is known here."""
    path = info.path.removeprefix(PLACE) or "/"
    changed = timestamp(info.modified_at)
    return {
        "name": posixpath.basename(path) or "/",
        "type": _KINDS.get(info.kind, info.kind),
        "path": path,
        "size": info.size_bytes,
        "mode": info.mode & 0o7777,
        "uid": _id(info.owner),
        "gid": _id(info.group),
        "atime": changed,
        "mtime": changed,
        "ctime": changed,
        **({} if info.target is None else {"target": info.target}),
    }


def _id(name: str) -> int:
    return int(name) if name.isascii() and name.isdigit() and len(name) < 10 else _IDS.get(name, 65534)


def stats(found: Sequence[FileInfo]) -> list[Json]:
    return [stat(each) for each in found]


def in_words(error: errors.ClocheError) -> str:
    """Where the vault has a volume is nobody's business."""
    return str(error).replace(f"{PLACE}/", "/").replace(PLACE, "/")


def routes(desk: Desk, secret: bytes) -> list[BaseRoute]:
    plane = ControlVolumes(desk, secret)
    content = VolumeContent(desk, secret)
    return [
        desk.route("POST", "/volumes", plane.create),
        desk.route("GET", "/volumes", plane.list_all),
        desk.route("GET", "/volumes/{id}", plane.get),
        desk.route("DELETE", "/volumes/{id}", plane.remove),
        *content.routes(),
    ]


class HeldStream(Stream):
    """Of a file of a volume, which stays in use for as long as it is sent: what is read of must count as somebody's."""

    def __init__(
        self,
        hold: Callable[[], AbstractAsyncContextManager[Files]],
        chunks: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
    ):
        super().__init__(chunks, headers=headers)
        self._hold = hold

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._hold():
            await super().__call__(scope, receive, send)


class ControlVolumes:
    def __init__(self, desk: Desk, secret: bytes):
        self._desk = desk
        self._volumes = desk.engine.volumes
        self._secret = secret

    async def create(self, request: Request) -> Response:
        owner = self._desk.owner(request)
        name = wanted_name(await self._desk.body(request))
        return json_reply(self._with_token(await self._volumes.create(name, owner)), 201)

    async def list_all(self, request: Request) -> Response:
        return json_reply([listed(each) for each in await self._volumes.list(self._desk.owner(request))])

    async def get(self, request: Request) -> Response:
        return json_reply(
            self._with_token(await self._volumes.get(request.path_params["id"], self._desk.owner(request)))
        )

    async def remove(self, request: Request) -> Response:
        await self._volumes.remove(request.path_params["id"], self._desk.owner(request))
        return Response(status_code=204)

    def _with_token(self, volume: VolumeRecord) -> Json:
        return {**listed(volume), "token": _token(self._secret, volume.id)}


class VolumeContent:
    """Files of a volume, whether a sandbox has it or not."""

    def __init__(self, desk: Desk, secret: bytes):
        self._volumes = desk.engine.volumes
        self._secret = secret

    def routes(self) -> list[BaseRoute]:
        return [
            self._route("GET", "dir", self.list_directory),
            self._route("POST", "dir", self.make_directory),
            self._route("GET", "path", self.stat),
            self._route("PATCH", "path", self.change),
            self._route("DELETE", "path", self.remove),
            self._route("GET", "file", self.read),
            self._route("PUT", "file", self.write),
        ]

    async def list_directory(self, request: Request) -> Response:
        place, depth = place_of(request.query_params), depth_of(request.query_params)
        async with self._volumes.files(await self._volume(request), writes=False) as files:
            return json_reply(stats(await files.list(place, depth=depth)))

    async def make_directory(self, request: Request) -> Response:
        query = request.query_params
        place, asked = place_of(query), metadata_of(query)
        async with self._volumes.files(await self._volume(request), writes=True) as files:
            if query.get("force") != "true":
                await files.stat(posixpath.dirname(place))  # or it says that there is none
            if not await files.make_dir(place, owner="user") and query.get("force") != "true":
                raise errors.FileExists(f"{place} exists already")
            return json_reply(stat(await _changed(files, place, asked)), 201)

    async def stat(self, request: Request) -> Response:
        place = place_of(request.query_params)
        async with self._volumes.files(await self._volume(request), writes=False) as files:
            return json_reply(stat(await files.stat(place)))

    async def change(self, request: Request) -> Response:
        volume, place = await self._volume(request), place_of(request.query_params)
        asked = metadata(await request.body())
        async with self._volumes.files(volume, writes=True) as files:
            return json_reply(stat(await _changed(files, place, asked)))

    async def remove(self, request: Request) -> Response:
        place = place_of(request.query_params)
        if place == PLACE:
            raise errors.InvalidRequest("path: the volume itself is removed by DELETE /volumes/ID")
        async with self._volumes.files(await self._volume(request), writes=True) as files:
            await files.stat(place)
            await files.remove(place)
        return Response(status_code=204)

    async def read(self, request: Request) -> Response:
        place = place_of(request.query_params)
        volume = await self._volume(request)
        async with self._volumes.files(volume, writes=False) as files:
            file = await files.open(place)
        headers = {
            "content-type": BYTES_TYPE,
            "content-length": str(file.size_bytes),
            # A file is a stranger's: no page of it may act in the name of the server that it comes from.
            "content-security-policy": "sandbox",
            "x-content-type-options": "nosniff",
        }
        hold = partial(self._volumes.files, volume, writes=False)
        return HeldStream(hold, file.until_read(file.size_bytes), headers)

    async def write(self, request: Request) -> Response:
        volume, place = await self._volume(request), place_of(request.query_params)
        asked = metadata_of(request.query_params)
        async with self._volumes.files(volume, writes=True) as files:
            content = await small_or_streamed(body_chunks(request, volume.size_bytes))
            written = await files.write(place, content, owner="user", below=PLACE)
            return json_reply(stat(await _changed(files, place, asked, written)), 201)

    def _route(self, method: str, kind: str, handler: Handler) -> Route:
        return Route(f"/volumecontent/{{id}}/{kind}", Edge(self, handler), methods=[method])

    async def _volume(self, request: Request) -> VolumeRecord:
        """Raises Unauthenticated whether there is such a volume or not, VolumeNotFound."""
        id = request.path_params["id"]
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not same(token.strip(), _token(self._secret, id)):
            raise errors.Unauthenticated("this takes the volume's token: Authorization: Bearer TOKEN")
        return await self._volumes.get(id, None)

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        status = status_of(error)
        response = json_reply({"code": str(status), "message": in_words(error)}, status)
        if not is_worth_a_retry(status, error):
            response.headers["Should-Retry"] = "false"
        return response


async def _changed(files: Files, place: str, asked: Metadata, known: FileInfo | None = None) -> FileInfo:
    if asked.asks:
        return await files.change(place, uid=asked.uid, gid=asked.gid, mode=asked.mode, below=PLACE)
    return known or await files.stat(place)


def _token(secret: bytes, volume: str) -> str:
    return token_of(secret, "e2b:volume", volume)
