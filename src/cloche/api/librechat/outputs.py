"""What a program left in /mnt/data, on its way into the store.

All that is new or changed is kept, whatever it is called. What cannot be is told, to the model and to its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from itertools import islice

from cloche import errors
from cloche.api.librechat.identity import Caller, own_space
from cloche.api.librechat.inputs import Input
from cloche.api.librechat.replies import Json, Notes, check_name, content_type_of, is_name, named, new_code_id
from cloche.api.librechat.request import DATA
from cloche.config.librechat import LibreChat
from cloche.engine.sandboxes.files import Found, Survey
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import Struct
from cloche.store.librechat import CodeFile, Content, StoredCodeFiles, new_file

AT_ONCE = 8
DIRECTORY_MARK = ".dirkeep"  # what stands for a directory with nothing in it, since only files are kept

_LEFT_OUT = {
    "unnamed": "a name must be UTF-8. Rename what has another",
    "deep": "what lies ten directories down or more is too deep",
    "unreadable": "what cannot be read, cannot be kept. Change its mode",
}


class Output(Struct):
    """A file that a program made, or made of another one."""

    path: str
    file: CodeFile
    made_of: CodeFile | None = None


class Collected(Struct):
    """What there is after a program's run."""

    outputs: tuple[Output, ...] = ()
    inherited: tuple[Input, ...] = ()  # inputs that are as they were
    deleted: tuple[str, ...] = ()
    failed: int = 0  # outputs that could not be kept
    not_kept: dict[str, int] = {}  # those that nobody will be able to keep, with their sizes
    empty: tuple[str, ...] = ()  # directories
    at_ns: int = 0  # when all this was so


class Changes(Struct):
    """What a program did, before anything of it is kept."""

    made: tuple[Found, ...]
    inherited: tuple[Input, ...]
    deleted: tuple[str, ...]
    ignored: dict[str, int] = {}


class Outputs:
    """Keeps what programs made."""

    def __init__(self, files: StoredCodeFiles, config: LibreChat):
        self._files = files
        self._config = config

    async def collect(
        self,
        sandbox: Sandbox,
        caller: Caller,
        storage: str,
        inputs: Sequence[Input],
        notes: Notes,
        *,
        marks: bool,
        ignored: Mapping[str, int] | None = None,
        since_ns: int = 0,
    ) -> Collected:
        """Keeps what is new or changed, as files of that storage session. `marks`: empty directories, too.

        `ignored` are files, with their sizes, of which it was said before that they cannot be kept. At
        `since_ns` (see `Files.survey`; 0 if never) all was collected before. Raises Gone.
        """
        survey = await sandbox.files.survey(DATA, _known(inputs), since_ns=since_ns)
        _tell_left_out(survey, notes)
        changes = changes_of(survey, inputs, ignored or {})
        keeping = _Keeping(self._files, self._config, sandbox, caller, storage, notes)
        empty = [f"{path}/{DIRECTORY_MARK}" for path in survey.empty] if marks else []
        made = await keeping.keep(changes.made, empty) if changes.made or empty else []
        before = {one.path: one.file for one in inputs}
        return Collected(
            outputs=tuple(Output(path=file.name, file=file, made_of=before.get(file.name)) for file in made),
            inherited=changes.inherited,
            deleted=changes.deleted,
            failed=len(changes.made) + len(empty) - len(made) + (0 if since_ns else _lost_of(survey)),
            not_kept=dict(islice({**changes.ignored, **keeping.not_kept}.items(), self._config.max_files)),
            empty=survey.empty if marks else self._lasting(survey.empty, notes),
            at_ns=survey.at_ns,
        )

    def _lasting(self, empty: Sequence[str], notes: Notes) -> tuple[str, ...]:
        """Those directories that are remembered. Nobody has to pay for one, so there cannot be any number of them."""
        most = self._config.max_files
        if len(empty) > most:
            notes.add(f"{len(empty) - most} empty directories will not last: a session can have {most}")
        return tuple(path for path in empty[:most] if is_name(path))


