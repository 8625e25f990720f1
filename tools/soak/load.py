"""The load: a few clients in a closed loop, each with a sandbox that it keeps, and a conductor who breaks things."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable

import cloche
from soak import census, faults, ours, theirs
from soak.book import Book
from soak.census import Sample
from soak.deck import Deck
from soak.host import Host
from soak.hostile import Attacks, Survivors
from soak.visit import Operation, Visit, check_run, taken

HANG_SECONDS = 90.0  # longer than any operation takes on two busy cores
SAMPLE_SECONDS = 2.0
FAULT_SECONDS = 4.0  # from one to the next, on average
HOSTILE_SHARE = 0.06
STALE_SECONDS = 1.0  # in which clients still try connections that have died with the server


class Load:
    def __init__(self, host: Host, book: Book, seed: int, clients: int):
        self.samples: list[Sample] = []
        self._host = host
        self._book = book
        self._seed = seed
        self._clients = clients
        self._up = asyncio.Event()
        self._up.set()
        self._over = asyncio.Event()
        self._breaking = asyncio.Lock()
        dice = random.Random(f"{seed} decks")
        self._peaceful = Deck(ours.OPERATIONS | theirs.OPERATIONS, dice)
        self._hostile = Deck(Attacks(host).operations, dice)
        self._faults = Deck(faults.WORLD, dice)

    async def warm_up(self) -> None:
        """Every operation once: whatever is loaded or opened when it is first needed, now is."""
        for number, operation in enumerate([*self._peaceful.kinds, *self._hostile.kinds]):
            await self._attempt(operation, self._visit(number, f"warm{number}"))

    async def go(self, seconds: float, kills: int) -> None:
        """For so long, with so many deaths of the whole server spread over it."""
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(self._sample()), tasks.create_task(self._break_things())]
            clients = [tasks.create_task(self._client(number)) for number in range(self._clients)]
            for number in range(kills):
                await asyncio.sleep(seconds / (kills + 1) * 0.8)
                await self._kill_server(number)
            await asyncio.sleep(max(0.0, self._book.began + seconds - time.monotonic()))
            self._over.set()
            await asyncio.wait(clients)
            for each in beside:
                each.cancel()

    def _visit(self, number: int, name: str) -> Visit:
        owner = self._host.owners[number % len(self._host.owners)]
        return Visit(self._host.url, owner.key, random.Random(f"{self._seed} {name}"))

    # -- clients

    async def _client(self, number: int) -> None:
        visit = self._visit(number, f"client{number}")
        companion = Companion(visit)
        while not self._over.is_set():
            await self._up.wait()
            await self._attempt(companion.use, visit, since=companion.last_good)
            deck = self._hostile if visit.dice.random() < HOSTILE_SHARE else self._peaceful
            await self._attempt(deck.draw(), visit)
        await self._attempt(companion.leave, visit)

    async def _attempt(self, operation: Operation, visit: Visit, since: float = float("inf")) -> None:
        """`since`: when what it uses was last known to be well, where that was before."""
        began, name = time.monotonic(), operation.__name__
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await operation(visit)
        except BaseExceptionGroup as group:
            self._book.failed(name, min(began, since), group.exceptions[0])
        except Exception as error:  # noqa: BLE001 whatever a client raises is what is measured here
            self._book.failed(name, min(began, since), error)
        else:
            self._book.did(name, began)

    # -- faults

    async def _break_things(self) -> None:
        dice = random.Random(f"{self._seed} faults")
        while True:
            await asyncio.sleep(dice.expovariate(1 / FAULT_SECONDS))
            await self._up.wait()
            async with self._breaking:
                await self._faults.draw()(self._host, self._book)

    async def _kill_server(self, number: int) -> None:
        """What was paused, kept or stored is there again; the rest has ended, and is known to have."""
        async with self._breaking:  # what must survive this is not to be hurt by something else
            await self._kill_and_look(number)

    async def _kill_and_look(self, number: int) -> None:
        visit = self._visit(0, f"survivors{number}")
        survivors = Survivors(visit, self._host.data_dir / "store.sqlite3")
        if not await self._expect("before the server is killed", survivors.make()):
            return
        self._up.clear()
        fault = self._book.fault("server killed", "gone", "unreachable", "unavailable", "other", "hang")
        self._host.kill()
        await asyncio.to_thread(self._host.start)
        fault.over(STALE_SECONDS)
        self._up.set()
        await asyncio.sleep(STALE_SECONDS)  # so that what comes begins after the fault, and is explained by none
        await self._expect("after the server was killed", survivors.look())

    async def _expect(self, name: str, what: Awaitable[None]) -> bool:
        began = time.monotonic()
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await what
        except Exception as error:  # noqa: BLE001 as above
            self._book.failed(name, began, error)
            return False
        self._book.did(name, began)
        return True

    # -- measuring

    async def _sample(self) -> None:
        while True:
            await self._up.wait()
            memory = await asyncio.to_thread(census.memory, self._host.pid)
            self.samples.append(Sample(time.monotonic() - self._book.began, self._host.starts, memory))
            await asyncio.sleep(SAMPLE_SECONDS)


class Companion:
    """A sandbox that a client keeps for the whole run, in which a number counts its uses."""

    def __init__(self, visit: Visit):
        self._visit = visit
        self._box: cloche.AsyncSandbox | None = None
        self._uses = 0
        self.last_good = time.monotonic()

    async def use(self, visit: Visit) -> None:
        try:
            await self._use()
        except BaseException:
            await self.leave(visit)
            raise

    async def _use(self) -> None:
        if self._box is None:
            self._box = await cloche.AsyncSandbox(timeout=3600, **self._visit.server)
            check_run(await self._box.run("uses = 0"))
            self._uses = 0
        for _ in range(self._visit.dice.randrange(1, 8)):
            self._uses += 1
            await taken(self._box, "uses = uses + 1\nuses", self._uses)
        self.last_good = time.monotonic()

    async def leave(self, visit: Visit) -> None:
        box, self._box = self._box, None
        if box is not None:
            with contextlib.suppress(cloche.ClocheError):
                await box.close()
