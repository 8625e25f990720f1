"""execd's files and directories. They are read and changed with root's rights, and what is made belongs to `user`."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import posixpath
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.dialect import Json, UnsupportedField, decode_json_body, format_timestamp, json_reply
from cloche.api.encoding import RangeNotSatisfiable, RequestedRange, inline_content_disposition, parse_range_header
from cloche.api.http import DropConnection, StreamResponse, read_body_chunks
from cloche.api.multipart import FormPart, iterate_form_parts, parse_form_boundary, read_field_text
from cloche.api.opensandbox.commands import read_file_part
from cloche.api.opensandbox.context import error_reply
from cloche.api.opensandbox.execd import ExecdPlane, MissingQueryParameter, require_query_parameter
from cloche.engine.sandboxes.files import OpenFile, SandboxFiles
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import FileInfo, Struct, User

# The wire format of files: decodes requests, encodes entries. Pure.

HOME = "/home/user"
MAX_DEPTH = 4096  # no path has more parts
MAX_PATTERN = 1024  # letters
MAX_ALTERNATIVES = 32
MAX_REPLACED_BYTES = 64 << 20  # of a file whose text is replaced
REPLACED_STEP_BYTES = 1 << 16
USER_ID = 1000
_ALTERNATIVES = re.compile(r"\{([^{}]*)\}")
BYTES_TYPE = "application/octet-stream"
TEXT_TYPE = "text/plain; charset=utf-8"
FILE_HEADERS = {
    # A file is a stranger's: no page of it may act in the name of the server that it comes from.
    "content-security-policy": "sandbox",
    "x-content-type-options": "nosniff",
}


class PermissionBody(Struct):
    mode: int | None = None
    owner: str | None = None
    group: str | None = None


class UploadMetadata(PermissionBody):
    path: str = ""


class MoveFileBody(Struct):
    src: str
    dest: str


class ReplaceTextBody(Struct):
    old: str
    new: str


def encode_file_info(info: FileInfo) -> Json:
    """An entry. File systems of sandboxes do not tell when a file was made: it is the time of its last change."""
    changed = format_timestamp(info.modified_at)
    return {
        "path": info.path,
        "type": info.kind,
        "size": info.size_bytes,
        "modified_at": changed,
        "created_at": changed,
        "owner": info.owner,
        "group": info.group,
        "mode": encode_mode(info.mode),
    }


def encode_mode(mode: int) -> int:
    """The octal digits as a decimal number: 0o644 is 644."""
    return int(f"{mode & 0o7777:o}")


def decode_mode(given: int | None) -> int | None:
    """None for 0 and None: nothing is changed then. Raises InvalidRequest."""
    if not given:
        return None
    try:
        return int(str(given), 8)
    except ValueError:
        raise errors.InvalidRequest(f"mode: its octal digits as a number, such as 644, not {given}") from None


def resolve_home(path: str) -> str:
    """The path, with `~` as the home of `user`. Raises InvalidRequest for an empty one."""
    if not path:
        raise errors.InvalidRequest("path: it is empty")
    return HOME + path[1:] if path == "~" or path.startswith("~/") else path


def expand_pattern(pattern: str) -> list[str]:
    """A pattern with alternatives, `*.{py,txt}`, as patterns without. Raises InvalidRequest for too many."""
    if len(pattern) > MAX_PATTERN:
        raise errors.InvalidRequest(f"pattern: it has {MAX_PATTERN} letters at most")
    patterns, done = [pattern], list[str]()
    while patterns:
        match = _ALTERNATIVES.search(each := patterns.pop())
        if match is None:
            done.append(each)
        else:
            patterns += [each[: match.start()] + one + each[match.end() :] for one in match[1].split(",")]
        if len(patterns) + len(done) > MAX_ALTERNATIVES:
            raise errors.InvalidRequest(f"pattern: it has {MAX_ALTERNATIVES} alternatives at most")
    return list(dict.fromkeys(done))


def compile_pattern(pattern: str) -> Callable[[str], object]:
    """A function that tells whether a name matches. Raises InvalidRequest."""
    return re.compile("|".join(map(fnmatch.translate, expand_pattern(pattern)))).match


class FileIdentity(NamedTuple):
    """Whose rights an operation has, and to whom new files are given."""

    user: User
    owner: User


def requested_identity(request: Request) -> FileIdentity:
    """The identity in the path, `/v1/filesystem/{uid}/{gid}`, else the default one. Raises UnsupportedField."""
    given = (request.path_params.get("uid"), request.path_params.get("gid"))
    if given == (None, None):
        return FileIdentity(user="root", owner="user")
    if given == ("0", "0"):
        return FileIdentity(user="root", owner="root")
    if given == (str(USER_ID), str(USER_ID)):
        return FileIdentity(user="user", owner="user")
    raise UnsupportedField(f"files can be used as 0/0 (root) and as {USER_ID}/{USER_ID} (user); give one of these")


def replace_in_pieces(content: bytes, old: bytes, new: bytes) -> Iterator[tuple[bytes, int]]:
    """What `content.replace(old, new)` returns, piece by piece, each with its number of places.

    Raises FileError before the result is longer than a file may be.

    For 64 MiB of one letter that takes three seconds, in which the interpreter does nothing else.
    """
    step, rest, size = max(REPLACED_STEP_BYTES, len(old)), b"", 0
    for start in range(0, len(content), step):
        piece = rest + content[start : start + step]
        *before, tail = piece.split(old)
        begun = min(len(tail), len(old) - 1)  # of the tail's end, where the next place may begin
        rest = tail[len(tail) - begun :]
        size += sum(map(len, before)) + len(before) * len(new) + len(tail) - begun
        if size > MAX_REPLACED_BYTES:
            raise errors.FileError(f"the file would have more than {MAX_REPLACED_BYTES} bytes")
        yield new.join([*before, tail[: len(tail) - begun]]), len(before)
    yield rest, 0


# The owners and groups of a sandbox by their names.

MAX_PASSWD_BYTES = 256 << 10


class SandboxAccounts:
    """The ids of a sandbox's users and groups, read when they are first needed."""

    def __init__(self, sandbox: Sandbox):
        self._sandbox = sandbox
        self._read: dict[str, dict[str, int]] = {}

    async def id_of(self, name: str | None, table: str) -> int | None:
        """The id of that name, or number: `table` is passwd or group. Raises InvalidRequest for an unknown one."""
        if not name:
            return None
        if name.isascii() and name.isdigit() and len(name) < 6:
            return int(name)
        if table not in self._read:
            content = await read_file_part(self._sandbox, f"/etc/{table}", 0, MAX_PASSWD_BYTES)
            self._read[table] = _parse_accounts(content.decode("utf-8", "replace"))
        if name not in self._read[table]:
            raise errors.InvalidRequest(f"the sandbox has no {name[:80]!r} in /etc/{table}")
        return self._read[table][name]


