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
from cloche.api.dialect import Json, json_reply
from cloche.api.encoding import format_last_modified
from cloche.api.http import DropConnection, StreamResponse, read_body_chunks
from cloche.api.librechat.context import LibreChatContext
from cloche.api.librechat.identity import LibreChatCaller, reach_of, space_of
from cloche.api.librechat.replies import (
    LibreChatRefusal,
    check_name,
    content_type_of,
    is_code_id,
    iso_timestamp,
    new_code_id,
    safe_suffix,
)
from cloche.api.multipart import FormPart, iterate_form_parts, parse_form_boundary, read_field_text
from cloche.store.librechat import AccessScope, CodeFile, CodeFileContent, StoredCodeFiles, new_code_file

# Upload reservations: files take room before the store knows them, also where many arrive at once.

UPLOAD_CHECK_BYTES = 4 << 20  # what one request brings is looked at whenever so much more of it has come
STORAGE_LIMIT_ERROR = "storage_limit_exceeded"

_UploadAccount = tuple[str, ...]


class IncomingUploads:
    """The bytes and files that all current requests are uploading, by owner and by user."""

    def __init__(self, files: StoredCodeFiles):
        self._files = files
        self._bytes: Counter[_UploadAccount] = Counter()
        self._count: Counter[_UploadAccount] = Counter()

    def new_reservation(self, caller: LibreChatCaller) -> UploadReservation:
        return UploadReservation(self, caller)

    def add(self, caller: LibreChatCaller, *, files: int = 0, bytes: int = 0) -> None:
        """Adds to the totals of the caller. The numbers can be negative."""
        for account in (_owner_account(caller), _user_account(caller)):
            self._bytes[account] += bytes
            self._count[account] += files
            if not self._bytes[account] and not self._count[account]:
                del self._bytes[account], self._count[account]

    async def check(self, caller: LibreChatCaller) -> None:
        """Raises LibreChatRefusal (413) if the uploads of the owner, or of this user, exceed the room left."""
        owner, user = _owner_account(caller), _user_account(caller)
        try:
            await self._files.check_room(caller.owner, files=max(1, self._count[owner]), bytes=self._bytes[owner])
            if caller.user:
                count, size = max(1, self._count[user]), self._bytes[user]
                await self._files.check_room(caller.owner, caller.tenant, caller.user, files=count, bytes=size)
        except errors.TooLarge as error:
            raise LibreChatRefusal(413, STORAGE_LIMIT_ERROR, str(error)) from None


