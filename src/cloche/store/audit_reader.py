"""Reads the audit log, and verifies that no line was changed or removed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from cloche.model import Struct
from cloche.store.audit import (
    CLOSED_EVENT,
    DAY_SECONDS,
    REMOVED_EVENT,
    AuditFileName,
    AuditLine,
    decode_line,
    format_time,
    hash_line,
    list_files,
    load_salt,
)


class AuditQuery(Struct):
    """A filter for lines."""

    owner: str | None = None  # of the object, or of the actor
    sandbox: str | None = None
    what: str | None = None  # such as "sandbox.created", or all that begins with "sandbox."
    since: float | None = None

    def holds(self, line: AuditLine) -> bool:
        return (
            self.owner in (None, line.owner, line.by)
            and self.sandbox in (None, line.sandbox)
            and (self.what is None or line.what == self.what or line.what.startswith(self.what + "."))
            and (self.since is None or line.at >= format_time(self.since))
        )


class AuditPosition(NamedTuple):
    """The position up to which a reader has read."""

    name: AuditFileName
    offset: int


START_POSITION = AuditPosition(AuditFileName("", 0), 0)


def read_last(directory: Path, query: AuditQuery, limit: int) -> list[AuditLine]:
    """Returns the newest matching lines, the oldest of them first. Raises OSError."""
    return list(deque((line for line, _ in read_lines(directory, query)), maxlen=limit))


def read_lines(
    directory: Path, query: AuditQuery, after: AuditPosition = START_POSITION
) -> Iterator[tuple[AuditLine, AuditPosition]]:
    """Yields the matching lines, each with its end position. Raises OSError. Invalid lines are skipped."""
    first_day = "" if query.since is None else format_time(query.since - DAY_SECONDS)[:10]
    for name in list_files(directory):
        if name < after.name or name.day < first_day:
            continue
        for raw, end in _read_raw_lines(directory / str(name), after.offset if name == after.name else 0):
            line = decode_line(raw)
            if line is not None and query.holds(line):
                yield line, AuditPosition(name, end)


def end_position(directory: Path) -> AuditPosition:
    """Returns the end of the log, for readers of new lines only. Raises OSError."""
    names = list_files(directory)
    return AuditPosition(names[-1], (directory / str(names[-1])).stat().st_size) if names else START_POSITION


def _read_raw_lines(path: Path, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yields whole lines, each with its end offset."""
    try:
        file = path.open("rb")
    except FileNotFoundError:  # removed just now
        return
    with file:
        file.seek(offset)
        while raw := file.readline():
            if not raw.endswith(b"\n"):
                return
            yield raw, file.tell()


# -- verifying


class AuditVerdict(Struct):
    lines: int
    files: int
    problems: tuple[str, ...]  # lines that were changed or removed
    notes: tuple[str, ...]  # findings that can have other reasons, too


class _ProcessChain(NamedTuple):
    n: int
    hash: str
    closed: bool


class _ChainVerifier:
    def __init__(self, salt: bytes):
        self._salt = salt
        self.chains: dict[str, _ProcessChain] = {}
        self._before: AuditLine | None = None  # the last line of all that was seen
        self.problems: list[str] = []
        self.headless: list[str] = []  # processes without their first lines
        self.pruned = 0
        self.lines = 0

    def check_line(self, raw: bytes, where: str) -> None:
        line = decode_line(raw)
        if line is None or not line.is_ours:
            if raw.strip():
                self.problems.append(
                    f"{where}: no process of Cloche has written this: it was changed or added, or its writer was killed"
                )
            return
        self.lines += 1
        self.pruned += line.what == REMOVED_EVENT
        chain = self.chains.get(line.instance)
        if not self._breaks_chain(line, chain, where):
            self._check_previous_line(line, where)
        self.chains[line.instance] = _ProcessChain(line.n, hash_line(line, self._salt), line.what == CLOSED_EVENT)
        self._before = line

    def _breaks_chain(self, line: AuditLine, chain: _ProcessChain | None, where: str) -> bool:
        """Whether the line does not follow the previous one of its own process; reports it."""
        said = len(self.problems) + len(self.headless)
        if chain is None:
            if line.n != 1 or line.prev:
                self.headless.append(f"{where}: the first {line.n - 1} lines of {line.instance} are not there")
        elif line.n != chain.n + 1:
            self.problems.append(f"{where}: line {line.n} of {line.instance} follows {chain.n}: some were removed")
        elif line.prev != chain.hash:
            self.problems.append(f"{where}: line {chain.n} of {line.instance}, before it, was changed")
        return len(self.problems) + len(self.headless) > said

    def _check_previous_line(self, line: AuditLine, where: str) -> None:
        """Checks the previous line of the log, of any process."""
        before = self._before
        if before is None:
            if line.after:
                self.headless.append(f"{where}: the lines before the first one are missing")
            return
        after = hash_line(before, self._salt) if before.instance != line.instance else ""
        if line.after != after:
            self.problems.append(f"{where}: a line before it was changed, or lines of another process were removed")


def verify_log(directory: Path, is_live: Callable[[str], bool]) -> AuditVerdict:
    """Verifies the log. Raises OSError. `is_live`: whether the host process of that name still runs."""
    seen, names = _ChainVerifier(load_salt(directory)), list_files(directory)
    for name in names:
        for number, (raw, _) in enumerate(_read_raw_lines(directory / str(name)), 1):
            seen.check_line(raw, f"{name}:{number}")
    notes = []
    if seen.pruned:  # the log itself says that it was cut at its beginning
        notes += seen.headless
    else:
        seen.problems += seen.headless
    cut = [name for name, chain in seen.chains.items() if not chain.closed and not is_live(name)]
    notes += [f"{name} has no last line: it was killed, or lines were cut off at the end" for name in cut]
    return AuditVerdict(lines=seen.lines, files=len(names), problems=tuple(seen.problems), notes=tuple(notes))
