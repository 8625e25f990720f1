"""Files that a program left in /mnt/data, copied into the store.

All new or changed files are kept. Files that cannot be kept are reported to the model and to its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from itertools import islice

from cloche import errors
from cloche.api.dialect import Json
from cloche.api.librechat.identity import LibreChatCaller, own_space
from cloche.api.librechat.inputs import ProgramInput
from cloche.api.librechat.replies import (
    ProgramNotes,
    check_name,
    content_type_of,
    is_valid_name,
    new_code_id,
    quote_name,
)
from cloche.api.librechat.request import DATA_DIRECTORY
from cloche.config.librechat import LibreChatConfig
from cloche.engine.sandboxes.files import DirectorySurvey, SurveyedFile
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import Struct
from cloche.store.librechat import CodeFile, CodeFileContent, StoredCodeFiles, new_code_file

MAX_COPIES_AT_ONCE = 8
DIRECTORY_MARK = ".dirkeep"  # what stands for a directory with nothing in it, since only files are kept

_LEFT_OUT_REASONS = {
    "unnamed": "a name must be UTF-8. Rename what has another",
    "deep": "what lies ten directories down or more is too deep",
    "unreadable": "what cannot be read, cannot be kept. Change its mode",
}


class ProgramOutput(Struct):
    """A file that a program made, or made of another one."""

    path: str
    file: CodeFile
    made_of: CodeFile | None = None


class CollectedOutputs(Struct):
    """The files after a program's run."""

    outputs: tuple[ProgramOutput, ...] = ()
    inherited: tuple[ProgramInput, ...] = ()  # inputs that are as they were
    deleted: tuple[str, ...] = ()
    failed: int = 0  # outputs that could not be kept
    not_kept: dict[str, int] = {}  # files that are too large to be kept, with their sizes
    empty: tuple[str, ...] = ()  # directories
    at_ns: int = 0  # when all this was so


class OutputChanges(Struct):
    """The changes of a program, before they are stored."""

    made: tuple[SurveyedFile, ...]
    inherited: tuple[ProgramInput, ...]
    deleted: tuple[str, ...]
    ignored: dict[str, int] = {}


class ProgramOutputs:
    """Stores the files that programs made."""

    def __init__(self, files: StoredCodeFiles, config: LibreChatConfig):
        self._files = files
        self._config = config

    async def collect(
        self,
        sandbox: Sandbox,
        caller: LibreChatCaller,
        storage: str,
        inputs: Sequence[ProgramInput],
        notes: ProgramNotes,
        *,
        marks: bool,
        ignored: Mapping[str, int] | None = None,
        since_ns: int = 0,
    ) -> CollectedOutputs:
        """Stores new and changed files in that storage session. `marks`: empty directories, too.

        `ignored` are files, with their sizes, that were reported before as impossible to keep. `since_ns` is the time
        of the last collection (see `Files.survey`; 0 if never). Raises Gone.
        """
        survey = await sandbox.files.survey(DATA_DIRECTORY, _known_sizes(inputs), since_ns=since_ns)
        _note_left_out(survey, notes)
        changes = find_changes(survey, inputs, ignored or {})
        keeping = _OutputCopier(self._files, self._config, sandbox, caller, storage, notes)
        empty = [f"{path}/{DIRECTORY_MARK}" for path in survey.empty] if marks else []
        made = await keeping.keep(changes.made, empty) if changes.made or empty else []
        before = {one.path: one.file for one in inputs}
        return CollectedOutputs(
            outputs=tuple(ProgramOutput(path=file.name, file=file, made_of=before.get(file.name)) for file in made),
            inherited=changes.inherited,
            deleted=changes.deleted,
            failed=len(changes.made) + len(empty) - len(made) + (0 if since_ns else _count_lost(survey)),
            not_kept=dict(islice({**changes.ignored, **keeping.not_kept}.items(), self._config.max_files)),
            empty=survey.empty if marks else self._lasting_directories(survey.empty, notes),
            at_ns=survey.at_ns,
        )

    def _lasting_directories(self, empty: Sequence[str], notes: ProgramNotes) -> tuple[str, ...]:
        """The empty directories that are remembered. They cost no quota, so their number is limited."""
        most = self._config.max_files
        if len(empty) > most:
            notes.add(f"{len(empty) - most} empty directories will not last: a session can have {most}")
        return tuple(path for path in empty[:most] if is_valid_name(path))


