"""Files that come with a request: by id, or in the messages themselves. They are for the container."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import mimetypes
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cloche import errors
from cloche.gateway.containers import BadWish, plain_name
from cloche.gateway.items import Item
from cloche.model import MIB, Struct
from cloche.store.files import StoredFile, StoredFiles, made_here

MAX_ATTACHMENTS = 100
MAX_INLINE_BYTES = 64 * MIB  # of all stored files that go to an upstream in one request, as often as they do
MAX_INLINE_PARTS = 100
AT_ONCE_CHARACTERS = 1 * MIB  # of an inline file; longer ones are decoded in a thread
SLICE_CHARACTERS = 1 * MIB  # of base64: while one is decoded no other thread runs; a multiple of 4

Place = tuple[int, int]  # of a part: the number of its item, and its own

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w=.-]+)*;base64,", re.ASCII)


class Attachment(Struct):
    """`origin` is a file's id or a digest: the same one is put into a container once."""

    name: str
    origin: str
    size_bytes: int
    stored: StoredFile | None = None
    content: bytes = b""  # where it is not stored


class Part(NamedTuple):
    """A part of a message with a file or a picture. `where` is None in what went before the request."""

    place: Place  # the number of its item, the history's first, and its own
    content: Item
    where: str | None

    @property
    def file_id(self) -> str | None:
        id = self.content.get("file_id")
        return id if isinstance(id, str) else None


class Attachments:
    """By their origins: `found` are those of the request, `earlier` those that only the history has, the oldest first.

    A request is refused for a file that it cannot have. What went before is not: it was right then.
    """

    def __init__(self) -> None:
        self.found: dict[str, Attachment] = {}
        self.earlier: dict[str, Attachment] = {}
        self._places: dict[Place, str] = {}  # the parts of messages that they came in
        self._pictures: dict[Place, str] = {}
        self._gone: set[Place] = set()

    @property
    def all(self) -> dict[str, Attachment]:
        return {**self.earlier, **self.found}

    async def take(
        self,
        files: StoredFiles,
        owner: str,
        file_ids: tuple[str, ...],
        items: Sequence[Item] = (),
        history: Sequence[Item] = (),
    ) -> None:
        """Raises FileNotFound for ids that are nobody's or somebody else's, InvalidRequest for what cannot be read."""
        contents = InlineContents(files, owner)
        for id in file_ids:
            self._add(_stored(await contents.find(id)))
        for part in parts_of(history, items):
            try:
                await self._take(part, contents)
            except (errors.FileNotFound, errors.InvalidRequest) as error:
                if part.where is not None:
                    raise
                if _cannot_be_shown(part, error):
                    self._gone.add(part.place)
        self.earlier = dict(reversed(self.earlier.items()))

    def shown(self, items: list[Item], paths: Mapping[str, str]) -> list[Item]:
        """The history and the new items as a model gets them: instead of a file, where it is; pictures as they came."""
        changes = {
            place: self._as_shown(place, items[place[0]][_key(items[place[0]])][place[1]], paths.get(origin))
            for place, origin in self._places.items()
        }
        return with_parts(items, {**changes, **dict.fromkeys(self._gone, GONE)})

    def _as_shown(self, place: Place, part: Item, path: str | None) -> Item:
        if part["type"] == "input_file":
            return GONE if path is None else _note(f"The user's file {path.rpartition('/')[2]} is at {path}.")
        return part if place not in self._pictures else _with_content(part, "", self._pictures[place])

    async def _take(self, part: Part, contents: InlineContents) -> None:
        if _is_long(part.content):
            attachment = await asyncio.to_thread(_of_part, part.content, part.where or "")
        else:
            attachment = _of_part(part.content, part.where or "")
        if attachment is None and part.file_id is not None:
            file = await contents.find(part.file_id)
            attachment = _stored(file)
            if part.content["type"] == "input_image":
                self._pictures[part.place] = await contents.url(file, part.where or "")
        if attachment is not None:
            self._add(attachment, part)

    def _add(self, attachment: Attachment, part: Part | None = None) -> None:
        known = self.found if part is None or part.where is not None else self.earlier
        if attachment.origin not in self.found and attachment.origin not in self.earlier:
            if len(self.found) + len(self.earlier) >= MAX_ATTACHMENTS:
                message = f"A request can bring {MAX_ATTACHMENTS} files at most."
                raise BadWish(message, "input", "array_above_max_length")
            known[attachment.origin] = attachment
        if part is not None:
            self._places[part.place] = attachment.origin


