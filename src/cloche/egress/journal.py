"""What became of each connection: kept with the sandbox, and said in the server's log."""

from __future__ import annotations

import time
from collections import deque

from cloche.egress.destination import Destination
from cloche.network_policy import NetworkEntry
from cloche.telemetry import log

MAX_REASON = 500


class Journal:
    """A sandbox's network log, the oldest first. The oldest entries make room for new ones."""

    def __init__(self, sandbox: str, owner: str, size: int):
        self._sandbox = sandbox
        self._owner = owner
        self._entries: deque[NetworkEntry] = deque(maxlen=size)

    @property
    def entries(self) -> list[NetworkEntry]:
        return list(self._entries)

    def write(self, entry: NetworkEntry) -> None:
        self._entries.append(entry)
        about = {name: getattr(entry, name) for name in _SAID if getattr(entry, name) not in ("", 0)}
        log.info("network." + entry.verdict, sandbox=self._sandbox, owner=self._owner, **about)


_SAID = ("protocol", "host", "port", "reason", "sent_bytes", "received_bytes")


class Attempt:
    """One connection of a program. It is written down once, when it has ended."""

    def __init__(self, journal: Journal, protocol: str = "other"):
        self._journal = journal
        self._began_at, self._clock = time.time(), time.monotonic()
        self.protocol = protocol
        self.asked: Destination | None = None
        self.host = ""  # where what was asked for is no destination
        self.sent_bytes = 0
        self.received_bytes = 0
        self._written = False

    def end(self, verdict: str, reason: str = "") -> None:
        """The first word counts."""
        if self._written:
            return
        self._written = True
        host, port = (self.asked.host, self.asked.port) if self.asked else (self.host[:300], 0)
        self._journal.write(
            NetworkEntry(
                at=self._began_at,
                protocol=self.protocol,  # type: ignore[arg-type]  # one of those that exist
                host=host,
                port=port,
                verdict=verdict,  # type: ignore[arg-type]
                reason=reason[:MAX_REASON],
                sent_bytes=self.sent_bytes,
                received_bytes=self.received_bytes,
                seconds=round(time.monotonic() - self._clock, 6),
            )
        )
