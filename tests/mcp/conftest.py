"""One server for all tests of MCP, and the official client over both transports."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from tests.conftest import RunningServer, serving, with_template

from cloche.model import Template

CLOCHE = str(Path(sys.executable).with_name("cloche"))
VERSION = "2025-11-25"
Connecting = Callable[..., AbstractAsyncContextManager[Client]]


class House(NamedTuple):
    """A server, and the data directory in which it runs."""

    server: RunningServer
    place: Path

    @property
    def url(self) -> str:
        return f"{self.server.url}/mcp"

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> Any:
        """Of `/api/v1` or `/admin`."""
        headers = {"x-api-key": key or self.server.key, "content-type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.server.url + path, data, headers, method=method)
        with urllib.request.urlopen(request) as answer:
            content = answer.read()
        return json.loads(content) if content else None

    def sandboxes(self, key: str | None = None) -> set[str]:
        """Those of MCP's clients that live."""
        found = self.ask("GET", "/api/v1/sandboxes", key=key)
        return {each["id"] for each in found if each["metadata"].get("made_by") == "mcp"}

    def new_owner(self, name: str) -> str:
        """Their key."""
        return str(self.ask("POST", "/admin/keys", {"owner": name, "name": name})["key"])


@pytest.fixture(scope="session")
def house(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    place = with_template(tmp_path_factory.mktemp("mcp") / "data", template)
    with serving(place) as running:
        yield House(running, place)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tools are the same over both. `make test` has one test of them over stdio, where each session is a process."""
    for item in items:
        given = getattr(item, "callspec", None)
        if given is not None and given.params.get("transport") == "stdio" and item.path.name == "test_tools.py":
            item.add_marker(pytest.mark.long)


@pytest.fixture(params=["stdio", "http"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def connecting(house: House, transport: str) -> Connecting:
    """Makes clients of that transport: `async with connecting() as client`."""
    return over_stdio(house) if transport == "stdio" else over_http(house)


def over_stdio(house: House, *options: str, env: dict[str, str] | None = None) -> Connecting:
    """By default of the server that runs in the data directory."""

    @asynccontextmanager
    async def connect(**how: Any) -> AsyncIterator[Client]:
        given = {**os.environ, **(env or {})}
        command = ["--data-dir", str(house.place), "mcp", *options]
        parameters = StdioServerParameters(command=CLOCHE, args=command, env=given)
        async with Client(stdio_client(parameters), **how) as client:
            yield client

    return connect


def over_http(house: House, key: str | None = None) -> Connecting:
    @asynccontextmanager
    async def connect(**how: Any) -> AsyncIterator[Client]:
        headers = {"authorization": f"Bearer {key or house.server.key}"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60) as http,
            Client(streamable_http_client(house.url, http_client=http), **how) as client,
        ):
            yield client

    return connect


def words(result: Any) -> str:
    """All texts of an answer."""
    return "\n".join(each.text for each in result.content if each.type == "text")


class Raw(NamedTuple):
    """A client that says what it likes, over HTTP."""

    http: httpx2.Client
    headers: dict[str, str]

    def post(self, message: Any, **headers: str) -> httpx2.Response:
        content = message if isinstance(message, bytes) else json.dumps(message).encode()
        return self.http.post("/mcp", content=content, headers={**self.headers, **_headers(headers)})

    def call(self, name: str, id: int = 1, **arguments: Any) -> httpx2.Response:
        params = {"name": name, "arguments": arguments}
        return self.post({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params})

    def initialize(self, **headers: str) -> httpx2.Response:
        client = {"name": "raw", "version": "1"}
        params = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": client}
        answer = self.post({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}, **headers)
        if answer.status_code == 200:
            self.headers["mcp-session-id"] = answer.headers["mcp-session-id"]
            self.post({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return answer

    def end(self) -> httpx2.Response:
        return self.http.delete("/mcp", headers=self.headers)


def _headers(given: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in given.items()}


@pytest.fixture
def raw(house: House) -> Iterator[Callable[..., Raw]]:
    """Makes such clients: `raw(key)`."""
    made: list[Raw] = []

    def make(key: str | None = None) -> Raw:
        headers = {
            "authorization": f"Bearer {key or house.server.key}",
            "content-type": "application/json",
            "accept": "application/json, text/event-stream",
        }
        made.append(Raw(httpx2.Client(base_url=house.server.url, timeout=60), headers))
        return made[-1]

    yield make
    for each in made:
        if "mcp-session-id" in each.headers:
            each.end()
        each.http.close()