class InlineContents:
    """Contents of stored files, for an upstream, which knows no ids of ours: bounded, and each is encoded once."""

    def __init__(self, files: StoredFiles, owner: str):
        self._files = files
        self._owner = owner
        self._found: dict[str, StoredFile] = {}
        self._urls: dict[str, str] = {}
        self._left_bytes = MAX_INLINE_BYTES
        self._left_parts = MAX_INLINE_PARTS

    async def find(self, id: str) -> StoredFile:
        """Raises FileNotFound."""
        if id not in self._found:
            self._found[id] = await self._files.get(self._owner, id)
        return self._found[id]

    async def url(self, file: StoredFile, where: str) -> str:
        """A data URL. Raises BadWish if that is too much, FileNotFound."""
        if file.bytes > self._left_bytes or not self._left_parts:
            raise BadWish(
                f"Invalid '{where}.file_id': the files that a model is shown can have {MAX_INLINE_BYTES} bytes in all, "
                f"in {MAX_INLINE_PARTS} parts.",
                f"{where}.file_id",
            )
        if file.id not in self._urls:
            self._urls[file.id] = await self._encoded(file)
        self._left_bytes -= file.bytes
        self._left_parts -= 1
        return self._urls[file.id]

    async def _encoded(self, file: StoredFile) -> str:
        content = b"".join([chunk async for chunk in await self._files.chunks(file)])
        mime = mimetypes.guess_type(plain_name(file.filename))[0] or "application/octet-stream"
        return f"data:{mime};base64,{base64.b64encode(content).decode()}"


async def inlined(files: StoredFiles, owner: str, history: Sequence[Item], items: Sequence[Item]) -> list[Item]:
    """The history and the items for an upstream without our container: stored files in themselves.

    Ids that are not ours may be the upstream's own, and stay. Raises InvalidRequest for files that are too large.
    """
    contents = InlineContents(files, owner)
    changes: dict[Place, Item] = {}
    for part in parts_of(history, items):
        if part.file_id is None:
            continue
        try:
            file = await contents.find(part.file_id)
            url = await contents.url(file, part.where or "")
            changes[part.place] = _with_content(part.content, plain_name(file.filename), url)
        except (errors.FileNotFound, errors.InvalidRequest) as error:
            if part.where is not None and isinstance(error, errors.InvalidRequest):
                raise
            if part.where is None and _cannot_be_shown(part, error):
                changes[part.place] = GONE
    return with_parts([*history, *items], changes)


def parts_of(history: Sequence[Item], items: Sequence[Item]) -> list[Part]:
    """Those of the request, then those of the history, the newest first: where not all fit, the oldest do not."""
    new = [
        Part((len(history) + at, number), part, f"input[{at}].{_key(items[at])}[{number}]")
        for (at, number), part in _parts(items)
    ]
    return [*new, *(Part(place, part, None) for place, part in reversed(list(_parts(history))))]


def with_parts(items: list[Item], changes: Mapping[Place, Item]) -> list[Item]:
    """The items with those parts in their places."""
    changed = list(items)
    contents: dict[int, list[Any]] = {}
    for (at, number), part in changes.items():
        key = _key(items[at])
        if at not in contents:
            contents[at] = list(items[at][key])
            changed[at] = {**items[at], key: contents[at]}
        contents[at][number] = part
    return changed


def _parts(items: Sequence[Item]) -> Iterator[tuple[Place, Item]]:
    for at, item in enumerate(items):
        content, by_id_only = item.get(_key(item)), _key(item) == "output"
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, dict) or part.get("type") not in ("input_file", "input_image"):
                continue
            if isinstance(part.get("file_id"), str) or not by_id_only:
                yield (at, number), part


