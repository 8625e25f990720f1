"""Stored files that are written into a sandbox, below /mnt/data, before a program starts.

A reference to a missing file, to another caller's file, or to a name already taken affects no other file.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

from cloche import errors
from cloche.api.librechat.identity import LibreChatCaller, reach_of
from cloche.api.librechat.replies import LibreChatRefusal, ProgramNotes, check_name, quote_name
from cloche.api.librechat.request import DATA_DIRECTORY, ProgramFileRef
from cloche.engine.sandboxes.files import INLINE_BYTES
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.file_content import Content
from cloche.gateway.containers import find_free_name
from cloche.model import Struct
from cloche.store.librechat import AccessScope, CodeFile, CodeFileRef, StoredCodeFiles

MAX_GUARDED_AT_ONCE = 500  # their names go as one message
MAX_SMALL_AT_ONCE = 64  # of up to 256 KiB each, which are in memory for a moment


class ProgramInput(Struct):
    """A file of the store, and where it is below /mnt/data."""

    path: str
    file: CodeFile


def _ignore_input(_: ProgramInput) -> None:
    """The default callback of `ProgramInputs.write`."""


class ProgramInputs:
    """Finds the files that references name, and writes them into sandboxes."""

    def __init__(self, files: StoredCodeFiles, max_files: int):
        self._files = files
        self._max_files = max_files

    async def find(
        self, caller: LibreChatCaller, refs: Sequence[ProgramFileRef], notes: ProgramNotes
    ) -> list[ProgramInput]:
        """Returns one input for each path. Notes report missing files, and files placed under another name."""
        if len(refs) > self._max_files:
            left_out = len(refs) - self._max_files
            notes.add(f"{left_out} files are not here: a program can have {self._max_files} at once. Name fewer")
        refs = refs[: self._max_files]
        asked = [(reach, (ref.session, ref.id)) for ref in refs if (reach := _file_reach(caller, ref)) is not None]
        found = await self._files.find(asked) if asked else {}
        return _without_duplicates(_resolve_names(refs, found, notes), notes)

    async def write(
        self,
        sandbox: Sandbox,
        inputs: Iterable[ProgramInput],
        notes: ProgramNotes,
        there: Callable[[ProgramInput], None] = _ignore_input,
    ) -> list[ProgramInput]:
        """Returns the inputs that were written; programs cannot change read-only ones.

        `there` is called with each one as soon as it is written, so that a cancelled caller knows them.
        """
        inputs = list(inputs)
        large = [one for one in inputs if one.file.bytes > INLINE_BYTES]
        small = [one for one in inputs if one.file.bytes <= INLINE_BYTES]
        plain = _unless_read_only(there)
        written = [one for one in large if await self._write_large(sandbox, one, notes, plain)]
        for start in range(0, len(small), MAX_SMALL_AT_ONCE):
            written += await self._write_small(sandbox, small[start : start + MAX_SMALL_AT_ONCE], notes, plain)
        bare = await _guard_files(sandbox, [one.path for one in written if one.file.read_only], notes)
        for one in written:
            if one.file.read_only and one.path not in bare:
                there(one)
        return [one for one in written if one.path not in bare]

    async def _write_small(
        self,
        sandbox: Sandbox,
        inputs: Sequence[ProgramInput],
        notes: ProgramNotes,
        there: Callable[[ProgramInput], None],
    ) -> list[ProgramInput]:
        contents = await self._files.contents(one.file for one in inputs)
        writing = (
            _write_input(sandbox, one, content, notes, there) for one, content in zip(inputs, contents, strict=True)
        )
        done = await asyncio.gather(*writing)
        return [one for one, is_there in zip(inputs, done, strict=True) if is_there]

    async def _write_large(
        self, sandbox: Sandbox, one: ProgramInput, notes: ProgramNotes, there: Callable[[ProgramInput], None]
    ) -> bool:
        try:
            chunks = await self._files.chunks(one.file)
        except errors.FileNotFound:
            return await _write_input(sandbox, one, None, notes, there)
        async with contextlib.aclosing(chunks):
            return await _write_input(sandbox, one, chunks, notes, there)


def _unless_read_only(there: Callable[[ProgramInput], None]) -> Callable[[ProgramInput], None]:
    """A read-only file counts as written once it is guarded."""
    return lambda one: None if one.file.read_only else there(one)


async def _write_input(
    sandbox: Sandbox,
    one: ProgramInput,
    content: Content | None,
    notes: ProgramNotes,
    there: Callable[[ProgramInput], None],
) -> bool:
    """Whether it was written. A content of None means that the store no longer has it."""
    if content is None:
        notes.add(_missing_note(quote_name(one.path)))
        return False
    try:
        await sandbox.files.write(DATA_DIRECTORY + one.path, content, below=DATA_DIRECTORY)
    except errors.NoSpace:
        notes.add(f"{quote_name(one.path)} is not here: there is no space left for its {one.file.bytes} bytes")
    except (errors.FileError, errors.InvalidPath, errors.FileNotFound) as error:
        notes.add(f"{quote_name(one.path)} is not here: it could not be written ({error})")
    else:
        there(one)
        return True
    return False


async def _guard_files(sandbox: Sandbox, paths: Sequence[str], notes: ProgramNotes) -> Sequence[str]:
    """Guards these files. Returns the ones that were moved meanwhile, and are therefore removed."""
    bare: list[str] = []
    for start in range(0, len(paths), MAX_GUARDED_AT_ONCE):
        bare += await sandbox.files.guard(DATA_DIRECTORY, paths[start : start + MAX_GUARDED_AT_ONCE])
    for path in bare:
        notes.add(f"{quote_name(path)} is not here: it is read-only, and a program moves it, or what lies above it")
        with contextlib.suppress(errors.FileError, errors.FileNotFound):
            await sandbox.files.remove(DATA_DIRECTORY + path, below=DATA_DIRECTORY)
    return bare


def _missing_note(what: str) -> str:
    return f"{what} is not here: it has expired, was deleted, or never was. Upload it again to use it"


def _file_reach(caller: LibreChatCaller, ref: ProgramFileRef) -> AccessScope | None:
    """None for a space that cannot exist: then the file is as unknown as any other."""
    try:
        return reach_of(caller, ref.space, "resource_id")
    except LibreChatRefusal:
        return None


def _resolve_names(
    refs: Sequence[ProgramFileRef], found: dict[CodeFileRef, CodeFile], notes: ProgramNotes
) -> list[ProgramInput]:
    """Each file once, and under a name that it can have."""
    inputs: dict[tuple[CodeFileRef, str], ProgramInput] = {}
    for ref in refs:
        file = found.get((ref.session, ref.id))
        if file is None:
            what = quote_name(ref.name) if ref.name else f"file {ref.id}"
            notes.add(_missing_note(what))
            continue
        try:
            path = check_name(ref.name or file.name)
        except errors.InvalidPath as error:
            notes.add(f"{error}. It is not here: refer to it by another name")
            continue
        inputs[file.ref, path] = ProgramInput(path=path, file=file)
    return list(inputs.values())


def _without_duplicates(inputs: list[ProgramInput], notes: ProgramNotes) -> list[ProgramInput]:
    """The newest file keeps the name; of two equally old ones, the one named last."""
    placed: dict[str, ProgramInput] = {}
    older: list[ProgramInput] = []
    for _, one in sorted(enumerate(inputs), key=lambda each: (each[1].file.created_at, each[0]), reverse=True):
        if one.path not in placed:
            placed[one.path] = one
        elif placed[one.path].file.sha256 != one.file.sha256:
            older.append(one)
    for one in older:
        path = find_free_name(one.path, placed)
        placed[path] = ProgramInput(path=path, file=one.file)
        notes.add(
            f"there are two files {quote_name(one.path)}: the newer one has that name, the older one is "
            f"{quote_name(path)}"
        )
    return list(placed.values())
