"""Tools for the sandbox's files. Paths are absolute, or relative to /mnt/data."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

import msgspec
from msgspec import Meta

from cloche import errors
from cloche.mcp.call import McpTool, McpToolCall, McpToolResult
from cloche.mcp.content import (
    ContentBlock,
    embedded_block,
    escape_surrogates,
    guess_mime,
    image_block,
    link_block,
    read_file_bytes,
    text_block,
)
from cloche.mcp.schemas import StructuredOutput, ToolArguments
from cloche.mcp.tools_code import DoneOutput, ToolFile, to_tool_file
from cloche.mcp.uris import path_to_uri
from cloche.mime_types import SIGNATURES
from cloche.model import FileInfo

MAX_LISTED = 1000

FilePath = Annotated[str, Meta(description="Absolute, or relative to /mnt/data.", min_length=1)]


class ListFilesArguments(ToolArguments):
    path: Annotated[str, Meta(description="A directory.")] = "/mnt/data"
    depth: Annotated[int, Meta(ge=1, le=20, description="Number of levels.")] = 1


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    kind: str
    size_bytes: int
    uri: str


class FileEntriesOutput(StructuredOutput):
    files: list[FileEntry]
    more: int = 0


class PathArguments(ToolArguments):
    path: FilePath


class ReadFileArguments(ToolArguments):
    path: FilePath
    offset: Annotated[int, Meta(ge=0, description="For text: the first line to return, counted from 0.")] = 0
    lines: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="For text: their number; by default all.")] = (
        None
    )


class WriteFileArguments(ToolArguments):
    path: FilePath
    text: Annotated[str, Meta(description="The new content of the file.")]


class UploadFileArguments(ToolArguments):
    path: FilePath
    base64: Annotated[str, Meta(description="The file's bytes, in Base64.")]


class MoveFileArguments(ToolArguments):
    path: FilePath
    to: FilePath


class WrittenFileOutput(StructuredOutput):
    file: ToolFile


class ReadFileOutput(StructuredOutput):
    file: ToolFile
    mime: str
    lines: int | None = None  # of text


async def list_files(call: McpToolCall, arguments: ListFilesArguments) -> McpToolResult:
    found = await (await call.workspace.box()).files.list(arguments.path, depth=arguments.depth)
    shown = found[:MAX_LISTED]
    more = len(found) - len(shown)
    lines = [_file_line(each) for each in shown] or [f"{arguments.path} is empty"]
    lines += [f"… and {more} more"] if more else []
    return McpToolResult(
        text_block("\n".join(lines)), given=FileEntriesOutput(files=[_file_entry(each) for each in shown], more=more)
    )


def _file_line(info: FileInfo) -> str:
    return f"{info.path}/" if info.kind == "directory" else f"{info.path} ({info.size_bytes} bytes)"


def _file_entry(info: FileInfo) -> FileEntry:
    return FileEntry(path=info.path, kind=info.kind, size_bytes=info.size_bytes, uri=path_to_uri(info.path))


async def read_file(call: McpToolCall, arguments: ReadFileArguments) -> McpToolResult:
    """Text as text, pictures as pictures, all else as a resource."""
    files = (await call.workspace.box()).files
    info = await files.stat(arguments.path)
    data = await read_file_bytes(files, info.path, _max_file_bytes(call))
    mime = guess_mime(info.path) or ""
    if mime in SIGNATURES:
        return McpToolResult(image_block(data, mime), given=ReadFileOutput(file=to_tool_file(info), mime=mime))
    words = decode_text(data)
    if words is None:
        mime = mime or "application/octet-stream"
        return McpToolResult(
            embedded_block(path_to_uri(info.path), mime, data), given=ReadFileOutput(file=to_tool_file(info), mime=mime)
        )
    lines = words.splitlines(keepends=True)
    part = lines[arguments.offset :][: arguments.lines]
    given = ReadFileOutput(file=to_tool_file(info), mime=mime or "text/plain", lines=len(lines))
    return McpToolResult(text_block("".join(part)), given=given)


def _max_file_bytes(call: McpToolCall) -> int:
    """The maximum size of a file, of which Base64 makes a third more."""
    return call.told.most_bytes // 2


def decode_text(data: bytes) -> str | None:
    """The text of the bytes; None where they are not text."""
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None


async def write_file(call: McpToolCall, arguments: WriteFileArguments) -> McpToolResult:
    return await _write_bytes(call, arguments.path, arguments.text.encode("utf-8", "surrogatepass"))


async def upload_file(call: McpToolCall, arguments: UploadFileArguments) -> McpToolResult:
    try:
        data = base64.b64decode(arguments.base64, validate=True)
    except (binascii.Error, ValueError):
        raise errors.InvalidRequest("base64 is not valid Base64: encode the file's bytes, without line ends") from None
    return await _write_bytes(call, arguments.path, data)


async def _write_bytes(call: McpToolCall, path: str, data: bytes) -> McpToolResult:
    info = await (await call.workspace.box()).files.write(path, data)
    await call.told.resources_changed()
    return McpToolResult(_file_block(call, info), given=WrittenFileOutput(file=to_tool_file(info)))


def _file_block(call: McpToolCall, info: FileInfo) -> ContentBlock:
    return link_block(info) if call.told.knows_links else text_block(f"{info.path} ({info.size_bytes} bytes)")


async def download_file(call: McpToolCall, arguments: PathArguments) -> McpToolResult:
    files = (await call.workspace.box()).files
    info = await files.stat(arguments.path)
    data = await read_file_bytes(files, info.path, _max_file_bytes(call))
    mime = guess_mime(info.path) or "application/octet-stream"
    return McpToolResult(
        embedded_block(path_to_uri(info.path), mime, data), given=ReadFileOutput(file=to_tool_file(info), mime=mime)
    )


async def move_file(call: McpToolCall, arguments: MoveFileArguments) -> McpToolResult:
    info = await (await call.workspace.box()).files.move(arguments.path, arguments.to)
    await call.told.resources_changed()
    return McpToolResult(_file_block(call, info), given=WrittenFileOutput(file=to_tool_file(info)))


async def delete_file(call: McpToolCall, arguments: PathArguments) -> McpToolResult:
    await (await call.workspace.box()).files.remove(arguments.path)
    await call.told.resources_changed()
    return McpToolResult(text_block(f"{escape_surrogates(arguments.path)} is gone"), given=DoneOutput(done=True))


TOOLS = (
    McpTool(
        "list_files",
        "List files",
        "List a directory of the sandbox.",
        ListFilesArguments,
        list_files,
        FileEntriesOutput,
        reads_only=True,
    ),
    McpTool(
        "read_file",
        "Read a file",
        "Read a file of the sandbox: text as text, a picture as a picture.",
        ReadFileArguments,
        read_file,
        ReadFileOutput,
        reads_only=True,
    ),
    McpTool(
        "write_file",
        "Write a file",
        "Write text to a file of the sandbox; missing parent directories are created.",
        WriteFileArguments,
        write_file,
        WrittenFileOutput,
        destroys=True,
        repeats=True,
    ),
    McpTool(
        "upload_file",
        "Upload a file",
        "Put a file of any kind into the sandbox.",
        UploadFileArguments,
        upload_file,
        WrittenFileOutput,
        destroys=True,
        repeats=True,
    ),
    McpTool(
        "download_file",
        "Download a file",
        "Return the bytes of a file of the sandbox.",
        PathArguments,
        download_file,
        ReadFileOutput,
        reads_only=True,
    ),
    McpTool(
        "move_file",
        "Move a file",
        "Move or rename a file or directory of the sandbox.",
        MoveFileArguments,
        move_file,
        WrittenFileOutput,
        destroys=True,
    ),
    McpTool(
        "delete_file",
        "Delete a file",
        "Remove a file, or a directory and its contents, from the sandbox.",
        PathArguments,
        delete_file,
        DoneOutput,
        destroys=True,
    ),
)
