"""The audit log on a disk: `<data_dir>/audit/DAY.jsonl`, one line for each thing that was done, never changed.

Each line holds the hash of the line before it of the same host process, and where another process wrote the line
before it, the hash of that one, too: lines which were changed or removed are found, also all those of a process (see
`audit_reading.verify`). Names of owners count in that hash by a pseudonym: one who is to be forgotten can be replaced
by it without breaking the chain. Several processes append at once, whole lines each.
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
from cloche.store.retention_clock import surely_past

SEGMENTS = 8  # into which what may be kept is cut, so that the oldest can go
MIN_SEGMENT_BYTES = 64 * KIB
SALT = "salt"
REMOVED = "audit.removed"  # the log says so itself when a file of it has gone for its age or the log's size
CLOSED = "audit.closed"  # the last line of a process that ended as it should
HASH_LENGTH = 32
DAY_SECONDS = 86400.0
DRAFT_SECONDS = 3600.0
TAIL_BYTES = 1 << 16  # in which the last line of a file is found
TOO_MUCH = "there was more than audit.max_bytes"

_FILE = re.compile(r"(\d{4}-\d{2}-\d{2})(?:\.(\d{1,6}))?\.jsonl")


class AuditLine(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Who did what. No code, no content, no name of a file."""

    at: str
    what: str
    owner: str = ""  # whose it is
    by: str = ""  # who did it: an owner
    key: str = ""  # with which key, by its id; "sandbox-token:ID", "local" (no key was needed) or "server" (by itself)
    sandbox: str = ""
    id: str = ""  # of what it was done to, where that is no sandbox
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
        """Whether a process of ours can have written it."""
        return self.n >= 1 and bool(self.instance)


class Prunable(NamedTuple):
    name: str
    bytes: int
    why: str


class FileName(NamedTuple):
    """In the order in which they were written."""

    day: str
    number: int

    def __str__(self) -> str:
        return f"{self.day}.{self.number}.jsonl" if self.number else f"{self.day}.jsonl"


def file_name(name: str) -> FileName | None:
    found = _FILE.fullmatch(name)
    return FileName(found[1], int(found[2] or 0)) if found else None


def files_in(directory: Path) -> list[FileName]:
    """The oldest first. Raises OSError."""
    try:
        return sorted(found for name in os.listdir(directory) if (found := file_name(name)) is not None)
    except FileNotFoundError:
        return []


