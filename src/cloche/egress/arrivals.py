"""Who connects to a listener in a sandbox, at a pace that the host's loop can bear."""

from __future__ import annotations

import asyncio
import errno
import select
import socket
from collections.abc import Callable

from cloche.egress.pace import Pace

ACCEPTED_AT_ONCE = 32
PAUSE_SECONDS = 0.1
# A program that does nothing else can connect thousands of times in a second, and all doors are one loop's.
CONNECTS_AT_ONCE = 1000
CONNECTS_PER_SECOND = 200.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Arrivals:
    """Hands every connection that comes to `listener` to `admit(connection)`, who owns it, until `close`."""

    def __init__(self, listener: socket.socket, admit: Callable[[socket.socket], None]):
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._admit = admit
        self._waiting = select.poll()
        self._waiting.register(listener, select.POLLIN)
        self._pace = Pace(CONNECTS_AT_ONCE, CONNECTS_PER_SECOND)
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._listen()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._listener)
            self._listener.close()

    def _listen(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                if not self._is_somebody_there():
                    return
                connection, _address = self._listener.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED:  # it would be called again at once, for ever
                    self._pause()
                return
            connection.setblocking(False)
            self._admit(connection)
            if not self._pace.take():
                self._pause()
                return

    def _is_somebody_there(self) -> bool:
        """Whether `accept` has somebody for us, and does not wait in any case.

        Who made the listener may have kept it, and could make it one that waits, with all of the loop, and take away
        who came. Between this and `accept` that is still possible. It is left at that since the maker is a sandbox's
        init, which runs our code alone: programs inside have no way to its descriptors.
        """
        self._listener.setblocking(False)
        return bool(self._waiting.poll(0))

    def _pause(self) -> None:
        """Who connects meanwhile waits in the kernel's queue."""
        self._loop.remove_reader(self._listener)
        self._loop.call_later(PAUSE_SECONDS, self._listen)
