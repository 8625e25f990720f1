"""Files of LibreChat's users: uploads, downloads, lists and deletions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.http import Dropped, Stream
from cloche.api.librechat import file_replies as replies
from cloche.api.librechat.arriving import Arriving
from cloche.api.librechat.desk import Desk
from cloche.api.librechat.replies import Refusal, is_code_id, json_reply
from cloche.api.librechat.spaces import reach_of
from cloche.api.librechat.uploads import Upload
from cloche.store.librechat import CodeFile, Reach

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
            return json_reply(replies.upload_body(upload, await upload.keep()))

    async def upload_batch(self, request: Request) -> Response:
        """As many files of the form as possible."""
        async with Upload(self._desk, self._arriving, self._desk.caller(request)) as upload:
            await upload.take(request)
            made = await upload.keep()
            body = replies.batch_body(upload, made, self._desk.config.max_files)
            return json_reply(body, 200 if made else upload.failed[0].refusal.status)

    async def download(self, request: Request) -> Response:
        file = await self._asked(request)
        headers = replies.download_headers(file)
        if request.method == "HEAD":
            return Response(headers=headers)
        return Stream(_whole(await self._files.chunks(file), file.bytes), headers=headers)

    async def metadata(self, request: Request) -> Response:
        return json_reply(replies.metadata_body(await self._asked(request)))

    async def list(self, request: Request) -> Response:
        reach = reach_of(self._desk.caller(request), request.query_params)
        detail = request.query_params.get("detail", "simple")
        if detail not in replies.LISTED:
            raise Refusal(400, f"detail must be one of: {', '.join(replies.LISTED)}")
        session = request.path_params["session"]
        if not is_code_id(session):
            raise Refusal(400, "a session id has 21 characters of A-Z a-z 0-9 _ -")
        found = await self._files.of_session(reach, session, MAX_LISTED)
        return json_reply([replies.LISTED[detail](file) for file in found])

    async def delete(self, request: Request) -> Response:
        """Of a file that the same caller has deleted already, too. One that is another's was never there."""
        reach = reach_of(self._desk.caller(request), request.query_params)
        session, id = request.path_params["session"], request.path_params["file"]
        if not self._deleted.has(reach, session, id):
            await self._files.remove([await self._asked(request)])
            self._deleted.add(reach, session, id)
        return json_reply({"message": "success", "id": id, **replies.sessions_body(session)})

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