def salt_of(directory: Path) -> bytes:
    """What pseudonyms are made with, made at the first use. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / SALT
    if not path.exists():
        draft = directory / f".{SALT}-{secrets.token_hex(8)}"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # whoever came first
        draft.unlink()
    return path.read_bytes()


@functools.lru_cache(maxsize=1000)
def pseudonym(name: str, salt: bytes) -> str:
    """What stands for that name. No name of an owner begins as these do."""
    if not name or name.startswith("#"):
        return name
    return "#" + hashlib.sha256(salt + name.encode()).hexdigest()[:16]


def hash_of(line: AuditLine, salt: bytes) -> str:
    """What the next line has as `prev`."""
    bare = msgspec.structs.replace(line, owner=pseudonym(line.owner, salt), by=pseudonym(line.by, salt))
    return hashlib.sha256(msgspec.json.encode(bare)).hexdigest()[:HASH_LENGTH]


class AuditFiles:
    """What one host process appends. Not for several threads at once."""

    def __init__(self, directory: Path, instance: str, max_bytes: int):
        self.directory = directory
        self._instance = instance
        self.segment_bytes = max(max_bytes // SEGMENTS, MIN_SEGMENT_BYTES)
        self.turned = False  # whether what was appended last began a file, or is in one that another process began
        self._salt = b""
        self._n, self._prev = 0, ""
        self._last = FileName("", 0)

    def append(self, lines: Sequence[AuditLine], *, sync: bool = False) -> None:
        """All of them or none. Raises OSError. `sync`: returns when the disk has them."""
        self._salt = self._salt or salt_of(self.directory)
        with _alone(self.directory):
            name = self._current()
            with locked(self.directory / str(name)) as fd:
                n, prev, encoded = self._linked(lines, last_line(self.directory, name))
                _append(fd, encoded, sync)
        self.turned = name != self._last
        self._n, self._prev, self._last = n, prev, name

    def _linked(self, lines: Sequence[AuditLine], before: AuditLine | None) -> tuple[int, str, bytes]:
        """Their last number and hash, and what is written of them."""
        n, prev, encoded = self._n, self._prev, []
        for n, line in enumerate(lines, self._n + 1):
            line.instance, line.n, line.prev, line.after = self._instance, n, prev, ""
            if before is not None and before.instance != self._instance:
                line.after = hash_of(before, self._salt)
            before, prev = line, hash_of(line, self._salt)
            encoded.append(msgspec.json.encode(line) + b"\n")
        return n, prev, b"".join(encoded)

    def _current(self) -> FileName:
        """The newest of today that is not full. Never an older one than before, whatever the clock says.

        Nor one that another process has left already at midnight, as the clock was when that wrote.
        """
        now = time.time()
        today, tomorrow = (time.strftime("%Y-%m-%d", time.gmtime(at)) for at in (now, now + DAY_SECONDS))
        there = [each for each in files_in(self.directory) if today <= each.day <= tomorrow]
        newest = max([*there, FileName(today, 0), self._last])
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self.directory / str(newest)).st_size >= self.segment_bytes:
                return FileName(newest.day, newest.number + 1)
        return newest


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Nobody else appends to any file there meanwhile: what is the last line of all stays so."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def last_line(directory: Path, name: FileName) -> AuditLine | None:
    """The one that is followed by what is appended to that file: its last, or of those before it. Raises OSError."""
    for each in sorted((each for each in files_in(directory) if each <= name), reverse=True):
        with contextlib.suppress(FileNotFoundError), (directory / str(each)).open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
            for raw in reversed(file.read().splitlines()):
                if (line := decoded(raw)) is not None and line.is_ours:
                    return line
    return None


def decoded(raw: bytes) -> AuditLine | None:
    """None for what is no line."""
    try:
        return msgspec.json.decode(raw, type=AuditLine) if len(raw) <= TAIL_BYTES else None
    except (msgspec.MsgspecError, UnicodeError):
        return None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """That file, which nobody else appends to or replaces meanwhile; it is made where it is not there."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_at(fd, path):
                yield fd
                return
        finally:
            os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """It may have been replaced, or removed, while we waited for it."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _append(fd: int, lines: bytes, sync: bool) -> None:
    """Raises OSError, with nothing of them left."""
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":  # somebody was killed in the middle of a line
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


def prune(directory: Path, days: float, max_bytes: int) -> list[Prunable]:
    """Removes what `prunable` says, and what somebody left who was killed while replacing a file. Raises OSError."""
    found = prunable(directory, days, max_bytes)
    for each in found:
        with locked(directory / each.name):
            (directory / each.name).unlink(missing_ok=True)
    for draft in directory.glob(".*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - draft.stat().st_mtime > DRAFT_SECONDS:
                draft.unlink()
    return found


def removal(gone: Prunable) -> AuditLine:
    """What the log says of it."""
    return AuditLine(at=stamp(time.time()), what=REMOVED, key="server", id=gone.name, bytes=gone.bytes, about=gone.why)


def append_once(directory: Path, max_bytes: int, lines: Sequence[AuditLine]) -> None:
    """For a command that has something to say while no server need run. Raises OSError."""
    last = AuditLine(at=stamp(time.time()), what=CLOSED, key="local")
    AuditFiles(directory, new_id("c"), max_bytes).append([*lines, last], sync=True)


def stamp(at: float) -> str:
    """Times in the log, which sort as they come."""
    whole = int(at)
    return f"{_second(whole)}.{int((at - whole) * 1e6):06d}Z"


@functools.lru_cache(maxsize=16)  # of many that are written at once
def _second(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


def prunable(directory: Path, days: float, max_bytes: int) -> list[Prunable]:
    """The files whose days are over, and the oldest of those that are too much; the newest stays. Only looks."""
    first_day = time.strftime("%Y-%m-%d", time.gmtime(surely_past() - (days + 1) * DAY_SECONDS))
    sizes = {name: _size(directory / str(name)) for name in files_in(directory)}
    total, found = sum(sizes.values()), []
    for name in list(sizes)[:-1]:
        why = "its days are over" if name.day < first_day else TOO_MUCH if total > max_bytes else ""
        if not why:
            break
        total -= sizes[name]
        found.append(Prunable(str(name), sizes[name], why))
    return found


def forget(directory: Path, owner: str) -> int:
    """Replaces the name of that owner by its pseudonym, in all files. How many lines there were. Raises OSError."""
    salt = salt_of(directory)
    return sum(
        _rewrite(directory / str(name), lambda line: _without(line, owner, salt)) for name in files_in(directory)
    )


def _without(line: AuditLine, owner: str, salt: bytes) -> bool:
    """Whether the line had it."""
    had = owner in (line.owner, line.by)
    line.owner = pseudonym(line.owner, salt) if line.owner == owner else line.owner
    line.by = pseudonym(line.by, salt) if line.by == owner else line.by
    return had


def _rewrite(path: Path, change: Callable[[AuditLine], bool]) -> int:
    """A file as it is, or as it was: a process that is killed meanwhile leaves it whole."""
    with locked(path):
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
            _replace(path, b"".join(each + b"\n" for each in kept))
        return changed


def _replace(path: Path, content: bytes) -> None:
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


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
