"""What MCP adds to an execution: the same program through `/api/v1` and as a call of a tool, in turns."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from cloche import mcp
from cloche.bench import programs
from cloche.bench.over_http import Client, HttpLab
from cloche.bench.samples import expect, shares

if TYPE_CHECKING:
    from mcp.client.client import Client as Official

ROUNDS = 5
CALL = {"name": "run_code", "arguments": {"code": programs.ONE}}
HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "cloche-bench", "version": "1"}}

Once = Callable[[], Awaitable[None]]


def calls(lab: HttpLab) -> None:
    """`1+1` by one client after another, in one sandbox each."""
    if mcp.is_installed():
        with lab.book.attempt("mcp_http", "mcp_bare", "mcp_call"), lab.pooled.client() as client:
            asyncio.run(_measure(lab, client))


async def _measure(lab: HttpLab, client: Client) -> None:
    import httpx2
    from mcp.client.client import Client as Official
    from mcp.client.streamable_http import streamable_http_client

    sandbox, bare = client.create(), _Bare(client)
    async with (
        httpx2.AsyncClient(headers=lab.pooled.headers) as http,
        Official(streamable_http_client(f"{lab.pooled.url}/mcp", http_client=http)) as official,
    ):
        ways: dict[str, Once] = {
            "mcp_http": lambda: _run(client, sandbox),
            "mcp_bare": bare.call,
            "mcp_call": lambda: _call(official),
        }
        for once in ways.values():
            await once()  # each of them gets its sandbox
        for count in shares(lab.counts.warm, min(ROUNDS, lab.counts.warm)):
            seconds = {key: await _timed(lab, key, once, count) for key, once in ways.items()}
            for key in ("mcp_bare", "mcp_call"):
                lab.book.add(f"{key}_adds", (seconds[key] - seconds["mcp_http"]) / seconds["mcp_http"])
    bare.end()
    client.remove(sandbox)


async def _timed(lab: HttpLab, key: str, once: Once, count: int) -> float:
    """The median."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        await once()
        found.append(time.perf_counter() - began)
        lab.book.add(key, found[-1])
    return median(found)


async def _run(client: Client, sandbox: str) -> None:
    run = client.run(sandbox, programs.ONE)
    expect(run["text"] == "2", run)


async def _call(official: Official) -> None:
    answer = await official.call_tool(CALL["name"], CALL["arguments"])  # type: ignore[arg-type]  # CALL has both kinds
    found: Any = answer.content[0]
    expect(found.text == "2", found)


class _Bare:
    """A session by the same client that asks `/api/v1`."""

    def __init__(self, client: Client):
        self._client = client
        self._headers = {"mcp-session-id": ""}
        client.ask("POST", "/mcp", _message("initialize", HELLO))
        self._headers["mcp-session-id"] = client.answered["mcp-session-id"]

    async def call(self) -> None:
        found = json.loads(self._client.ask("POST", "/mcp", _message("tools/call", CALL), self._headers))
        expect(found["result"]["content"][0]["text"] == "2", found)

    def end(self) -> None:
        self._client.ask("DELETE", "/mcp", headers=self._headers)


def _message(method: str, params: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
