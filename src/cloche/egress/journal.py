"""What became of each connection: kept with the sandbox, and said in the server's log."""

from __future__ import annotations

import time
import traceback
from collections import deque
from typing import Literal

from cloche.egress.destination import Destination, is_showable
from cloche.egress.pace import Pace
from cloche.egress.refusal import Verdict
from cloche.network_policy import NetworkEntry
from cloche.telemetry import log

Protocol = Literal["connect", "http", "socks", "package", "other"]

MAX_REASON = 500
# A sandbox can be denied thousands of times in a second, and the server's log is for all of them.
LINES_AT_ONCE = 60
LINES_PER_SECOND = 2.0


class Journal:
    """A sandbox's network log, the oldest first. The oldest entries make room for new ones, and are counted."""

    def __init__(self, sandbox: str, owner: str, size: int):
        self._sandbox = sandbox
        self._owner = owner
        self._entries: deque[NetworkEntry] = deque(maxlen=size)
        self._lines = Pace(LINES_AT_ONCE, LINES_PER_SECOND)
        self._unsaid = 0
        self.count = 0  # of all that were ever written

    @property
    def entries(self) -> list[NetworkEntry]:
        return list(self._entries)

    @property
    def dropped(self) -> int:
        """How many made room."""
        return self.count - len(self._entries)

    def write(self, entry: NetworkEntry) -> None:
        self._entries.append(entry)
        self.count += 1
        if not self._lines.take():
            self._unsaid += 1
            return
        self.say_what_was_left_out()
        about = {name: getattr(entry, name) for name in _SAID if getattr(entry, name) not in ("", 0)}
        log.info("network." + entry.verdict, sandbox=self._sandbox, owner=self._owner, **about)

    def say_broken(self, error: BaseException) -> None:
        """A fault of ours, in the server's log alone: what a program can bring about it can bring about often."""
        if self._lines.take():
            place = traceback.extract_tb(error.__traceback__)[-1]
            about = {"error": type(error).__name__, "at": f"{place.name}:{place.lineno}"}
            log.error("network.broken", sandbox=self._sandbox, owner=self._owner, **about)

    def say_what_was_left_out(self) -> None:
        """In the server's log, where it had too many lines at once."""
        if self._unsaid:
            log.info("network.left_out", sandbox=self._sandbox, owner=self._owner, lines=self._unsaid)
            self._unsaid = 0


_SAID = ("protocol", "host", "port", "reason", "sent_bytes", "received_bytes")


class Attempt:
    """One connection of a program. It is written down once, when it has ended."""

    def __init__(self, journal: Journal, protocol: Protocol = "other"):
        self._journal = journal
        self._began_at, self._clock = time.time(), time.monotonic()
        self.protocol: Protocol = protocol
        self.asked: Destination | None = None
        self.host = ""  # where what was asked for is no destination
        self.let_through = False
        self.sent_bytes = 0
        self.received_bytes = 0
        self._written = False

    def stop(self, reason: str) -> None:
        """It ended, not by a word of ours: it was allowed if it had been let through, and had failed if not."""
        self.end("allowed" if self.let_through else "failed", reason)

    def end(self, verdict: Verdict, reason: str = "") -> None:
        """The first word counts."""
        if self._written:
            return
        self._written = True
        host, port = (self.asked.host, self.asked.port) if self.asked else (self.host, 0)
        self._journal.write(
            NetworkEntry(
                at=self._began_at,
                protocol=self.protocol,
                host=host if is_showable(host) else "",
                port=port,
                verdict=verdict,
                reason=reason[:MAX_REASON],
                sent_bytes=self.sent_bytes,
                received_bytes=self.received_bytes,
                seconds=round(time.monotonic() - self._clock, 6),
            )
        )
