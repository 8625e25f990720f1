"""Measurement through HTTP by a bare client: two `cloche serve`, one with a pool and one without."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import msgspec

from cloche.bench import closed_loop, programs
from cloche.bench.closed_loop import LoadResult
from cloche.bench.lab import SETTLE_SECONDS, SampleCounts
from cloche.bench.samples import SampleBook, expect_answer
from cloche.config import Config, PoolConfig
from cloche.sdk.embedded import EmbeddedEngine

SANDBOXES_PATH = "/api/v1/sandboxes"
POOL_READY_PATTERN = re.compile(rb"^cloche_pool_ready ([0-9.]+)$", re.MULTILINE)
REFILL_SECONDS = 60.0
STOP_SECONDS = 120.0
HTTP_ANSWER_SECONDS = 120.0
CREATOR_CLIENTS = 4  # clients that make sandboxes which stay


class HttpBenchClient:
    """Two keep-alive connections: a raw one for short, timed requests, and an ordinary one for long ones."""

    def __init__(self, address: tuple[str, int], key: str):
        self._http = http.client.HTTPConnection(*address, timeout=HTTP_ANSWER_SECONDS)
        self._raw = RawConnection(address, key)
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self.answered = http.client.HTTPMessage()  # the headers of the last answer

    def close(self) -> None:
        self._http.close()
        self._raw.close()

    def ask(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
        """Raises WrongAnswer."""
        self._http.request(method, path, body, {**self._headers, **headers} if headers else self._headers)
        answer = self._http.getresponse()
        self.answered = answer.headers
        found = answer.read()
        expect_answer(answer.status < 300, (answer.status, found[:200]))
        return found

    def create(self) -> str:
        return str(json.loads(self._raw.ask("POST", SANDBOXES_PATH, b"{}"))["id"])

    def run(self, sandbox: str, code: str) -> Any:
        return json.loads(self._raw.ask("POST", f"{SANDBOXES_PATH}/{sandbox}/run", json.dumps({"code": code}).encode()))

    def remove(self, sandbox: str) -> None:
        self._raw.ask("DELETE", f"{SANDBOXES_PATH}/{sandbox}")


class RawConnection:
    """Raw sockets: http.client takes 0.2 ms to read a response's head, which would be measured too."""

    def __init__(self, address: tuple[str, int], key: str):
        self._socket = socket.create_connection(address, HTTP_ANSWER_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = f"host: {address[0]}\r\nauthorization: Bearer {key}\r\ncontent-type: application/json"

    def close(self) -> None:
        self._socket.close()

    def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Raises WrongAnswer."""
        head = f"{method} {path} HTTP/1.1\r\n{self._head}\r\ncontent-length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)
        received = bytearray()
        while (answer := closed_loop.parse_answer(received)) is None:
            piece = self._socket.recv(closed_loop.RECEIVED_BYTES)
            expect_answer(bool(piece), "the server closed the connection")
            received += piece
        expect_answer(answer.status < 300, (answer.status, answer.body[:200]))
        return answer.body


class ServerProcess:
    """A server in a process of its own. Use with `with`."""

    def __init__(self, config: Config, pool: int):
        self._key = "e2b_" + secrets.token_hex(20)
        program = "from cloche.cli import main; main()"
        command = [sys.executable, "-c", program, "--data-dir", config.data_dir, "serve", "--port", "0"]
        environ = {**os.environ, "CLOCHE_API_KEY": self._key, "CLOCHE_POOL_READY": str(pool)}
        # A line for each request goes to where nobody has to read it.
        self._process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        url = next((line.split()[1] for line in self._process.stdout if line.startswith("ready ")), "")
        if not url:
            raise RuntimeError("the server ended before it was ready")
        self._address = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._pool = pool
        self.url = url
        self.headers = {"authorization": f"Bearer {self._key}"}

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(STOP_SECONDS)

    @contextlib.contextmanager
    def client(self) -> Iterator[HttpBenchClient]:
        found = HttpBenchClient(self._address, self._key)
        with contextlib.closing(found):
            yield found

    def load(self, what: str, clients: int, **given: Any) -> LoadResult:
        return closed_loop.run_load(self._address, self._key, what, clients, **given)

    @contextlib.contextmanager
    def sandboxes(self, count: int) -> Iterator[list[str]]:
        """Creates so many sandboxes for the block. Raises WrongAnswer if not all could be made."""
        made = self.load("creations", CREATOR_CLIENTS, count=count)
        try:
            expect_answer(not made.failures and len(made.ids) == count, made.failures[:1])
            yield made.ids
        finally:
            self.load("removals", CREATOR_CLIENTS, ids=made.ids)

    def wait_for_pool(self, client: HttpBenchClient) -> None:
        """Waits until the pool is full again. Raises TimeoutError."""
        end = time.monotonic() + REFILL_SECONDS
        while sum(float(found) for found in POOL_READY_PATTERN.findall(client.ask("GET", "/metrics"))) < self._pool:
            if time.monotonic() > end:
                raise TimeoutError("the pool did not fill up again")
            time.sleep(0.01)
        time.sleep(SETTLE_SECONDS)

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the server's own process."""
        with open(f"/proc/{self._process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class HttpLab:
    """Two servers, and a zygote like theirs for timing raw forks. Use with `with`."""

    def __init__(self, config: Config, counts: SampleCounts, *, peer: bool = True):
        self.counts = counts
        self.book = SampleBook()
        self.peer = peer
        self._config = config
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> HttpLab:
        try:
            self.pooled = self._stack.enter_context(ServerProcess(self._config, max(self._config.pool.ready, 1)))
            self.empty = self._stack.enter_context(ServerProcess(self._config, 0))
            self._bare = EmbeddedEngine(msgspec.structs.replace(self._config, pool=PoolConfig(ready=0)))
            self._stack.callback(self._bare.close)
            self._bare.open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def raw_cost_seconds(self) -> float:
        return self._bare.call(lambda: self._bare.engine.housing.raw_cost_seconds())

    def record_generator_load(self, load: LoadResult) -> None:
        """Records the load generator's share of a core, and its failed requests."""
        self.book.add("generator", load.core_share)
        self.book["generator"].failures += load.failures


def measure_first_results(lab: HttpLab) -> None:
    """Create and execute `1+1`, from the pool and without one, with the raw cost between."""
    with lab.pooled.client() as pooled, lab.empty.client() as empty:
        for client in (pooled, empty):
            client.remove(client.create())
        for _ in range(lab.counts.fast):
            with lab.book.attempt("http_one_pool"):
                lab.pooled.wait_for_pool(pooled)
                _measure_first(lab, pooled, "http_one_pool", programs.ONE, "text")
            with lab.book.attempt("http_raw"):
                time.sleep(SETTLE_SECONDS)
                lab.book.add("http_raw", lab.raw_cost_seconds())
            with lab.book.attempt("http_one_empty"):
                time.sleep(SETTLE_SECONDS)
                _measure_first(lab, empty, "http_one_empty", programs.ONE, "text")


def measure_first_displays(lab: HttpLab) -> None:
    """Create and show a DataFrame, and a picture, from the pool."""
    with lab.pooled.client() as client:
        for key, code, name in (("http_frame", programs.FRAME, "html"), ("http_png", programs.PLOT, "png")):
            for _ in range(lab.counts.images):
                with lab.book.attempt(key):
                    lab.pooled.wait_for_pool(client)
                    _measure_first(lab, client, key, code, name)


def _measure_first(lab: HttpLab, client: HttpBenchClient, key: str, code: str, name: str) -> None:
    began = time.perf_counter()
    sandbox = client.create()
    run = client.run(sandbox, code)
    seconds = time.perf_counter() - began
    client.remove(sandbox)
    expect_answer(any(result.get(name) for result in run["results"]), run)
    lab.book.add(key, seconds)


def measure_round_trips(lab: HttpLab) -> None:
    """`1+1` by one client in one sandbox."""
    with lab.pooled.client() as client:
        sandbox = client.create()
        for _ in range(lab.counts.warm):
            with lab.book.attempt("http_warm"):
                began = time.perf_counter()
                run = client.run(sandbox, programs.ONE)
                seconds = time.perf_counter() - began
                expect_answer(run["text"] == "2", run)
                lab.book.add("http_warm", seconds)
        client.remove(sandbox)


def measure_streams(lab: HttpLab) -> None:
    """10 MB of output as a stream of events, to its end."""
    with lab.pooled.client() as client:
        sandbox = client.create()
        asked = json.dumps({"code": programs.STREAM}).encode()
        for _ in range(lab.counts.transfers):
            with lab.book.attempt("http_stream"):
                began = time.perf_counter()
                found = client.ask("POST", f"{SANDBOXES_PATH}/{sandbox}/stream", asked)
                seconds = time.perf_counter() - began
                expect_answer(found.count(b"x") >= programs.STREAM_BYTES * 0.999, len(found))
                lab.book.add("http_stream", programs.STREAM_BYTES / seconds)
        client.remove(sandbox)


def measure_files(lab: HttpLab) -> None:
    """A large file in and out."""
    content = os.urandom(1 << 20) * (lab.counts.transfer_bytes // (1 << 20) + 1)
    content = content[: lab.counts.transfer_bytes]
    with lab.pooled.client() as client:
        for _ in range(lab.counts.transfers):
            with lab.book.attempt("http_file_write", "http_file_read"):
                _measure_transfer(lab, client, content)


def _measure_transfer(lab: HttpLab, client: HttpBenchClient, content: bytes) -> None:
    sandbox = client.create()
    path = f"{SANDBOXES_PATH}/{sandbox}/files/content?path=/mnt/data/large"
    began = time.perf_counter()
    client.ask("PUT", path, content)
    written = time.perf_counter()
    found = client.ask("GET", path)
    ended = time.perf_counter()
    client.remove(sandbox)
    expect_answer(found == content, f"{len(found)} bytes")
    lab.book.add("http_file_write", len(content) / (written - began))
    lab.book.add("http_file_read", len(content) / (ended - written))
