"""Files of LibreChat's users: uploads, downloads, lists and deletions."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.encoding import last_modified
from cloche.api.http import Dropped, Stream, body_chunks
from cloche.api.librechat.context import Desk
from cloche.api.librechat.identity import Caller, reach_of, space_of
from cloche.api.librechat.replies import (
    Json,
    Refusal,
    check_name,
    content_type_of,
    ending_of,
    is_code_id,
    json_reply,
    new_code_id,
    timestamp,
)
from cloche.api.multipart import Part, boundary_of, parts
from cloche.store.librechat import CodeFile, Content, Reach, StoredCodeFiles, new_file

# Files on their way into the store: they take room before they are known there, also where many come at once.

CHECK_BYTES = 4 << 20  # what one request brings is looked at whenever so much more of it has come
NO_ROOM = "storage_limit_exceeded"

_Who = tuple[str, ...]


class Arriving:
    """What all requests are bringing just now."""

    def __init__(self, files: StoredCodeFiles):
        self._files = files
        self._bytes: Counter[_Who] = Counter()
        self._count: Counter[_Who] = Counter()

    def reservation(self, caller: Caller) -> Reservation:
        return Reservation(self, caller)

    def add(self, caller: Caller, *, files: int = 0, bytes: int = 0) -> None:
        """They can be negative."""
        for who in (_owner(caller), _user(caller)):
            self._bytes[who] += bytes
            self._count[who] += files
            if not self._bytes[who] and not self._count[who]:
                del self._bytes[who], self._count[who]

    async def check(self, caller: Caller) -> None:
        """Raises Refusal (413) if there is no room for all that the owner, or this user of theirs, is bringing."""
        owner, user = _owner(caller), _user(caller)
        try:
            await self._files.check_room(caller.owner, files=max(1, self._count[owner]), bytes=self._bytes[owner])
            if caller.user:
                count, size = max(1, self._count[user]), self._bytes[user]
                await self._files.check_room(caller.owner, caller.tenant, caller.user, files=count, bytes=size)
        except errors.TooLarge as error:
            raise Refusal(413, NO_ROOM, str(error)) from None


class Reservation:
    """The room of one request's files."""

    def __init__(self, arriving: Arriving, caller: Caller):
        self._arriving = arriving
        self._caller = caller
        self._files = 0
        self._bytes = 0
        self._checked_bytes = 0

    async def check(self) -> None:
        """Raises Refusal (413)."""
        self._checked_bytes = self._bytes
        await self._arriving.check(self._caller)

    @contextlib.contextmanager
    def file(self) -> Iterator[None]:
        """One file, as long as it comes. Of one that fails nothing is kept."""
        before = self._bytes
        self._take(files=1)
        try:
            yield
        except BaseException:
            self._take(files=-1, bytes=before - self._bytes)
            raise

    async def taking(self, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Those for which there is room. Raises Refusal (413) where that ends."""
        async for chunk in chunks:
            self._take(bytes=len(chunk))
            if self._bytes - self._checked_bytes >= CHECK_BYTES:
                await self.check()
            yield chunk

    def release(self) -> None:
        """Its files are known to the store by now, or were dropped."""
        self._take(files=-self._files, bytes=-self._bytes)

    def _take(self, *, files: int = 0, bytes: int = 0) -> None:
        self._files += files
        self._bytes += bytes
        self._checked_bytes = min(self._checked_bytes, self._bytes)
        self._arriving.add(self._caller, files=files, bytes=bytes)


def _owner(caller: Caller) -> _Who:
    return (caller.owner,)


def _user(caller: Caller) -> _Who:
    return caller.owner, caller.tenant, caller.user


# Forms with files, on their way into the store: each is written as it comes, and one that fails spoils only itself.

MAX_FIELD_BYTES = 4096
MAX_FAILED = 200  # that are listed; the others are counted
TOO_LARGE = "File size limit exceeded"
FIELDS = frozenset({"kind", "id", "version", "entity_id", "read_only"})  # others are ignored


class Arrived(NamedTuple):
    """A file whose content is in the store, and that is not known there yet."""

    name: str
    content: Content
    content_type: str


class Failed(NamedTuple):
    name: str
    refusal: Refusal


class Upload:
    """The files of one request. Use as `async with Upload(desk, arriving, caller) as upload`: what it does not keep is
    gone. There is room for all that it brings before it is written.
    """

    def __init__(self, desk: Desk, arriving: Arriving, caller: Caller):
        self.session = new_code_id()
        self.arrived: list[Arrived] = []
        self.failed: list[Failed] = []
        self.failures = 0
        self.too_many = False
        self._files = desk.shelf.code_files
        self._config = desk.config
        self._caller = caller
        self._room = arriving.reservation(caller)
        self._fields: dict[str, str] = {}
        self._kept = False

    async def __aenter__(self) -> Upload:
        """Raises Refusal if there is no room for a file."""
        await self._room.check()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if not self._kept:
                await self._files.drop([each.content.id for each in self.arrived])
        finally:
            self._room.release()

    async def take(self, request: Request) -> None:
        """Reads the whole form. Raises InvalidRequest for what is none, and Refusal for one that is too large."""
        boundary = boundary_of(request.headers.get("content-type", ""))
        try:
            async with aclosing(body_chunks(request)) as body, aclosing(parts(body, boundary, lenient=True)) as form:
                async for part in form:
                    if part.filename is not None:
                        await self._take_file(part, part.filename)
                    elif part.name in FIELDS:
                        self._fields[part.name] = await _text(part)
        except errors.TooLarge as error:
            raise Refusal(413, TOO_LARGE, str(error)) from None
        if not self.arrived and not self.failed:
            raise Refusal(400, "No files were uploaded", "send them as parts of a form, each with its filename")

    async def keep(self) -> list[CodeFile]:
        """What arrived, as files of the space that the form names. Raises Refusal if there is no room, or no space."""
        space = space_of(self._caller, self._fields)
        read_only = self._fields.get("read_only", "").strip().lower() in ("true", "1")
        await self._room.check()
        made = [
            new_file(
                each.content,
                space,
                session=self.session,
                user=self._caller.user,
                name=each.name,
                content_type=each.content_type,
                read_only=read_only,
            )
            for each in self.arrived
        ]
        await self._files.add(made)
        self._kept = True
        self._room.release()
        return made

    async def _take_file(self, part: Part, name: str) -> None:
        """What is left of the content of one that fails is skipped: the form goes on behind it."""
        try:
            self.arrived.append(await self._arrived(part, name))
        except Refusal as refusal:
            if refusal.body["error"] == NO_ROOM:  # nor for any other file
                raise
            self._fail(name, refusal)

    async def _arrived(self, part: Part, name: str) -> Arrived:
        if len(self.arrived) >= self._config.max_files:
            self.too_many = True
            raise Refusal(400, f"more than {self._config.max_files} files: send the others in another request")
        try:
            check_name(name)
        except errors.InvalidPath as error:
            raise Refusal(400, str(error)) from None
        limited = self._room.taking(_limited(part.chunks, self._config.file_bytes))
        with self._room.file():
            content = await self._files.put_content(new_code_id(), limited, self._config.file_bytes)
        return Arrived(name=name, content=content, content_type=content_type_of(name, part.content_type))

    def _fail(self, name: str, refusal: Refusal) -> None:
        self.failures += 1
        if len(self.failed) < MAX_FAILED:
            sayable = name.encode("utf-8", "replace").decode()
            self.failed.append(Failed(name=sayable[:1000], refusal=refusal))


async def _limited(chunks: AsyncGenerator[bytes, None], max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Raises Refusal where the file is too large. The whole body being so is another error."""
    left = max_bytes
    async for chunk in chunks:
        left -= len(chunk)
        if left < 0:
            raise Refusal(413, TOO_LARGE, f"a file can have {max_bytes} bytes here")
        yield chunk


async def _text(part: Part) -> str:
    content = b""
    async for chunk in part.chunks:
        content += chunk
        if len(content) > MAX_FIELD_BYTES:
            raise errors.InvalidRequest(f"the field {part.name} is too long: it has {MAX_FIELD_BYTES} bytes at most")
    return content.decode("utf-8", "replace")


# How files are said: to clients that upload them, list them, and ask whether they are still there.


def sessions_body(session: str) -> Json:
    """The storage session as each generation of clients calls it."""
    return {"storage_session_id": session, "session_id": session}


def upload_body(upload: Upload, made: list[CodeFile]) -> Json:
    return {"message": "success", **sessions_body(upload.session), "files": [_uploaded(file) for file in made]}


def batch_body(upload: Upload, made: list[CodeFile], max_files: int) -> Json:
    """What became of each file. Of failures beyond those that are listed, the number is told."""
    files = [{"status": "success", **_uploaded(file)} for file in made] + [_failed(each) for each in upload.failed]
    outcome = "success" if not upload.failures else "partial_success" if made else "error"
    body: Json = {"message": outcome, **sessions_body(upload.session), "files": files}
    body |= {"succeeded": len(made), "failed": upload.failures}
    if upload.too_many:
        body |= {"filesLimitReached": True, "maxFiles": max_files}
    if not made:
        body["error"] = upload.failed[0].refusal.body["error"]
    return body


def _uploaded(file: CodeFile) -> Json:
    return {"filename": file.name, "fileId": file.id, **sessions_body(file.session)}


def _failed(failed: Failed) -> Json:
    said = failed.refusal.body
    return {"status": "error", "filename": failed.name, "error": ": ".join(filter(None, map(said.get, _SAID)))}


_SAID = ("error", "message")


def object_name(file: CodeFile) -> str:
    """Old clients read the id of a file from this."""
    return f"{file.session}/{file.id}{ending_of(file.name)}"


def metadata_body(file: CodeFile) -> Json:
    return {
        **_summary(file),
        "id": file.id,
        **sessions_body(file.session),
        "originalFilename": file.name,
        "contentType": file.content_type,
        "readOnly": file.read_only,
    }


def _summary(file: CodeFile) -> Json:
    # Clients upload a file again once this is 23 hours old: it says since when the file has been unused.
    return {
        "name": object_name(file),
        "size": file.bytes,
        "lastModified": timestamp(file.used_at),
        "etag": file.sha256[:32],
    }


def _full(file: CodeFile) -> Json:
    details = {
        "content-type": file.content_type,
        "original-filename": file.name,
        "original-filename-encoded": "none",
    }
    return {**metadata_body(file), "metadata": details, "versionId": None}


def _normalized(file: CodeFile) -> Json:
    return {
        "id": file.id,
        "name": file.name,
        **sessions_body(file.session),
        "size": file.bytes,
        "contentType": file.content_type,
        "lastModified": timestamp(file.used_at),
        **({"readOnly": True} if file.read_only else {}),
    }


LISTED: Mapping[str, Callable[[CodeFile], Any]] = {
    "simple": object_name,
    "summary": lambda file: {**_summary(file), **sessions_body(file.session)},
    "full": _full,
    "normalized": _normalized,
}
"""How each file is listed, by the `detail` that a client asks for."""


def download_headers(file: CodeFile) -> dict[str, str]:
    return {
        "content-length": str(file.bytes),
        "content-type": file.content_type,
        "content-disposition": f"attachment; filename*=UTF-8''{quote(file.name, safe='')}",
        "etag": f'"{file.sha256[:32]}"',
        "last-modified": last_modified(file.created_at),
        # A file is a stranger's: no page of it may act in the name of the server that it comes from.
        "content-security-policy": "sandbox",
        "x-content-type-options": "nosniff",
    }


MAX_LISTED = 10_000
MAX_REMEMBERED = 10_000

OBJECT = "/sessions/{session}/objects/{file}"


def routes(desk: Desk) -> list[Route]:
    files = Files(desk)
    return [
        desk.route("POST", "/upload", files.upload),
        desk.route("POST", "/upload/batch", files.upload_batch),
        desk.route("GET", "/download/{session}/{file}", files.download),
        desk.route("GET", OBJECT, files.metadata),
        desk.route("DELETE", OBJECT, files.delete),
        desk.route("GET", "/files/{session}", files.list),
        desk.route("DELETE", "/files/{session}/{file}", files.delete),
    ]


class Files:
    def __init__(self, desk: Desk):
        self._desk = desk
        self._files = desk.shelf.code_files
        self._arriving = Arriving(self._files)
        self._deleted = _Deletions()

    async def upload(self, request: Request) -> Response:
        """All files of the form, or none."""
        async with Upload(self._desk, self._arriving, self._desk.caller(request)) as upload:
            await upload.take(request)
            if upload.failed:
                raise upload.failed[0].refusal
            return json_reply(upload_body(upload, await upload.keep()))

    async def upload_batch(self, request: Request) -> Response:
        """As many files of the form as possible."""
        async with Upload(self._desk, self._arriving, self._desk.caller(request)) as upload:
            await upload.take(request)
            made = await upload.keep()
            body = batch_body(upload, made, self._desk.config.max_files)
            return json_reply(body, 200 if made else upload.failed[0].refusal.status)

    async def download(self, request: Request) -> Response:
        file = await self._asked(request)
        headers = download_headers(file)
        if request.method == "HEAD":
            return Response(headers=headers)
        return Stream(_whole(await self._files.chunks(file), file.bytes), headers=headers)

    async def metadata(self, request: Request) -> Response:
        return json_reply(metadata_body(await self._asked(request)))

    async def list(self, request: Request) -> Response:
        reach = reach_of(self._desk.caller(request), request.query_params)
        detail = request.query_params.get("detail", "simple")
        if detail not in LISTED:
            raise Refusal(400, f"detail must be one of: {', '.join(LISTED)}")
        session = request.path_params["session"]
        if not is_code_id(session):
            raise Refusal(400, "a session id has 21 characters of A-Z a-z 0-9 _ -")
        found = await self._files.of_session(reach, session, MAX_LISTED)
        return json_reply([LISTED[detail](file) for file in found])

    async def delete(self, request: Request) -> Response:
        """Of a file that the same caller has deleted already, too. One that is another's was never there."""
        reach = reach_of(self._desk.caller(request), request.query_params)
        session, id = request.path_params["session"], request.path_params["file"]
        if not self._deleted.has(reach, session, id):
            await self._files.remove([await self._asked(request)])
            self._deleted.add(reach, session, id)
        return json_reply({"message": "success", "id": id, **sessions_body(session)})

    async def _asked(self, request: Request) -> CodeFile:
        """Raises Refusal if it is not there for whoever asks."""
        reach = reach_of(self._desk.caller(request), request.query_params)
        session, id = request.path_params["session"], request.path_params["file"]
        try:
            if is_code_id(session) and is_code_id(id):
                return await self._files.get(reach, session, id)
        except errors.FileNotFound:
            pass
        raise Refusal(404, "File not found", "it never was there, has expired, or belongs to somebody else")


class _Deletions:
    """The latest ones: a client that asks again, since it saw no answer, is told the same."""

    def __init__(self) -> None:
        self._latest: OrderedDict[tuple[Reach, str, str], None] = OrderedDict()

    def has(self, *what: Reach | str) -> bool:
        return what in self._latest

    def add(self, reach: Reach, session: str, id: str) -> None:
        self._latest[reach, session, id] = None
        if len(self._latest) > MAX_REMEMBERED:
            self._latest.popitem(last=False)


async def _whole(chunks: AsyncGenerator[bytes, None], size: int) -> AsyncGenerator[bytes, None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            size -= len(chunk)
            yield chunk
    if size:
        raise Dropped  # the disk lost a part of it, and its length is promised already
