"""The door of one sandbox: what connects to its listener, who is let through, and how many at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from cloche.config.sections import Network
from cloche.egress import refusal
from cloche.egress.arrivals import Arrivals
from cloche.egress.journal import Attempt, Journal
from cloche.egress.rulebook import Denied, Rulebooks
from cloche.egress.visit import Visit as Visit
from cloche.network_policy import NetworkEntry, NetworkPolicy, Secret

if TYPE_CHECKING:  # loaded with the first sandbox that has secrets
    from cloche.egress.authority import Authority

Attend = Callable[[Visit], Awaitable[None]]


class Crowd:
    """How many connections there are through all doors. An owner's sandboxes have half at most."""

    def __init__(self, most: int):
        self._most = most
        self._most_each = max(1, most // 2)
        self.count = 0
        self._of: Counter[str] = Counter()

    def why_full(self, owner: str) -> str | None:
        """None where there is room for one more of that owner's."""
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
        self.owner = journal.owner
        self.lookups = asyncio.Semaphore(config.lookups)
        self.moved_bytes = 0
        self.authority: Authority | None = None  # that vouches for the proxy, where the sandbox has secrets
        self._crowd = crowd
        self._attend = attend
        self._visits: dict[asyncio.Task[None], Visit] = {}
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._arrivals = Arrivals(listener, self._admit)

    def replace(self, policy: NetworkPolicy) -> None:
        """From now on. What has been let through and is not allowed any more is ended."""
        self.policy = policy
        self.rulebooks.replace(policy)
        for visit, task in [(visit, task) for task, visit in self._visits.items()]:
            try:
                visit.check_again()
            except Denied as denied:
                visit.attempt.end("denied", f"ended by a new policy: {denied}")
                task.cancel()

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._visits)

    @property
    def log(self) -> list[NetworkEntry]:
        """What has ended, and then what goes on."""
        going_on = (visit.attempt.still_open for visit in self._visits.values())
        now = sorted((each for each in going_on if each is not None), key=lambda entry: entry.at)
        return [*self.journal.entries, *now]

    @property
    def secrets(self) -> tuple[Secret, ...]:
        return self.policy.secrets

    def secrets_for(self, host: str) -> tuple[Secret, ...]:
        """Those for a host by that name. They are added over TLS only, where the host has proved who it is."""
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
        """As `close`, and nothing of it is left then."""
        self.close()
        if self._visits:
            await asyncio.wait(list(self._visits))

    def _admit(self, connection: socket.socket) -> None:
        if len(self._visits) >= self.config.connections:
            self._turn_away(connection, f"more than {self.config.connections} connections of the sandbox at once")
        elif (full := self._crowd.why_full(self.owner)) is not None:
            self._turn_away(connection, full)
        else:
            self._let_in(Visit(self, connection))

    def _turn_away(self, connection: socket.socket, why: str) -> None:
        with connection, contextlib.suppress(OSError):
            Attempt(self.journal).end("denied", why)
            connection.send(refusal.answer(503, why))

    def _let_in(self, visit: Visit) -> None:
        task = self._loop.create_task(self._serve(visit))
        self._visits[task] = visit
        self._crowd.enter(self.owner)
        task.add_done_callback(self._on_left)

    def _on_left(self, task: asyncio.Task[None]) -> None:
        visit = self._visits.pop(task)
        self._crowd.leave(self.owner)
        visit.reset()  # nothing happens where it has left
        if not task.cancelled() and (error := task.exception()) is not None:
            self.journal.say_broken(error)
            visit.attempt.stop("the proxy itself has failed")
        visit.attempt.stop("the sandbox ended")

    async def _serve(self, visit: Visit) -> None:
        try:
            await visit.enter()
            async with asyncio.timeout(self.config.connection_seconds):
                await self._attend(visit)
            visit.attempt.stop("" if visit.attempt.let_through else "it said nothing")
            await visit.leave()
        except TimeoutError:
            visit.attempt.stop(f"it took longer than {self.config.connection_seconds:g} s")
        except (OSError, EOFError) as error:
            visit.attempt.stop(_shown(error))


def _shown(error: OSError | EOFError) -> str:
    return getattr(error, "strerror", None) or type(error).__name__
