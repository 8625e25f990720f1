"""The egress of one sandbox: it accepts connections at its listener, and limits how many there are at once."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import select
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from cloche.config.sections import NetworkConfig
from cloche.egress import streams
from cloche.egress.journal import ConnectionAttempt, NetworkJournal
from cloche.egress.rules import Address, Destination, PolicyDenied, SandboxRules
from cloche.egress.streams import BUFFER_BYTES, EgressRefusal, RequestTooSlow, TokenBucket, accepted_streams
from cloche.network_policy import NetworkEntry, NetworkPolicy, Secret

if TYPE_CHECKING:
    from cloche.egress.authority import CertificateAuthority

# One connection of a program to the proxy, and the connections opened for it: when one ends, none stays
# open.

LEAVE_SECONDS = 5.0  # for the last written data to be sent
LINGER_SECONDS = 1.0
LINGER_BYTES = 1 << 20
_RESET = struct.pack("ii", 1, 0)


class EgressConnection:
    """The streams of a program's connection, and its line in the log."""

    def __init__(self, door: SandboxEgress, connection: socket.socket):
        self.door = door
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter
        self.attempt = ConnectionAttempt(door.journal)
        self.say_no: streams.RefusalEncoder = streams.http_refusal  # the encoding of a refusal in the client's protocol
        self._connection = connection
        self._transport: asyncio.Transport | None = None
        self._opened: list[tuple[socket.socket, asyncio.StreamWriter]] = []
        self._bound_for: Destination | None = None
        self._reached: Address | None = None
        self._has_left = False

    async def enter(self) -> None:
        self.reader, self.writer = await accepted_streams(self._connection, self._on_accepted)

    def _on_accepted(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def set_destination(self, destination: Destination) -> None:
        """Records the destination: from here on a new policy is checked against it."""
        self.attempt.destination = self._bound_for = destination

    def set_address(self, address: Address) -> None:
        """Records the address that is connected to, for the same check."""
        self._reached = address

    def arrived(self, connection: socket.socket, writer: asyncio.StreamWriter) -> None:
        """A connection was opened for it, which ends with it."""
        still = [(each, its) for each, its in self._opened if not its.transport.is_closing()]
        self._opened = [*still, (connection, writer)]
        self.attempt.let_through = True

    def check_again(self) -> None:
        """Raises PolicyDenied where the rules of today do not allow it."""
        if self._bound_for is not None:
            self.door.rulebooks.check_again(self._bound_for, self._reached)

    async def refuse(self, why: EgressRefusal) -> None:
        """Logs the refusal, sends it, and waits until it is read: unread bytes would cause a reset, and lose it."""
        self.attempt.end(why.verdict, str(why))
        if self.attempt.destination is not None:
            why.host = self.attempt.destination.host
        said = self.say_no(why)
        if not said:
            return self.reset()
        self.writer.write(said)
        await self._linger_for_reader()
        return None

    async def _linger_for_reader(self) -> None:
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(LINGER_SECONDS):
                await self.writer.drain()
                self.writer.write_eof()
                left = LINGER_BYTES
                while left > 0 and (part := await self.reader.read(BUFFER_BYTES)):
                    left -= len(part)

    async def leave(self) -> None:
        """Closes it, after some time for the last bytes to be read."""
        await self._linger_for_reader()
        writers = [self.writer, *(writer for _, writer in self._opened)]
        for writer in writers:
            writer.close()
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
                self._has_left = True

    def reset(self) -> None:
        """Resets all its connections, so that both peers see a break and not an end, unless it has ended properly."""
        if self._has_left:
            return
        for connection in (self._connection, *(connection for connection, _ in self._opened)):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.abort()

    def abort(self) -> None:
        """Closes everything at once. It can be called again."""
        if self._transport is None:
            self._connection.close()
        else:
            self._transport.abort()
        for _, writer in self._opened:
            writer.transport.abort()


# Accepts connections on a listener in a sandbox, at a pace that the host's loop can bear.

ACCEPTED_AT_ONCE = 32
PAUSE_SECONDS = 0.1
# A program that does nothing else can connect thousands of times in a second, and all doors are one loop's.
CONNECTS_AT_ONCE = 1000
CONNECTS_PER_SECOND = 200.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class ConnectionAcceptor:
    """Hands every connection that comes to `listener` to `admit(connection)`, which owns it, until `close`."""

    def __init__(self, listener: socket.socket, admit: Callable[[socket.socket], None]):
        self._listener = listener
        self._admit = admit
        self._waiting = select.poll()
        self._waiting.register(listener, select.POLLIN)
        self._pace = TokenBucket(CONNECTS_AT_ONCE, CONNECTS_PER_SECOND)
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._start_listening()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._listener)
            self._listener.close()

    def _start_listening(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._listener, self._accept_some)

    def _accept_some(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                if not self._has_connection():
                    return
                connection, _address = self._listener.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED:  # it would be called again at once, for ever
                    self._pause_listening()
                return
            connection.setblocking(False)
            self._admit(connection)
            if not self._pace.take():
                self._pause_listening()
                return

    def _has_connection(self) -> bool:
        """Whether `accept` has a connection for us; it never waits.

        The maker of the listener may have kept it, and could make it block, with all of the loop, and take away a
        connection that came. Between this and `accept` that is still possible. It is left at that since the maker is
        a sandbox's init, which runs our code alone: programs inside have no way to its descriptors.
        """
        self._listener.setblocking(False)
        return bool(self._waiting.poll(0))

    def _pause_listening(self) -> None:
        """Stops accepting for a moment; new connections wait in the kernel's queue."""
        self._loop.remove_reader(self._listener)
        self._loop.call_later(PAUSE_SECONDS, self._start_listening)


Attend = Callable[[EgressConnection], Awaitable[None]]


class ConnectionLimiter:
    """Counts the connections of all sandboxes. An owner's sandboxes have half at most."""

    def __init__(self, most: int):
        self._most = most
        self._most_each = max(1, most // 2)
        self.count = 0
        self._of: Counter[str] = Counter()

    def full_reason(self, owner: str) -> str | None:
        """The reason to refuse one more connection of that owner; None where there is room."""
        if self.count >= self._most:
            return "too many connections of all sandboxes at once"
        if self._of[owner] >= self._most_each:
            return f"more than {self._most_each} connections of all sandboxes of one owner at once"
        return None

    def enter(self, owner: str) -> None:
        self.count += 1
        self._of[owner] += 1

    def leave(self, owner: str) -> None:
        self.count -= 1
        self._of[owner] -= 1
        if not self._of[owner]:
            del self._of[owner]


class SandboxEgress:
    """Accepts on `listener`, which it owns, until `close`. `attend` serves each connection."""

    def __init__(
        self,
        listener: socket.socket,
        policy: NetworkPolicy,
        config: NetworkConfig,
        journal: NetworkJournal,
        crowd: ConnectionLimiter,
        attend: Attend,
    ):
        self.config = config
        self.journal = journal
        self.policy = policy
        self.rulebooks = SandboxRules(policy, config.bound, config.internal_ranges)
        self.owner = journal.owner
        self.lookups = asyncio.Semaphore(config.lookups)
        self.moved_bytes = 0
        self.authority: CertificateAuthority | None = None  # that vouches for the proxy, where the sandbox has secrets
        self._crowd = crowd
        self._attend = attend
        self._visits: dict[asyncio.Task[None], EgressConnection] = {}
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._arrivals = ConnectionAcceptor(listener, self._admit_connection)

    def replace(self, policy: NetworkPolicy) -> None:
        """Applies the policy from now on. Connections that it no longer allows are ended."""
        self.policy = policy
        self.rulebooks.replace(policy)
        for visit, task in [(visit, task) for task, visit in self._visits.items()]:
            try:
                visit.check_again()
            except PolicyDenied as denied:
                visit.attempt.end("denied", f"ended by a new policy: {denied}")
                task.cancel()

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._visits)

    @property
    def log(self) -> list[NetworkEntry]:
        """The entries of ended connections, then those of open ones."""
        going_on = (visit.attempt.open_entry for visit in self._visits.values())
        now = sorted((each for each in going_on if each is not None), key=lambda entry: entry.at)
        return [*self.journal.entries, *now]

    @property
    def secrets(self) -> tuple[Secret, ...]:
        return self.policy.secrets

    def secrets_for(self, host: str) -> tuple[Secret, ...]:
        """The secrets for a host by that name. They are added over TLS only, where the host has proved its
        identity.
        """
        return tuple(secret for secret in self.policy.secrets if secret.is_for(host))

    def close(self) -> None:
        """Ends everything that goes through it. Each connection is written down at once."""
        if not self._is_open:
            return
        self._is_open = False
        self._arrivals.close()
        for task, visit in list(self._visits.items()):
            visit.attempt.stop("the sandbox ended")
            task.cancel()
        self.journal.close()

    async def aclose(self) -> None:
        """As `close`, and waits until nothing of it is left."""
        self.close()
        if self._visits:
            await asyncio.wait(list(self._visits))

    def _admit_connection(self, connection: socket.socket) -> None:
        if len(self._visits) >= self.config.connections:
            self._turn_away(connection, f"more than {self.config.connections} connections of the sandbox at once")
        elif (full := self._crowd.full_reason(self.owner)) is not None:
            self._turn_away(connection, full)
        else:
            self._start_serving(EgressConnection(self, connection))

    def _turn_away(self, connection: socket.socket, why: str) -> None:
        with connection, contextlib.suppress(OSError):
            ConnectionAttempt(self.journal).end("denied", why)
            connection.send(streams.error_answer(503, why))

    def _start_serving(self, visit: EgressConnection) -> None:
        task = self._loop.create_task(self._serve_connection(visit))
        self._visits[task] = visit
        self._crowd.enter(self.owner)
        task.add_done_callback(self._on_served)

    def _on_served(self, task: asyncio.Task[None]) -> None:
        visit = self._visits.pop(task)
        self._crowd.leave(self.owner)
        visit.reset()  # nothing happens where it has left
        if not task.cancelled() and (error := task.exception()) is not None:
            self.journal.log_broken(error)
            visit.attempt.stop("the proxy itself has failed")
        visit.attempt.stop("the sandbox ended")

    async def _serve_connection(self, visit: EgressConnection) -> None:
        try:
            await visit.enter()
            async with asyncio.timeout(self.config.connection_seconds):
                await self._attend(visit)
            visit.attempt.stop("" if visit.attempt.let_through else "it said nothing")
            await visit.leave()
        except TimeoutError:
            visit.attempt.stop(f"it took longer than {self.config.connection_seconds:g} s")
        except (OSError, EOFError) as error:
            visit.attempt.stop(_show_error(error))


def _show_error(error: OSError | EOFError) -> str:
    return getattr(error, "strerror", None) or type(error).__name__


# The time limit for a program to send its request.


@contextlib.asynccontextmanager
async def request_deadline(visit: EgressConnection) -> AsyncIterator[None]:
    """Raises RequestTooSlow."""
    seconds = visit.door.config.request_seconds
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise RequestTooSlow(f"it did not send a whole request within {seconds:g} s") from None
