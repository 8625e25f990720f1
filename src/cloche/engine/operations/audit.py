"""Audit log: actions on sandboxes and stored things, with their actors.

`record` takes a microsecond or two and never waits; a thread writes the entries twice a second. Where no
log is opened (a library's own engine), entries are dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from cloche.config.sections import AuditConfig
from cloche.engine.principal import current_principal
from cloche.model import Principal
from cloche.store.audit import CLOSED_EVENT, AuditFileWriter, AuditLine, format_time, prune_old, removal_line
from cloche.telemetry import log

# Rate limit of each owner's audit log lines: beyond it, lines are added up minute by minute.
#
# The log is bounded for all owners together, and its oldest lines go first: without this limit, one busy
# owner would soon push out the records of all others.

BURST_LINES = 2000  # of one owner, before
LINES_PER_MINUTE = 120  # hold for it; and as many for how its sandboxes begin and end
HELD_SECONDS = 60.0  # for which actions beyond that are summed
MAX_HELD_KINDS = 32  # of one owner with separate sums; of more, only the action is kept
MAX_OWNERS = 10_000

_UNLIMITED_PREFIXES = (
    "admin.",
    "audit.",
    "owner.",
    "key.made",
    "key.rotated",
    "key.revoked",
)  # by admins and the server only


class _LineAllowance(NamedTuple):
    lines: float
    at: float


class AuditRateLimit:
    """Not thread-safe. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._left: dict[tuple[str, bool], _LineAllowance] = {}
        self._held: dict[str, dict[tuple[str, ...], AuditLine]] = {}  # by owner and kind
        self._since = 0.0

    @property
    def holds(self) -> bool:
        """Whether held lines are left to be written."""
        return bool(self._held)

    def filter_lines(self, lines: Sequence[AuditLine], now: float, *, whole: bool = False) -> list[AuditLine]:
        """The lines to be written now, with those held for a minute; `whole`: with all held ones."""
        passed = []
        for line in lines:
            if self._may_write(line, now):
                passed.append(line)
            else:
                self._hold_line(line, now)
        if self._held and (whole or now - self._since >= HELD_SECONDS):
            passed += [line for kinds in self._held.values() for line in kinds.values()]
            self._held = {}
        return passed

    def _may_write(self, line: AuditLine, now: float) -> bool:
        if line.what.startswith(_UNLIMITED_PREFIXES):
            return True
        source = line.owner, line.what.startswith("sandbox.")
        before = self._left.get(source) or _LineAllowance(BURST_LINES, now)
        lines = min(BURST_LINES, before.lines + (now - before.at) * LINES_PER_MINUTE / 60)
        self._left[source] = _LineAllowance(max(lines - 1, 0.0), now) if lines >= 1 else _LineAllowance(lines, now)
        if len(self._left) > MAX_OWNERS:
            self._drop_idle_owners(now)
        return lines >= 1

    def _drop_idle_owners(self, now: float) -> None:
        """Removes owners whose allowance is full again."""
        idle = BURST_LINES / LINES_PER_MINUTE * 60
        self._left = {source: left for source, left in self._left.items() if now - left.at < idle}

    def _hold_line(self, line: AuditLine, now: float) -> None:
        if not self._held:
            self._since = now
        kinds = self._held.setdefault(line.owner, {})
        kind: tuple[str, ...] = (line.what, line.by, line.key, line.sandbox, line.outcome, line.about)
        if kind not in kinds and len(kinds) >= MAX_HELD_KINDS:
            kind = (line.what,)
            line.by = line.key = line.sandbox = line.outcome = line.about = ""
        held = kinds.setdefault(kind, line)
        if held is not line:
            held.count += line.count
            held.bytes += line.bytes
            held.until = line.until or line.at
            held.id = ""


FLUSH_SECONDS = 0.5
SYNC_SECONDS = 5.0  # after which written lines are on the disk
PRUNE_SECONDS = 3600.0
FLOOD_ENTRIES = 8  # of the same kind at once, by the same, in one sandbox: more are one line with a number
MOST_LINES = 200  # of one owner at once: beyond them, actions in all its sandboxes are summed together
MOST_ENTRIES = 20_000  # that wait for the disk
LINES_LOST = "audit.lost"
STARTED, ENDED = "execution.started", "execution.ended"

TOKEN, LOCAL, SERVER, NOBODY = "sandbox-token", "local", "server", "none"
NO_PRINCIPAL = Principal(owner="", key_id=NOBODY)  # a client without a key, or with an unknown one


class AuditEntry(NamedTuple):
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


class ActionRecorder(Protocol):
    """Records an action in one sandbox."""

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
        """`who`: the actor, where it is not the current principal."""


