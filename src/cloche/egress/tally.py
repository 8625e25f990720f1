"""What went through all doors of this process, for `/metrics`."""

from __future__ import annotations

from collections import Counter

from cloche.network_policy import NetworkEntry


class Tally:
    """Of connections that have ended."""

    def __init__(self) -> None:
        self.connections: Counter[tuple[str, str]] = Counter()  # verdict, protocol
        self.sent_bytes = 0
        self.received_bytes = 0

    def count(self, entry: NetworkEntry) -> None:
        self.connections[entry.verdict, entry.protocol] += 1
        self.sent_bytes += entry.sent_bytes
        self.received_bytes += entry.received_bytes