def _parse_accounts(text: str) -> dict[str, int]:
    rows = (line.split(":") for line in text.splitlines())
    return {row[0]: int(row[2]) for row in rows if len(row) > 2 and row[2].isascii() and row[2].isdigit()}


# Files and directories of one request.


class ExecdFiles:
    def __init__(self, sandbox: Sandbox, identity: FileIdentity):
        self._files: SandboxFiles = sandbox.files
        self._accounts = SandboxAccounts(sandbox)
        self._identity = identity

    async def describe(self, path: str) -> FileInfo:
        return await self._files.stat(resolve_home(path), user=self._identity.user)

    async def open(self, path: str) -> OpenFile:
        return await self._files.open(resolve_home(path), user=self._identity.user)

    async def list(self, path: str, depth: int) -> list[FileInfo]:
        return await self._files.list(resolve_home(path), depth=depth, user=self._identity.user)

    async def write(self, path: str, content: AsyncIterator[bytes], message: PermissionBody) -> None:
        await self._files.write(
            resolve_home(path),
            content,
            user=self._identity.user,
            owner=self._identity.owner,
            mode=decode_mode(message.mode),
            in_place=True,  # an existing file keeps its owner
        )
        await self._give_to(path, message)

    async def make_dir(self, path: str, message: PermissionBody) -> None:
        await self._files.make_dir(resolve_home(path), user=self._identity.user, owner=self._identity.owner)
        await self.change(path, message)

    async def change(self, path: str, message: PermissionBody) -> None:
        mode = decode_mode(message.mode)
        if mode is not None:
            await self._files.change(resolve_home(path), mode=mode, user=self._identity.user)
        await self._give_to(path, message)

    async def move(self, source: str, target: str) -> None:
        """Raises FileExists: nothing is replaced."""
        source, target = resolve_home(source), resolve_home(target)
        if await self._files.exists(target, user=self._identity.user):
            raise errors.FileExists(f"destination path already exists: {target}")
        await self._files.move(source, target, user=self._identity.user, owner=self._identity.owner)

    async def remove_file(self, path: str) -> None:
        """A missing one is no error. Raises IsADirectory."""
        with contextlib.suppress(errors.FileNotFound):
            if (await self.describe(path)).kind == "directory":
                raise errors.IsADirectory(f"path is a directory: {path}")
            await self._files.remove(resolve_home(path), user=self._identity.user)

    async def remove_tree(self, path: str) -> None:
        """With all that is in it. A missing one is no error."""
        with contextlib.suppress(errors.FileNotFound):
            await self._files.remove(resolve_home(path), user=self._identity.user)

    async def replace(self, path: str, message: ReplaceTextBody) -> int:
        """Replaces a text everywhere in a file. The number of places."""
        if not message.old:
            raise errors.InvalidRequest("old content must not be empty")
        file = await self.open(path)
        if file.size_bytes > MAX_REPLACED_BYTES:
            file.close()
            raise errors.FileError(f"{path} has {file.size_bytes} bytes: {MAX_REPLACED_BYTES} can be replaced in")
        content = b"".join([chunk async for chunk in file.until_read(MAX_REPLACED_BYTES)])
        old, new = message.old.encode("utf-8", "surrogatepass"), message.new.encode("utf-8", "surrogatepass")
        pieces, count = list[bytes](), 0
        for piece, places in replace_in_pieces(content, old, new):
            await asyncio.sleep(0)  # others have their turn
            pieces.append(piece)
            count += places
        if count:
            await self._files.write(resolve_home(path), b"".join(pieces), user=self._identity.user, in_place=True)
        return count

    async def _give_to(self, path: str, message: PermissionBody) -> None:
        uid = await self._accounts.id_of(message.owner, "passwd")
        gid = await self._accounts.id_of(message.group, "group")
        if uid is not None or gid is not None:
            await self._files.change(resolve_home(path), uid=uid, gid=gid, user=self._identity.user)


