"""Files of the store on their way into a sandbox: below /mnt/data, before a program starts.

A reference that leads nowhere, or to somebody else's file, or to a name that another one has, spoils only itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

from cloche import errors
from cloche.api.librechat.identity import Caller, reach_of
from cloche.api.librechat.replies import Notes, Refusal, check_name, named
from cloche.api.librechat.request import DATA, FileRef
from cloche.engine.sandboxes.files import INLINE_BYTES, Content
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.gateway.containers import free_name
from cloche.model import Struct
from cloche.store.librechat import CodeFile, Reach, Ref, StoredCodeFiles

GUARDED_AT_ONCE = 500  # their names go as one message
SMALL_AT_ONCE = 64  # of up to 256 KiB each, which are in memory for a moment


class Input(Struct):
    """A file of the store, and where it is below /mnt/data."""

    path: str
    file: CodeFile


def _nobody(_: Input) -> None:
    """Hears of it."""


class Inputs:
    """Finds what references mean, and writes it into sandboxes."""

    def __init__(self, files: StoredCodeFiles, max_files: int):
        self._files = files
        self._max_files = max_files

    async def find(self, caller: Caller, refs: Sequence[FileRef], notes: Notes) -> list[Input]:
        """One input for each path. Notes say what there is no input for, and what is not where it was asked for."""
        if len(refs) > self._max_files:
            left_out = len(refs) - self._max_files
            notes.add(f"{left_out} files are not here: a program can have {self._max_files} at once. Name fewer")
        refs = refs[: self._max_files]
        asked = [(reach, (ref.session, ref.id)) for ref in refs if (reach := _reach(caller, ref)) is not None]
        found = await self._files.find(asked) if asked else {}
        return _without_duplicates(_named(refs, found, notes), notes)

    async def write(
        self, sandbox: Sandbox, inputs: Iterable[Input], notes: Notes, there: Callable[[Input], None] = _nobody
    ) -> list[Input]:
        """Those that are there now; read-only ones cannot be changed by programs.

        `there` hears of each as soon as it is: whoever is cancelled knows then what was written.
        """
        inputs = list(inputs)
        large = [one for one in inputs if one.file.bytes > INLINE_BYTES]
        small = [one for one in inputs if one.file.bytes <= INLINE_BYTES]
        plain = _unless_read_only(there)
        written = [one for one in large if await self._write_large(sandbox, one, notes, plain)]
        for start in range(0, len(small), SMALL_AT_ONCE):
            written += await self._write_small(sandbox, small[start : start + SMALL_AT_ONCE], notes, plain)
        bare = await _guard(sandbox, [one.path for one in written if one.file.read_only], notes)
        for one in written:
            if one.file.read_only and one.path not in bare:
                there(one)
        return [one for one in written if one.path not in bare]

    async def _write_small(
        self, sandbox: Sandbox, inputs: Sequence[Input], notes: Notes, there: Callable[[Input], None]
    ) -> list[Input]:
        contents = await self._files.contents(one.file for one in inputs)
        writing = (_write(sandbox, one, content, notes, there) for one, content in zip(inputs, contents, strict=True))
        done = await asyncio.gather(*writing)
        return [one for one, is_there in zip(inputs, done, strict=True) if is_there]

    async def _write_large(self, sandbox: Sandbox, one: Input, notes: Notes, there: Callable[[Input], None]) -> bool:
        try:
            chunks = await self._files.chunks(one.file)
        except errors.FileNotFound:
            return await _write(sandbox, one, None, notes, there)
        async with contextlib.aclosing(chunks):
            return await _write(sandbox, one, chunks, notes, there)


def _unless_read_only(there: Callable[[Input], None]) -> Callable[[Input], None]:
    """Such a one is there once it is guarded."""
    return lambda one: None if one.file.read_only else there(one)


async def _write(
    sandbox: Sandbox, one: Input, content: Content | None, notes: Notes, there: Callable[[Input], None]
) -> bool:
    """Whether it is there now. None: the store has it no longer."""
    if content is None:
        notes.add(_gone(named(one.path)))
        return False
    try:
        await sandbox.files.write(DATA + one.path, content, below=DATA)
    except errors.NoSpace:
        notes.add(f"{named(one.path)} is not here: there is no space left for its {one.file.bytes} bytes")
    except (errors.FileError, errors.InvalidPath, errors.FileNotFound) as error:
        notes.add(f"{named(one.path)} is not here: it could not be written ({error})")
    else:
        there(one)
        return True
    return False


async def _guard(sandbox: Sandbox, paths: Sequence[str], notes: Notes) -> Sequence[str]:
    """Those that programs could change after all, and that are therefore not there: something moved them meanwhile."""
    bare: list[str] = []
    for start in range(0, len(paths), GUARDED_AT_ONCE):
        bare += await sandbox.files.guard(DATA, paths[start : start + GUARDED_AT_ONCE])
    for path in bare:
        notes.add(f"{named(path)} is not here: it is read-only, and a program moves it, or what lies above it")
        with contextlib.suppress(errors.FileError, errors.FileNotFound):
            await sandbox.files.remove(DATA + path, below=DATA)
    return bare


def _gone(what: str) -> str:
    return f"{what} is not here: it has expired, was deleted, or never was. Upload it again to use it"


def _reach(caller: Caller, ref: FileRef) -> Reach | None:
    """None for a space that cannot be: then the file is as unknown as any other."""
    try:
        return reach_of(caller, ref.space, "resource_id")
    except Refusal:
        return None


def _named(refs: Sequence[FileRef], found: dict[Ref, CodeFile], notes: Notes) -> list[Input]:
    """Each file once, and under a name that it can have."""
    inputs: dict[tuple[Ref, str], Input] = {}
    for ref in refs:
        file = found.get((ref.session, ref.id))
        if file is None:
            what = named(ref.name) if ref.name else f"file {ref.id}"
            notes.add(_gone(what))
            continue
        try:
            path = check_name(ref.name or file.name)
        except errors.InvalidPath as error:
            notes.add(f"{error}. It is not here: refer to it by another name")
            continue
        inputs[file.ref, path] = Input(path=path, file=file)
    return list(inputs.values())


def _without_duplicates(inputs: list[Input], notes: Notes) -> list[Input]:
    """The newest has the name; of two as old, the one that was named last."""
    placed: dict[str, Input] = {}
    older: list[Input] = []
    for _, one in sorted(enumerate(inputs), key=lambda each: (each[1].file.created_at, each[0]), reverse=True):
        if one.path not in placed:
            placed[one.path] = one
        elif placed[one.path].file.sha256 != one.file.sha256:
            older.append(one)
    for one in older:
        path = free_name(one.path, placed)
        placed[path] = Input(path=path, file=one.file)
        notes.add(f"there are two files {named(one.path)}: the newer one has that name, the older one is {named(path)}")
    return list(placed.values())