class _Keeping:
    """The outputs of one program, being copied."""

    def __init__(
        self,
        files: StoredCodeFiles,
        config: LibreChat,
        sandbox: Sandbox,
        caller: Caller,
        storage: str,
        notes: Notes,
    ):
        self._files = files
        self._config = config
        self._sandbox = sandbox
        self._caller = caller
        self._storage = storage
        self._notes = notes
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._begun: list[str] = []  # ids of contents
        self.not_kept: dict[str, int] = {}

    async def keep(self, found: Sequence[Found], empty: Sequence[str]) -> list[CodeFile]:
        wanted = self._possible(found)
        room = self._config.max_files
        if len(wanted) + len(empty) > room:
            over = len(wanted) + len(empty) - room
            self._notes.add(
                f"{over} files were not kept: a program can leave {room} at once. Pack them into one archive"
            )
        wanted, empty = wanted[:room], empty[: max(room - len(wanted), 0)]
        if not await self._has_room(len(wanted), sum(one.size_bytes for one in wanted)):
            return []
        copying = [self._copy(one) for one in wanted] + [self._mark(path) for path in empty]
        return await self._added([asyncio.ensure_future(each) for each in copying])

    async def _added(self, copying: Sequence[asyncio.Future[CodeFile | None]]) -> list[CodeFile]:
        """All that was copied, once the store knows it. Else nothing of it is left, also when we are cancelled."""
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

    def _possible(self, found: Sequence[Found]) -> list[Found]:
        wanted = self._within_space([one for one in found if self._is_possible(one)])
        paths = {one.path for one in wanted}
        self.not_kept = {one.path: one.size_bytes for one in found if one.path not in paths}
        return wanted

    def _within_space(self, found: Sequence[Found]) -> list[Found]:
        """The smaller ones first. Files with holes may claim any size, and nobody has to store holes."""
        left, wanted = self._sandbox.limits.space_bytes, []
        for one in sorted(found, key=lambda one: one.size_bytes):
            left -= one.size_bytes
            if left >= 0:
                wanted.append(one)
        if len(wanted) < len(found):
            over = len(found) - len(wanted)
            self._notes.add(f"{over} files were not kept: they claim more bytes than there is space for")
        return sorted(wanted, key=lambda one: one.path)

    def _is_possible(self, one: Found) -> bool:
        if one.size_bytes > self._config.file_bytes:
            self._notes.add(
                f"{named(one.path)} was not kept: it has {one.size_bytes} bytes, and a file can have "
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

    async def _copy(self, one: Found) -> CodeFile | None:
        """None if it could not be read: it is gone, say. No more is kept of it than there was room for."""
        path, size = one.path, one.size_bytes
        async with self._turn:
            try:
                async with await self._sandbox.files.open(DATA + path) as opened:
                    if opened.size_bytes != size:
                        self._notes.add(
                            f"{named(path)} changes while it is read: at most its first {size} bytes are kept"
                        )
                    return self._file(path, await self._content(opened.chunks(end=size)))
            except (
                errors.FileError,
                errors.NotFound,
                errors.InvalidPath,
                errors.TooLarge,
                errors.Unavailable,
            ) as error:
                self._notes.add(f"{named(path)} was not kept: {error}")
                return None

    async def _mark(self, path: str) -> CodeFile | None:
        try:
            return self._file(check_name(path), await self._content(_nothing()))
        except (errors.InvalidPath, errors.Unavailable):
            return None

    async def _content(self, chunks: AsyncGenerator[bytes, None]) -> Content:
        id = new_code_id()
        self._begun.append(id)
        return await self._files.put_content(id, chunks, self._config.file_bytes)

    def _file(self, path: str, content: Content) -> CodeFile:
        space, user, kind = own_space(self._caller), self._caller.user, content_type_of(path)
        return new_file(content, space, session=self._storage, user=user, name=path, content_type=kind)


async def _nothing() -> AsyncGenerator[bytes, None]:
    return
    yield b""


def changes_of(survey: Survey, inputs: Sequence[Input], ignored: Mapping[str, int]) -> Changes:
    """What differs from the inputs. A read-only one is as it was, whatever there is now.

    So is one that was not seen, where not all was looked at: nobody knows that it is gone.
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
    return Changes(made=tuple(made), inherited=tuple(same), deleted=tuple(deleted), ignored=passed)


def _known(inputs: Sequence[Input]) -> dict[str, int]:
    """What a survey shall compare. Of a read-only one there is nothing to know: no file has the size -1."""
    return {one.path: -1 if one.file.read_only else one.file.bytes for one in inputs}


def _is_same(found: Found | None, before: Input | None) -> bool:
    if found is None or before is None:
        return False
    return before.file.read_only or found.sha256 == before.file.sha256


def _tell_left_out(survey: Survey, notes: Notes) -> None:
    if not survey.whole:
        notes.add(
            "not all of /mnt/data was looked at: it has too many files. Remove some, or pack them into an archive"
        )
    for why, words in _LEFT_OUT.items():
        if count := survey.passed.get(why, 0):
            what = "1 file or directory in /mnt/data was" if count == 1 else f"{count} files or directories were"
            notes.add(f"{what} not kept: {words}")
    if survey.passed.get("packages"):
        notes.add(
            "a directory that packages were installed into (a venv, node_modules) is not kept: install them again "
            "where they are needed"
        )


def _lost_of(survey: Survey) -> int:
    """What of it should have been kept. Of a session it is told once, as nobody knows whose it is later on."""
    return sum(survey.passed.get(why, 0) for why in _LEFT_OUT)


def encode(collected: Collected) -> Json:
    """The fields that are about files."""
    fields: Json = {"files": [*map(_output, collected.outputs), *map(_inherited, collected.inherited)]}
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


def _output(output: Output) -> Json:
    fields = _file(output.path, output.file)
    if output.made_of is not None:
        source = output.made_of
        fields["modified_from"] = {"id": source.id, "storage_session_id": source.session, "session_id": source.session}
    return fields


def _inherited(one: Input) -> Json:
    return {**_file(one.path, one.file), "inherited": True}


def _file(path: str, file: CodeFile) -> Json:
    return {"id": file.id, "name": path, "storage_session_id": file.session, "session_id": file.session}
