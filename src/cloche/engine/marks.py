"""Finding marks in a kernel's output: see "Marks" in `cloche.guest.wire`."""

from __future__ import annotations

from collections.abc import Callable

from cloche.guest import wire

_HEX = frozenset(b"0123456789abcdef")


class MarkedStream:
    """Takes the bytes of one output pipe, hands the text to `emit` and stops at each mark whose frame has not come.

    A mark that is split across reads is found. While `held` is not None, `feed` must not be called.
    The work is linear in the bytes, whatever marks a hostile kernel writes.
    """

    def __init__(self, token: str, emit: Callable[[bytes], None]):
        self._start = wire.MARK_START + token.encode() + b";"
        self._emit = emit
        self._rest = b""  # after the mark that holds us, or the beginning of what may be a mark
        self._released = -1
        self._ignoring = False
        self.held: int | None = None

    def feed(self, data: bytes) -> None:
        buffer = self._rest + data if self._rest else data
        self._rest = b""
        done = seen = 0  # given away up to `done`, looked at up to `seen`
        while self.held is None:
            at = buffer.find(self._start, seen)
            end = at + wire.MARK_LENGTH
            if at < 0 or end > len(buffer):
                self._keep_tail(buffer, done, at)
                return
            seen = at + 1  # what looks like a mark and is none is the program's
            mark = self._mark(buffer, at)
            if mark is not None:
                self._give(buffer[done:at])
                done = seen = end
                self.held = mark if mark > self._released and not self._ignoring else None
        self._rest = buffer[done:]

    def release(self, mark: int) -> bool:
        """Frame `mark` came. True if the stream stands at that mark or beyond; False if more must be read first."""
        if mark <= self._released:
            return True
        self._released = mark - 1
        self.go_on()
        if self.held is None:
            return False
        self._released = mark
        return True

    def skip(self, mark: int) -> None:
        """Frame `mark` came and its mark did not: nothing waits for it any more."""
        self._released = max(self._released, mark)

    def go_on(self) -> None:
        """Hands on what stood behind a released mark."""
        if self.held is not None and self.held <= self._released:
            self.held = None
            rest, self._rest = self._rest, b""
            self.feed(rest)

    def let_go(self) -> None:
        """An execution has ended: marks that no frame claimed hold nothing back any longer."""
        if self.held is not None:
            self._ignoring, self.held = True, None
            rest, self._rest = self._rest, b""
            self.feed(rest)
            self._ignoring = False

    def flush(self) -> None:
        """All that is to come has come: hands on also what waits for its frame, or might be the beginning of a mark."""
        self.let_go()
        rest, self._rest = self._rest, b""
        self._give(rest)

    def _mark(self, buffer: bytes, at: int) -> int | None:
        end = at + wire.MARK_LENGTH - 1
        digits = buffer[at + len(self._start) : end]
        return int(digits, 16) if buffer[end] == 0x07 and _HEX.issuperset(digits) else None

    def _keep_tail(self, buffer: bytes, done: int, at: int) -> None:
        if at < 0:
            at = buffer.rfind(b"\x1b", max(done, len(buffer) - len(self._start) + 1))
        if at >= 0 and (at + len(self._start) <= len(buffer) or self._start.startswith(buffer[at:])):
            self._rest = buffer[at:]
            self._give(buffer[done:at])
        else:
            self._give(buffer[done:] if done else buffer)

    def _give(self, data: bytes) -> None:
        if data:
            self._emit(data)
