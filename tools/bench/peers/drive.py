"""Measures one peer.

A job as JSON on stdin; lines of JSON on stdout: a sample, a failure, or why there is none.
"""

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

from bench.peers import autogen, e2b_server, gateway, kernels, one_shot
from bench.peers.session import BenchPeer, PeerAbsent, PeerFailed, PeerSession

AnswerCheck = Callable[[Any], bool]
PEER_SETTLE_SECONDS = 1.0
_REPORT_STREAM = sys.stdout

PEER_FACTORIES: dict[str, Callable[[dict[str, Any]], BenchPeer]] = {
    "ipykernel": lambda job: kernels.KernelsPeer(),
    "gateway": lambda job: gateway.KernelGatewayPeer(),
    "gateway_nodelay": lambda job: gateway.KernelGatewayPeer(nodelay=True),
    "e2b_server": lambda job: e2b_server.E2bServerPeer(job["checkout"]),
    "e2b_server_nodelay": lambda job: e2b_server.E2bServerPeer(job["checkout"], nodelay=True),
    "autogen_jupyter": lambda job: autogen.AutoGenPeer(local=False),
    "autogen_local": lambda job: autogen.AutoGenPeer(local=True),
    "bubblewrap": lambda job: one_shot.OneShotPeer("bwrap", one_shot.bubblewrap_command),
    "gvisor": lambda job: one_shot.OneShotPeer("runsc", one_shot.gvisor_command),
}
PEER_PACKAGES = {"ipykernel": "ipykernel", "gateway": "jupyter_kernel_gateway", "autogen": "autogen-ext"}


def write_line(**line: object) -> None:
    """Writes a line to the original stdout: programs started here must not write in between."""
    _REPORT_STREAM.write(json.dumps(line) + "\n")
    _REPORT_STREAM.flush()


@contextlib.contextmanager
def report_failures(key: str) -> Iterator[None]:
    try:
        yield
    except (PeerFailed, HTTPException, OSError, TimeoutError, RuntimeError, ValueError, KeyError) as error:
        write_line(key=key, failure=f"{type(error).__name__}: {error}")


class PeerDriver:
    def __init__(self, peer: BenchPeer, counts: dict[str, Any], programs: dict[str, str]):
        self._peer = peer
        self._counts = counts
        self._programs = programs

    def all(self) -> None:
        for key, code, check in (("one", self._programs["one"], is_two), ("frame", self._programs["frame"], is_frame)):
            self._measure_starts(key, code, check)
        self._measure_starts("png", self._programs["png"], is_picture)
        self._measure_rate("cycles_8", 8, self._run_cycle)
        if self._peer.stateless:
            return
        self._measure_warm()
        self._measure_memory()
        for clients in self._counts["clients"]:
            self._measure_executions(clients)

    def _measure_starts(self, key: str, code: str, check: AnswerCheck) -> None:
        if self._peer.stateless and key == "png":  # where would it show it?
            return
        for _ in range(self._counts["starts"]):
            with report_failures(key):
                began = time.perf_counter()
                with contextlib.closing(self._peer.session()) as session:
                    shown = session.run(code)
                    seconds = time.perf_counter() - began
                _expect_answer(check(shown) or (self._peer.stateless and key == "frame"), shown.data)
                write_line(key=key, value=seconds)

    def _measure_warm(self) -> None:
        with contextlib.closing(self._peer.session()) as session:
            session.run(self._programs["one"])
            for _ in range(self._counts["warm"]):
                with report_failures("warm"):
                    began = time.perf_counter()
                    shown = session.run(self._programs["one"])
                    write_line(key="warm", value=time.perf_counter() - began)
                    _expect_answer(is_two(shown), shown.data)
            for _ in range(self._counts["streams"]):
                with report_failures("stream"):
                    self._measure_stream(session)

    def _measure_stream(self, session: PeerSession) -> None:
        began = time.perf_counter()
        found = len(session.run(self._programs["stream"]).stdout)
        seconds = time.perf_counter() - began
        _expect_answer(found >= self._counts["stream_bytes"], f"{found} bytes")
        write_line(key="stream", value=self._counts["stream_bytes"] / seconds)

    def _measure_memory(self) -> None:
        with report_failures("memory"), contextlib.ExitStack() as stack:
            time.sleep(PEER_SETTLE_SECONDS)  # what was before has ended by then
            before = _private_bytes()
            for _ in range(self._counts["kernels"]):
                stack.enter_context(contextlib.closing(self._peer.session())).run(self._programs["one"])
            time.sleep(PEER_SETTLE_SECONDS)
            write_line(key="memory", value=(_private_bytes() - before) / self._counts["kernels"])

    def _measure_executions(self, clients: int) -> None:
        key = f"executions_{clients}"
        with report_failures(key), contextlib.ExitStack() as stack:
            sessions = [stack.enter_context(contextlib.closing(self._peer.session())) for _ in range(clients)]
            for session in sessions:
                session.run(self._programs["one"])
            self._measure_rate(
                key, clients, lambda client: _expect_answer(is_two(sessions[client].run(self._programs["one"])), "1+1")
            )

    def _run_cycle(self, client: int) -> None:
        with contextlib.closing(self._peer.session()) as session:
            _expect_answer(is_two(session.run(self._programs["one"])), "1+1")

    def _measure_rate(self, key: str, clients: int, operation: Callable[[int], None]) -> None:
        """Operations per second, by as many threads as clients."""
        done = [0] * clients
        began = time.perf_counter()
        end = began + self._counts["load_seconds"]

        def work(client: int) -> None:
            while time.perf_counter() < end:
                with report_failures(key):
                    operation(client)
                    done[client] += 1

        workers = [threading.Thread(target=work, args=(client,)) for client in range(clients)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if sum(done):
            write_line(key=key, value=sum(done) / (time.perf_counter() - began))


def is_two(shown: Any) -> bool:
    return str(shown.data.get("text/plain")) == "2"


def is_frame(shown: Any) -> bool:
    return "text/html" in shown.data or "Oslo" in shown.stdout


def is_picture(shown: Any) -> bool:
    return "image/png" in shown.data


def _expect_answer(condition: bool, found: object) -> None:
    if not condition:
        raise PeerFailed(f"a wrong answer: {found!r:.200}")


def _private_bytes() -> int:
    """Private memory of all descendants of this process."""
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


def _peer_version(peer: str) -> str:
    package = next((name for start, name in PEER_PACKAGES.items() if peer.startswith(start)), None)
    with contextlib.suppress(PackageNotFoundError):
        return version(package) if package else ""
    return ""


def main() -> None:
    job = json.loads(sys.stdin.read())
    try:
        with PEER_FACTORIES[job["peer"]](job) as peer:
            write_line(version=_peer_version(job["peer"]))
            PeerDriver(peer, job["counts"], job["programs"]).all()
    except (PeerAbsent, ImportError) as error:
        write_line(absent=str(error))


if __name__ == "__main__":
    main()