IDENTITY_PREFIX = "/v1/filesystem/{uid}/{gid}"


class FilePlane:
    def __init__(self, plane: ExecdPlane):
        self._plane = plane

    @property
    def routes(self) -> list[BaseRoute]:
        return [each for prefix in ("", IDENTITY_PREFIX) for each in self._routes_below(prefix)]

    def _routes_below(self, prefix: str) -> Iterator[BaseRoute]:
        route = self._plane.route
        yield route("POST", f"{prefix}/files/upload", self.upload)
        yield route("GET", f"{prefix}/files/download", self.download)
        yield route("GET", f"{prefix}/files/info", self.describe)
        yield route("GET", f"{prefix}/files/search", self.search)
        yield route("POST", f"{prefix}/files/mv", self.move)
        yield route("POST", f"{prefix}/files/permissions", self.change)
        yield route("POST", f"{prefix}/files/replace", self.replace)
        yield route("DELETE", f"{prefix}/files", self.remove_files)
        yield route("POST", f"{prefix}/directories", self.make_dirs)
        yield route("GET", f"{prefix}/directories/list", self.list)
        yield route("DELETE", f"{prefix}/directories", self.remove_dirs)

    async def upload(self, request: Request) -> Response:
        """A form with pairs of fields: `metadata`, then `file`."""
        files, _ = await self._enter(request)
        boundary = parse_form_boundary(request.headers.get("content-type", ""))
        body = read_body_chunks(request, self._plane.api.config.server.upload_bytes)
        async with contextlib.aclosing(body), contextlib.aclosing(iterate_form_parts(body, boundary)) as parts:
            about: UploadMetadata | None = None
            async for part in parts:
                if part.name == "metadata":
                    about = await _read_metadata(part)
                elif part.name == "file":
                    if about is None:
                        raise errors.InvalidRequest("metadata file is missing: it comes before each file")
                    await files.write(about.path, part.chunks, about)
                    about = None
        return Response()

    async def download(self, request: Request) -> Response:
        files, sandbox = await self._enter(request)
        path, query = require_query_parameter(request, "path"), request.query_params
        by_lines = "offset" in query or "limit" in query
        if by_lines and "range" in request.headers:
            raise errors.InvalidRequest("offset and limit, which count lines, and the Range header exclude each other")
        first = _parse_line_number("offset", query.get("offset")) or 1
        most = _parse_line_number("limit", query.get("limit"))
        file = await files.open(path)
        if by_lines:
            lines = _stream_lines(file, first, most)
            return StreamResponse(lines, headers=FILE_HEADERS, media_type=TEXT_TYPE, until=sandbox.wait_ended)
        try:
            return _file_response(file, request, sandbox)
        except BaseException:
            file.close()
            raise

    async def describe(self, request: Request) -> Response:
        files, _ = await self._enter(request)
        paths = request.query_params.getlist("path")
        return json_reply({path: encode_file_info(await files.describe(path)) for path in paths})

    async def search(self, request: Request) -> Response:
        """All below that directory but directories, whose own name matches the pattern."""
        files, _ = await self._enter(request)
        path = require_query_parameter(request, "path")
        matches = compile_pattern(request.query_params.get("pattern") or "*")
        found = [each for each in await files.list(path, MAX_DEPTH) if each.kind != "directory"]
        return json_reply([encode_file_info(each) for each in found if matches(each.name)])

    async def list(self, request: Request) -> Response:
        files, _ = await self._enter(request)
        path = require_query_parameter(request, "path")
        depth = _parse_depth(request.query_params.get("depth"))
        kind = (await files.describe(path)).kind
        if kind != "directory":
            raise errors.NotADirectory(
                f"path is {'a symbolic link' if kind == 'symlink' else 'not a directory'}: {path}"
            )
        return json_reply([encode_file_info(each) for each in await files.list(path, depth)] if depth else [])

    async def move(self, request: Request) -> Response:
        files, _ = await self._enter(request)
        for asked in await self._plane.json_body(request, list[MoveFileBody]):
            await files.move(asked.src, asked.dest)
        return Response()

    async def change(self, request: Request) -> Response:
        files, _ = await self._enter(request)
        for path, asked in (await self._read_permissions(request)).items():
            await files.change(path, asked)
        return Response()

    async def replace(self, request: Request) -> Response:
        files, _ = await self._enter(request)
        asked = await self._plane.json_body(request, dict[str, ReplaceTextBody])
        counts = {path: await files.replace(path, text) for path, text in asked.items()}
        if request.query_params.get("verbose") != "true":
            return Response()
        return json_reply({path: {"replacedCount": count} for path, count in counts.items()})

    async def remove_files(self, request: Request) -> Response:
        files, _ = await self._enter(request)
        for path in _require_paths(request):
            await files.remove_file(path)
        return Response()

    async def make_dirs(self, request: Request) -> Response:
        files, _ = await self._enter(request)
        for path, asked in (await self._read_permissions(request)).items():
            await files.make_dir(path, asked)
        return Response()

    async def remove_dirs(self, request: Request) -> Response:
        files, _ = await self._enter(request)
        for path in _require_paths(request):
            await files.remove_tree(path)
        return Response()

    async def _enter(self, request: Request) -> tuple[ExecdFiles, Sandbox]:
        sandbox, _ = await self._plane.enter(request)
        return ExecdFiles(sandbox, requested_identity(request)), sandbox

    async def _read_permissions(self, request: Request) -> Mapping[str, PermissionBody]:
        return await self._plane.json_body(request, dict[str, PermissionBody])


