"""Parts of a running server fail, one at a time. Each test says which, when, and what becomes of it.

All of them claim that the one concerned gets a clear error, that the server needs nobody to recover, and that a
neighbour (another owner's sandbox, with state, a file, and a program whose output is being streamed) notices nothing.

Which fault is shown where, here and elsewhere below `tests/`:

- nursery, init, kernel or a cell of the pool killed, at any moment: `faults/test_killed.py`
- an init that no sandbox has yet, killed: `faults/test_pending_inits.py`
- the same stopped, so that they hang: `faults/test_hung.py`; a stopped archiver: `engine/test_images.py`
- a nursery that exits, crashes or bombs while it imports: `escape/test_nursery.py`, `guest/test_zygote_children.py`
- the store locked for seconds or for long, full, read-only, damaged: `faults/test_store.py`
- a full disk, for images, files, uploads, records, logs: `faults/test_disk.py`, `engine/test_images.py`
- the wall clock set forward and back: `faults/test_clock.py`; pauses: `engine/test_clocks_while_paused.py`
- a kernel that sends garbage, floods, never ends a frame: `escape/test_frames.py`, `engine/test_floods.py`
- an init or a zygote that does, or that stops reading: `faults/test_channels.py`, `escape/test_nursery.py`
- copies of kernels that lie: `engine/test_branching_hostile.py`
- half-open connections, heads and bodies that never end: `faults/test_connections.py`, `server/test_connection.py`
- too few descriptors: `faults/test_connections.py`
- readers that stop, uploads of a byte a second: `faults/test_connections.py`, `server/test_stalled_readers.py`
- a model's server that hangs, resets, sends garbage in the middle: `openai/test_upstream_http.py`,
  `test_http_client.py`, `test_any_script.py`, `test_chat_any_script.py`, `test_aborted.py`,
  `test_many_streams.py` there
- the server killed at any moment, and under load: `faults/test_host_death.py`, `faults/test_server.py`; with volumes:
  `engine/test_volumes.py`
- SIGTERM under load: `faults/test_server.py`, `server/test_serve.py`
- a client that leaves in the middle: `e2b/test_bad_input.py`, `engine/test_endings.py`
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest
from tests.conftest import RunningServer, serving, wait_until, with_template
from tests.conftest import _wait_until_ready as wait_until_ready

import cloche
from cloche.model import Template

CALM = {  # no sandbox but those of the test, and room for all of them
    "CLOCHE_SERVER_CANARY_SECONDS": "600",
    "CLOCHE_CAPACITY_SANDBOXES": "100",
    "CLOCHE_CAPACITY_MEMORY_RESERVE_BYTES": "0",
}
COUNTING = "import time\nfor number in range(10**6):\n    print(number, flush=True)\n    time.sleep(0.05)"


def key_of(server: RunningServer, owner: str) -> str:
    """A new key of that owner."""
    asked = {"owner": owner, "role": "user", "name": "test"}
    answer = httpx2.post(f"{server.url}/admin/keys", headers={"x-api-key": server.key}, json=asked, timeout=60)
    return str(answer.json()["key"])


def in_background(work: Callable[[], object]) -> Future[object]:
    """What it gives or raises; it has begun when this returns."""
    future: Future[object] = Future()
    begun = threading.Event()

    def run() -> None:
        begun.set()
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    begun.wait()
    return future


class Neighbour:
    """Somebody else on the same server, to whom nothing may happen."""

    def __init__(self, server: RunningServer):
        self.box = cloche.Sandbox(url=server.url, api_key=key_of(server, "neighbour"))
        self.box.run("kept = 41")
        self.box.files.write("/mnt/data/kept", b"kept")
        self._lines = ""
        self._ended: BaseException | str | None = None
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        wait_until(lambda: "\n" in self._lines)

    def _listen(self) -> None:
        try:
            for event in self.box.contexts.create().stream(COUNTING, timeout=3600):
                self._lines += getattr(event, "text", "")
                self._ended = getattr(event, "outcome", None)
        except cloche.errors.ClocheError as error:
            self._ended = error

    def assert_streaming(self) -> None:
        before = len(self._lines)
        wait_until(lambda: len(self._lines) > before + 5 or self._ended is not None)
        assert self._ended is None, self._ended
        numbers = [int(line) for line in self._lines.rpartition("\n")[0].split("\n")]
        assert numbers == list(range(len(numbers))), "some of the stream is missing"

    def assert_unharmed(self) -> None:
        self.assert_streaming()
        assert self.box.run("kept + 1").text == "42"
        assert self.box.files.read("/mnt/data/kept") == b"kept"

    def close(self) -> None:
        self.box.close()
        self._thread.join(30)


class Part(NamedTuple):
    """A process, and its pids from our namespace inwards."""

    pid: int
    inside: tuple[int, ...]

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    @property
    def alive(self) -> bool:
        return _part(self.pid) == self


def parts(server: RunningServer) -> set[Part]:
    """All processes below the server's."""
    return {part for pid in _below(server.process.pid) if (part := _part(pid)) is not None}


