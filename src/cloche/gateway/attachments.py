"""Files that come with a request, by id or inside of messages. They are put into the container."""

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
from cloche.gateway.containers import InvalidContainerOption, sanitize_file_name
from cloche.gateway.items import Item
from cloche.model import MIB, Struct
from cloche.store.files import StoredFile, StoredFiles, is_own_file_id

MAX_ATTACHMENTS = 100
MAX_INLINE_BYTES = 64 * MIB  # of all stored files that go to an upstream in one request, as often as they do
MAX_INLINE_PARTS = 100
MAX_UNTHREADED_CHARACTERS = 1 * MIB  # of an inline file; longer ones are decoded in a thread
SLICE_CHARACTERS = 1 * MIB  # of base64: while one is decoded no other thread runs; a multiple of 4

PartPosition = tuple[int, int]  # of a part: the number of its item, and its own

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w=.-]+)*;base64,", re.ASCII)


class AttachedFile(Struct):
    """`origin` is a file's id or a digest: the same one is put into a container once."""

    name: str
    origin: str
    size_bytes: int
    stored: StoredFile | None = None
    content: bytes = b""  # where it is not stored


class AttachmentPart(NamedTuple):
    """A part of a message with a file or a picture. `where` is None for parts of the history."""

    place: PartPosition  # the number of its item, the history's first, and its own
    content: Item
    where: str | None

    @property
    def file_id(self) -> str | None:
        id = self.content.get("file_id")
        return id if isinstance(id, str) else None


class Attachments:
    """The attached files by origin: `found` of the request, `earlier` of the history alone, oldest first.

    A request is refused for a file that it cannot have. The history is not: it was valid when it was sent.
    """

    def __init__(self) -> None:
        self.found: dict[str, AttachedFile] = {}
        self.earlier: dict[str, AttachedFile] = {}
        self._places: dict[PartPosition, str] = {}  # the parts of messages that they came in
        self._pictures: dict[PartPosition, str] = {}
        self._gone: set[PartPosition] = set()

    @property
    def all(self) -> dict[str, AttachedFile]:
        return {**self.earlier, **self.found}

    async def take(
        self,
        files: StoredFiles,
        owner: str,
        file_ids: tuple[str, ...],
        items: Sequence[Item] = (),
        history: Sequence[Item] = (),
    ) -> None:
        """Loads all attached files.

        Raises FileNotFound for unknown or foreign ids, InvalidRequest for unreadable files.
        """
        contents = InlineFileContents(files, owner)
        for id in file_ids:
            self._add_file(_from_stored_file(await contents.find(id)))
        for part in list_file_parts(history, items):
            try:
                await self._take_part(part, contents)
            except (errors.FileNotFound, errors.InvalidRequest) as error:
                if part.where is not None:
                    raise
                if _cannot_be_shown(part, error):
                    self._gone.add(part.place)
        self.earlier = dict(reversed(self.earlier.items()))

    def shown(self, items: list[Item], paths: Mapping[str, str]) -> list[Item]:
        """Returns history and new items for the model: a file becomes a note with its path; pictures stay as sent."""
        changes = {
            place: self._show_part(place, items[place[0]][_parts_key(items[place[0]])][place[1]], paths.get(origin))
            for place, origin in self._places.items()
        }
        return replace_parts(items, {**changes, **dict.fromkeys(self._gone, FILE_GONE_PART)})

    def _show_part(self, place: PartPosition, part: Item, path: str | None) -> Item:
        if part["type"] == "input_file":
            return (
                FILE_GONE_PART
                if path is None
                else _text_part(f"The user's file {path.rpartition('/')[2]} is at {path}.")
            )
        return part if place not in self._pictures else _fill_part(part, "", self._pictures[place])

    async def _take_part(self, part: AttachmentPart, contents: InlineFileContents) -> None:
        if _is_long_inline(part.content):
            attachment = await asyncio.to_thread(_from_inline_part, part.content, part.where or "")
        else:
            attachment = _from_inline_part(part.content, part.where or "")
        if attachment is None and part.file_id is not None:
            file = await contents.find(part.file_id)
            attachment = _from_stored_file(file)
            if part.content["type"] == "input_image":
                self._pictures[part.place] = await contents.url(file, part.where or "")
        if attachment is not None:
            self._add_file(attachment, part)

    def _add_file(self, attachment: AttachedFile, part: AttachmentPart | None = None) -> None:
        known = self.found if part is None or part.where is not None else self.earlier
        if attachment.origin not in self.found and attachment.origin not in self.earlier:
            if len(self.found) + len(self.earlier) >= MAX_ATTACHMENTS:
                message = f"A request can bring {MAX_ATTACHMENTS} files at most."
                raise InvalidContainerOption(message, "input", "array_above_max_length")
            known[attachment.origin] = attachment
        if part is not None:
            self._places[part.place] = attachment.origin


