"""Measurement of MCP's overhead: the same program through `/api/v1` and as a tool call, in turns."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from cloche import mcp
from cloche.bench import programs
from cloche.bench.over_http import HttpBenchClient, HttpLab
from cloche.bench.samples import expect_answer, split_evenly

if TYPE_CHECKING:
    from mcp.client.client import Client as Official

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
