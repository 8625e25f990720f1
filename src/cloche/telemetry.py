"""What Cloche says about itself, on stderr: events with names (`execution.ended`) and a few fields.

Never code, output, file contents or keys. As a library it is silent below WARNING; the CLI and the server call
`configure`. The host application's own logging settings are neither used nor changed.
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

Format = Literal["console", "json"]
Level = Literal["debug", "info", "warning", "error"]

PRIVATE = frozenset({"code", "output", "stdout", "stderr", "text", "content", "path", "key", "api_key"})
"""Fields that are dropped above DEBUG, should somebody log them by mistake."""

FREQUENT = frozenset({"request.ended", "librechat.token_refused"})
"""Events that are logged only: were they kept, they would push out those that say why something ended."""

OF_NETWORKS = frozenset({"network.allowed", "network.denied", "network.failed", "network.left_out"})
"""Events that are kept apart, for the same reason: they are what an operator asks for by name."""

KEPT_ENTRIES = 1000

_NUMBERS: dict[Level, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class Entry(Struct):
    """Something that was said."""

    at: float
    level: Level
    event: str
    fields: dict[str, Any]


class Log:
    """`log.info("sandbox.ended", sandbox=id, reason=reason)`. The last entries are kept, whatever the level."""

    def __init__(self) -> None:
        self.recent: deque[Entry] = deque(maxlen=KEPT_ENTRIES)  # the oldest first
        self._of_networks: deque[Entry] = deque(maxlen=KEPT_ENTRIES)
        self.level: Level = "warning"
        self.format: Format = "console"

    @property
    def kept(self) -> list[Entry]:
        """All that is kept, the oldest first."""
        return list(heapq.merge(self.recent, self._of_networks, key=lambda entry: entry.at))

    def forget(self, owner: str) -> None:
        """What is kept of that owner, and of their sandboxes."""
        sandboxes = {each.fields.get("sandbox") for each in self.kept if each.fields.get("owner") == owner} - {None}

        def is_theirs(entry: Entry) -> bool:
            return entry.fields.get("owner") == owner or entry.fields.get("sandbox") in sandboxes

        for kept in (self.recent, self._of_networks):
            others = [each for each in kept if not is_theirs(each)]
            kept.clear()
            kept.extend(others)

    def debug(self, event: str, **fields: Any) -> None:
        self._write("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write("error", event, fields)

    def _write(self, level: Level, event: str, fields: dict[str, Any]) -> None:
        if level != "debug":
            fields = {name: value for name, value in fields.items() if name not in PRIVATE}
        entry = Entry(at=time.time(), level=level, event=event, fields=fields)
        if level != "debug" and event not in FREQUENT:
            (self._of_networks if event in OF_NETWORKS else self.recent).append(entry)
        if _NUMBERS[level] >= _NUMBERS[self.level]:
            _print(_FORMS[self.format](entry))


log = Log()


def configure(format: Format = "console", level: Level = "info") -> None:
    """Sets how much is logged and in which form, for the whole process."""
    log.level = level
    log.format = format


class Histogram:
    """How often something took how long. `bounds` are upper ones, ascending; one more bucket is for what is over."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value


def _print(line: str) -> None:
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # nobody reads it any more: no reason to fail at what was being done


def _json(entry: Entry) -> str:
    said = {"at": _stamp(entry.at), "level": entry.level, "event": entry.event, **entry.fields}
    return msgspec.json.encode(said, enc_hook=str).decode()


def _console(entry: Entry) -> str:
    fields = " ".join(f"{name}={_shown(value)}" for name, value in entry.fields.items())
    return f"{_stamp(entry.at)} [{entry.level}] {entry.event} {fields}".rstrip()


def _shown(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)  # a line stays a line


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# Written here and not by a library, as it takes 5 microseconds and not 80: a server logs every request.
_FORMS: dict[Format, Callable[[Entry], str]] = {"json": _json, "console": _console}
