"""Reading the audit log, and looking for what was changed in it or removed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from cloche.model import Struct
from cloche.store.audit import (
    CLOSED,
    DAY_SECONDS,
    REMOVED,
    AuditLine,
    FileName,
    decoded,
    files_in,
    hash_of,
    salt_of,
    stamp,
)


class Wanted(Struct):
    """Which lines are asked for."""

    owner: str | None = None  # whose, or by whom
    sandbox: str | None = None
    what: str | None = None  # such as "sandbox.created", or all that begins with "sandbox."
    since: float | None = None

    def holds(self, line: AuditLine) -> bool:
        return (
            self.owner in (None, line.owner, line.by)
            and self.sandbox in (None, line.sandbox)
            and (self.what is None or line.what == self.what or line.what.startswith(self.what + "."))
            and (self.since is None or line.at >= stamp(self.since))
        )


class Place(NamedTuple):
    """Up to where somebody has read."""

    name: FileName
    offset: int


START = Place(FileName("", 0), 0)


def last(directory: Path, wanted: Wanted, limit: int) -> list[AuditLine]:
    """The newest that are wanted, the oldest of them first. Raises OSError."""
    return list(deque((line for line, _ in lines(directory, wanted)), maxlen=limit))


def lines(directory: Path, wanted: Wanted, after: Place = START) -> Iterator[tuple[AuditLine, Place]]:
    """Those that are wanted, with where each ends. Raises OSError. What is no line is passed over."""
    first_day = "" if wanted.since is None else stamp(wanted.since - DAY_SECONDS)[:10]
    for name in files_in(directory):
        if name < after.name or name.day < first_day:
            continue
        for raw, end in _raw(directory / str(name), after.offset if name == after.name else 0):
            line = decoded(raw)
            if line is not None and wanted.holds(line):
                yield line, Place(name, end)


def end_of(directory: Path) -> Place:
    """Where whoever wants what comes from now on begins. Raises OSError."""
    names = files_in(directory)
    return Place(names[-1], (directory / str(names[-1])).stat().st_size) if names else START


def _raw(path: Path, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """Whole lines, with where each ends."""
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


class Verdict(Struct):
    lines: int
    files: int
    problems: tuple[str, ...]  # what was changed or removed
    notes: tuple[str, ...]  # what can be for other reasons, too


class _Chain(NamedTuple):
    n: int
    hash: str
    closed: bool


class _Verification:
    def __init__(self, salt: bytes):
        self._salt = salt
        self.chains: dict[str, _Chain] = {}
        self._before: AuditLine | None = None  # the last line of all that was seen
        self.problems: list[str] = []
        self.headless: list[str] = []  # processes whose first lines are not there
        self.pruned = 0
        self.lines = 0

    def see(self, raw: bytes, where: str) -> None:
        line = decoded(raw)
        if line is None or not line.is_ours:
            if raw.strip():
                self.problems.append(
                    f"{where}: no process of Cloche has written this: it was changed or added, or its writer was killed"
                )
            return
        self.lines += 1
        self.pruned += line.what == REMOVED
        chain = self.chains.get(line.instance)
        if not self._is_amiss(line, chain, where):
            self._look_before(line, where)
        self.chains[line.instance] = _Chain(line.n, hash_of(line, self._salt), line.what == CLOSED)
        self._before = line

    def _is_amiss(self, line: AuditLine, chain: _Chain | None, where: str) -> bool:
        """Whether it does not follow the line before it of its own process, which is said."""
        said = len(self.problems) + len(self.headless)
        if chain is None:
            if line.n != 1 or line.prev:
                self.headless.append(f"{where}: the first {line.n - 1} lines of {line.instance} are not there")
        elif line.n != chain.n + 1:
            self.problems.append(f"{where}: line {line.n} of {line.instance} follows {chain.n}: some were removed")
        elif line.prev != chain.hash:
            self.problems.append(f"{where}: line {chain.n} of {line.instance}, before it, was changed")
        return len(self.problems) + len(self.headless) > said

    def _look_before(self, line: AuditLine, where: str) -> None:
        """The line before it, whoever wrote that."""
        before = self._before
        if before is None:
            if line.after:
                self.headless.append(f"{where}: what was before the first line is not there")
            return
        after = hash_of(before, self._salt) if before.instance != line.instance else ""
        if line.after != after:
            self.problems.append(f"{where}: what was before it was changed, or lines of another process were removed")


def verify(directory: Path, is_live: Callable[[str], bool]) -> Verdict:
    """Raises OSError. `is_live`: whether the host process of that name still runs."""
    seen, names = _Verification(salt_of(directory)), files_in(directory)
    for name in names:
        for number, (raw, _) in enumerate(_raw(directory / str(name)), 1):
            seen.see(raw, f"{name}:{number}")
    notes = []
    if seen.pruned:  # the log itself says that it was cut at its beginning
        notes += seen.headless
    else:
        seen.problems += seen.headless
    cut = [name for name, chain in seen.chains.items() if not chain.closed and not is_live(name)]
    notes += [f"{name} has no last line: it was killed, or lines were cut off at the end" for name in cut]
    return Verdict(lines=seen.lines, files=len(names), problems=tuple(seen.problems), notes=tuple(notes))
