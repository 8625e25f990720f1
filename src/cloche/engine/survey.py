"""What lies below a directory of a sandbox, as its init told it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from cloche import errors
from cloche.engine.guest import Reply
from cloche.model import Struct

_Path = Annotated[str, msgspec.Meta(min_length=1, max_length=8192)]
_Size = Annotated[int, msgspec.Meta(ge=0)]
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


class Found(Struct):
    """A regular file. Its SHA-256 is there if it was asked for and the size is the one that was expected."""

    path: str  # relative
    size_bytes: int
    sha256: str | None = None


class Survey(Struct):
    """Regular files and empty directories, by their paths, which lead through no symlink.

    `passed` counts what is left out: "symlink", "special", "hidden" and "deep" directories, "unreadable" ones, those
    that "packages" were installed into lately, and "unnamed": what has a name that is no text.
    """

    files: tuple[Found, ...]
    empty: tuple[str, ...] = ()
    passed: dict[str, int] = {}
    whole: bool = True  # else there is more than could be told
    at_ns: int = 0  # when it began, by the sandbox's clock


class _Told(msgspec.Struct):
    files: list[tuple[_Path, _Size, _Digest | None]]
    empty: list[_Path]


def survey_of(reply: Reply) -> Survey:
    """Raises ProtocolViolation."""
    try:
        told = msgspec.json.decode(reply.body, type=_Told)
        passed = msgspec.convert(reply.ok.get("passed"), dict[str, int])
        at_ns = msgspec.convert(reply.ok.get("at_ns"), _Size)
    except (msgspec.MsgspecError, UnicodeError):
        raise errors.ProtocolViolation("the guest's init sent no survey") from None
    paths = [path for path, _, _ in told.files] + told.empty
    if any(_is_odd(path) for path in paths) or len(set(paths)) != len(paths):
        raise errors.ProtocolViolation("the guest's init sent a survey of paths that cannot be")
    files = tuple(_found(*each) for each in sorted(told.files, key=lambda each: each[0]))
    whole = reply.ok.get("truncated") is False
    return Survey(files=files, empty=tuple(sorted(told.empty)), passed=passed, whole=whole, at_ns=at_ns)


def _found(path: str, size_bytes: int, digest: str | None) -> Found:
    return Found(path=path, size_bytes=size_bytes, sha256=digest)


def _is_odd(path: str) -> bool:
    return any(name in ("", ".", "..") or "\0" in name for name in path.split("/"))
