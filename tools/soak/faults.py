"""Faults that are the world's: something of the server's dies, or is held up. Each says whom it may hurt."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import time
from pathlib import Path

from soak.book import Book
from soak.census import descendants
from soak.host import Host

LOCK_SECONDS = 2.0
HALF_OPEN = 150
HALF_OPEN_SECONDS = 8.0
REQUESTS = (
    b"",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    b"POST /api/v1/sandboxes HTTP/1.1\r\nContent-Length: 900\r\n\r\n{",
)


def zygotes(pid: int) -> list[int]:
    """Those from which cells are forked: the last of a nursery's processes that are pid 1 of nothing."""
    found = []
    for each in descendants(pid):
        numbers, parent = _pids(each)
        if len(numbers) == 3 and numbers[-1] != 1 and _pids(parent)[0][-1:] == [1]:
            found.append(each)
    return found


def cradles(pid: int) -> list[int]:
    """The children of zygotes from which inits are forked."""
    parents = set(zygotes(pid))
    known = {each: _pids(each) for each in descendants(pid)}
    return [each for each, (inside, parent) in known.items() if parent in parents and len(inside) == 3]


def inits(pid: int) -> list[int]:
    """The first process of each cell, the newest cell first. An embryo is in the user namespace of its parent."""
    known = {each: _pids(each) for each in descendants(pid)}  # asked once: it may be gone a moment later
    first = [(each, parent) for each, (inside, parent) in known.items() if len(inside) == 4 and inside[-1] == 1]
    cells = [each for each, parent in first if _namespace(each, "user") != _namespace(parent, "user")]
    return sorted(cells, key=_started, reverse=True)


def kernel_named(pid: int, name: str) -> tuple[int, int]:
    """(kernel, init) of the program that calls itself that. Raises LookupError."""
    for each in descendants(pid):
        if _comm(each) == name:
            inside = _namespace(each, "pid")
            return each, next((init for init in inits(pid) if _namespace(init, "pid") == inside), each)
    raise LookupError(name)


def _namespace(pid: int, kind: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _pids(pid: int) -> tuple[list[int], int]:
    """Its number in every namespace, the outermost first, and its parent's number here."""
    numbers: list[int] = []
    parent = 0
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "NSpid":
                numbers = [int(each) for each in value.split()]
            elif name == "PPid":
                parent = int(value)
    except OSError:
        pass
    return numbers, parent


def _started(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except OSError:
        return 0


def killed(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


async def zygote_dies(host: Host, book: Book) -> None:
    """Sandboxes live on; whoever asks for a new one waits, or is told to ask again."""
    fault = book.fault("zygote killed", "unavailable")
    for pid in zygotes(host.pid):
        killed(pid)
    await asyncio.sleep(5)
    fault.over()


async def cradle_dies(host: Host, book: Book) -> None:
    """As with the zygote, which ends when it notices."""
    fault = book.fault("cradle killed", "unavailable")
    for pid in cradles(host.pid):
        killed(pid)
    await asyncio.sleep(5)
    fault.over()


async def newest_cell_dies(host: Host, book: Book) -> None:
    """It waits in the pool, or was just handed out: then one sandbox is lost."""
    fault = book.fault("newest cell killed", "gone", "unavailable", victims=1)
    for pid in inits(host.pid)[:1]:
        killed(pid)
    await asyncio.sleep(1)
    fault.over()


async def store_locked(host: Host, book: Book) -> None:
    """Nobody is hurt: what wants to write waits."""
    fault = book.fault("store locked")
    await asyncio.to_thread(_hold_store, host.data_dir / "store.sqlite3")
    fault.over()


def _hold_store(path: Path) -> None:
    db = sqlite3.connect(path, timeout=10, isolation_level=None)
    try:
        db.execute("BEGIN EXCLUSIVE")
        time.sleep(LOCK_SECONDS)
        db.execute("ROLLBACK")
    finally:
        db.close()


async def half_open(host: Host, book: Book) -> None:
    """Connections that say half a request and wait hurt nobody."""
    fault = book.fault("half-open connections")
    port = int(host.url.rsplit(":", 1)[1])
    opened = []
    for number in range(HALF_OPEN):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:  # the server was killed meanwhile
            break
        writer.write(REQUESTS[number % len(REQUESTS)])
        opened.append(writer)
    await asyncio.sleep(HALF_OPEN_SECONDS)
    for writer in opened:
        writer.transport.abort()
    fault.over()


WORLD = {zygote_dies: 2, cradle_dies: 1, newest_cell_dies: 4, store_locked: 2, half_open: 2}
"""How often, beside each other. The server's own death is the conductor's."""
