"""The directory of a container that its files are in, as a user sees it: regular files below /mnt/data."""

from __future__ import annotations

import posixpath
import re

from cloche import errors
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.gateway.names import free_name
from cloche.model import FileInfo

DATA = "/mnt/data/"
MAX_DEPTH = 16
MAX_LISTED = 5000
_NOT_UTF8 = re.compile(r"\\udc[89a-f][0-9a-f]")  # how such bytes of a name are shown: nobody could ask for that file


async def regular_file(sandbox: Sandbox, path: str) -> FileInfo | None:
    """The file at a path below /mnt/data that leads through no symlink; None if there is none. Raises Gone."""
    path = posixpath.normpath(path)
    names = path.removeprefix(DATA).split("/")
    if not path.startswith(DATA) or len(names) > MAX_DEPTH:
        return None
    try:
        for depth in range(1, len(names)):
            if (await sandbox.files.stat(DATA + "/".join(names[:depth]))).kind != "directory":
                return None
        info = await sandbox.files.stat(path)
    except (errors.FileError, errors.NotFound, errors.InvalidPath):
        return None
    return info if info.kind == "file" else None


async def regular_files(sandbox: Sandbox) -> tuple[list[FileInfo], bool]:
    """Whether these are all."""
    try:
        found, is_all = await _listed(sandbox, MAX_DEPTH), True
    except errors.FileError:  # too many: those in its subdirectories are left out
        found, is_all = await _listed(sandbox, 1), False
    files = [each for each in found if each.kind == "file" and not _NOT_UTF8.search(each.path)]
    return files[:MAX_LISTED], is_all and len(files) <= MAX_LISTED


async def reserve(sandbox: Sandbox, name: str, reserved: set[str]) -> str:
    """Such a name that neither a file has nor anybody else; it is added to `reserved`."""
    taken: set[str] = set()
    while True:
        free = free_name(name, taken | reserved)
        reserved.add(free)  # before looking: somebody else may ask meanwhile
        try:
            if not await sandbox.files.exists(DATA + free):
                return free
        except BaseException:
            reserved.discard(free)
            raise
        reserved.discard(free)
        taken.add(free)


async def _listed(sandbox: Sandbox, depth: int) -> list[FileInfo]:
    try:
        return await sandbox.files.list(DATA, depth=depth)
    except errors.FileError:
        raise errors.FileError(
            "/mnt/data has more files than can be listed: let code remove some, or pack them"
        ) from None
