"""`make soak`: see docs/deploy.md."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import httpx2
from e2b_code_interpreter import AsyncSandbox

import cloche
from cloche.engine.sandboxes.pool import KEEP_OTHER_SECONDS
from soak import census
from soak.book import Book, Failure
from soak.census import Census
from soak.host import Host
from soak.load import Load
from soak.report import Report, leaks
from soak.visit import Visit

SETTLE_SECONDS = KEEP_OTHER_SECONDS + 15.0  # cells of unusual sandboxes are kept for so long, with their nursery
OWNERS = 4
POOL_AT_MOST = 16


def main() -> int:
    given = _arguments()
    with contextlib.ExitStack() as stack:
        place = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cloche-soak-")))
        place.mkdir(parents=True, exist_ok=True)
        host = Host(place, given.data_dir, OWNERS)
        report = asyncio.run(_soaked(host, given))
        text = report.markdown()
        if given.report:
            given.report.write_text(text)
        print(text)
        if not report.passed:
            print(f"the server's last words:\n{_tail(host.log)}", file=sys.stderr)
    return 0 if report.passed else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--kills", type=int, default=None, help="of the whole server; 1 in ten minutes, at least 1")
    parser.add_argument("--seed", type=int, default=0, help="the same operations and faults, as far as time allows")
    parser.add_argument("--data-dir", default=os.environ.get("CLOCHE_DATA_DIR") or ".data", help="with the template")
    parser.add_argument("--keep", type=Path, help="use this directory, and leave it")
    parser.add_argument("--report", type=Path, help="write the report here too")
    given = parser.parse_args()
    if given.kills is None:
        given.kills = max(1, round(given.minutes / 10))
    return given


async def _soaked(host: Host, given: argparse.Namespace) -> Report:
    _say("starting a server")
    await asyncio.to_thread(host.start)
    try:
        rehearsal = Book()
        load = Load(host, rehearsal, given.seed, given.clients)
        _say("every operation once")
        await load.warm_up()
        before = await _settled(host, None)
        book = Book()
        book.failures += rehearsal.failures
        load = Load(host, book, given.seed, given.clients)
        _say(f"{given.clients} clients for {given.minutes:g} minutes, {given.kills} deaths of the server")
        await load.go(given.minutes * 60, given.kills)
        _say("looking for what is left")
        after = await _settled(host, before)
    finally:
        status = host.stop() if host.runs else -1
    if status != 0:
        book.failed("stopping the server", time.monotonic(), RuntimeError(f"its status was {status}"))
    for line in _errors(host.log):
        book.failures.append(Failure(0.0, "the server's log", line))
    title = f"Soak of {given.minutes:g} minutes, {given.clients} clients, seed {given.seed}"
    return Report(book, before, after, load.samples, title)


async def _settled(host: Host, before: Census | None) -> Census:
    """A census after all is removed: once nothing is over `before`, or after some time as it is."""
    await _remove_everything(host)
    await _empty_pools(host)
    until = time.monotonic() + (SETTLE_SECONDS if before else 10.0)
    while True:
        await asyncio.sleep(2)
        now = await asyncio.to_thread(census.take, host.pid, host.data_dir)
        if time.monotonic() > until or (before is not None and not leaks(before, now, 10**9)):
            return now


async def _empty_pools(host: Host) -> None:
    """Their cells may be of a nursery that is dead, and which is not all gone before they are.

    There are two: in sandboxes of E2B's clients kernels run as root.
    """
    server = Visit(host.url, host.owners[0].key, random.Random())
    boxes = [await cloche.AsyncSandbox(timeout=60, **server.server) for _ in range(POOL_AT_MOST)]
    theirs = [await AsyncSandbox.create(timeout=60, **server.e2b) for _ in range(POOL_AT_MOST)]
    for box in boxes:
        await box.close()
    for each in theirs:
        await each.kill()


async def _remove_everything(host: Host) -> None:
    """What faults kept operations from removing: by the API, as a user would who knew of it all."""
    unlisted = await asyncio.to_thread(census.unlisted, host.data_dir)
    lists = ("/api/v1/sandboxes", "/api/v1/snapshots", "/api/v1/runs", "/api/v1/volumes")
    for owner in host.owners:
        async with httpx2.AsyncClient(base_url=host.url, headers={"x-api-key": owner.key}, timeout=60) as client:
            for path in lists:
                for each in (await client.get(path)).raise_for_status().json():
                    await client.delete(f"{path}/{each['id']}")
            for path in ("/v1/containers", "/v1/files"):
                for each in (await client.get(path, params={"limit": 100})).raise_for_status().json()["data"]:
                    await client.delete(f"{path}/{each['id']}")
            for path in unlisted.get(owner.name, ()):
                (await client.delete(path)).raise_for_status()


def _errors(log: Path) -> list[str]:
    """What the server blames on itself. A zygote that is killed while it is born is no fault of its own."""
    lines = log.read_text(errors="replace").splitlines()
    wrong = [line[:300] for line in lines if " [error" in line or line.startswith("Traceback")]
    return [line for line in wrong if "nursery" not in line]


def _tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _say(what: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