class InlineFileContents:
    """Contents of stored files for an upstream, which knows no ids of ours. Bounded; each file is encoded once."""

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
        """Returns a data URL. Raises InvalidContainerOption if the files are too large in all, FileNotFound."""
        if file.bytes > self._left_bytes or not self._left_parts:
            raise InvalidContainerOption(
                f"Invalid '{where}.file_id': the files that a model is shown can have {MAX_INLINE_BYTES} bytes in all, "
                f"in {MAX_INLINE_PARTS} parts.",
                f"{where}.file_id",
            )
        if file.id not in self._urls:
            self._urls[file.id] = await self._encode_data_url(file)
        self._left_bytes -= file.bytes
        self._left_parts -= 1
        return self._urls[file.id]

    async def _encode_data_url(self, file: StoredFile) -> str:
        content = b"".join([chunk async for chunk in await self._files.chunks(file)])
        mime = mimetypes.guess_type(sanitize_file_name(file.filename))[0] or "application/octet-stream"
        return f"data:{mime};base64,{base64.b64encode(content).decode()}"


async def inline_stored_files(
    files: StoredFiles, owner: str, history: Sequence[Item], items: Sequence[Item]
) -> list[Item]:
    """Returns history and items for an upstream without our container, with stored files inlined.

    Ids that are not ours may be the upstream's own, and stay. Raises InvalidRequest for files that are too large.
    """
    contents = InlineFileContents(files, owner)
    changes: dict[PartPosition, Item] = {}
    for part in list_file_parts(history, items):
        if part.file_id is None:
            continue
        try:
            file = await contents.find(part.file_id)
            url = await contents.url(file, part.where or "")
            changes[part.place] = _fill_part(part.content, sanitize_file_name(file.filename), url)
        except (errors.FileNotFound, errors.InvalidRequest) as error:
            if part.where is not None and isinstance(error, errors.InvalidRequest):
                raise
            if part.where is None and _cannot_be_shown(part, error):
                changes[part.place] = FILE_GONE_PART
    return replace_parts([*history, *items], changes)


def list_file_parts(history: Sequence[Item], items: Sequence[Item]) -> list[AttachmentPart]:
    """Lists the file parts of the request, then of the history, newest first: the oldest may not fit."""
    new = [
        AttachmentPart((len(history) + at, number), part, f"input[{at}].{_parts_key(items[at])}[{number}]")
        for (at, number), part in _iter_file_parts(items)
    ]
    return [*new, *(AttachmentPart(place, part, None) for place, part in reversed(list(_iter_file_parts(history))))]


def replace_parts(items: list[Item], changes: Mapping[PartPosition, Item]) -> list[Item]:
    """Returns the items with these parts replaced."""
    changed = list(items)
    contents: dict[int, list[Any]] = {}
    for (at, number), part in changes.items():
        key = _parts_key(items[at])
        if at not in contents:
            contents[at] = list(items[at][key])
            changed[at] = {**items[at], key: contents[at]}
        contents[at][number] = part
    return changed


def _iter_file_parts(items: Sequence[Item]) -> Iterator[tuple[PartPosition, Item]]:
    for at, item in enumerate(items):
        content, by_id_only = item.get(_parts_key(item)), _parts_key(item) == "output"
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, dict) or part.get("type") not in ("input_file", "input_image"):
                continue
            if isinstance(part.get("file_id"), str) or not by_id_only:
                yield (at, number), part


