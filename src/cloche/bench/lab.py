"""The lab: two embedded engines, a plain ipykernel as their peer, and the numbers of samples."""

from __future__ import annotations

import importlib.util
import subprocess
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

import msgspec

from cloche.bench import programs
from cloche.bench.samples import SampleBook, expect_answer
from cloche.config import Config, PoolConfig
from cloche.engine.operations.metrics import measure_inside
from cloche.events import Run
from cloche.model import SandboxSpec, Struct
from cloche.sdk.embedded import EmbeddedEngine, use_engine
from cloche.sdk.sandbox import Sandbox

REFILL_SECONDS = 60.0
# Before a sample: what the last one left (dying processes, their namespaces) is not to be part of the next.
SETTLE_SECONDS = 0.03


class SampleCounts(Struct):
    """The number of samples of each kind."""

    fast: int = 200  # what takes us milliseconds
    warm: int = 1000
    images: int = 100
    peer: int = 30  # what takes the peer seconds
    lean: int = 10  # the peer's leanest start
    live: int = 100  # idle sandboxes, for their memory
    measured: int = 3  # how often
    kernels: int = 4  # the same of the peer
    loads: int = 3  # repetitions under load
    load_seconds: float = 2.0
    threads: int = 8
    warm_sandboxes: int = 64
    interrupts: int = 50
    transfers: int = 5
    transfer_bytes: int = 100_000_000
    installs: int = 8  # first installations, each on a host that has nothing of it
    growths: int = 5  # rounds from few live ones to many
    most_live: int = 500  # sandboxes among which others are measured
    crowd: int = 1000  # idle ones at once
    crowds: int = 1  # how often
    peer_starts: int = 10  # of each of the peers that have an environment of their own
    peer_warm: int = 300
    peer_clients: tuple[int, ...] = (1, 8, 64)


QUICK_COUNTS = SampleCounts(
    fast=30,
    warm=200,
    images=20,
    peer=4,
    lean=2,
    live=40,
    measured=1,
    kernels=2,
    loads=1,
    load_seconds=1.5,
    interrupts=10,
    transfers=2,
    installs=3,
    growths=1,
    most_live=100,
    crowd=200,
    peer_starts=3,
    peer_warm=50,
    peer_clients=(1, 8),
)


class SampleTarget(Protocol):
    """The needs of every measurement: the book for its samples, and whether there is a peer."""

    book: SampleBook
    peer: bool


class Lab:
    """Use with `with`. `peer` is false where no peer is installed or wanted."""

    def __init__(self, config: Config, counts: SampleCounts, *, peer: bool = True):
        self.counts = counts
        self.book = SampleBook()
        self.peer = peer and not missing_packages()
        self._size = max(config.pool.ready, 1)
        self._pooled = EmbeddedEngine(msgspec.structs.replace(config, pool=PoolConfig(ready=self._size)))
        self._empty = EmbeddedEngine(msgspec.structs.replace(config, pool=PoolConfig(ready=0)))

    def __enter__(self) -> Lab:
        """Raises IsolationUnavailable, TemplateBuildFailed, NurseryFailed or Unavailable."""
        try:
            for engine in (self._pooled, self._empty):
                self._start_engine(engine)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._pooled.close()
        self._empty.close()

    def with_pool(self) -> AbstractContextManager[None]:
        """Meanwhile `Sandbox()` takes from a pool."""
        return use_engine(self._pooled)

    def without_pool(self) -> AbstractContextManager[None]:
        return use_engine(self._empty)

    def wait_for_pool(self) -> None:
        """Waits until the pool is full again. Raises TimeoutError."""
        end = time.monotonic() + REFILL_SECONDS
        while self._pooled.engine.waiting < self._size:
            if time.monotonic() > end:
                raise TimeoutError("the pool did not fill up again")
            time.sleep(0.005)
        time.sleep(SETTLE_SECONDS)

    def raw_cost_seconds(self) -> float:
        """The raw fork time of the zygote that makes the sandboxes without a pool."""
        return self._empty.call(lambda: self._empty.engine.cell_supply.raw_cost_seconds())

    def memory_bytes(self, box: Sandbox) -> int:
        """Memory of a pooled sandbox, by its cgroup; without one, init's figure, which is far too high."""

        async def read() -> int:
            guest = (await self._pooled.engine.get(box.id, SandboxSpec().owner)).guest
            used = guest.cell.stats().memory_bytes
            return used if used is not None else (await measure_inside(guest)).memory_bytes or 0

        return self._pooled.call(read)

    def _start_engine(self, engine: EmbeddedEngine) -> None:
        began = time.perf_counter()
        engine.open()
        with use_engine(engine), Sandbox() as box:
            expect_two(box.run(programs.ONE))
            self.book.add("cold", time.perf_counter() - began)


