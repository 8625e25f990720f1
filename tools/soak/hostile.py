"""Operations whose own sandbox is attacked, from inside or outside: it may suffer, in a way that is told."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import urllib.parse
from pathlib import Path

import cloche
from soak import faults
from soak.book import Wrong
from soak.host import Host
from soak.visit import LIFE_SECONDS, Operation, Visit, check, check_run, taken, until

MEMORY_BYTES = 256 << 20
SPACE_BYTES = 32 << 20
SAVED_SECONDS = 60.0
NAMED = "import ctypes; ctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)"
FORK_BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
HOG = "kept = []\nwhile True: kept.append(b'x' * (1 << 20))"
FILLER = "with open('/mnt/data/full', 'wb') as file:\n    while True: file.write(b'x' * (1 << 20))"
FLOOD = "import os\nwhile True: os.write(1, b'z' * 65536)"


class Attacks:
    """They need the server's process, for its children's numbers."""

    def __init__(self, host: Host):
        self._host = host

    async def kernel_killed(self, visit: Visit) -> None:
        """Its execution ends as `died`; the context gets a new kernel."""
        name = visit.name()[:14]
        async with visit.sandbox() as box:
            running = asyncio.create_task(box.run(NAMED.format(name=name) + "; import time; time.sleep(60)"))
            await self._kill(name, 0, running)
            run = await running
            check(run.outcome, "died", "outcome of a killed kernel")
            await taken(box, "3 * 3", 9)

    async def init_killed(self, visit: Visit) -> None:
        """The sandbox is lost, and says so from then on."""
        name = visit.name()[:14]
        async with visit.sandbox() as box:
            running = asyncio.create_task(box.run(NAMED.format(name=name) + "; import time; time.sleep(60)"))
            await self._kill(name, 1, running)
            try:
                check((await running).outcome, "died", "outcome in a lost sandbox")
            except cloche.errors.Gone:
                pass
            try:
                await box.run("1")
            except cloche.errors.Gone:
                return
            raise Wrong("a sandbox whose init was killed answers")

    async def _kill(self, name: str, which: int, running: asyncio.Task[cloche.Run]) -> None:
        """Where a fault was there first, whoever waits for the program hears which."""
        for _ in range(600):
            if running.done():
                return
            try:
                faults.killed(faults.kernel_named(self._host.pid, name)[which])
                return
            except LookupError:
                await asyncio.sleep(0.05)
        raise Wrong(f"no kernel called itself {name}")

    async def slow_reader(self, visit: Visit) -> None:
        """Whoever reads a flood a little at a time, and goes, holds up nobody."""
        async with visit.sandbox() as box:
            reader, writer = await self._post(visit, box.id, {"code": FLOOD})
            for _ in range(20):
                await reader.read(1024)
                await asyncio.sleep(0.1)
            writer.transport.abort()
            await taken(box, "5 + 5", 10)

    async def slow_upload(self, visit: Visit) -> None:
        """An upload that never ends is no file."""
        async with visit.sandbox() as box:
            _, writer = await self._open(visit)
            path = urllib.parse.quote("/mnt/data/slow", safe="")
            head = f"PUT /api/v1/sandboxes/{box.id}/files/content?path={path} HTTP/1.1\r\nHost: x\r\n"
            writer.write(f"{head}X-API-Key: {visit.key}\r\nContent-Length: 1000000\r\n\r\n".encode())
            for _ in range(20):
                writer.write(b"x" * 100)
                await writer.drain()
                await asyncio.sleep(0.05)
            writer.transport.abort()
            await asyncio.sleep(0.2)
            check(await box.files.exists("/mnt/data/slow"), False, "the file of a broken upload exists")

    async def _open(self, visit: Visit) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", int(visit.url.rsplit(":", 1)[1]))

    async def _post(
        self, visit: Visit, id: str, body: dict[str, str]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self._open(visit)
        content = json.dumps(body).encode()
        head = f"POST /api/v1/sandboxes/{id}/stream HTTP/1.1\r\nHost: x\r\nX-API-Key: {visit.key}\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return reader, writer

    @property
    def operations(self) -> dict[Operation, int]:
        return {
            self.kernel_killed: 2,
            self.init_killed: 1,
            self.slow_reader: 1,
            self.slow_upload: 1,
            fork_bomb: 1,
            memory_hog: 1,
            disk_filler: 1,
        }


async def fork_bomb(visit: Visit) -> None:
    """On a busy host it may take longer to end than a sandbox is waited for, which is given up then, and says so."""
    async with visit.sandbox(limits={"processes": 64}) as box:
        run = await box.run(FORK_BOMB, timeout=1)
        check(run.outcome in ("timed_out", "died", "raised"), True, f"a fork bomb's end as {run.outcome}")
        try:
            await taken(box, "6 + 6", 12)
        except cloche.errors.SandboxLost:
            pass


async def memory_hog(visit: Visit) -> None:
    async with visit.sandbox(limits={"memory_bytes": MEMORY_BYTES}) as box:
        run = await box.run(HOG, timeout=30)
        check(run.outcome in ("out_of_memory", "raised", "died"), True, f"a memory hog's end as {run.outcome}")
        await taken(box, "7 + 7", 14)


async def disk_filler(visit: Visit) -> None:
    async with visit.sandbox(limits={"space_bytes": SPACE_BYTES}) as box:
        run = await box.run(FILLER, timeout=30)
        check_run(run, "raised")
        check("No space left" in str(run.error and run.error.value), True, "ENOSPC")
        await taken(box, "8 + 8", 16)


class Survivors:
    """What must outlast the server's death: it is made before, and looked at after."""

    def __init__(self, visit: Visit, store: Path):
        self._visit = visit
        self._store = store
        self._number = visit.number()

    async def make(self) -> None:
        server = self._visit.server
        self._volume = await cloche.AsyncVolumes(**server).create(self._visit.name())
        box = await cloche.AsyncSandbox(timeout=600, volumes={"/mnt/v": self._volume}, **server)
        check_run(await box.run(f"for at in ('/mnt/v/a', '/mnt/data/a'): _ = open(at, 'w').write('{self._number}')"))
        self._snapshot = await box.snapshot(self._visit.name())
        self._run = await box.run(f"print({self._number})", detach=True)
        check_run(await self._run.result())
        await box.pause(memory=False)
        self._paused = box.id
        if not await until(self._volume_is_saved, SAVED_SECONDS):
            raise Wrong(f"a volume that nobody has was not saved in {SAVED_SECONDS:.0f} s")
        self._running = await cloche.AsyncSandbox(timeout=LIFE_SECONDS, **server)

    def _volume_is_saved(self) -> bool:
        """Some seconds after the last one has let go of it, it is on the disk, and outlasts what may come."""
        db = sqlite3.connect(f"file:{self._store}?mode=ro", uri=True, timeout=10)
        try:
            return db.execute("SELECT image FROM volumes WHERE id = ?", [self._volume.id]).fetchone()[0] is not None
        finally:
            db.close()

    async def look(self) -> None:
        """Raises Wrong for whatever was lost, or lives though it cannot."""
        server, wanted = self._visit.server, self._number
        box = await cloche.AsyncSandbox.connect(self._paused, **server)
        await taken(box, "int(open('/mnt/data/a').read())", wanted)
        await taken(box, "int(open('/mnt/v/a').read())", wanted)
        await box.close()
        async with self._visit.sandbox(self._snapshot.id) as made:
            await taken(made, "int(open('/mnt/data/a').read())", wanted)
        kept = await cloche.AsyncDetachedRun.connect(self._run.id, **server)
        check((await kept.result()).stdout, f"{wanted}\n", "what a detached run said before the server died")
        try:
            await self._running.run("1")
        except (cloche.errors.Gone, cloche.errors.NotFound):
            pass
        else:
            raise Wrong("a sandbox outlived its server's death")
        await kept.remove()
        await cloche.AsyncSnapshots(**server).remove(self._snapshot)
        await cloche.AsyncVolumes(**server).remove(self._volume)
