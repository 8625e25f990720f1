"""Cloche's own log, on stderr: events with names (`execution.ended`) and a few fields.

Never code, output, file contents or keys. As a library it is silent below WARNING; the CLI and the server
call `configure_logging`. The host application's own logging settings are neither used nor changed.
"""

from __future__ import annotations

import bisect
import heapq
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from cloche.model import Struct

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

PRIVATE_FIELDS = frozenset({"code", "output", "stdout", "stderr", "text", "content", "path", "key", "api_key"})
"""Fields that are dropped above DEBUG, should somebody log them by mistake."""

FREQUENT_EVENTS = frozenset({"request.ended", "librechat.token_refused"})
"""Events that are logged only: were they kept, they would push out those that say why something ended."""

NETWORK_EVENTS = frozenset({"network.allowed", "network.denied", "network.failed", "network.left_out"})
"""Events that are kept apart, for the same reason: they are what an operator asks for by name."""

KEPT_ENTRIES = 1000

_LEVEL_NUMBERS: dict[LogLevel, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class LogEntry(Struct):
    """One logged event."""

    at: float
    level: LogLevel
    event: str
    fields: dict[str, Any]


class EventLog:
    """`log.info("sandbox.ended", sandbox=id, reason=reason)`. The last entries are kept, at every level."""

    def __init__(self) -> None:
        self.recent: deque[LogEntry] = deque(maxlen=KEPT_ENTRIES)  # the oldest first
        self._of_networks: deque[LogEntry] = deque(maxlen=KEPT_ENTRIES)
        self.level: LogLevel = "warning"
        self.format: LogFormat = "console"

    @property
    def kept(self) -> list[LogEntry]:
        """All kept entries, the oldest first."""
        return list(heapq.merge(self.recent, self._of_networks, key=lambda entry: entry.at))

    def forget(self, owner: str) -> None:
        """Removes the kept entries of that owner and of the owner's sandboxes."""
        sandboxes = {each.fields.get("sandbox") for each in self.kept if each.fields.get("owner") == owner} - {None}

        def is_theirs(entry: LogEntry) -> bool:
            return entry.fields.get("owner") == owner or entry.fields.get("sandbox") in sandboxes

        for kept in (self.recent, self._of_networks):
            others = [each for each in kept if not is_theirs(each)]
            kept.clear()
            kept.extend(others)

    def debug(self, event: str, **fields: Any) -> None:
        self._write_entry("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write_entry("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write_entry("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write_entry("error", event, fields)

    def _write_entry(self, level: LogLevel, event: str, fields: dict[str, Any]) -> None:
        if level != "debug":
            fields = {name: value for name, value in fields.items() if name not in PRIVATE_FIELDS}
        entry = LogEntry(at=time.time(), level=level, event=event, fields=fields)
        if level != "debug" and event not in FREQUENT_EVENTS:
            (self._of_networks if event in NETWORK_EVENTS else self.recent).append(entry)
        if _LEVEL_NUMBERS[level] >= _LEVEL_NUMBERS[self.level]:
            _write_line(_FORMATTERS[self.format](entry))


log = EventLog()


def configure_logging(format: LogFormat = "console", level: LogLevel = "info") -> None:
    """Sets the level and the format of logging, for the whole process."""
    log.level = level
    log.format = format


class Histogram:
    """A histogram of durations. `bounds` are upper ones, ascending; one more bucket is for values above them."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value


def _write_line(line: str) -> None:
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # its reader is gone: no reason for the caller to fail


def _format_json(entry: LogEntry) -> str:
    said = {"at": _format_time(entry.at), "level": entry.level, "event": entry.event, **entry.fields}
    return msgspec.json.encode(said, enc_hook=str).decode()


def _format_console(entry: LogEntry) -> str:
    fields = " ".join(f"{name}={_format_value(value)}" for name, value in entry.fields.items())
    return f"{_format_time(entry.at)} [{entry.level}] {entry.event} {fields}".rstrip()


def _format_value(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)  # a line stays a line


def _format_time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# Written here and not by a library, as it takes 5 microseconds and not 80: a server logs every request.
_FORMATTERS: dict[LogFormat, Callable[[LogEntry], str]] = {"json": _format_json, "console": _format_console}