def _require_paths(request: Request) -> list[str]:
    paths = request.query_params.getlist("path")
    if not paths:
        raise MissingQueryParameter("missing query parameter 'path'")
    return paths


async def _read_metadata(part: FormPart) -> UploadMetadata:
    return decode_json_body((await read_field_text(part)).encode(), UploadMetadata)


def _parse_depth(given: str | None) -> int:
    if given is None:
        return 1
    if not (given.isascii() and given.isdigit()):
        raise errors.InvalidRequest(f"depth: it must be a number of levels, not {given[:80]!r}")
    return min(int(given[:8]), MAX_DEPTH)


def _parse_line_number(name: str, given: str | None) -> int | None:
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < 16 and int(given)):
        raise errors.InvalidRequest(f"{name}: it must be a number of lines from 1, not {given[:80]!r}")
    return int(given)


def _file_response(file: OpenFile, request: Request, sandbox: Sandbox) -> Response:
    name = posixpath.basename(request.query_params["path"])
    disposition = inline_content_disposition(name).replace("inline", "attachment", 1)
    headers = {**FILE_HEADERS, "accept-ranges": "bytes", "content-disposition": disposition}
    span, status = RequestedRange(0, file.size_bytes, file.size_bytes), 200
    try:
        asked = parse_range_header(request.headers.get("range"), file.size_bytes)
    except RangeNotSatisfiable:
        file.close()
        response = error_reply(416, "INVALID_FILE", f"the range is behind the file's {file.size_bytes} bytes")
        response.headers["content-range"] = f"bytes */{span.end}"
        return response
    if asked is not None:
        span, status = asked, 206
        headers["content-range"] = span.content_range
    headers["content-length"] = str(span.end - span.start)
    content = _stream_span(file, span)
    return StreamResponse(content, status_code=status, headers=headers, media_type=BYTES_TYPE, until=sandbox.wait_ended)