def ignore_action(
    what: str, *, id: str = "", outcome: str = "", about: str = "", bytes: int = 0, who: Principal | None = None
) -> None:
    """The recorder of sandboxes without an owner."""


class AuditLog:
    """Drops all entries but those between `open` and `aclose`, which it writes to a log."""

    def __init__(self) -> None:
        self.lost = 0  # notes that no disk took
        self.failing = ""  # why nothing can be written now
        self._files: AuditFileWriter | None = None
        self._config = AuditConfig()
        self._entries: list[AuditEntry] = []
        self._lines: list[AuditLine] = []  # those that could not be written
        self._owed = 0  # lost, and not yet on record as such
        self._thread: ThreadPoolExecutor | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._writing: asyncio.Future[None] | None = None
        self._synced_at = self._pruned_at = 0.0
        self._ration = AuditRateLimit()

    def open(self, files: AuditFileWriter, config: AuditConfig) -> None:
        if config.enabled:
            self._files, self._config = files, config
            self._thread = ThreadPoolExecutor(1, "cloche-audit")
            self.record("audit.opened", "", itself=True)

    async def aclose(self) -> None:
        """Writes all entries to the disk, if that takes them."""
        files, self._files = self._files, None
        if files is None or self._thread is None:
            return
        for timer in (self._timer, self._telling):
            if timer is not None:
                timer.cancel()
        if self._writing is not None:
            await asyncio.wait([self._writing])
        entries, self._entries = [*self._entries, _make_entry(CLOSED_EVENT, "", itself=True)], []
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write_entries, files, entries, True, True)
        self._thread.shutdown(wait=False)
        if self._lines or self._owed:
            log.error("audit.lost", lines=len(self._lines) + self._owed, why=self.failing)

    async def wait_flushed(self) -> None:
        """Returns when all entries until here are in the file, if the disk takes them."""
        for _ in range(2):  # the lines being written, and those that came meanwhile
            if self._writing is None:
                self._flush_entries(whole=True)
            if self._writing is not None:
                await asyncio.wait([self._writing])

    def record(
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
        """Records an action on a thing of that owner, by `who`, else by the current principal.

        Or by the server `itself`. Never waits.
        """
        if self._files is None:
            return
        self._entries.append(_make_entry(what, owner, sandbox, id, outcome, about, bytes, itself=itself, who=who))
        if len(self._entries) >= MOST_ENTRIES:
            self._make_room()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush_entries)

    def of(self, sandbox: str, owner: str, key_id: str = "") -> ActionRecorder:
        """A recorder for actions in that sandbox, which was made with that key."""
        if not owner:
            return ignore_action
        token = Principal(owner="", key_id=f"{TOKEN}:{key_id}") if key_id else None  # the holder of the token

        def noted(
            what: str, *, id: str = "", outcome: str = "", about: str = "", bytes: int = 0, who: Principal | None = None
        ) -> None:
            who = who or current_principal() or token
            self.record(what, owner, sandbox=sandbox, id=id, outcome=outcome, about=about, bytes=bytes, who=who)

        return noted

    # -- inside

    def _make_room(self) -> None:
        """Too many entries came within half a second, or the disk does not take them."""
        if self._writing is None:
            self._flush_entries()
            return
        over = len(self._entries) - MOST_ENTRIES // 2
        self._entries = self._entries[over:]
        self._count_lost(over)

    def _count_lost(self, count: int) -> None:
        self.lost += count
        self._owed += count

    def _flush_entries(self, *, whole: bool = False) -> None:
        """`whole`: also the held lines of owners over their rate limit, which are written once a minute."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._files is None or self._thread is None:
            return
        loop = asyncio.get_running_loop()
        if self._writing is not None:  # lines that came meanwhile are next
            self._timer = loop.call_later(FLUSH_SECONDS, self._flush_entries)
            return
        entries, self._entries = self._entries, []
        self._writing = loop.run_in_executor(self._thread, self._write_entries, self._files, entries, False, whole)
        self._writing.add_done_callback(self._on_written)

    def _on_written(self, writing: asyncio.Future[None]) -> None:
        self._writing = None
        if self._files is None or self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        if self._entries or self._lines:
            self._timer = loop.call_later(FLUSH_SECONDS, self._flush_entries)
        elif self._ration.holds and self._telling is None:
            self._telling = loop.call_later(HELD_SECONDS, self._flush_held_lines)

    def _flush_held_lines(self) -> None:
        """Writes held lines even if no entry has come since."""
        self._telling = None
        self._flush_entries()

    # -- in the thread

    def _write_entries(self, files: AuditFileWriter, entries: Sequence[AuditEntry], last: bool, whole: bool) -> None:
        now = time.monotonic()
        sync = last or now - self._synced_at > SYNC_SECONDS
        owed = self._owed
        told = self._ration.filter_lines(condense_entries(entries), now, whole=whole)
        lines = [*self._lines, *self._lost_line(owed), *told]
        try:
            files.append(lines, sync=sync)
        except OSError as error:
            self._keep_unwritten(lines, error)
            return
        self._lines, self._owed = [], self._owed - owed
        self._synced_at = now if sync else self._synced_at
        if self.failing:
            log.warning("audit.works_again", lost=self.lost)
            self.failing = ""
        if now - self._pruned_at > PRUNE_SECONDS or not self._pruned_at or files.turned:
            self._prune_files(files, now)

    def _lost_line(self, owed: int) -> Iterable[AuditLine]:
        if owed:
            yield AuditLine(at=format_time(time.time()), what=LINES_LOST, key=SERVER, count=owed, about=self.failing)

    def _keep_unwritten(self, lines: Sequence[AuditLine], error: OSError) -> None:
        """Keeps lines for the next try, the oldest: the beginning is worth most."""
        told = [line for line in lines if line.what != LINES_LOST]
        self._lines = told[:MOST_ENTRIES]
        self._count_lost(sum(line.count for line in told[MOST_ENTRIES:]))
        why = error.strerror or type(error).__name__
        if why != self.failing:
            self.failing = why
            log.error("audit.not_written", why=why, lines=len(self._lines))

    def _prune_files(self, files: AuditFileWriter, now: float) -> None:
        self._pruned_at = now
        try:
            removed = prune_old(files.directory, self._config.days, self._config.max_bytes - files.segment_bytes)
            said = [removal_line(each) for each in removed]
            if said:
                files.append(said)
        except OSError as error:
            log.error("audit.not_pruned", why=error.strerror)


def _make_entry(
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
) -> AuditEntry:
    who = None if itself else who or current_principal()
    if who is None:
        return AuditEntry(time.time(), what, owner, "", SERVER if itself else TOKEN, sandbox, id, outcome, about, bytes)
    return AuditEntry(time.time(), what, owner, who.owner, who.key_id or LOCAL, sandbox, id, outcome, about, bytes)


def condense_entries(entries: Sequence[AuditEntry]) -> list[AuditLine]:
    """The lines for these entries, in their order. Nothing is left out, but a flood is one line with a count.

    Creations and ends of sandboxes are always single lines: each takes a sandbox. An execution that began and
    ended among these is one line, from its start until its end. `AuditRateLimit` bounds the lines of one owner
    in the long run.
    """
    began = _complete_executions(entries)
    entries = [entry for entry in entries if entry.what != STARTED or entry.id not in began]
    kinds = Counter(map(_entry_kind, entries))
    crowd: Counter[str] = Counter()  # lines of each owner
    for kind, count in kinds.items():
        crowd[kind[1]] += count if count <= FLOOD_ENTRIES else 1
    lines: list[AuditLine] = []
    floods: dict[object, AuditLine] = {}
    for entry in entries:
        kind = _entry_kind(entry)
        crowded = crowd[entry.owner] > MOST_LINES and not entry.what.startswith("sandbox.")
        if kinds[kind] <= FLOOD_ENTRIES and not crowded:
            lines.append(_audit_line(entry) if entry.what != ENDED else _execution_line(entry, began.get(entry.id)))
            continue
        key = (*kind[:4], "", kind[5], "") if crowded else kind
        flood = floods.get(key)
        if flood is None:
            first = entry._replace(id="", sandbox="", about="") if crowded else entry._replace(id="")
            flood = floods[key] = _audit_line(first)
            lines.append(flood)
            continue
        flood.count += 1
        flood.bytes += entry.bytes
        flood.until = format_time(entry.at)
    return lines


def _complete_executions(entries: Sequence[AuditEntry]) -> dict[str, float]:
    """The start times of executions that also ended, by their ids."""
    ended = {entry.id for entry in entries if entry.what == ENDED}
    return {entry.id: entry.at for entry in entries if entry.what == STARTED and entry.id in ended}


def _execution_line(entry: AuditEntry, began_at: float | None) -> AuditLine:
    line = _audit_line(entry)
    if began_at is not None:
        line.at, line.until = format_time(began_at), line.at
    return line


def _entry_kind(entry: AuditEntry) -> tuple[str, str, str, str, str, str, str]:
    return entry.what, entry.owner, entry.by, entry.key, entry.sandbox, entry.outcome, entry.about


def _audit_line(entry: AuditEntry) -> AuditLine:
    return AuditLine(
        at=format_time(entry.at),
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
