"""The execution of `cloche run`, after its command line is parsed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from cloche import errors
from cloche.cli import EXIT_CLOCHE_FAILED
from cloche.cli.notebook import save_notebook
from cloche.cli.session import EXIT_INTERRUPTED, cancel_on_signal, open_sandbox, watch_execution
from cloche.cli.terminal import (
    EventLinesView,
    EventView,
    RunJsonView,
    SaveImages,
    StdinLines,
    TerminalView,
    print_message,
)
from cloche.config import Config
from cloche.events import Display, Ended
from cloche.mime_types import EXTENSIONS
from cloche.model import FileInfo, check_seconds
from cloche.sdk.backend import BackendFiles, BackendSandbox

if TYPE_CHECKING:
    from cloche.cli.run import RunCommandOptions

# `--out DIR`: saves the images and files of a run.
#
# Names from a sandbox are hostile: nothing lands outside DIR.

DATA_DIRECTORY = "/mnt/data"
MAX_DEPTH = 32


class _OverLimit(Exception):
    """The files of a sandbox exceed its space."""


class OutputDirectory:
    """Takes as many bytes as the sandbox's own space has, and no more: a sparse file may claim any size."""

    def __init__(self, directory: Path):
        """Raises InvalidRequest if the directory cannot be made."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise errors.InvalidRequest(f"--out {directory}: {error.strerror}") from None
        self._directory = directory
        self._number = 0
        self._numbers: dict[str, int] = {}  # of displays that can be updated
        self._taken: set[Path] = set()
        self._taken_bytes = 0

    def save_images(self, event: Display) -> bool:
        """Writes every image format of a display as `display-N.suffix`. False if it has none."""
        images = {mime: event.data[mime] for mime in EXTENSIONS if mime in event.data}
        if not images:
            return False
        number = self._number_of(event)
        for mime, content in images.items():
            path = self._directory / f"display-{number}.{EXTENSIONS[mime]}"
            encoded = content if isinstance(content, bytes) else str(content).encode("utf-8", "replace")
            with _report_saving(path), _replace_file(path) as file:
                file.write(encoded)
            self._taken.add(path)
            self._taken_bytes += len(encoded)  # how many there can be is the limit of the run's output
        return True

    def _number_of(self, event: Display) -> int:
        if event.update and event.id in self._numbers:
            return self._numbers[event.id]
        self._number += 1
        if event.id is not None:
            self._numbers[event.id] = self._number
        return self._number

    async def save_files(self, files: BackendFiles, uploaded: list[FileInfo], limit_bytes: int) -> None:
        """Copies every file in the data directory that is not exactly as it was uploaded."""
        known = {each.path: each for each in uploaded}
        try:
            root = (await files.stat(DATA_DIRECTORY)).path  # without walls it lies elsewhere
            found = await files.list(DATA_DIRECTORY, depth=MAX_DEPTH)
        except (errors.FileError, errors.NotFound) as error:
            print_message(f"files were not saved: {error}")
            return
        for info in found:
            if info.kind == "file" and not _is_unchanged(info, known.get(info.path)):
                await self._save_file(files, info, root, limit_bytes)

    async def _save_file(self, files: BackendFiles, info: FileInfo, root: str, limit_bytes: int) -> None:
        path = self._target_path(info.path, root)
        if path is None or path in self._taken:
            print_message(
                f"not saved: {info.path} ({'a hidden or strange name' if path is None else 'its name is taken'})"
            )
            return
        if info.size_bytes > limit_bytes - self._taken_bytes:  # without reading it: the others may fit
            print_message(_over_limit_message(path, limit_bytes))
            return
        try:
            chunks = await files.open_read(info.path)
        except (errors.FileError, errors.NotFound) as error:
            print_message(f"not saved: {error}")
            return
        try:
            with _report_saving(path):
                await self._copy_file(chunks, path, limit_bytes)
        except _OverLimit:
            print_message(_over_limit_message(path, limit_bytes))

    async def _copy_file(self, chunks: AsyncGenerator[bytes, None], path: Path, limit_bytes: int) -> None:
        """Counts the bytes that it reads, not the announced size: a file may grow while it is read.

        Holes stay holes.
        """
        async with contextlib.aclosing(chunks):
            path.parent.mkdir(parents=True, exist_ok=True)
            with _replace_file(path) as file:
                async for chunk in chunks:
                    self._taken_bytes += len(chunk)
                    if self._taken_bytes > limit_bytes:
                        raise _OverLimit
                    _write_or_skip(file, chunk)
                file.truncate()

    def _target_path(self, path: str, root: str) -> Path | None:
        """The target path of a sandbox's file.

        None for paths outside of `root` and hidden ones, such as .git/hooks/x.
        """
        parts = PurePosixPath(path).parts[len(PurePosixPath(root).parts) :]
        if not path.startswith(root + "/") or not parts or "\0" in path:
            return None
        if any(part.startswith(".") for part in parts):
            return None
        return self._directory.joinpath(*parts)


def _write_or_skip(file: IO[bytes], chunk: bytes) -> None:
    if chunk.count(0) == len(chunk):
        file.seek(len(chunk), os.SEEK_CUR)
    else:
        file.write(chunk)


def _over_limit_message(path: Path, limit_bytes: int) -> str:
    return f"not saved: {path} (over the limit of {limit_bytes} bytes in all, the space of the sandbox)"


def _is_unchanged(info: FileInfo, before: FileInfo | None) -> bool:
    return before is not None and (info.modified_at, info.size_bytes) == (before.modified_at, before.size_bytes)


@contextlib.contextmanager
def _report_saving(path: Path) -> Iterator[None]:
    """Says on stderr that `path` was saved, or why not: the run's own outcome matters more."""
    try:
        yield
    except OSError as error:
        print_message(f"not saved: {path} ({error.strerror})")
    else:
        print_message(f"saved {path}")


