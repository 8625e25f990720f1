"""Tools for the sandbox's files. Paths are absolute, or relative to /mnt/data."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

import msgspec
from msgspec import Meta

from cloche import errors
from cloche.mcp.call import Answer, Call, Tool
from cloche.mcp.content import Content, contents, embedded, link, mime_of, picture, sayable, text
from cloche.mcp.schemas import Arguments, Given
from cloche.mcp.tools_code import Done, File, file_of
from cloche.mcp.uris import uri_of
from cloche.model import FileInfo

MOST_LISTED = 1000
PICTURES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})

Path = Annotated[str, Meta(description="Absolute, or relative to /mnt/data.", min_length=1)]


class ListFiles(Arguments):
    path: Annotated[str, Meta(description="A directory.")] = "/mnt/data"
    depth: Annotated[int, Meta(ge=1, le=20, description="How many levels.")] = 1


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    kind: str
    size_bytes: int
    uri: str


class Entries(Given):
    files: list[Entry]
    more: int = 0


class OnePath(Arguments):
    path: Path


class ReadFile(Arguments):
    path: Path
    offset: Annotated[int, Meta(ge=0, description="Of text: the first line that is given, from 0 on.")] = 0
    lines: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Of text: how many; by default all.")] = None


class WriteFile(Arguments):
    path: Path
    text: Annotated[str, Meta(description="All that is in the file from now on.")]


class UploadFile(Arguments):
    path: Path
    base64: Annotated[str, Meta(description="The file's bytes, in Base64.")]


class MoveFile(Arguments):
    path: Path
    to: Path


class Written(Given):
    file: File


class ReadGiven(Given):
    file: File
    mime: str
    lines: int | None = None  # of text


async def list_files(call: Call, asked: ListFiles) -> Answer:
    found = await (await call.workspace.box()).files.list(asked.path, depth=asked.depth)
    shown = found[:MOST_LISTED]
    more = len(found) - len(shown)
    lines = [_line(each) for each in shown] or [f"{asked.path} is empty"]
    lines += [f"… and {more} more"] if more else []
    return Answer(text("\n".join(lines)), given=Entries(files=[_entry(each) for each in shown], more=more))


def _line(info: FileInfo) -> str:
    return f"{info.path}/" if info.kind == "directory" else f"{info.path} ({info.size_bytes} bytes)"


def _entry(info: FileInfo) -> Entry:
    return Entry(path=info.path, kind=info.kind, size_bytes=info.size_bytes, uri=uri_of(info.path))


async def read_file(call: Call, asked: ReadFile) -> Answer:
    """Text as text, pictures as pictures, all else as a resource."""
    files = (await call.workspace.box()).files
    info = await files.stat(asked.path)
    data = await contents(files, info.path, _most(call))
    mime = mime_of(info.path) or ""
    if mime in PICTURES:
        return Answer(picture(data, mime), given=ReadGiven(file=file_of(info), mime=mime))
    words = decoded(data)
    if words is None:
        mime = mime or "application/octet-stream"
        return Answer(embedded(uri_of(info.path), mime, data), given=ReadGiven(file=file_of(info), mime=mime))
    lines = words.splitlines(keepends=True)
    part = lines[asked.offset :][: asked.lines]
    given = ReadGiven(file=file_of(info), mime=mime or "text/plain", lines=len(lines))
    return Answer(text("".join(part)), given=given)


def _most(call: Call) -> int:
    """Bytes, of which Base64 makes a third more."""
    return call.told.most_bytes // 2


def decoded(data: bytes) -> str | None:
    """None where it is no text."""
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None


async def write_file(call: Call, asked: WriteFile) -> Answer:
    return await _written(call, asked.path, asked.text.encode("utf-8", "surrogatepass"))


async def upload_file(call: Call, asked: UploadFile) -> Answer:
    try:
        data = base64.b64decode(asked.base64, validate=True)
    except (binascii.Error, ValueError):
        raise errors.InvalidRequest("base64 is no Base64: give the file's bytes in it, without line ends") from None
    return await _written(call, asked.path, data)


async def _written(call: Call, path: str, data: bytes) -> Answer:
    info = await (await call.workspace.box()).files.write(path, data)
    await call.told.resources_changed()
    return Answer(_named(call, info), given=Written(file=file_of(info)))


def _named(call: Call, info: FileInfo) -> Content:
    return link(info) if call.told.knows_links else text(f"{info.path} ({info.size_bytes} bytes)")


async def download_file(call: Call, asked: OnePath) -> Answer:
    files = (await call.workspace.box()).files
    info = await files.stat(asked.path)
    data = await contents(files, info.path, _most(call))
    mime = mime_of(info.path) or "application/octet-stream"
    return Answer(embedded(uri_of(info.path), mime, data), given=ReadGiven(file=file_of(info), mime=mime))


async def move_file(call: Call, asked: MoveFile) -> Answer:
    info = await (await call.workspace.box()).files.move(asked.path, asked.to)
    await call.told.resources_changed()
    return Answer(_named(call, info), given=Written(file=file_of(info)))


async def delete_file(call: Call, asked: OnePath) -> Answer:
    await (await call.workspace.box()).files.remove(asked.path)
    await call.told.resources_changed()
    return Answer(text(f"{sayable(asked.path)} is gone"), given=Done(done=True))


TOOLS = (
    Tool("list_files", "List files", "List a directory of the sandbox.", ListFiles, list_files, Entries,
         reads_only=True),
    Tool("read_file", "Read a file", "Read a file of the sandbox: text as text, a picture as a picture.",
         ReadFile, read_file, ReadGiven, reads_only=True),
    Tool("write_file", "Write a file", "Write text to a file of the sandbox; directories above it are made.",
         WriteFile, write_file, Written, destroys=True, repeats=True),
    Tool("upload_file", "Upload a file", "Put a file of any kind into the sandbox.", UploadFile, upload_file, Written,
         destroys=True, repeats=True),
    Tool("download_file", "Download a file", "A file of the sandbox with its bytes as they are.", OnePath,
         download_file, ReadGiven, reads_only=True),
    Tool("move_file", "Move a file", "Move or rename a file or directory of the sandbox.", MoveFile, move_file, Written,
         destroys=True),
    Tool("delete_file", "Delete a file", "Remove a file, or a directory and what is in it, from the sandbox.",
         OnePath, delete_file, Done, destroys=True),
)  # fmt: skip
