"""envd's wire format: the user of a request, its path, and the description of files. Pure."""

from __future__ import annotations

import base64
import binascii
import posixpath
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from cloche import errors
from cloche.api.dialect import format_timestamp
from cloche.api.e2b.context import e2b_sandbox_of
from cloche.engine.sandboxes.create import DEFAULT_USER_NOTE
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


# -- the calling user, and paths


def parse_user_name(name: str | None, default: User = DEFAULT_USER) -> User:
    """The user of that name; the default for None or an empty name. Raises Unauthenticated."""
    for user in HOMES:
        if user == (name or default):
            return user
    raise errors.Unauthenticated(f"invalid username: {name!r}")


def user_from_query(request: Request) -> User:
    """The user in the query's `username`, else the sandbox's default. Raises Unauthenticated."""
    return parse_user_name(request.query_params.get("username"), default_user_of(request))


def default_user_of(request: Request) -> User:
    """The user for requests that name none: the template's default if a client built the template."""
    return "root" if e2b_sandbox_of(request).info.notes.get(DEFAULT_USER_NOTE) == "root" else DEFAULT_USER


def file_access_user(_user: User) -> User:
    """The user for file access: always root, as in E2B; new files belong to the requesting user.

    Kernels run as root there, so the same client could otherwise not write to or remove a directory that a cell
    has created. It grants nothing new: a holder of the sandbox's token may name root as the user anyway.
    """
    return "root"


def calling_user(request: Request) -> User:
    """The user of a service call: `Authorization: Basic base64("user:")`. Raises Unauthenticated."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return default_user_of(request)
    try:
        name = base64.b64decode(value.strip(), validate=True).decode().partition(":")[0]
        return parse_user_name(name, default_user_of(request))
    except (binascii.Error, UnicodeDecodeError):
        raise errors.Unauthenticated("the Authorization header is not `Basic base64(USER:)`") from None


def resolve_user_path(path: str, user: User) -> str:
    """The absolute path: `~` is the user's home, to which other paths are relative. Raises InvalidPath."""
    if path.startswith("~") and path[1:2] not in ("", "/"):
        raise errors.InvalidPath(f"cannot tell whose home is meant by {path!r}: write the whole path")
    if path.startswith("~"):
        path = path[2:]
    return posixpath.normpath(posixpath.join(HOMES[user], path))


# -- files


def encode_entry_info(info: FileInfo) -> dict[str, Any]:
    """EntryInfo. A symlink has the type and mode of its target; size, permissions and time are its own."""
    described: dict[str, Any] = {
        "name": info.name,
        "type": _TYPES.get(info.kind, "FILE_TYPE_UNSPECIFIED"),
        "path": info.path,
        "size": str(info.size_bytes),
        "mode": info.mode,
        "permissions": format_go_permissions(info.kind, info.mode),
        "owner": info.owner,
        "group": info.group,
        "modifiedTime": format_timestamp(info.modified_at),
    }
    if info.leads_to is not None:
        described["symlinkTarget"] = info.leads_to.path
        described["type"] = _TYPES.get(info.leads_to.kind, "FILE_TYPE_UNSPECIFIED")
        described["mode"] = info.leads_to.mode
    if metadata := metadata_from_attributes(info):
        described["metadata"] = metadata
    return described


def encode_write_info(info: FileInfo) -> dict[str, Any]:
    """The response for a written file."""
    described: dict[str, Any] = {"path": info.path, "name": info.name, "type": "file"}
    if metadata := metadata_from_attributes(info):
        described["metadata"] = metadata
    return described


def metadata_from_attributes(info: FileInfo) -> dict[str, str]:
    space = ATTRIBUTE_SPACE + "."
    return {name[len(space) :]: value for name, value in info.attributes.items() if name.startswith(space)}


def format_go_permissions(kind: FileKind, mode: int) -> str:
    """Go's format of a FileMode: `-rw-r--r--`, `drwxr-xr-x`, `Lrwxrwxrwx`, `dtrwxrwxrwx`."""
    letters = (_KIND_LETTERS[kind] if kind != "file" else "") + "".join(
        letter for bit, letter in _SPECIAL_BITS if mode & bit
    )
    bits = "".join(letter if mode >> 8 - at & 1 else "-" for at, letter in enumerate("rwxrwxrwx"))
    return (letters or "-") + bits


# -- metadata of an upload

METADATA_PREFIX = "x-metadata-"
MAX_METADATA_BYTES = 4096
MAX_METADATA_VALUE_BYTES = 255  # as a sandbox's own programs: see `setxattr` in the policy of system calls


def metadata_from_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The metadata in the `X-Metadata-*` headers. Raises InvalidRequest for values that cannot be stored."""
    given = {name[len(METADATA_PREFIX) :]: value for name, value in headers.items() if name.startswith(METADATA_PREFIX)}
    for name, value in given.items():
        if not name or not all(32 <= ord(letter) < 127 for letter in name + value):
            raise errors.InvalidRequest("names and values of metadata must be printable ASCII, and names not empty")
    if sum(len(name) + len(value) for name, value in given.items()) > MAX_METADATA_BYTES:
        raise errors.InvalidRequest(f"metadata can have {MAX_METADATA_BYTES} bytes in all: send less")
    if any(len(value) > MAX_METADATA_VALUE_BYTES for value in given.values()):
        raise errors.InvalidRequest(f"a value of metadata can have {MAX_METADATA_VALUE_BYTES} bytes: send less")
    return given
