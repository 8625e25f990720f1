"""envd's values as they are on the wire: who asks, which path is meant, how a file is described. Pure."""

from __future__ import annotations

import base64
import binascii
import posixpath
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from cloche import errors
from cloche.api.e2b.replies import timestamp
from cloche.engine.sandboxes.create import DEFAULT_USER as DEFAULT_USER_NOTE
from cloche.model import FileInfo, FileKind, User

DEFAULT_USER: User = "user"
HOMES: dict[User, str] = {"user": "/home/user", "root": "/root"}
ATTRIBUTE_SPACE = "e2b"  # what clients call a file's metadata are its extended attributes `user.e2b.*`

_TYPES: dict[FileKind | None, str] = {
    "file": "FILE_TYPE_FILE",
    "directory": "FILE_TYPE_DIRECTORY",
    "symlink": "FILE_TYPE_SYMLINK",
}
_KIND_LETTERS = {"file": "-", "directory": "d", "symlink": "L", "other": "?"}
_SPECIAL_BITS = ((0o4000, "u"), (0o2000, "g"), (0o1000, "t"))


# -- who asks, and for what


def user_named(name: str | None, default: User = DEFAULT_USER) -> User:
    """That user of the sandbox; the default one for None or an empty name. Raises Unauthenticated."""
    for user in HOMES:
        if user == (name or default):
            return user
    raise errors.Unauthenticated(f"invalid username: {name!r}")


def user_asked(request: Request) -> User:
    """The one of the query's `username`, else the sandbox's own. Raises Unauthenticated."""
    return user_named(request.query_params.get("username"), default_user(request))


def default_user(request: Request) -> User:
    """As whom things are done where a client names nobody: as its template says, where clients built that."""
    return "root" if request.scope["state"]["resident"].info.notes.get(DEFAULT_USER_NOTE) == "root" else DEFAULT_USER


def rights(_user: User) -> User:
    """With whose rights file work is done, for whichever user: as in E2B, root's, and what is made is the user's.

    Kernels run as root there, so a directory that a cell has made could else not be written to or removed by the same
    client. Nothing is given away: whoever holds the sandbox's token may name root as the user just as well.
    """
    return "root"


def caller(request: Request) -> User:
    """The user as whom a call of a service is made: `Authorization: Basic base64("user:")`. Raises Unauthenticated."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return default_user(request)
    try:
        name = base64.b64decode(value.strip(), validate=True).decode().partition(":")[0]
        return user_named(name, default_user(request))
    except (binascii.Error, UnicodeDecodeError):
        raise errors.Unauthenticated("the Authorization header is not `Basic base64(USER:)`") from None


def absolute(path: str, user: User) -> str:
    """The path that is meant: `~` is the user's home, below which a relative path lies. Raises InvalidPath."""
    if path.startswith("~") and path[1:2] not in ("", "/"):
        raise errors.InvalidPath(f"cannot tell whose home is meant by {path!r}: write the whole path")
    if path.startswith("~"):
        path = path[2:]
    return posixpath.normpath(posixpath.join(HOMES[user], path))


# -- files


def entry(info: FileInfo) -> dict[str, Any]:
    """EntryInfo. A symlink has the type and mode of what it leads to; size, permissions and time are its own."""
    described: dict[str, Any] = {
        "name": info.name,
        "type": _TYPES.get(info.kind, "FILE_TYPE_UNSPECIFIED"),
        "path": info.path,
        "size": str(info.size_bytes),
        "mode": info.mode,
        "permissions": permissions(info.kind, info.mode),
        "owner": info.owner,
        "group": info.group,
        "modifiedTime": timestamp(info.modified_at),
    }
    if info.leads_to is not None:
        described["symlinkTarget"] = info.leads_to.path
        described["type"] = _TYPES.get(info.leads_to.kind, "FILE_TYPE_UNSPECIFIED")
        described["mode"] = info.leads_to.mode
    if metadata := metadata_of(info):
        described["metadata"] = metadata
    return described


def write_info(info: FileInfo) -> dict[str, Any]:
    """What a client is told of a file that it has written."""
    described: dict[str, Any] = {"path": info.path, "name": info.name, "type": "file"}
    if metadata := metadata_of(info):
        described["metadata"] = metadata
    return described


def metadata_of(info: FileInfo) -> dict[str, str]:
    space = ATTRIBUTE_SPACE + "."
    return {name[len(space) :]: value for name, value in info.attributes.items() if name.startswith(space)}


def permissions(kind: FileKind, mode: int) -> str:
    """As Go writes a FileMode: `-rw-r--r--`, `drwxr-xr-x`, `Lrwxrwxrwx`, `dtrwxrwxrwx`."""
    letters = (_KIND_LETTERS[kind] if kind != "file" else "") + "".join(
        letter for bit, letter in _SPECIAL_BITS if mode & bit
    )
    bits = "".join(letter if mode >> 8 - at & 1 else "-" for at, letter in enumerate("rwxrwxrwx"))
    return (letters or "-") + bits


# -- metadata of an upload

METADATA_PREFIX = "x-metadata-"
MAX_METADATA_BYTES = 4096


def metadata_asked(headers: Mapping[str, str]) -> dict[str, str]:
    """What the `X-Metadata-*` headers say. Raises InvalidRequest for what cannot be kept."""
    given = {name[len(METADATA_PREFIX) :]: value for name, value in headers.items() if name.startswith(METADATA_PREFIX)}
    for name, value in given.items():
        if not name or not all(32 <= ord(letter) < 127 for letter in name + value):
            raise errors.InvalidRequest("names and values of metadata must be printable ASCII, and names not empty")
    if sum(len(name) + len(value) for name, value in given.items()) > MAX_METADATA_BYTES:
        raise errors.InvalidRequest(f"metadata can have {MAX_METADATA_BYTES} bytes in all: send less")
    return given