def _parts_key(item: Item) -> str:
    """Returns the field that holds an item's parts.

    Output of a client's function is for the model: only our ids count in it.
    """
    kind = item.get("type", "message")
    return "output" if kind in ("function_call_output", "custom_tool_call_output") else "content"


def _cannot_be_shown(part: AttachmentPart, error: errors.ClocheError) -> bool:
    """Whether an upstream could not use the part: a file of ours that is gone, or too large for it."""
    if part.file_id is None:
        return "file_data" in part.content
    return not isinstance(error, errors.FileNotFound) or is_own_file_id(part.file_id)


def _text_part(text: str) -> Item:
    return {"type": "input_text", "text": text}


FILE_GONE_PART = _text_part("(A file that the user attached here is no longer there.)")


def _from_stored_file(file: StoredFile) -> AttachedFile:
    return AttachedFile(name=sanitize_file_name(file.filename), origin=file.id, size_bytes=file.bytes, stored=file)


def _is_long_inline(part: Item) -> bool:
    data = part.get("image_url" if part["type"] == "input_image" else "file_data")
    return isinstance(data, str) and len(data) > MAX_UNTHREADED_CHARACTERS


def _from_inline_part(part: Item, where: str) -> AttachedFile | None:
    """Returns the file that a part holds inline; None if it is stored elsewhere."""
    if part["type"] == "input_image":
        url = part.get("image_url")
        return _decode_picture(url) if isinstance(url, str) and url.startswith("data:") else None
    if part.get("file_url"):
        raise InvalidContainerOption(
            "This server does not fetch files: send the file as 'file_data', or upload it and send its 'file_id'.",
            f"{where}.file_url",
        )
    if part.get("file_data") is not None:
        return _decode_file_part(part, where)
    if not part.get("file_id"):
        raise InvalidContainerOption(
            f"Missing required parameter: '{where}.file_id'.", f"{where}.file_id", "missing_required_parameter"
        )
    return None


def _decode_file_part(part: Item, where: str) -> AttachedFile:
    mime, content = _decode_base64(part["file_data"], f"{where}.file_data")
    name = part.get("filename")
    if not isinstance(name, str) or not name:
        name = "file" + (mimetypes.guess_extension(mime) or "")
    return _from_content(sanitize_file_name(name), content)


def _decode_picture(url: str) -> AttachedFile | None:
    """Decodes a picture. Returns None for an unreadable one: the upstream reports that."""
    try:
        mime, content = _decode_base64(url, "image_url")
    except errors.InvalidRequest:
        return None
    extension = {"image/jpeg": ".jpg"}.get(mime) or mimetypes.guess_extension(mime) or ".png"
    return _from_content(f"image{extension}", content)


def _from_content(name: str, content: bytes) -> AttachedFile:
    digest = hashlib.sha256(name.encode() + b"\0")
    digest.update(content)
    return AttachedFile(name=name, origin=f"sha256:{digest.hexdigest()}", size_bytes=len(content), content=content)


def _decode_base64(data: Any, param: str) -> tuple[str, bytes]:
    """The type and the content. Raises InvalidRequest."""
    if not isinstance(data, str):
        raise InvalidContainerOption(f"Invalid type for '{param}': expected a string.", param, "invalid_type")
    header = _DATA_URL.match(data)
    try:
        content = b"".join(_decode_slices(data, header.end() if header else 0))
    except (binascii.Error, ValueError):
        raise InvalidContainerOption(f"Invalid '{param}': expected base64, or a data URL with base64.", param) from None
    return (header[1] or "" if header else ""), content


def _decode_slices(data: str, start: int) -> Iterator[bytes]:
    """Decodes base64 from `start` on, slice by slice. Raises ValueError."""
    for at in range(start, len(data), SLICE_CHARACTERS):
        content = base64.b64decode(data[at : at + SLICE_CHARACTERS], validate=True)
        if at + SLICE_CHARACTERS < len(data) and len(content) != SLICE_CHARACTERS // 4 * 3:
            raise ValueError("padding before the end")
        yield content


def _fill_part(part: Item, name: str, url: str) -> Item:
    if part["type"] == "input_image":
        return {"type": "input_image", "image_url": url, "detail": part.get("detail") or "auto"}
    return {"type": "input_file", "filename": name, "file_data": url}
