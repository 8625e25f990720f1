"""Forms with files, on their way into the store: each is written as it comes, and one that fails spoils only itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import NamedTuple

from starlette.requests import Request

from cloche import errors
from cloche.api.http import body_chunks
from cloche.api.librechat.arriving import NO_ROOM, Arriving
from cloche.api.librechat.desk import Desk
from cloche.api.librechat.identity import Caller
from cloche.api.librechat.names import check_name, content_type_of
from cloche.api.librechat.replies import Refusal, new_code_id
from cloche.api.librechat.spaces import space_of
from cloche.api.multipart import Part, boundary_of, parts
from cloche.store.librechat import CodeFile, Content, new_file

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