class _OutputCopier:
    """Copies the outputs of one program."""

    def __init__(
        self,
        files: StoredCodeFiles,
        config: LibreChatConfig,
        sandbox: Sandbox,
        caller: LibreChatCaller,
        storage: str,
        notes: ProgramNotes,
    ):
        self._files = files
        self._config = config
        self._sandbox = sandbox
        self._caller = caller
        self._storage = storage
        self._notes = notes
        self._turn = asyncio.Semaphore(MAX_COPIES_AT_ONCE)
        self._begun: list[str] = []  # ids of contents
        self.not_kept: dict[str, int] = {}

    async def keep(self, found: Sequence[SurveyedFile], empty: Sequence[str]) -> list[CodeFile]:
        wanted = self._select_possible(found)
        room = self._config.max_files
        if len(wanted) + len(empty) > room:
            over = len(wanted) + len(empty) - room
            self._notes.add(
                f"{over} files were not kept: a program can leave {room} at once. Pack them into one archive"
            )
        wanted, empty = wanted[:room], empty[: max(room - len(wanted), 0)]
        if not await self._has_room(len(wanted), sum(one.size_bytes for one in wanted)):
            return []
        copying = [self._copy_file(one) for one in wanted] + [self._mark_directory(path) for path in empty]
        return await self._add_copied([asyncio.ensure_future(each) for each in copying])

    async def _add_copied(self, copying: Sequence[asyncio.Future[CodeFile | None]]) -> list[CodeFile]:
        """Adds all copied files to the store, or none: also when cancelled."""
        try:
            files = [file for file in await asyncio.gather(*copying) if file is not None]
            if await self._has_room(len(files), sum(file.bytes for file in files)):  # others kept files meanwhile
                await self._files.add(files)
                return files
            await self._files.drop(self._begun)
            return []
        except BaseException:
            for each in copying:
                each.cancel()
            await asyncio.gather(*copying, return_exceptions=True)
            await self._files.drop(self._begun)
            raise

    def _select_possible(self, found: Sequence[SurveyedFile]) -> list[SurveyedFile]:
        wanted = self._within_space([one for one in found if self._is_possible(one)])
        paths = {one.path for one in wanted}
        self.not_kept = {one.path: one.size_bytes for one in found if one.path not in paths}
        return wanted

    def _within_space(self, found: Sequence[SurveyedFile]) -> list[SurveyedFile]:
        """Selects files that fit, the smaller ones first. Sparse files may claim any size."""
        left, wanted = self._sandbox.limits.space_bytes, []
        for one in sorted(found, key=lambda one: one.size_bytes):
            left -= one.size_bytes
            if left >= 0:
                wanted.append(one)
        if len(wanted) < len(found):
            over = len(found) - len(wanted)
            self._notes.add(f"{over} files were not kept: they claim more bytes than there is space for")
        return sorted(wanted, key=lambda one: one.path)

    def _is_possible(self, one: SurveyedFile) -> bool:
        if one.size_bytes > self._config.file_bytes:
            self._notes.add(
                f"{quote_name(one.path)} was not kept: it has {one.size_bytes} bytes, and a file can have "
                f"{self._config.file_bytes}. Compress or split it"
            )
            return False
        try:
            check_name(one.path)
        except errors.InvalidPath as error:
            self._notes.add(f"{error}. It was not kept: rename it")
            return False
        return True

    async def _has_room(self, count: int, size: int) -> bool:
        caller = self._caller
        try:
            await self._files.check_room(caller.owner, caller.tenant, caller.user, files=count or 1, bytes=size)
        except (errors.TooLarge, errors.QuotaExceeded) as error:
            self._notes.add(f"{count} files were not kept: {error}")
            return False
        return True

    async def _copy_file(self, one: SurveyedFile) -> CodeFile | None:
        """None if it could not be read, because it is gone, say. No more is kept of it than there was room for."""
        path, size = one.path, one.size_bytes
        async with self._turn:
            try:
                async with await self._sandbox.files.open(DATA_DIRECTORY + path) as opened:
                    if opened.size_bytes != size:
                        self._notes.add(
                            f"{quote_name(path)} changes while it is read: at most its first {size} bytes are kept"
                        )
                    return self._new_file(path, await self._store_content(opened.chunks(end=size)))
            except (
                errors.FileError,
                errors.NotFound,
                errors.InvalidPath,
                errors.TooLarge,
                errors.Unavailable,
            ) as error:
                self._notes.add(f"{quote_name(path)} was not kept: {error}")
                return None

    async def _mark_directory(self, path: str) -> CodeFile | None:
        try:
            return self._new_file(check_name(path), await self._store_content(_no_chunks()))
        except (errors.InvalidPath, errors.Unavailable):
            return None

    async def _store_content(self, chunks: AsyncGenerator[bytes, None]) -> CodeFileContent:
        id = new_code_id()
        self._begun.append(id)
        return await self._files.put_content(id, chunks, self._config.file_bytes)

    def _new_file(self, path: str, content: CodeFileContent) -> CodeFile:
        space, user, kind = own_space(self._caller), self._caller.user, content_type_of(path)
        return new_code_file(content, space, session=self._storage, user=user, name=path, content_type=kind)


