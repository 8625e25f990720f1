"""Paths inside a sandbox, as callers give them. Resolving them is the guest's work, never the host's."""

from __future__ import annotations

import posixpath

from cloche import errors

MAX_PATH = 4096


def check_cwd(cwd: object) -> None:
    """Raises InvalidPath unless `cwd` is None or something that `sandbox_path` takes."""
    if cwd is not None:
        sandbox_path(cwd, "/")


def sandbox_path(path: object, cwd: str) -> str:
    """An absolute path for the guest's init; relative ones are below `cwd`. Raises InvalidPath."""
    if not isinstance(path, str):
        raise errors.InvalidPath(f"a path must be a string, not {type(path).__name__}")
    if not path:
        raise errors.InvalidPath("a path must not be empty")
    if "\0" in path:
        raise errors.InvalidPath(f"a path cannot hold a NUL character: {path!r}")
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise errors.InvalidPath(f"a path must be valid Unicode: {path!r}") from None
    if size > MAX_PATH:
        raise errors.InvalidPath(f"a path can have {MAX_PATH} bytes, not {size}")
    return posixpath.join(cwd, path)
