"""The sandbox's files as resources: listed and read."""

from __future__ import annotations

from typing import Any

from cloche import errors
from cloche.mcp.content import mime_of, resource, sayable
from cloche.mcp.reading import contents
from cloche.mcp.tools_files import decoded
from cloche.mcp.uris import TEMPLATE, path_of, uri_of
from cloche.mcp.workspace import Workspace
from cloche.model import FileInfo
from cloche.sdk import seam

HOME = "/mnt/data"
DEPTH = 4
PAGE = 200
MOST = 5000
TEMPLATES = [
    {
        "uriTemplate": TEMPLATE,
        "name": "file",
        "title": "A file of the sandbox",
        "description": "By its absolute path: sandbox:///mnt/data/plot.png",
    }
]


async def listed(workspace: Workspace, cursor: str | None) -> dict[str, Any]:
    """A page of the files below /mnt/data; none where no sandbox is in use yet. Raises InvalidRequest."""
    start = _start(cursor)
    box = workspace.current
    if box is None:
        return {"resources": []}
    found = [each for each in await _files(box) if each.kind == "file"][:MOST]
    page = found[start : start + PAGE]
    more = {"nextCursor": str(start + PAGE)} if len(found) > start + PAGE else {}
    return {"resources": [_described(each) for each in page], **more}


async def _files(box: seam.Sandbox) -> list[FileInfo]:
    try:
        return await box.files.list(HOME, depth=DEPTH)
    except (errors.Gone, errors.NotFound, errors.FileError):
        return []


def _start(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 10):
        raise errors.InvalidRequest(f"{cursor[:100]!r} is no cursor of this list")
    return int(cursor)


def _described(info: FileInfo) -> dict[str, Any]:
    found: dict[str, Any] = {"uri": uri_of(info.path), "name": sayable(info.path.removeprefix(f"{HOME}/"))}
    mime = mime_of(info.path)
    return {**found, "size": info.size_bytes, **({"mimeType": mime} if mime else {})}


async def read(workspace: Workspace, uri: str) -> dict[str, Any]:
    """Raises FileNotFound, TooLarge and what reading does."""
    path = path_of(uri)
    if workspace.current is None:
        raise errors.FileNotFound("there are no files yet: this session has not used its sandbox")
    data = await contents(workspace.current.files, path)
    words = decoded(data)
    return {"contents": [resource(uri, mime_of(path), data if words is None else words)]}