def expect_two(run: Run) -> None:
    """Raises WrongAnswer unless it is the run of `1+1`."""
    expect_answer(run.text == "2", run)


# --- The peer: a plain ipykernel, driven by jupyter_client's blocking client.

PEER_PACKAGES = ("ipykernel", "jupyter_client", "pandas", "matplotlib")
BENCH_ADVICE = "in a checkout of Cloche: pip install '.[bench]'"
TRANSPORTS = ("tcp", "ipc")
KERNEL_START_SECONDS = 120.0
KERNEL_ANSWER_SECONDS = 60.0


def missing_packages() -> list[str]:
    """The peer's packages that are not installed."""
    return [name for name in PEER_PACKAGES if importlib.util.find_spec(name) is None]


class IpykernelProcess:
    """One ipykernel process, ready. Use with `with`.

    `lean` leaves out the usual `wait_for_ready`, and waits only for the kernel's message that its output channel
    is connected: nothing that still gets every answer is faster.
    """

    def __init__(self, transport: str = "tcp", *, lean: bool = False):
        from jupyter_client.manager import KernelManager

        self._manager: Any = KernelManager(transport=transport)
        self._manager.start_kernel(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._client: Any = self._manager.blocking_client()
        try:
            self._client.start_channels()
            if lean:
                self._wait_for_welcome()
            else:
                self._client.wait_for_ready(timeout=KERNEL_START_SECONDS)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> IpykernelProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return int(self._manager.provisioner.pid)

    def first(self, code: str, mime: str) -> Any:
        """Executes, and returns the value of that MIME type when it arrives."""
        request = self._client.execute(code, store_history=True)
        while True:
            message = self._next_message(request)
            content = message["content"]
            expect_answer(message["msg_type"] != "error", content)
            if mime in content.get("data", {}):
                return content["data"][mime]
            expect_answer(content.get("execution_state") != "idle", f"no {mime}")

    def run(self, code: str) -> list[dict[str, Any]]:
        """Executes to the end, idle and reply; returns its messages, without its changes of state."""
        request = self._client.execute(code, store_history=True)
        said = list(self._until_idle(request))
        reply = self._client.get_shell_msg(timeout=KERNEL_ANSWER_SECONDS)
        while reply["parent_header"].get("msg_id") != request:
            reply = self._client.get_shell_msg(timeout=KERNEL_ANSWER_SECONDS)
        expect_answer(reply["content"]["status"] == "ok", reply["content"])
        return said

    def interrupt_seconds(self, code: str) -> float:
        """The time from the interrupt of a program that has printed something until its kernel is idle."""
        request = self._client.execute(code)
        while self._next_message(request)["msg_type"] != "stream":
            pass
        began = time.perf_counter()
        self._manager.interrupt_kernel()
        self._until_idle(request)
        return time.perf_counter() - began

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def _until_idle(self, request: str) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        while True:
            message = self._next_message(request)
            if message["content"].get("execution_state") == "idle":
                return said
            if message["msg_type"] != "status":
                said.append(message["content"])

    def _next_message(self, request: str) -> Any:
        while True:
            message = self._client.get_iopub_msg(timeout=KERNEL_ANSWER_SECONDS)
            if message["parent_header"].get("msg_id") == request:
                return message

    def _wait_for_welcome(self) -> None:
        while self._client.get_iopub_msg(timeout=KERNEL_START_SECONDS)["msg_type"] != "iopub_welcome":
            pass