@contextlib.contextmanager
def _replace_file(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes its name when it is whole. It replaces a symlink there and never follows it."""
    umask = os.umask(0)
    os.umask(umask)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=".cloche-")
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o666 & ~umask)
            yield file
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


CHUNK_BYTES = 1 << 20
EXIT_TIMED_OUT = 124
EXIT_OUT_OF_MEMORY = 137


async def run_program(config: Config, ask: RunCommandOptions) -> int:
    """Runs the program and returns the exit status.

    Raises the errors of `session.open_sandbox`, and BrokenPipeError.
    """
    check_seconds("--timeout", ask.timeout_seconds)
    outbox = OutputDirectory(ask.out) if ask.out else None
    with cancel_on_signal():
        async with open_sandbox(
            config, ask.template, env=ask.env, limits=ask.limits, network=ask.network, alone=ask.alone
        ) as box:
            uploaded = [await upload_file(box, path, place) for path, place in ask.uploads]
            view = make_view(ask.form, outbox.save_images if outbox else None)
            status = await _execute_program(box, ask, view)
            if ask.notebook is not None:
                await save_notebook(box, ask.notebook)
            if outbox is not None:
                await _save_outputs(box, outbox, uploaded)
    if isinstance(view, TerminalView) and view.unseen:
        print_message(f"images that cannot be shown here: {view.unseen}; --out DIR saves them")
    return status


def make_view(form: str, save: SaveImages | None = None) -> EventView:
    kinds: dict[str, Callable[[SaveImages | None], EventView]] = {
        "text": TerminalView,
        "events": EventLinesView,
        "json": RunJsonView,
    }
    return kinds[form](save)


async def upload_file(box: BackendSandbox, path: Path, place: str) -> FileInfo:
    try:
        return await box.files.write(place, _read_chunks(path))
    except (errors.ClocheError, OSError) as error:
        raise errors.InvalidRequest(f"--file {path}: {error}") from None


def _read_chunks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from iter(functools.partial(file.read, CHUNK_BYTES), b"")


async def _execute_program(box: BackendSandbox, ask: RunCommandOptions, view: EventView) -> int:
    execution = await box.context().execute(
        ask.code, timeout_seconds=ask.timeout_seconds, input=ask.reads_stdin, argv=ask.argv
    )
    killing: list[asyncio.Future[None]] = []
    presses: list[Callable[[], object]] = [
        execution.interrupt,
        lambda: killing.append(asyncio.ensure_future(box.kill())),
    ]
    ended = await watch_execution(execution, view, StdinLines() if ask.reads_stdin else None, presses)
    if killing:
        await asyncio.wait(killing)
        return EXIT_INTERRUPTED
    return report_end(ended)


def report_end(ended: Ended) -> int:
    """Returns the exit status, and prints the reason of the end where it is not obvious."""
    if ended.reason and not _exited_by_itself(ended):
        print_message(ended.reason.partition(";")[0])  # the rest is about a context that is never used again
    return _exit_status(ended)


def _exited_by_itself(ended: Ended) -> bool:
    """`os._exit(3)`: there is nothing to explain."""
    return ended.outcome == "died" and ended.exit_code is not None and ended.exit_code < 128


def _exit_status(ended: Ended) -> int:
    fixed = {"ok": 0, "timed_out": EXIT_TIMED_OUT, "out_of_memory": EXIT_OUT_OF_MEMORY, "interrupted": EXIT_INTERRUPTED}
    if ended.outcome in fixed:
        return fixed[ended.outcome]
    if ended.exit_code is not None:
        return ended.exit_code
    return 1 if ended.outcome == "raised" else EXIT_CLOCHE_FAILED


async def _save_outputs(box: BackendSandbox, outbox: OutputDirectory, uploaded: list[FileInfo]) -> None:
    try:
        await outbox.save_files(box.files, uploaded, box.limits.space_bytes)
    except errors.Gone as error:
        print_message(f"files were not saved: {error}")