def inits(server: RunningServer) -> set[Part]:
    """Pids 1 of sandboxes, also of those that wait in the pool; not embryos, which are no sandbox's yet."""
    depth = max(len(each.inside) for each in parts(server))
    deepest = {each for each in parts(server) if len(each.inside) == depth and each.inside[-1] == 1}
    return {each for each in deepest if _user_namespace(each.pid) != _user_namespace(_parent(each.pid))}


def cradles(server: RunningServer) -> set[Part]:
    """The parents of inits. Where one has died, that is what held it, a pid 1."""
    return _parents(inits(server))


def zygotes(server: RunningServer) -> set[Part]:
    """The parents of cradles."""
    return _parents(cradles(server))


def _parents(of: set[Part]) -> set[Part]:
    found = {part for each in of if (part := _part(_parent(each.pid))) is not None}
    return {each for each in found if each.inside[-1] != 1}


def _user_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/user")
    except OSError:
        return ""


def kernel_of(server: RunningServer, box: cloche.Sandbox) -> Part:
    """The process of a sandbox's default context."""
    box.run("open('/proc/self/comm', 'w').write(chr(70) + 'kernel')")
    return next(each for each in parts(server) if _comm(each.pid) == "Fkernel")


@contextmanager
def new_init(server: RunningServer) -> Iterator[list[Part]]:
    """The init of the sandbox that is made inside; no pool may be there."""
    before, found = inits(server), []
    yield found
    found += inits(server) - before
    assert len(found) == 1, found


def _below(pid: int) -> Iterator[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return
    for child in children:
        yield child
        yield from _below(child)


def _part(pid: int) -> Part | None:
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except OSError:
        return None
    if status["State"].split()[0] in "ZX":
        return None
    return Part(pid, tuple(map(int, status["NSpid"].split())))


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@contextmanager
def serving_by(command: list[str], data_dir: Path, **env: str) -> Iterator[RunningServer]:
    """As `serving`, for a server that is started by another command."""
    key = "e2b_" + secrets.token_hex(20)
    given = {**os.environ, **CALM, "CLOCHE_DATA_DIR": str(data_dir), "CLOCHE_API_KEY": key, **env}
    process = subprocess.Popen([*command, "serve", "--port", "0"], env=given, stdout=subprocess.PIPE, text=True)
    try:
        url, said = wait_until_ready(process)
        yield RunningServer(url, key, process, said)
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="session")
def place(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(tmp_path_factory.mktemp("faults") / "data", template)


@pytest.fixture(scope="session")
def running(place: Path) -> Iterator[RunningServer]:
    """A server without a pool, so that the process of every sandbox is known."""
    with serving(place, env={**CALM, "CLOCHE_POOL_READY": "0"}) as server:
        yield server


@pytest.fixture(scope="session")
def neighbour(running: RunningServer) -> Iterator[Neighbour]:
    made = Neighbour(running)
    yield made
    made.close()


@pytest.fixture
def mine(running: RunningServer) -> dict[str, str]:
    """What `cloche.Sandbox` takes to be on that server."""
    return {"url": running.url, "api_key": running.key}