def _key(item: Item) -> str:
    """Where an item has its parts. What a client's function gave is for the model: of it only our ids matter."""
    kind = item.get("type", "message")
    return "output" if kind in ("function_call_output", "custom_tool_call_output") else "content"


def _cannot_be_shown(part: Part, error: errors.ClocheError) -> bool:
    """Whether an upstream could make nothing of it: a file of ours that is gone or too large for it."""
    if part.file_id is None:
        return "file_data" in part.content
    return not isinstance(error, errors.FileNotFound) or made_here(part.file_id)


def _note(text: str) -> Item:
    return {"type": "input_text", "text": text}


GONE = _note("(A file that the user attached here is no longer there.)")


def _stored(file: StoredFile) -> Attachment:
    return Attachment(name=plain_name(file.filename), origin=file.id, size_bytes=file.bytes, stored=file)


def _is_long(part: Item) -> bool:
    data = part.get("image_url" if part["type"] == "input_image" else "file_data")
    return isinstance(data, str) and len(data) > AT_ONCE_CHARACTERS


def _of_part(part: Item, where: str) -> Attachment | None:
    """What a part holds itself; None if that is elsewhere."""
    if part["type"] == "input_image":
        url = part.get("image_url")
        return _picture(url) if isinstance(url, str) and url.startswith("data:") else None
    if part.get("file_url"):
        raise BadWish(
            "This server does not fetch files: send the file as 'file_data', or upload it and send its 'file_id'.",
            f"{where}.file_url",
        )
    if part.get("file_data") is not None:
        return _file(part, where)
    if not part.get("file_id"):
        raise BadWish(
            f"Missing required parameter: '{where}.file_id'.", f"{where}.file_id", "missing_required_parameter"
        )
    return None


def _file(part: Item, where: str) -> Attachment:
    mime, content = _decoded(part["file_data"], f"{where}.file_data")
    name = part.get("filename")
    if not isinstance(name, str) or not name:
        name = "file" + (mimetypes.guess_extension(mime) or "")
    return _inline(plain_name(name), content)


def _picture(url: str) -> Attachment | None:
    """None for one that cannot be read: that is for the upstream to say."""
    try:
        mime, content = _decoded(url, "image_url")
    except errors.InvalidRequest:
        return None
    extension = {"image/jpeg": ".jpg"}.get(mime) or mimetypes.guess_extension(mime) or ".png"
    return _inline(f"image{extension}", content)


def _inline(name: str, content: bytes) -> Attachment:
    digest = hashlib.sha256(name.encode() + b"\0")
    digest.update(content)
    return Attachment(name=name, origin=f"sha256:{digest.hexdigest()}", size_bytes=len(content), content=content)


def _decoded(data: Any, param: str) -> tuple[str, bytes]:
    """The type and the content. Raises InvalidRequest."""
    if not isinstance(data, str):
        raise BadWish(f"Invalid type for '{param}': expected a string.", param, "invalid_type")
    header = _DATA_URL.match(data)
    try:
        content = b"".join(_slices(data, header.end() if header else 0))
    except (binascii.Error, ValueError):
        raise BadWish(f"Invalid '{param}': expected base64, or a data URL with base64.", param) from None
    return (header[1] or "" if header else ""), content


def _slices(data: str, start: int) -> Iterator[bytes]:
    """What base64 says from there on. Raises ValueError."""
    for at in range(start, len(data), SLICE_CHARACTERS):
        content = base64.b64decode(data[at : at + SLICE_CHARACTERS], validate=True)
        if at + SLICE_CHARACTERS < len(data) and len(content) != SLICE_CHARACTERS // 4 * 3:
            raise ValueError("padding before the end")
        yield content


def _with_content(part: Item, name: str, url: str) -> Item:
    if part["type"] == "input_image":
        return {"type": "input_image", "image_url": url, "detail": part.get("detail") or "auto"}
    return {"type": "input_file", "filename": name, "file_data": url}
