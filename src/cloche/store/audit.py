"""The audit log on disk: `<data_dir>/audit/DAY.jsonl`, one line for each action, never changed.

Each line holds the hash of the previous line of the same host process and, if another process wrote the line
before it, the hash of that line, too: changed or removed lines are found, also all those of a process (see
`audit_reader.verify_log`). Names of owners count in that hash by a pseudonym: an owner can be erased by
replacing the name with it, without breaking the chain. Several processes append at once, whole lines each.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from cloche.model import KIB, new_id
from cloche.store.retention_clock import retention_now

SEGMENTS = 8  # into which the log is cut, so that the oldest can go
MIN_SEGMENT_BYTES = 64 * KIB
SALT_FILE = "salt"
REMOVED_EVENT = "audit.removed"  # the log says so itself when a file of it has gone for its age or the log's size
CLOSED_EVENT = "audit.closed"  # the last line of a process that ended as it should
HASH_LENGTH = 32
DAY_SECONDS = 86400.0
DRAFT_SECONDS = 3600.0
TAIL_BYTES = 1 << 16  # in which the last line of a file is found
TOO_MUCH_REASON = "there was more than audit.max_bytes"

_FILE = re.compile(r"(\d{4}-\d{2}-\d{2})(?:\.(\d{1,6}))?\.jsonl")


class AuditLine(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One action and its actor. It holds no code, no content, no name of a file."""

    at: str
    what: str
    owner: str = ""  # of the object
    by: str = ""  # the actor: an owner
    key: str = ""  # with which key, by its id; "sandbox-token:ID", "local" (no key was needed) or "server" (by itself)
    sandbox: str = ""
    id: str = ""  # of the object, if that is no sandbox
    outcome: str = ""
    about: str = ""  # the template of a route, a port, a reason of ours
    bytes: int = 0
    count: int = 1  # of a flood: so many of them, from `at` until `until`
    until: str = ""
    instance: str = ""
    n: int = 0  # of that process
    prev: str = ""  # the hash of its line before
    after: str = ""  # the hash of the line before this one in the log, where that is another process's

    @property
    def is_ours(self) -> bool:
        """Whether a process of Cloche can have written it."""
        return self.n >= 1 and bool(self.instance)


class PrunableFile(NamedTuple):
    name: str
    bytes: int
    why: str


class AuditFileName(NamedTuple):
    """The name of a log file. Names sort in the order in which the files were written."""

    day: str
    number: int

    def __str__(self) -> str:
        return f"{self.day}.{self.number}.jsonl" if self.number else f"{self.day}.jsonl"


def parse_file_name(name: str) -> AuditFileName | None:
    found = _FILE.fullmatch(name)
    return AuditFileName(found[1], int(found[2] or 0)) if found else None


def list_files(directory: Path) -> list[AuditFileName]:
    """Lists the log files, the oldest first. Raises OSError."""
    try:
        return sorted(found for name in os.listdir(directory) if (found := parse_file_name(name)) is not None)
    except FileNotFoundError:
        return []


def load_salt(directory: Path) -> bytes:
    """Returns the salt of the pseudonyms, made at the first use. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / SALT_FILE
    if not path.exists():
        draft = directory / f".{SALT_FILE}-{secrets.token_hex(8)}"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # the first process wins
        draft.unlink()
    return path.read_bytes()


@functools.lru_cache(maxsize=1000)
def make_pseudonym(name: str, salt: bytes) -> str:
    """Returns the pseudonym of a name. No name of an owner begins as these do."""
    if not name or name.startswith("#"):
        return name
    return "#" + hashlib.sha256(salt + name.encode()).hexdigest()[:16]


def hash_line(line: AuditLine, salt: bytes) -> str:
    """Returns the hash that the next line has as `prev`."""
    bare = msgspec.structs.replace(line, owner=make_pseudonym(line.owner, salt), by=make_pseudonym(line.by, salt))
    return hashlib.sha256(msgspec.json.encode(bare)).hexdigest()[:HASH_LENGTH]


class AuditFileWriter:
    """Appends the lines of one host process. Not safe for several threads at once."""

    def __init__(self, directory: Path, instance: str, max_bytes: int):
        self.directory = directory
        self._instance = instance
        self.segment_bytes = max(max_bytes // SEGMENTS, MIN_SEGMENT_BYTES)
        self.turned = False  # whether the last append began a file, or is in one that another process began
        self._salt = b""
        self._n, self._prev = 0, ""
        self._last = AuditFileName("", 0)

    def append(self, lines: Sequence[AuditLine], *, sync: bool = False) -> None:
        """Appends all lines or none. Raises OSError. `sync`: returns when the disk has them."""
        self._salt = self._salt or load_salt(self.directory)
        with _lock_directory(self.directory):
            name = self._current_file()
            with lock_file(self.directory / str(name)) as fd:
                n, prev, encoded = self._link_lines(lines, find_last_line(self.directory, name))
                _append_lines(fd, encoded, sync)
        self.turned = name != self._last
        self._n, self._prev, self._last = n, prev, name

    def _link_lines(self, lines: Sequence[AuditLine], before: AuditLine | None) -> tuple[int, str, bytes]:
        """Links the lines. Returns their last number and hash, and their encoding."""
        n, prev, encoded = self._n, self._prev, []
        for n, line in enumerate(lines, self._n + 1):
            line.instance, line.n, line.prev, line.after = self._instance, n, prev, ""
            if before is not None and before.instance != self._instance:
                line.after = hash_line(before, self._salt)
            before, prev = line, hash_line(line, self._salt)
            encoded.append(msgspec.json.encode(line) + b"\n")
        return n, prev, b"".join(encoded)

    def _current_file(self) -> AuditFileName:
        """Returns the newest file of today that is not full.

        Never an older one than before, even if the clock goes back.

        Nor one that another process has left already at midnight, by its clock.
        """
        now = time.time()
        today, tomorrow = (time.strftime("%Y-%m-%d", time.gmtime(at)) for at in (now, now + DAY_SECONDS))
        there = [each for each in list_files(self.directory) if today <= each.day <= tomorrow]
        newest = max([*there, AuditFileName(today, 0), self._last])
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self.directory / str(newest)).st_size >= self.segment_bytes:
                return AuditFileName(newest.day, newest.number + 1)
        return newest


@contextlib.contextmanager
def _lock_directory(directory: Path) -> Iterator[None]:
    """Locks the directory: no other process appends to any file in it, so that the last line stays the last."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def find_last_line(directory: Path, name: AuditFileName) -> AuditLine | None:
    """Returns the line before the end of that file: its last, or the last of the files before it.

    Raises OSError.
    """
    for each in sorted((each for each in list_files(directory) if each <= name), reverse=True):
        with contextlib.suppress(FileNotFoundError), (directory / str(each)).open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
            for raw in reversed(file.read().splitlines()):
                if (line := decode_line(raw)) is not None and line.is_ours:
                    return line
    return None


