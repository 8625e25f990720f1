"""What a model should know beside what its program wrote: lines of the program's stderr."""

from __future__ import annotations

from collections.abc import Iterable

MARK = "[sandbox] "
MAX_NOTES = 50
MAX_CHARACTERS = 1000
_SHOWN = 200


class Notes:
    """Of one execution. Those over a limit are counted."""

    def __init__(self, notes: Iterable[str] = ()):
        self._notes: list[str] = []
        self._more = 0
        for note in notes:
            self.add(note)

    def add(self, note: str) -> None:
        """One line. What it names was said by a client or a program."""
        line = " ".join(note.split())[:MAX_CHARACTERS]
        if len(self._notes) < MAX_NOTES:
            self._notes.append(line)
        else:
            self._more += 1

    def after(self, stderr: str) -> str:
        """`stderr`, and these below it."""
        lines = [*self._notes, *([f"and {self._more} more notes like these"] if self._more else [])]
        if not lines:
            return stderr
        gap = "\n" if stderr and not stderr.endswith("\n") else ""
        return stderr + gap + "".join(f"{MARK}{line}\n" for line in lines)


def named(name: str) -> str:
    """A file's name as a note says it: whatever is in it, it stays on one line."""
    return repr(name if len(name) <= _SHOWN else name[:_SHOWN] + "...")