async def _no_chunks() -> AsyncGenerator[bytes, None]:
    return
    yield b""


def find_changes(survey: DirectorySurvey, inputs: Sequence[ProgramInput], ignored: Mapping[str, int]) -> OutputChanges:
    """The differences from the inputs. A read-only input counts as unchanged in any case.

    So does one that was not found by an incomplete survey: it may still exist.
    """
    all_seen = survey.whole and not survey.passed.get("unreadable")
    before, there = {one.path: one for one in inputs}, {found.path: found for found in survey.files}
    differs = [found for found in survey.files if not _is_same(found, before.get(found.path))]
    unseen = [one for one in inputs if one.path not in there and not one.file.read_only]
    spared = frozenset(one.path for one in unseen if not all_seen)
    same = [one for one in inputs if one.file.read_only or one.path in spared or _is_same(there.get(one.path), one)]
    deleted = [one.path for one in unseen if all_seen]
    passed = {found.path: found.size_bytes for found in differs if ignored.get(found.path) == found.size_bytes}
    made = [found for found in differs if found.path not in passed]
    return OutputChanges(made=tuple(made), inherited=tuple(same), deleted=tuple(deleted), ignored=passed)


def _known_sizes(inputs: Sequence[ProgramInput]) -> dict[str, int]:
    """The sizes for a survey to compare. A read-only file is never compared: no file has the size -1."""
    return {one.path: -1 if one.file.read_only else one.file.bytes for one in inputs}


def _is_same(found: SurveyedFile | None, before: ProgramInput | None) -> bool:
    if found is None or before is None:
        return False
    return before.file.read_only or found.sha256 == before.file.sha256


def _note_left_out(survey: DirectorySurvey, notes: ProgramNotes) -> None:
    if not survey.whole:
        notes.add(
            "not all of /mnt/data was looked at: it has too many files. Remove some, or pack them into an archive"
        )
    for why, words in _LEFT_OUT_REASONS.items():
        if count := survey.passed.get(why, 0):
            what = "1 file or directory in /mnt/data was" if count == 1 else f"{count} files or directories were"
            notes.add(f"{what} not kept: {words}")
    if survey.passed.get("packages"):
        notes.add(
            "a directory that packages were installed into (a venv, node_modules) is not kept: install them again "
            "where they are needed"
        )


def _count_lost(survey: DirectorySurvey) -> int:
    """The number of files that should have been kept. Sessions report it once: later their author is unknown."""
    return sum(survey.passed.get(why, 0) for why in _LEFT_OUT_REASONS)


def encode_files(collected: CollectedOutputs) -> Json:
    """The fields of a reply that describe files."""
    fields: Json = {"files": [*map(_encode_output, collected.outputs), *map(_encode_inherited, collected.inherited)]}
    if collected.deleted:
        fields["deleted_files"] = list(collected.deleted)
    if collected.failed:
        delivered = len(collected.outputs)
        fields["artifact_delivery"] = {
            "code": "artifact_delivery_failed",
            "status": "partial" if delivered else "failed",
            "attempted": delivered + collected.failed,
            "delivered": delivered,
            "failed": collected.failed,
        }
    return fields


def _encode_output(output: ProgramOutput) -> Json:
    fields = _encode_file(output.path, output.file)
    if output.made_of is not None:
        source = output.made_of
        fields["modified_from"] = {"id": source.id, "storage_session_id": source.session, "session_id": source.session}
    return fields


def _encode_inherited(one: ProgramInput) -> Json:
    return {**_encode_file(one.path, one.file), "inherited": True}


def _encode_file(path: str, file: CodeFile) -> Json:
    return {"id": file.id, "name": path, "storage_session_id": file.session, "session_id": file.session}
