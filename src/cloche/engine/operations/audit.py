"""Who did what: what happens to sandboxes and to what is kept, told to the audit log.

Whoever does something calls `note`, which takes a microsecond or two and never waits; a thread writes what was noted,
twice a second. Where nothing is opened (a library's own engine), notes are dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from cloche.config.sections import Audit
from cloche.engine.principal import acting
from cloche.model import Principal
from cloche.store.audit import CLOSED, AuditFiles, AuditLine, prune, removal, stamp
from cloche.telemetry import log

# How many lines of the audit log one owner can have: beyond them it is told how much there was, minute by minute.
#
# The log is bounded for all owners together, and its oldest lines go first: without this, one who does a lot, or
# nothing
# but that, would soon have pushed out what is on record of everybody else.

BURST_LINES = 2000  # of one owner, before
LINES_PER_MINUTE = 120  # hold for it; and as many for how its sandboxes begin and end
HELD_SECONDS = 60.0  # for which what is beyond is added up
KINDS = 32  # of one owner that are told apart while they are added up; of more, only what was done
MAX_OWNERS = 10_000

_UNRATIONED = ("admin.", "audit.", "owner.", "key.made", "key.rotated", "key.revoked")  # by admins and the server only


class _Left(NamedTuple):
    lines: float
    at: float


class Ration:
    """Not for several threads at once. Times are of one clock, any that never goes back."""

    def __init__(self) -> None:
        self._left: dict[tuple[str, bool], _Left] = {}
        self._held: dict[str, dict[tuple[str, ...], AuditLine]] = {}  # by owner and kind
        self._since = 0.0

    @property
    def holds(self) -> bool:
        """Whether something is left to be told."""
        return bool(self._held)

    def pass_on(self, lines: Sequence[AuditLine], now: float, *, whole: bool = False) -> list[AuditLine]:
        """Those that are to be written now, with what was held for a minute; `whole`: with all that is held."""
        passed = []
        for line in lines:
            if self._may(line, now):
                passed.append(line)
            else:
                self._hold(line, now)
        if self._held and (whole or now - self._since >= HELD_SECONDS):
            passed += [line for kinds in self._held.values() for line in kinds.values()]
            self._held = {}
        return passed

    def _may(self, line: AuditLine, now: float) -> bool:
        if line.what.startswith(_UNRATIONED):
            return True
        whose = line.owner, line.what.startswith("sandbox.")
        before = self._left.get(whose) or _Left(BURST_LINES, now)
        lines = min(BURST_LINES, before.lines + (now - before.at) * LINES_PER_MINUTE / 60)
        self._left[whose] = _Left(max(lines - 1, 0.0), now) if lines >= 1 else _Left(lines, now)
        if len(self._left) > MAX_OWNERS:
            self._forget_idle(now)
        return lines >= 1

    def _forget_idle(self, now: float) -> None:
        """Who has all of it again is as one that never came."""
        idle = BURST_LINES / LINES_PER_MINUTE * 60
        self._left = {whose: left for whose, left in self._left.items() if now - left.at < idle}

    def _hold(self, line: AuditLine, now: float) -> None:
        if not self._held:
            self._since = now
        kinds = self._held.setdefault(line.owner, {})
        kind: tuple[str, ...] = (line.what, line.by, line.key, line.sandbox, line.outcome, line.about)
        if kind not in kinds and len(kinds) >= KINDS:
            kind = (line.what,)
            line.by = line.key = line.sandbox = line.outcome = line.about = ""
        held = kinds.setdefault(kind, line)
        if held is not line:
            held.count += line.count
            held.bytes += line.bytes
            held.until = line.until or line.at
            held.id = ""


FLUSH_SECONDS = 0.5
SYNC_SECONDS = 5.0  # after which the disk has what was written
PRUNE_SECONDS = 3600.0
FLOOD = 8  # of the same kind at once, by the same, in one sandbox: more are one line with a number
MOST_LINES = 200  # of one owner at once: beyond them, what is done in sandboxes is told of all of these together
MOST_ENTRIES = 20_000  # that wait for the disk
LOST = "audit.lost"
STARTED, ENDED = "execution.started", "execution.ended"

TOKEN, LOCAL, SERVER, NOBODY = "sandbox-token", "local", "server", "none"
NONE = Principal(owner="", key_id=NOBODY)  # who asked with no key, or with one that is none


class Entry(NamedTuple):
    at: float
    what: str
    owner: str
    by: str
    key: str
    sandbox: str
    id: str
    outcome: str
    about: str
    bytes: int


class Noted(Protocol):
    """Something was done in one sandbox."""

    def __call__(
        self,
        what: str,
        *,
        id: str = "",
        outcome: str = "",
        about: str = "",
        bytes: int = 0,
        who: Principal | None = None,
    ) -> None:
        """By `who`, where that is somebody else than whom this task acts for."""


def unnoted(
    what: str, *, id: str = "", outcome: str = "", about: str = "", bytes: int = 0, who: Principal | None = None
) -> None:
    """For sandboxes that are nobody's."""


