"""Named volumes: created, listed and removed with a key; read and written with the volume's own token."""

from __future__ import annotations

import posixpath
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from cloche import errors
from cloche.api.auth import derive_sandbox_token, secrets_match
from cloche.api.dialect import Json, decode_json_body, dialect_route, format_timestamp, json_reply
from cloche.api.e2b.context import E2bContext, is_worth_retrying
from cloche.api.e2b.envd import BYTES_TYPE, buffer_small_content
from cloche.api.e2b.sandboxes_schema import parse_whole_number
from cloche.api.http import Handler, StreamResponse, read_body_chunks, status_of
from cloche.engine.sandboxes.files import SandboxFiles
from cloche.engine.sandboxes.volumes import VOLUME_PATH
from cloche.model import FileInfo, Struct, check_mode
from cloche.store.volumes import VolumeRecord

# Volumes on the wire: requests and responses. Pure; raises InvalidRequest and InvalidPath.

MAX_ID = 4094  # of a user or group: so many a sandbox has
MAX_DEPTH = 64
_KINDS = {"other": "unknown"}
_IDS = {"root": 0, "user": 1000, "nobody": 65534, "nogroup": 65534}


class CreateVolumeBody(Struct):
    """The body of a creation."""

    name: str


class FileMetadataChange(Struct):
    """The body of a metadata change; also decoded from a query."""

    uid: int | None = None
    gid: int | None = None
    mode: int | None = None

    @property
    def has_changes(self) -> bool:
        return (self.uid, self.gid, self.mode) != (None, None, None)


def decode_volume_name(body: bytes) -> str:
    return decode_json_body(body, CreateVolumeBody).name


def encode_volume(volume: VolumeRecord) -> Json:
    return {"volumeID": volume.id, "name": volume.name}


def decode_metadata_change(body: bytes) -> FileMetadataChange:
    return _check_metadata_change(decode_json_body(body, FileMetadataChange))


def metadata_change_from_query(query: Mapping[str, str]) -> FileMetadataChange:
    """The metadata that a query requests for a new file."""
    most = {"uid": MAX_ID, "gid": MAX_ID, "mode": 0o7777}
    asked = {name: parse_whole_number(name, query.get(name), 0, number) for name, number in most.items()}
    return _check_metadata_change(FileMetadataChange(**asked))


def _check_metadata_change(change: FileMetadataChange) -> FileMetadataChange:
    check_mode(change.mode)
    for name, value in (("uid", change.uid), ("gid", change.gid)):
        if value is not None and not 0 <= value <= MAX_ID:
            raise errors.InvalidRequest(f"{name}: it must be a whole number from 0 to {MAX_ID}, not {value}")
    return change


def parse_depth(query: Mapping[str, str]) -> int:
    return parse_whole_number("depth", query.get("depth"), 1, MAX_DEPTH) or 1


def path_in_volume(query: Mapping[str, str]) -> str:
    """The path inside the mounted volume. The volume's root is `/`; no path leads above it."""
    path = query.get("path", "")
    if not path:
        raise errors.InvalidRequest("path: it is missing; / is the volume itself")
    inside = posixpath.normpath("/" + path).lstrip("/")
    return f"{VOLUME_PATH}/{inside}" if inside else VOLUME_PATH


def encode_file_stat(info: FileInfo) -> Json:
    """A file's metadata. Of its times only the modification time is known; it stands for all three."""
    path = info.path.removeprefix(VOLUME_PATH) or "/"
    changed = format_timestamp(info.modified_at)
    return {
        "name": posixpath.basename(path) or "/",
        "type": _KINDS.get(info.kind, info.kind),
        "path": path,
        "size": info.size_bytes,
        "mode": info.mode & 0o7777,
        "uid": _numeric_user_id(info.owner),
        "gid": _numeric_user_id(info.group),
        "atime": changed,
        "mtime": changed,
        "ctime": changed,
        **({} if info.target is None else {"target": info.target}),
    }


def _numeric_user_id(name: str) -> int:
    return int(name) if name.isascii() and name.isdigit() and len(name) < 10 else _IDS.get(name, 65534)


def encode_file_stats(found: Sequence[FileInfo]) -> list[Json]:
    return [encode_file_stat(each) for each in found]


def hide_mount_path(error: errors.ClocheError) -> str:
    """The error's message, without the path where the server mounts the volume."""
    return str(error).replace(f"{VOLUME_PATH}/", "/").replace(VOLUME_PATH, "/")


def volume_routes(api: E2bContext, secret: bytes) -> list[BaseRoute]:
    plane = ControlVolumes(api, secret)
    content = VolumeContent(api, secret)
    return [
        api.route("POST", "/volumes", plane.create),
        api.route("GET", "/volumes", plane.list_all),
        api.route("GET", "/volumes/{id}", plane.get),
        api.route("DELETE", "/volumes/{id}", plane.remove),
        *content.routes(),
    ]


class VolumeFileStream(StreamResponse):
    """Streams a file of a volume, and marks the volume as in use until the response has ended."""

    def __init__(
        self,
        hold: Callable[[], AbstractAsyncContextManager[SandboxFiles]],
        chunks: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
    ):
        super().__init__(chunks, headers=headers)
        self._hold = hold

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._hold():
            await super().__call__(scope, receive, send)


