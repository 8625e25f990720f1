"""What an operation has in hand: a server, somebody's key, and dice that fall the same in every run of a seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import httpx2

import cloche
from soak.book import Lost, Wrong

LIFE_SECONDS = 120.0  # of a sandbox whose client was killed with the server
Operation = Callable[["Visit"], Awaitable[None]]


class Visit:
    def __init__(self, url: str, key: str, dice: random.Random):
        self.url = url
        self.key = key
        self.dice = dice

    @property
    def server(self) -> dict[str, Any]:
        """What our library takes as arguments."""
        return {"url": self.url, "api_key": self.key}

    @property
    def e2b(self) -> dict[str, Any]:
        """What E2B's SDKs take."""
        return {"api_key": self.key, "api_url": f"{self.url}/e2b", "sandbox_url": f"{self.url}/e2b"}

    @contextlib.asynccontextmanager
    async def sandbox(self, *args: Any, **how: Any) -> AsyncGenerator[cloche.AsyncSandbox, None]:
        box = await cloche.AsyncSandbox(*args, timeout=LIFE_SECONDS, **how, **self.server)
        try:
            yield box
        finally:
            await box.close()

    def http(self, prefix: str, header: str = "x-api-key") -> httpx2.AsyncClient:
        transport = httpx2.AsyncHTTPTransport(retries=0)
        return httpx2.AsyncClient(
            base_url=self.url + prefix, headers={header: self.key}, timeout=60, transport=transport
        )

    def number(self) -> int:
        return self.dice.randrange(10**6)

    def name(self) -> str:
        return f"s{self.dice.getrandbits(64):x}"


def check(got: object, wanted: object, what: str = "answer") -> None:
    """Raises Wrong."""
    if got != wanted:
        raise Wrong(f"{what} is {str(got)[:200]!r}, not {str(wanted)[:200]!r}")


def check_run(run: cloche.Run, outcome: str = "ok") -> None:
    """Raises Lost where the program was killed, else Wrong."""
    if run.outcome != outcome:
        said = f"{run.outcome} instead of {outcome}: {run.reason or run.error}"
        raise Lost(said) if run.outcome == "died" else Wrong(said)


def check_command(ran: cloche.CommandResult, wanted: tuple[str, str, int]) -> None:
    """What it said on stdout and stderr, and its status. Raises Lost where it ended with its sandbox, else Wrong."""
    if ran.outcome == "died":
        raise Lost(f"a command: {ran.reason}")
    check((ran.stdout.strip(), ran.stderr.strip(), ran.exit_code), wanted, "command")


async def taken(box: cloche.AsyncSandbox | cloche.AsyncContext, code: str, wanted: object) -> None:
    """Runs an expression, of which that is the value."""
    run = await box.run(code)
    check_run(run)
    check(run.text, str(wanted), code)


async def until(what: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in time."""
    for _ in range(int(seconds * 20)):
        if what():
            return True
        await asyncio.sleep(0.05)
    return False