def decode_line(raw: bytes) -> AuditLine | None:
    """Decodes a line. None if it is invalid."""
    try:
        return msgspec.json.decode(raw, type=AuditLine) if len(raw) <= TAIL_BYTES else None
    except (msgspec.MsgspecError, UnicodeError):
        return None


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[int]:
    """Opens and locks the file against appends and replacement by others; creates it if missing."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_same_file(fd, path):
                yield fd
                return
        finally:
            os.close(fd)


def _is_same_file(fd: int, path: Path) -> bool:
    """Whether the file is still at that path: it may have been replaced or removed meanwhile."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _append_lines(fd: int, lines: bytes, sync: bool) -> None:
    """Appends the bytes. Raises OSError, with nothing of them left."""
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":  # a process was killed in the middle of a line
        lines = b"\n" + lines
    written = 0
    try:
        while written < len(lines):
            written += os.write(fd, lines[written:])
        if sync:
            os.fsync(fd)
    except OSError:
        os.ftruncate(fd, size)
        raise


def prune_old(directory: Path, days: float, max_bytes: int) -> list[PrunableFile]:
    """Removes the files of `find_prunable`, and drafts of processes killed while replacing a file.

    Raises OSError.
    """
    found = find_prunable(directory, days, max_bytes)
    for each in found:
        with lock_file(directory / each.name):
            (directory / each.name).unlink(missing_ok=True)
    for draft in directory.glob(".*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - draft.stat().st_mtime > DRAFT_SECONDS:
                draft.unlink()
    return found


def removal_line(gone: PrunableFile) -> AuditLine:
    """Returns the log line about a removed file."""
    return AuditLine(
        at=format_time(time.time()), what=REMOVED_EVENT, key="server", id=gone.name, bytes=gone.bytes, about=gone.why
    )


def append_once(directory: Path, max_bytes: int, lines: Sequence[AuditLine]) -> None:
    """Appends lines from a command, which may run without a server. Raises OSError."""
    last = AuditLine(at=format_time(time.time()), what=CLOSED_EVENT, key="local")
    AuditFileWriter(directory, new_id("c"), max_bytes).append([*lines, last], sync=True)


def format_time(at: float) -> str:
    """Formats a time of the log; the texts sort by time."""
    whole = int(at)
    return f"{_format_second(whole)}.{int((at - whole) * 1e6):06d}Z"


@functools.lru_cache(maxsize=16)  # of many that are written at once
def _format_second(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


def find_prunable(directory: Path, days: float, max_bytes: int) -> list[PrunableFile]:
    """Returns files past their days, and the oldest beyond `max_bytes`; the newest stays. Removes nothing."""
    first_day = time.strftime("%Y-%m-%d", time.gmtime(retention_now() - (days + 1) * DAY_SECONDS))
    sizes = {name: _file_size(directory / str(name)) for name in list_files(directory)}
    total, found = sum(sizes.values()), []
    for name in list(sizes)[:-1]:
        why = "its days are over" if name.day < first_day else TOO_MUCH_REASON if total > max_bytes else ""
        if not why:
            break
        total -= sizes[name]
        found.append(PrunableFile(str(name), sizes[name], why))
    return found


def pseudonymize_owner(directory: Path, owner: str) -> int:
    """Replaces the name of that owner by its pseudonym, in all files. Returns the number of lines.

    Raises OSError.
    """
    salt = load_salt(directory)
    return sum(
        _rewrite_file(directory / str(name), lambda line: _pseudonymize_line(line, owner, salt))
        for name in list_files(directory)
    )


def _pseudonymize_line(line: AuditLine, owner: str, salt: bytes) -> bool:
    """Replaces the owner's name. Whether the line had it."""
    had = owner in (line.owner, line.by)
    line.owner = make_pseudonym(line.owner, salt) if line.owner == owner else line.owner
    line.by = make_pseudonym(line.by, salt) if line.by == owner else line.by
    return had


def _rewrite_file(path: Path, change: Callable[[AuditLine], bool]) -> int:
    """Rewrites a file atomically: a process that is killed meanwhile leaves it whole.

    Returns the number of changes.
    """
    with lock_file(path):
        kept, changed = [], 0
        for raw in path.read_bytes().splitlines():
            try:
                line = msgspec.json.decode(raw, type=AuditLine)
            except msgspec.DecodeError:
                kept.append(raw)
                continue
            hit = change(line)
            changed += hit
            kept.append(msgspec.json.encode(line) if hit else raw)
        if changed:
            _replace_file(path, b"".join(each + b"\n" for each in kept))
        return changed


def _replace_file(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