class ControlVolumes:
    def __init__(self, api: E2bContext, secret: bytes):
        self._api = api
        self._volumes = api.engine.volumes
        self._secret = secret

    async def create(self, request: Request) -> Response:
        owner = self._api.owner(request)
        name = await self._api.decoded(request, decode_volume_name)
        return json_reply(self._encode_with_token(await self._volumes.create(name, owner)), 201)

    async def list_all(self, request: Request) -> Response:
        return json_reply([encode_volume(each) for each in await self._volumes.list(self._api.owner(request))])

    async def get(self, request: Request) -> Response:
        return json_reply(
            self._encode_with_token(await self._volumes.get(request.path_params["id"], self._api.owner(request)))
        )

    async def remove(self, request: Request) -> Response:
        await self._volumes.remove(request.path_params["id"], self._api.owner(request))
        return Response(status_code=204)

    def _encode_with_token(self, volume: VolumeRecord) -> Json:
        return {**encode_volume(volume), "token": _volume_token(self._secret, volume.id)}


class VolumeContent:
    """Files of a volume, whether a sandbox has it or not."""

    def __init__(self, api: E2bContext, secret: bytes):
        self._volumes = api.engine.volumes
        self._secret = secret

    def routes(self) -> list[BaseRoute]:
        return [
            self._content_route("GET", "dir", self.list_directory),
            self._content_route("POST", "dir", self.make_directory),
            self._content_route("GET", "path", self.stat),
            self._content_route("PATCH", "path", self.change),
            self._content_route("DELETE", "path", self.remove),
            self._content_route("GET", "file", self.read),
            self._content_route("PUT", "file", self.write),
        ]

    async def list_directory(self, request: Request) -> Response:
        place, depth = path_in_volume(request.query_params), parse_depth(request.query_params)
        async with self._volumes.files(await self._authorized_volume(request), writes=False) as files:
            return json_reply(encode_file_stats(await files.list(place, depth=depth)))

    async def make_directory(self, request: Request) -> Response:
        query = request.query_params
        place, asked = path_in_volume(query), metadata_change_from_query(query)
        async with self._volumes.files(await self._authorized_volume(request), writes=True) as files:
            if query.get("force") != "true":
                await files.stat(posixpath.dirname(place))  # or it says that there is none
            if not await files.make_dir(place, owner="user") and query.get("force") != "true":
                raise errors.FileExists(f"{place} exists already")
            return json_reply(encode_file_stat(await _apply_metadata_change(files, place, asked)), 201)

    async def stat(self, request: Request) -> Response:
        place = path_in_volume(request.query_params)
        async with self._volumes.files(await self._authorized_volume(request), writes=False) as files:
            return json_reply(encode_file_stat(await files.stat(place)))

    async def change(self, request: Request) -> Response:
        volume, place = await self._authorized_volume(request), path_in_volume(request.query_params)
        change = decode_metadata_change(await request.body())
        async with self._volumes.files(volume, writes=True) as files:
            return json_reply(encode_file_stat(await _apply_metadata_change(files, place, change)))

    async def remove(self, request: Request) -> Response:
        place = path_in_volume(request.query_params)
        if place == VOLUME_PATH:
            raise errors.InvalidRequest("path: the volume itself is removed by DELETE /volumes/ID")
        async with self._volumes.files(await self._authorized_volume(request), writes=True) as files:
            await files.stat(place)
            await files.remove(place)
        return Response(status_code=204)

    async def read(self, request: Request) -> Response:
        place = path_in_volume(request.query_params)
        volume = await self._authorized_volume(request)
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
        return VolumeFileStream(hold, file.until_read(file.size_bytes), headers)

    async def write(self, request: Request) -> Response:
        volume, place = await self._authorized_volume(request), path_in_volume(request.query_params)
        change = metadata_change_from_query(request.query_params)
        async with self._volumes.files(volume, writes=True) as files:
            content = await buffer_small_content(read_body_chunks(request, volume.size_bytes))
            written = await files.write(place, content, owner="user", below=VOLUME_PATH)
            return json_reply(encode_file_stat(await _apply_metadata_change(files, place, change, written)), 201)

    def _content_route(self, method: str, kind: str, handler: Handler) -> Route:
        return dialect_route(self, method, f"/volumecontent/{{id}}/{kind}", handler)

    async def _authorized_volume(self, request: Request) -> VolumeRecord:
        """Raises Unauthenticated whether there is such a volume or not, VolumeNotFound."""
        id = request.path_params["id"]
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets_match(token.strip(), _volume_token(self._secret, id)):
            raise errors.Unauthenticated("this takes the volume's token: Authorization: Bearer TOKEN")
        return await self._volumes.get(id, None)

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        status = status_of(error)
        response = json_reply({"code": str(status), "message": hide_mount_path(error)}, status)
        if not is_worth_retrying(status, error):
            response.headers["Should-Retry"] = "false"
        return response


async def _apply_metadata_change(
    files: SandboxFiles, place: str, change: FileMetadataChange, known: FileInfo | None = None
) -> FileInfo:
    if change.has_changes:
        return await files.change(place, uid=change.uid, gid=change.gid, mode=change.mode, below=VOLUME_PATH)
    return known or await files.stat(place)


def _volume_token(secret: bytes, volume: str) -> str:
    return derive_sandbox_token(secret, "e2b:volume", volume)