class Trail:
    """Not yet told to anybody; from `open` until `aclose` a log hears it."""

    def __init__(self) -> None:
        self.lost = 0  # notes that no disk took
        self.failing = ""  # why nothing can be written now
        self._files: AuditFiles | None = None
        self._config = Audit()
        self._entries: list[Entry] = []
        self._lines: list[AuditLine] = []  # those that could not be written
        self._owed = 0  # lost, and not yet on record as such
        self._thread: ThreadPoolExecutor | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._writing: asyncio.Future[None] | None = None
        self._synced_at = self._pruned_at = 0.0
        self._ration = Ration()

    def open(self, files: AuditFiles, config: Audit) -> None:
        if config.enabled:
            self._files, self._config = files, config
            self._thread = ThreadPoolExecutor(1, "cloche-audit")
            self.note("audit.opened", "", itself=True)

    async def aclose(self) -> None:
        """All that was noted is on the disk, if that takes it."""
        files, self._files = self._files, None
        if files is None or self._thread is None:
            return
        for timer in (self._timer, self._telling):
            if timer is not None:
                timer.cancel()
        if self._writing is not None:
            await asyncio.wait([self._writing])
        entries, self._entries = [*self._entries, _entry(CLOSED, "", itself=True)], []
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write, files, entries, True, True)
        self._thread.shutdown(wait=False)
        if self._lines or self._owed:
            log.error("audit.lost", lines=len(self._lines) + self._owed, why=self.failing)

    async def flushed(self) -> None:
        """All that was noted until here is in the file, if the disk takes it."""
        for _ in range(2):  # what is written now, and what came meanwhile
            if self._writing is None:
                self._flush(whole=True)
            if self._writing is not None:
                await asyncio.wait([self._writing])

    def note(
        self,
        what: str,
        owner: str,
        *,
        sandbox: str = "",
        id: str = "",
        outcome: str = "",
        about: str = "",
        bytes: int = 0,
        itself: bool = False,
        who: Principal | None = None,
    ) -> None:
        """Something was done to what is that owner's, by `who`, else by whom this task acts for.

        Or by the server `itself`. Never waits.
        """
        if self._files is None:
            return
        self._entries.append(_entry(what, owner, sandbox, id, outcome, about, bytes, itself=itself, who=who))
        if len(self._entries) >= MOST_ENTRIES:
            self._make_room()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)

    def of(self, sandbox: str, owner: str, key_id: str = "") -> Noted:
        """For what is done in that sandbox, which was made with that key."""
        if not owner:
            return unnoted
        token = Principal(owner="", key_id=f"{TOKEN}:{key_id}") if key_id else None  # by whoever has that

        def noted(
            what: str, *, id: str = "", outcome: str = "", about: str = "", bytes: int = 0, who: Principal | None = None
        ) -> None:
            who = who or acting() or token
            self.note(what, owner, sandbox=sandbox, id=id, outcome=outcome, about=about, bytes=bytes, who=who)

        return noted

    # -- inside

    def _make_room(self) -> None:
        """More came within half a second than is written one by one, or the disk does not take it."""
        if self._writing is None:
            self._flush()
            return
        over = len(self._entries) - MOST_ENTRIES // 2
        self._entries = self._entries[over:]
        self._lose(over)

    def _lose(self, count: int) -> None:
        self.lost += count
        self._owed += count

    def _flush(self, *, whole: bool = False) -> None:
        """`whole`: also what one owner has too much of, and is told once a minute."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._files is None or self._thread is None:
            return
        loop = asyncio.get_running_loop()
        if self._writing is not None:  # what came meanwhile is next
            self._timer = loop.call_later(FLUSH_SECONDS, self._flush)
            return
        entries, self._entries = self._entries, []
        self._writing = loop.run_in_executor(self._thread, self._write, self._files, entries, False, whole)
        self._writing.add_done_callback(self._written)

    def _written(self, writing: asyncio.Future[None]) -> None:
        self._writing = None
        if self._files is None or self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        if self._entries or self._lines:
            self._timer = loop.call_later(FLUSH_SECONDS, self._flush)
        elif self._ration.holds and self._telling is None:
            self._telling = loop.call_later(HELD_SECONDS, self._tell)

    def _tell(self) -> None:
        """Nothing need have come since for what was held to be told."""
        self._telling = None
        self._flush()

    # -- in the thread

    def _write(self, files: AuditFiles, entries: Sequence[Entry], last: bool, whole: bool) -> None:
        now = time.monotonic()
        sync = last or now - self._synced_at > SYNC_SECONDS
        owed = self._owed
        told = self._ration.pass_on(condensed(entries), now, whole=whole)
        lines = [*self._lines, *self._confession(owed), *told]
        try:
            files.append(lines, sync=sync)
        except OSError as error:
            self._keep(lines, error)
            return
        self._lines, self._owed = [], self._owed - owed
        self._synced_at = now if sync else self._synced_at
        if self.failing:
            log.warning("audit.works_again", lost=self.lost)
            self.failing = ""
        if now - self._pruned_at > PRUNE_SECONDS or not self._pruned_at or files.turned:
            self._prune(files, now)

    def _confession(self, owed: int) -> Iterable[AuditLine]:
        if owed:
            yield AuditLine(at=stamp(time.time()), what=LOST, key=SERVER, count=owed, about=self.failing)

    def _keep(self, lines: Sequence[AuditLine], error: OSError) -> None:
        """For the next try, the oldest: how it began is worth most."""
        told = [line for line in lines if line.what != LOST]
        self._lines = told[:MOST_ENTRIES]
        self._lose(sum(line.count for line in told[MOST_ENTRIES:]))
        why = error.strerror or type(error).__name__
        if why != self.failing:
            self.failing = why
            log.error("audit.not_written", why=why, lines=len(self._lines))

    def _prune(self, files: AuditFiles, now: float) -> None:
        self._pruned_at = now
        try:
            removed = prune(files.directory, self._config.days, self._config.max_bytes - files.segment_bytes)
            said = [removal(each) for each in removed]
            if said:
                files.append(said)
        except OSError as error:
            log.error("audit.not_pruned", why=error.strerror)


def _entry(
    what: str,
    owner: str,
    sandbox: str = "",
    id: str = "",
    outcome: str = "",
    about: str = "",
    bytes: int = 0,
    *,
    itself: bool,
    who: Principal | None = None,
) -> Entry:
    who = None if itself else who or acting()
    if who is None:
        return Entry(time.time(), what, owner, "", SERVER if itself else TOKEN, sandbox, id, outcome, about, bytes)
    return Entry(time.time(), what, owner, who.owner, who.key_id or LOCAL, sandbox, id, outcome, about, bytes)


def condensed(entries: Sequence[Entry]) -> list[AuditLine]:
    """What is written of them, in their order. Nothing is left out, but of a flood only how much it was is told.

    How sandboxes are made and end is told one by one: it takes a sandbox each. An execution that began and ended among
    these is one line, from the one until the other. How many lines one owner can have in the long run says `Ration`.
    """
    began = _whole_executions(entries)
    entries = [entry for entry in entries if entry.what != STARTED or entry.id not in began]
    kinds = Counter(map(_kind, entries))
    crowd: Counter[str] = Counter()  # lines of each owner
    for kind, count in kinds.items():
        crowd[kind[1]] += count if count <= FLOOD else 1
    lines: list[AuditLine] = []
    floods: dict[object, AuditLine] = {}
    for entry in entries:
        kind = _kind(entry)
        crowded = crowd[entry.owner] > MOST_LINES and not entry.what.startswith("sandbox.")
        if kinds[kind] <= FLOOD and not crowded:
            lines.append(_line(entry) if entry.what != ENDED else _execution(entry, began.get(entry.id)))
            continue
        key = (*kind[:4], "", kind[5], "") if crowded else kind
        flood = floods.get(key)
        if flood is None:
            first = entry._replace(id="", sandbox="", about="") if crowded else entry._replace(id="")
            flood = floods[key] = _line(first)
            lines.append(flood)
            continue
        flood.count += 1
        flood.bytes += entry.bytes
        flood.until = stamp(entry.at)
    return lines


def _whole_executions(entries: Sequence[Entry]) -> dict[str, float]:
    """When those began that ended, too, by their ids."""
    ended = {entry.id for entry in entries if entry.what == ENDED}
    return {entry.id: entry.at for entry in entries if entry.what == STARTED and entry.id in ended}


def _execution(entry: Entry, began_at: float | None) -> AuditLine:
    line = _line(entry)
    if began_at is not None:
        line.at, line.until = stamp(began_at), line.at
    return line


def _kind(entry: Entry) -> tuple[str, str, str, str, str, str, str]:
    return entry.what, entry.owner, entry.by, entry.key, entry.sandbox, entry.outcome, entry.about


def _line(entry: Entry) -> AuditLine:
    return AuditLine(
        at=stamp(entry.at),
        what=entry.what,
        owner=entry.owner,
        by=entry.by,
        key=entry.key,
        sandbox=entry.sandbox,
        id=entry.id,
        outcome=entry.outcome,
        about=entry.about,
        bytes=entry.bytes,
    )
