"""A sandbox's network log as a list that shows itself."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable

from cloche.network_policy import NetworkEntry

_COLUMNS = ("time", "verdict", "protocol", "host", "port", "sent", "received", "seconds", "reason")


class NetworkLog(list[NetworkEntry]):
    """What programs tried, the oldest first. `dropped`: how many older entries made room for these."""

    def __init__(self, entries: Iterable[NetworkEntry] = (), dropped: int = 0):
        super().__init__(entries)
        self.dropped = dropped

    def __repr__(self) -> str:
        return "\n".join([*self._note(), *map(str, self)]) or "nothing was tried"

    def _note(self) -> list[str]:
        return [f"({self.dropped} older entries made room)"] if self.dropped else []

    def _repr_html_(self) -> str:
        """For notebooks. Host names are a program's own words, so everything is escaped."""
        head = _row("th", _COLUMNS)
        note = "".join(f"<p>{html.escape(each)}</p>" for each in self._note())
        return f"{note}<table>{head}{''.join(_row('td', _cells(each)) for each in self)}</table>"


def _cells(entry: NetworkEntry) -> list[object]:
    when = time.strftime("%H:%M:%S", time.localtime(entry.at))
    about = (entry.verdict, entry.protocol, entry.host, entry.port or "")
    return [when, *about, entry.sent_bytes, entry.received_bytes, f"{entry.seconds:.3f}", entry.reason]


def _row(cell: str, values: Iterable[object]) -> str:
    return "<tr>" + "".join(f"<{cell}>{html.escape(str(each))}</{cell}>" for each in values) + "</tr>"