class UploadReservation:
    """The room of one request's files."""

    def __init__(self, arriving: IncomingUploads, caller: LibreChatCaller):
        self._arriving = arriving
        self._caller = caller
        self._files = 0
        self._bytes = 0
        self._checked_bytes = 0

    async def check(self) -> None:
        """Raises LibreChatRefusal (413)."""
        self._checked_bytes = self._bytes
        await self._arriving.check(self._caller)

    @contextlib.contextmanager
    def file(self) -> Iterator[None]:
        """Counts one file while it arrives. A file that fails is not counted any more."""
        before = self._bytes
        self._reserve_more(files=1)
        try:
            yield
        except BaseException:
            self._reserve_more(files=-1, bytes=before - self._bytes)
            raise

    async def taking(self, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Yields the chunks that there is room for. Raises LibreChatRefusal (413) where the room ends."""
        async for chunk in chunks:
            self._reserve_more(bytes=len(chunk))
            if self._bytes - self._checked_bytes >= UPLOAD_CHECK_BYTES:
                await self.check()
            yield chunk

    def release(self) -> None:
        """Gives back all room: the store knows the files by now, or they were dropped."""
        self._reserve_more(files=-self._files, bytes=-self._bytes)

    def _reserve_more(self, *, files: int = 0, bytes: int = 0) -> None:
        self._files += files
        self._bytes += bytes
        self._checked_bytes = min(self._checked_bytes, self._bytes)
        self._arriving.add(self._caller, files=files, bytes=bytes)


def _owner_account(caller: LibreChatCaller) -> _UploadAccount:
    return (caller.owner,)


def _user_account(caller: LibreChatCaller) -> _UploadAccount:
    return caller.owner, caller.tenant, caller.user


# Forms with files, written into the store as they arrive. A file that fails does not affect the others.

MAX_FAILED = 200  # that are listed; the others are counted
TOO_LARGE_ERROR = "File size limit exceeded"
UPLOAD_FIELDS = frozenset({"kind", "id", "version", "entity_id", "read_only"})  # others are ignored


class ArrivedFile(NamedTuple):
    """A file with its content in the store, and no record there yet."""

    name: str
    content: CodeFileContent
    content_type: str


class FailedUpload(NamedTuple):
    name: str
    refusal: LibreChatRefusal


class LibreChatUpload:
    """The files of one request. Use as `async with LibreChatUpload(api, arriving, caller) as upload`.

    Files that were not kept are dropped at the end. Room is reserved before anything is written.
    """

    def __init__(self, api: LibreChatContext, arriving: IncomingUploads, caller: LibreChatCaller):
        self.session = new_code_id()
        self.arrived: list[ArrivedFile] = []
        self.failed: list[FailedUpload] = []
        self.failures = 0
        self.too_many = False
        self._files = api.store.code_files
        self._config = api.settings
        self._caller = caller
        self._room = arriving.new_reservation(caller)
        self._fields: dict[str, str] = {}
        self._kept = False

    async def __aenter__(self) -> LibreChatUpload:
        """Raises LibreChatRefusal if there is no room for a file."""
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
        """Reads the whole form. Raises InvalidRequest if it is no form, LibreChatRefusal if it is too large."""
        boundary = parse_form_boundary(request.headers.get("content-type", ""))
        try:
            async with (
                aclosing(read_body_chunks(request)) as body,
                aclosing(iterate_form_parts(body, boundary, lenient=True)) as form,
            ):
                async for part in form:
                    if part.filename is not None:
                        await self._take_file(part, part.filename)
                    elif part.name in UPLOAD_FIELDS:
                        self._fields[part.name] = await read_field_text(part)
        except errors.TooLarge as error:
            raise LibreChatRefusal(413, TOO_LARGE_ERROR, str(error)) from None
        if not self.arrived and not self.failed:
            raise LibreChatRefusal(
                400, "No files were uploaded", "send them as parts of a form, each with its filename"
            )

    async def keep(self) -> list[CodeFile]:
        """Records the files in the space that the form names. Raises LibreChatRefusal without room or space."""
        space = space_of(self._caller, self._fields)
        read_only = self._fields.get("read_only", "").strip().lower() in ("true", "1")
        await self._room.check()
        made = [
            new_code_file(
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

    async def _take_file(self, part: FormPart, name: str) -> None:
        """Stores one file. The rest of a file that fails is skipped: the form goes on behind it."""
        try:
            self.arrived.append(await self._receive_file(part, name))
        except LibreChatRefusal as refusal:
            if refusal.body["error"] == STORAGE_LIMIT_ERROR:  # nor for any other file
                raise
            self._record_failure(name, refusal)

    async def _receive_file(self, part: FormPart, name: str) -> ArrivedFile:
        if len(self.arrived) >= self._config.max_files:
            self.too_many = True
            raise LibreChatRefusal(400, f"more than {self._config.max_files} files: send the others in another request")
        try:
            check_name(name)
        except errors.InvalidPath as error:
            raise LibreChatRefusal(400, str(error)) from None
        limited = self._room.taking(_limit_chunks(part.chunks, self._config.file_bytes))
        with self._room.file():
            content = await self._files.put_content(new_code_id(), limited, self._config.file_bytes)
        return ArrivedFile(name=name, content=content, content_type=content_type_of(name, part.content_type))

    def _record_failure(self, name: str, refusal: LibreChatRefusal) -> None:
        self.failures += 1
        if len(self.failed) < MAX_FAILED:
            sayable = name.encode("utf-8", "replace").decode()
            self.failed.append(FailedUpload(name=sayable[:1000], refusal=refusal))


async def _limit_chunks(chunks: AsyncGenerator[bytes, None], max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Raises LibreChatRefusal where the file is too large. A too large body is another error."""
    left = max_bytes
    async for chunk in chunks:
        left -= len(chunk)
        if left < 0:
            raise LibreChatRefusal(413, TOO_LARGE_ERROR, f"a file can have {max_bytes} bytes here")
        yield chunk


# JSON bodies and headers that describe files: for uploads, listings, metadata and downloads.


def session_fields(session: str) -> Json:
    """The storage session as each generation of clients calls it."""
    return {"storage_session_id": session, "session_id": session}


def upload_body(upload: LibreChatUpload, made: list[CodeFile]) -> Json:
    return {"message": "success", **session_fields(upload.session), "files": [_uploaded_body(file) for file in made]}


def batch_body(upload: LibreChatUpload, made: list[CodeFile], max_files: int) -> Json:
    """The outcome of each file. Failures beyond the listed ones are counted."""
    files = [{"status": "success", **_uploaded_body(file)} for file in made] + [
        _failed_body(each) for each in upload.failed
    ]
    outcome = "success" if not upload.failures else "partial_success" if made else "error"
    body: Json = {"message": outcome, **session_fields(upload.session), "files": files}
    body |= {"succeeded": len(made), "failed": upload.failures}
    if upload.too_many:
        body |= {"filesLimitReached": True, "maxFiles": max_files}
    if not made:
        body["error"] = upload.failed[0].refusal.body["error"]
    return body


def _uploaded_body(file: CodeFile) -> Json:
    return {"filename": file.name, "fileId": file.id, **session_fields(file.session)}


def _failed_body(failed: FailedUpload) -> Json:
    said = failed.refusal.body
    return {
        "status": "error",
        "filename": failed.name,
        "error": ": ".join(filter(None, map(said.get, _REFUSAL_FIELDS))),
    }


_REFUSAL_FIELDS = ("error", "message")


def object_name(file: CodeFile) -> str:
    """Old clients read the id of a file from this."""
    return f"{file.session}/{file.id}{safe_suffix(file.name)}"


def metadata_body(file: CodeFile) -> Json:
    return {
        **_summary_body(file),
        "id": file.id,
        **session_fields(file.session),
        "originalFilename": file.name,
        "contentType": file.content_type,
        "readOnly": file.read_only,
    }


def _summary_body(file: CodeFile) -> Json:
    # Clients upload a file again once this is 23 hours old: it says since when the file has been unused.
    return {
        "name": object_name(file),
        "size": file.bytes,
        "lastModified": iso_timestamp(file.used_at),
        "etag": file.sha256[:32],
    }


def _full_body(file: CodeFile) -> Json:
    details = {
        "content-type": file.content_type,
        "original-filename": file.name,
        "original-filename-encoded": "none",
    }
    return {**metadata_body(file), "metadata": details, "versionId": None}


def _normalized_body(file: CodeFile) -> Json:
    return {
        "id": file.id,
        "name": file.name,
        **session_fields(file.session),
        "size": file.bytes,
        "contentType": file.content_type,
        "lastModified": iso_timestamp(file.used_at),
        **({"readOnly": True} if file.read_only else {}),
    }


LISTING_FORMATS: Mapping[str, Callable[[CodeFile], Any]] = {
    "simple": object_name,
    "summary": lambda file: {**_summary_body(file), **session_fields(file.session)},
    "full": _full_body,
    "normalized": _normalized_body,
}
"""How each file is listed, by the `detail` that a client asks for."""


def download_headers(file: CodeFile) -> dict[str, str]:
    return {
        "content-length": str(file.bytes),
        "content-type": file.content_type,
        "content-disposition": f"attachment; filename*=UTF-8''{quote(file.name, safe='')}",
        "etag": f'"{file.sha256[:32]}"',
        "last-modified": format_last_modified(file.created_at),
        # A file is a stranger's: no page of it may act in the name of the server that it comes from.
        "content-security-policy": "sandbox",
        "x-content-type-options": "nosniff",
    }


MAX_LISTED_FILES = 10_000
MAX_REMEMBERED_DELETIONS = 10_000

OBJECT_PATH = "/sessions/{session}/objects/{file}"


def file_routes(api: LibreChatContext) -> list[Route]:
    files = LibreChatFiles(api)
    return [
        api.route("POST", "/upload", files.upload),
        api.route("POST", "/upload/batch", files.upload_batch),
        api.route("GET", "/download/{session}/{file}", files.download_file),
        api.route("GET", OBJECT_PATH, files.metadata),
        api.route("DELETE", OBJECT_PATH, files.delete),
        api.route("GET", "/files/{session}", files.list),
        api.route("DELETE", "/files/{session}/{file}", files.delete),
    ]


class LibreChatFiles:
    def __init__(self, api: LibreChatContext):
        self._api = api
        self._files = api.store.code_files
        self._arriving = IncomingUploads(self._files)
        self._deleted = _RecentDeletions()

    async def upload(self, request: Request) -> Response:
        """Stores all files of the form, or none."""
        async with LibreChatUpload(self._api, self._arriving, self._api.caller(request)) as upload:
            await upload.take(request)
            if upload.failed:
                raise upload.failed[0].refusal
            return json_reply(upload_body(upload, await upload.keep()))

    async def upload_batch(self, request: Request) -> Response:
        """Stores as many files of the form as possible."""
        async with LibreChatUpload(self._api, self._arriving, self._api.caller(request)) as upload:
            await upload.take(request)
            made = await upload.keep()
            body = batch_body(upload, made, self._api.settings.max_files)
            return json_reply(body, 200 if made else upload.failed[0].refusal.status)

    async def download_file(self, request: Request) -> Response:
        file = await self._requested_file(request)
        headers = download_headers(file)
        if request.method == "HEAD":
            return Response(headers=headers)
        return StreamResponse(_complete_chunks(await self._files.chunks(file), file.bytes), headers=headers)

    async def metadata(self, request: Request) -> Response:
        return json_reply(metadata_body(await self._requested_file(request)))

    async def list(self, request: Request) -> Response:
        reach = reach_of(self._api.caller(request), request.query_params)
        detail = request.query_params.get("detail", "simple")
        if detail not in LISTING_FORMATS:
            raise LibreChatRefusal(400, f"detail must be one of: {', '.join(LISTING_FORMATS)}")
        session = request.path_params["session"]
        if not is_code_id(session):
            raise LibreChatRefusal(400, "a session id has 21 characters of A-Z a-z 0-9 _ -")
        found = await self._files.of_session(reach, session, MAX_LISTED_FILES)
        return json_reply([LISTING_FORMATS[detail](file) for file in found])

    async def delete(self, request: Request) -> Response:
        """Deletes a file; also succeeds if the same caller deleted it before. Other callers' files are not found."""
        reach = reach_of(self._api.caller(request), request.query_params)
        session, id = request.path_params["session"], request.path_params["file"]
        if not self._deleted.has(reach, session, id):
            await self._files.remove([await self._requested_file(request)])
            self._deleted.add(reach, session, id)
        return json_reply({"message": "success", "id": id, **session_fields(session)})

    async def _requested_file(self, request: Request) -> CodeFile:
        """Raises LibreChatRefusal if the caller has no such file."""
        reach = reach_of(self._api.caller(request), request.query_params)
        session, id = request.path_params["session"], request.path_params["file"]
        try:
            if is_code_id(session) and is_code_id(id):
                return await self._files.get(reach, session, id)
        except errors.FileNotFound:
            pass
        raise LibreChatRefusal(404, "File not found", "it never existed, has expired, or belongs to another user")


class _RecentDeletions:
    """The latest deletions: a client that repeats one because it saw no answer receives the same answer."""

    def __init__(self) -> None:
        self._latest: OrderedDict[tuple[AccessScope, str, str], None] = OrderedDict()

    def has(self, *what: AccessScope | str) -> bool:
        return what in self._latest

    def add(self, reach: AccessScope, session: str, id: str) -> None:
        self._latest[reach, session, id] = None
        if len(self._latest) > MAX_REMEMBERED_DELETIONS:
            self._latest.popitem(last=False)


async def _complete_chunks(chunks: AsyncGenerator[bytes, None], size: int) -> AsyncGenerator[bytes, None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            size -= len(chunk)
            yield chunk
    if size:
        raise DropConnection  # the disk lost a part of it, and its length is promised already