async def _stream_span(file: OpenFile, span: RequestedRange) -> AsyncGenerator[bytes, None]:
    left = span.end - span.start
    async with file, contextlib.aclosing(file.chunks(span.start, span.end)) as chunks:
        async for chunk in chunks:
            left -= len(chunk)
            yield chunk
    if left:
        raise DropConnection  # a program cut the file meanwhile, and its old length is promised already


async def _stream_lines(file: OpenFile, first: int, most: int | None) -> AsyncGenerator[bytes, None]:
    """The lines from `first` on, the first being 1, without the end of the last one."""
    number, held = 1, b""
    async with file, contextlib.aclosing(_normalize_line_ends(file.chunks(0, file.size_bytes))) as chunks:
        async for chunk in chunks:
            lines = chunk.split(b"\n")  # the first one goes on a line of the chunk before
            last = len(lines) if most is None else first + most - number
            piece = held + b"\n".join(lines[max(first - number, 0) : max(last, 0)])
            held = b"\n" if piece.endswith(b"\n") else b""
            if content := piece.removesuffix(held):
                yield content
            number += len(lines) - 1
            if most is not None and number >= first + most:
                return


async def _normalize_line_ends(chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    held = b""
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            whole = held + chunk
            held = b"\r" if whole.endswith(b"\r") else b""
            yield whole.removesuffix(held).replace(b"\r\n", b"\n")
    if held:
        yield held
