"""What a build says while it works: bounded, numbered from its beginning."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from cloche.store.builds import Level, LogEntry

MAX_ENTRIES = 10_000
MAX_BYTES = 1 << 20
MAX_LINE = 4096  # characters
ENTRY_BYTES = 100  # that an entry takes beside its message
KEPT_BYTES = 64 << 10  # of the last entries, with the build's record

# Colours and the like mean nothing where these lines are shown, and a line must not take over a terminal.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")


class BuildLog:
    """Output beyond the bound is left out, and that is said once. What we say ourselves always fits."""

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []
        self._bytes = 0
        self.is_full = False  # of output

    def say(self, message: str, level: Level = "info", step: str | None = None) -> None:
        """A word of ours."""
        self.entries.append(LogEntry(at=time.time(), level=level, message=message[:MAX_LINE], step=step))

    def output(self, line: str, stream: str, step: str) -> None:
        """A line that a program wrote."""
        text = _ESCAPES.sub("", line.rpartition("\r")[2] or line)[:MAX_LINE]
        self._bytes += len(text.encode("utf-8", "surrogatepass")) + ENTRY_BYTES
        if self._bytes > MAX_BYTES or len(self.entries) >= MAX_ENTRIES:
            if not self.is_full:
                self.say("the output is too long: the rest is left out", "warn", step)
            self.is_full = True
            return
        self.say(f"[{stream}]: {text}", "info" if stream == "stdout" else "warn", step)

    def last(self, max_bytes: int = KEPT_BYTES) -> Sequence[LogEntry]:
        """The last of them that are not more than so many bytes."""
        size, first = 0, len(self.entries)
        while first > 0:
            size += len(self.entries[first - 1].message.encode("utf-8", "surrogatepass")) + ENTRY_BYTES
            if size > max_bytes:
                break
            first -= 1
        return self.entries[first:]


class Lines:
    """Output as it comes, handed on line by line."""

    def __init__(self, log: BuildLog, step: str):
        self._log = log
        self._step = step
        self._rest = {"stdout": "", "stderr": ""}

    def add(self, stream: str, text: str) -> None:
        if self._log.is_full:  # a program that writes without end must not cost more than that it is read
            return
        *lines, rest = (self._rest[stream] + text).split("\n")
        for line in lines[:MAX_ENTRIES]:
            self._log.output(line, stream, self._step)
        if len(rest) > MAX_LINE:
            self._log.output(rest, stream, self._step)
            rest = ""
        self._rest[stream] = rest

    def end(self) -> None:
        for stream, rest in self._rest.items():
            if rest:
                self._log.output(rest, stream, self._step)
