"""Measures one peer. A job as JSON on stdin; lines of JSON on stdout: a sample, a failure, or why there is none."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cloche.bench import programs
from cloche.bench.peers import autogen, e2b_server, gateway, kernels, one_shot
from cloche.bench.peers.session import Absent, Peer, PeerFailed, Session

Check = Callable[[Any], bool]
SETTLE_SECONDS = 1.0
_LINES = sys.stdout

PEERS: dict[str, Callable[[dict[str, Any]], Peer]] = {
    "ipykernel": lambda job: kernels.Kernels(),
    "gateway": lambda job: gateway.Gateway(),
    "gateway_nodelay": lambda job: gateway.Gateway(nodelay=True),
    "e2b_server": lambda job: e2b_server.E2BServer(job["checkout"]),
    "e2b_server_nodelay": lambda job: e2b_server.E2BServer(job["checkout"], nodelay=True),
    "autogen_jupyter": lambda job: autogen.AutoGen(local=False),
    "autogen_local": lambda job: autogen.AutoGen(local=True),
    "bubblewrap": lambda job: one_shot.OneShot("bwrap", one_shot.bubblewrap),
    "gvisor": lambda job: one_shot.OneShot("runsc", one_shot.gvisor),
}
PACKAGES = {"ipykernel": "ipykernel", "gateway": "jupyter_kernel_gateway", "autogen": "autogen-ext"}


def say(**line: object) -> None:
    """Programs that are started here must not speak in between: stdout is theirs, the lines go where it went."""
    _LINES.write(json.dumps(line) + "\n")
    _LINES.flush()


@contextlib.contextmanager
def attempt(key: str) -> Iterator[None]:
    try:
        yield
    except (PeerFailed, HTTPException, OSError, TimeoutError, RuntimeError, ValueError, KeyError) as error:
        say(key=key, failure=f"{type(error).__name__}: {error}")


class Drive:
    def __init__(self, peer: Peer, counts: dict[str, Any]):
        self._peer = peer
        self._counts = counts

    def all(self) -> None:
        for key, code, check in (("one", programs.ONE, is_two), ("frame", programs.FRAME, is_frame)):
            self._starts(key, code, check)
        self._starts("png", programs.PLOT, is_picture)
        self._rate("cycles_8", 8, self._cycle)
        if self._peer.stateless:
            return
        self._warm()
        self._memory()
        for clients in self._counts["clients"]:
            self._executions(clients)

    def _starts(self, key: str, code: str, check: Check) -> None:
        if self._peer.stateless and key == "png":  # where would it show it?
            return
        for _ in range(self._counts["starts"]):
            with attempt(key):
                began = time.perf_counter()
                with contextlib.closing(self._peer.session()) as session:
                    shown = session.run(code)
                    seconds = time.perf_counter() - began
                _expect(check(shown) or (self._peer.stateless and key == "frame"), shown.data)
                say(key=key, value=seconds)

    def _warm(self) -> None:
        with contextlib.closing(self._peer.session()) as session:
            session.run(programs.ONE)
            for _ in range(self._counts["warm"]):
                with attempt("warm"):
                    began = time.perf_counter()
                    shown = session.run(programs.ONE)
                    say(key="warm", value=time.perf_counter() - began)
                    _expect(is_two(shown), shown.data)
            for _ in range(self._counts["streams"]):
                with attempt("stream"):
                    self._stream(session)

    def _stream(self, session: Session) -> None:
        began = time.perf_counter()
        found = len(session.run(programs.STREAM).stdout)
        seconds = time.perf_counter() - began
        _expect(found >= programs.STREAM_BYTES, f"{found} bytes")
        say(key="stream", value=programs.STREAM_BYTES / seconds)

    def _memory(self) -> None:
        with attempt("memory"), contextlib.ExitStack() as stack:
            time.sleep(SETTLE_SECONDS)  # what was before has ended by then
            before = _private_bytes()
            for _ in range(self._counts["kernels"]):
                stack.enter_context(contextlib.closing(self._peer.session())).run(programs.ONE)
            time.sleep(SETTLE_SECONDS)
            say(key="memory", value=(_private_bytes() - before) / self._counts["kernels"])

    def _executions(self, clients: int) -> None:
        key = f"executions_{clients}"
        with attempt(key), contextlib.ExitStack() as stack:
            sessions = [stack.enter_context(contextlib.closing(self._peer.session())) for _ in range(clients)]
            for session in sessions:
                session.run(programs.ONE)
            self._rate(key, clients, lambda client: _expect(is_two(sessions[client].run(programs.ONE)), "1+1"))

    def _cycle(self, client: int) -> None:
        with contextlib.closing(self._peer.session()) as session:
            _expect(is_two(session.run(programs.ONE)), "1+1")

    def _rate(self, key: str, clients: int, operation: Callable[[int], None]) -> None:
        """Operations per second, by as many threads as clients."""
        done = [0] * clients
        began = time.perf_counter()
        end = began + self._counts["load_seconds"]

        def work(client: int) -> None:
            while time.perf_counter() < end:
                with attempt(key):
                    operation(client)
                    done[client] += 1

        workers = [threading.Thread(target=work, args=(client,)) for client in range(clients)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if sum(done):
            say(key=key, value=sum(done) / (time.perf_counter() - began))


def is_two(shown: Any) -> bool:
    return str(shown.data.get("text/plain")) == "2"


def is_frame(shown: Any) -> bool:
    return "text/html" in shown.data or "Oslo" in shown.stdout


def is_picture(shown: Any) -> bool:
    return "image/png" in shown.data


def _expect(condition: bool, found: object) -> None:
    if not condition:
        raise PeerFailed(f"a wrong answer: {found!r:.200}")


def _private_bytes() -> int:
    """Of all processes that come from this one."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            parents.setdefault(int((entry / "stat").read_text().rpartition(")")[2].split()[1]), []).append(pid)
    waiting, total = list(parents.get(os.getpid(), [])), 0
    while waiting:
        pid = waiting.pop()
        waiting += parents.get(pid, [])
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
    return total


def _version(peer: str) -> str:
    package = next((name for start, name in PACKAGES.items() if peer.startswith(start)), None)
    with contextlib.suppress(PackageNotFoundError):
        return version(package) if package else ""
    return ""


def main() -> None:
    job = json.loads(sys.stdin.read())
    try:
        with PEERS[job["peer"]](job) as peer:
            say(version=_version(job["peer"]))
            Drive(peer, job["counts"]).all()
    except (Absent, ImportError) as error:
        say(absent=str(error))


if __name__ == "__main__":
    main()
