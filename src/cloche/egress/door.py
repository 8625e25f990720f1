"""The door of one sandbox: what connects to its listener, who is let through, and how many at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable

from cloche.egress.journal import Attempt, Journal
from cloche.egress.rulebook import Rulebooks
from cloche.network_config import Network
from cloche.network_policy import NetworkPolicy, Secret

ACCEPTED_AT_ONCE = 32
BUFFER_BYTES = 64 << 10
TOO_MANY = b"HTTP/1.1 503 Too many connections\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_NO_LINGER = struct.pack("ii", 0, 0)


class Crowd:
    """How many connections there are through all doors."""

    def __init__(self, most: int):
        self.most = most
        self.count = 0


class Visit:
    """One connection of a program: what it reads and writes, and its line in the log."""

    def __init__(self, door: Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.door = door
        self.reader = reader
        self.writer = writer
        self.attempt = Attempt(door.journal)


Attend = Callable[[Visit], Awaitable[None]]


class Door:
    """Accepts on `listener`, which it owns, until `close`. `attend` sees to each connection."""

    def __init__(
        self,
        listener: socket.socket,
        policy: NetworkPolicy,
        config: Network,
        journal: Journal,
        crowd: Crowd,
        attend: Attend,
    ):
        self.config = config
        self.journal = journal
        self.policy = policy
        self.rulebooks = Rulebooks(policy, config.bound, config.internal_ranges)
        self.moved_bytes = 0
        self._listener = listener
        self._crowd = crowd
        self._attend = attend
        self._visits: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listener, self._accept)

    def replace(self, policy: NetworkPolicy) -> None:
        """From now on. What has been let through stays until it ends, unless it is not allowed any more."""
        self.policy = policy
        self.rulebooks.replace(policy)

    @property
    def secrets(self) -> tuple[Secret, ...]:
        return self.policy.secrets

    def close(self) -> None:
        """Ends everything that goes through it."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for visit in self._visits:
            visit.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _address = self._listener.accept()
            except OSError:
                return
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)  # a close never waits
        if len(self._visits) >= self.config.connections or self._crowd.count >= self._crowd.most:
            with connection:
                Attempt(self.journal).end("denied", f"more than {self.config.connections} connections at once")
                with contextlib.suppress(OSError):
                    connection.send(TOO_MANY)
            return
        visit = self._loop.create_task(self._serve(connection))
        self._visits.add(visit)
        self._crowd.count += 1
        visit.add_done_callback(self._on_left)

    def _on_left(self, visit: asyncio.Task[None]) -> None:
        self._visits.discard(visit)
        self._crowd.count -= 1

    async def _serve(self, connection: socket.socket) -> None:
        reader = asyncio.StreamReader(BUFFER_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, connection)
        writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
        visit = Visit(self, reader, writer)
        try:
            async with asyncio.timeout(self.config.connection_seconds):
                await self._attend(visit)
            visit.attempt.end("failed", "it said nothing")
        except TimeoutError:
            visit.attempt.end("failed", f"it took longer than {self.config.connection_seconds:g} s")
        except (OSError, asyncio.IncompleteReadError) as error:
            visit.attempt.end("failed", str(error) or type(error).__name__)
        finally:
            visit.attempt.end("failed", "the sandbox ended")
            transport.abort() if transport.get_write_buffer_size() > BUFFER_BYTES else transport.close()
