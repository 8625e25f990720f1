"""Measurements through HTTP by one bare client: two `cloche serve`, one with a pool and one without."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from cloche import mcp
from cloche.bench import programs
from cloche.bench.lab import SETTLE_SECONDS, SampleCounts
from cloche.bench.raw_http import HTTP_ANSWER_SECONDS, SANDBOXES_PATH, RawConnection
from cloche.bench.samples import SampleBook, expect_answer, split_evenly
from cloche.config import Config, PoolConfig
from cloche.sdk.embedded import EmbeddedEngine

if TYPE_CHECKING:
    from mcp.client.client import Client as Official

POOL_READY_PATTERN = re.compile(rb"^cloche_pool_ready ([0-9.]+)$", re.MULTILINE)
REFILL_SECONDS = 60.0
STOP_SECONDS = 120.0


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


class ServerProcess:
    """A server in a process of its own. Use with `with`."""

    def __init__(self, config: Config, pool: int):
        self.key = "e2b_" + secrets.token_hex(20)
        program = "from cloche.cli import main; main()"
        command = [sys.executable, "-c", program, "--data-dir", config.data_dir, "serve", "--port", "0"]
        environ = {**os.environ, "CLOCHE_API_KEY": self.key, "CLOCHE_POOL_READY": str(pool)}
        # A line for each request goes to a file that is thrown away.
        self._process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        url = next((line.split()[1] for line in self._process.stdout if line.startswith("ready ")), "")
        if not url:
            raise RuntimeError("the server ended before it was ready")
        self.address = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._pool = pool
        self.url = url
        self.headers = {"authorization": f"Bearer {self.key}"}

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(STOP_SECONDS)

    @contextlib.contextmanager
    def client(self) -> Iterator[HttpBenchClient]:
        found = HttpBenchClient(self.address, self.key)
        with contextlib.closing(found):
            yield found

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
        return self._bare.call(lambda: self._bare.engine.cell_supply.raw_cost_seconds())


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


# --- Measurement of MCP's overhead: the same program through `/api/v1` and as a tool call, in turns.

ROUNDS = 5
TOOL_CALL = {"name": "run_code", "arguments": {"code": programs.ONE}}
INITIALIZE_PARAMS = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "cloche-bench", "version": "1"},
}

CallOnce = Callable[[], Awaitable[None]]


def measure_mcp_calls(lab: HttpLab) -> None:
    """`1+1` by one client after another, in one sandbox each."""
    if mcp.is_installed():
        with lab.book.attempt("mcp_http", "mcp_bare", "mcp_call"), lab.pooled.client() as client:
            asyncio.run(_measure_ways(lab, client))


async def _measure_ways(lab: HttpLab, client: HttpBenchClient) -> None:
    import httpx2
    from mcp.client.client import Client as Official
    from mcp.client.streamable_http import streamable_http_client

    sandbox, bare = client.create(), _BareMcpClient(client)
    async with (
        httpx2.AsyncClient(headers=lab.pooled.headers) as http,
        Official(streamable_http_client(f"{lab.pooled.url}/mcp", http_client=http)) as official,
    ):
        ways: dict[str, CallOnce] = {
            "mcp_http": lambda: _run_over_http(client, sandbox),
            "mcp_bare": bare.call,
            "mcp_call": lambda: _call_official(official),
        }
        for once in ways.values():
            await once()  # each of them gets its sandbox
        for count in split_evenly(lab.counts.warm, min(ROUNDS, lab.counts.warm)):
            seconds = {key: await _time_calls(lab, key, once, count) for key, once in ways.items()}
            for key in ("mcp_bare", "mcp_call"):
                lab.book.add(f"{key}_adds", (seconds[key] - seconds["mcp_http"]) / seconds["mcp_http"])
    bare.end()
    client.remove(sandbox)


async def _time_calls(lab: HttpLab, key: str, once: CallOnce, count: int) -> float:
    """Returns the median."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        await once()
        found.append(time.perf_counter() - began)
        lab.book.add(key, found[-1])
    return median(found)


async def _run_over_http(client: HttpBenchClient, sandbox: str) -> None:
    run = client.run(sandbox, programs.ONE)
    expect_answer(run["text"] == "2", run)


async def _call_official(official: Official) -> None:
    answer = await official.call_tool(TOOL_CALL["name"], TOOL_CALL["arguments"])  # type: ignore[arg-type]  # CALL has both kinds
    found: Any = answer.content[0]
    expect_answer(found.text == "2", found)


class _BareMcpClient:
    """An MCP session over the same client that is used for `/api/v1`."""

    def __init__(self, client: HttpBenchClient):
        self._client = client
        self._headers = {"mcp-session-id": ""}
        client.ask("POST", "/mcp", _rpc_message("initialize", INITIALIZE_PARAMS))
        self._headers["mcp-session-id"] = client.answered["mcp-session-id"]

    async def call(self) -> None:
        found = json.loads(self._client.ask("POST", "/mcp", _rpc_message("tools/call", TOOL_CALL), self._headers))
        expect_answer(found["result"]["content"][0]["text"] == "2", found)

    def end(self) -> None:
        self._client.ask("DELETE", "/mcp", headers=self._headers)


def _rpc_message(method: str, params: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
