"""A package index on loopback that says what a test wants it to say, and a door to the package index of ours.

It speaks the simple API (PEP 503, 658, 691) and npm's registry protocol. What it is asked is written down.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx2
import pytest

from cloche.config.sections import NetworkConfig, PackagesConfig
from cloche.egress import EgressProxy
from cloche.egress.door import SandboxEgress
from cloche.network_policy import NetworkEntry, NetworkPolicy

JSON = "application/vnd.pypi.simple.v1+json"
SECONDS = 20.0  # after which something that is certain to happen has failed to


@dataclass
class Told:
    """What is answered at a path."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None  # that is said; None: the true one
    repeat: int = 1  # so often the body is sent
    gate: threading.Event | None = None  # the second half is sent when it is set


@dataclass
class Asked:
    path: str
    headers: dict[str, str]


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Who asks may hang up."""


class IndexServer:
    """`told` has what is answered at which path."""

    def __init__(self, address: str = "127.0.0.1", style: str = "json", tls: ssl.SSLContext | None = None):
        self.told: dict[str, Told] = {}
        self.asked: list[Asked] = []
        self.style = style
        self.is_down = False
        self._projects: dict[str, list[dict[str, Any]]] = {}
        self._versions: dict[str, dict[str, Any]] = {}
        self._server = _QuietServer((address, 0), _handler(self))
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.address = address
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    @property
    def simple(self) -> str:
        return f"{self.url}/simple/"

    def count(self, path: str) -> int:
        return sum(asked.path == path for asked in self.asked)

    def close(self) -> None:
        """Connections that are open are not answered any more either."""
        self.is_down = True
        self._server.shutdown()
        self._server.server_close()

    def add_file(self, project: str, name: str, content: bytes, *, at: str = "", **said: Any) -> str:
        """A file of a project, which its page names from now on. `said` is what the page says of it."""
        path = f"/files/{name}"
        self.told[path] = Told(content)
        entry = {"filename": name, "url": at or f"../..{path}", "hashes": {"sha256": sha256(content)}, **said}
        self._projects.setdefault(project, []).append(entry)
        self.write_page(project)
        return path

    def write_page(self, project: str, **headers: str) -> None:
        files = self._projects[project]
        if self.style == "json":
            page = json.dumps({"meta": {"api-version": "1.0"}, "name": project, "files": files}).encode()
        else:
            page = "".join(_link(file) for file in files).encode()
        kind = JSON if self.style == "json" else "text/html"
        self.told[f"/simple/{project}/"] = Told(page, headers={"content-type": kind, **headers})

    def add_package(self, name: str, version: str, content: bytes, *, at: str = "", **dist: Any) -> str:
        """A version of an npm package."""
        path = f"/tarballs/{name.replace('/', '-')}-{version}.tgz"
        self.told[path] = Told(content)
        said = {"tarball": at or self.url + path, "integrity": sha512(content), "shasum": "0" * 40, **dist}
        self._versions.setdefault(name, {})[version] = {"name": name, "version": version, "dist": said}
        page = {"name": name, "dist-tags": {"latest": version}, "versions": self._versions[name]}
        self.told[f"/{name}"] = Told(json.dumps(page).encode(), headers={"content-type": "application/json"})
        return path


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sha512(content: bytes) -> str:
    return "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()


def _link(file: dict[str, Any]) -> str:
    said = {"requires-python": "data-requires-python", "yanked": "data-yanked", "core-metadata": "data-core-metadata"}
    attributes = "".join(f' {said[name]}="{value}"' for name, value in file.items() if name in said)
    fragment = "".join(f"#{algorithm}={digest}" for algorithm, digest in file["hashes"].items())
    return f'<a href="{file["url"]}{fragment}"{attributes}>{file["filename"]}</a>\n'


def _handler(index: IndexServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16

        def do_GET(self) -> None:
            if index.is_down:
                self.close_connection = True
                return
            path = unquote(self.path)
            index.asked.append(Asked(path, {name.lower(): value for name, value in self.headers.items()}))
            told = index.told.get(path, Told(b"nothing here", status=404))
            tag = told.headers.get("etag")
            if tag and self.headers.get("if-none-match") == tag:
                told = Told(status=304, headers=told.headers)
            with contextlib.suppress(OSError):
                self._tell(told)

        def _tell(self, told: Told) -> None:
            self.send_response(told.status)
            length = len(told.body) * told.repeat if told.length is None else told.length
            framing = {} if "transfer-encoding" in told.headers else {"content-length": str(length)}
            for name, value in {**framing, **told.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            half = len(told.body) // 2 if told.gate is not None else 0
            self.wfile.write(told.body[:half])
            if told.gate is not None:
                self.wfile.flush()
                told.gate.wait(SECONDS)
            self.wfile.write(told.body[half:])
            for _ in range(told.repeat - 1):
                self.wfile.write(told.body)
            self.close_connection = told.length is not None

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def index_server(
    address: str = "127.0.0.1", style: str = "json", tls: ssl.SSLContext | None = None
) -> Iterator[IndexServer]:
    server = IndexServer(address, style, tls)
    try:
        yield server
    finally:
        server.close()


class IndexDoor:
    """The door of a sandbox that is not there, with `get` for what `pip` and `npm` would ask."""

    def __init__(self, egress: EgressProxy, door: SandboxEgress, port: int, client: httpx2.AsyncClient):
        self.egress = egress
        self.door = door
        self.port = port
        self._client = client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> list[NetworkEntry]:
        return self.door.journal.entries

    async def get(self, path: str, **headers: str) -> httpx2.Response:
        return await self._client.get(path, headers={name.replace("_", "-"): value for name, value in headers.items()})

    async def send(self, method: str, path: str, **given: Any) -> httpx2.Response:
        return await self._client.request(method, path, **given)

    def stream(self, path: str) -> contextlib.AbstractAsyncContextManager[httpx2.Response]:
        return self._client.stream("GET", path)


def _listener() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    listener.setblocking(False)
    return listener


@contextmanager
def _without_proxies() -> Iterator[None]:
    """Of whoever runs the tests: the indexes are on loopback."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.lower().endswith("_proxy"):
                patch.delenv(name)
        yield


@asynccontextmanager
async def index_doors(
    directory: Path, count: int = 1, network: NetworkConfig | None = None, **packages: Any
) -> AsyncIterator[list[IndexDoor]]:
    """Doors of so many sandboxes of one host, whose packages are kept in `directory`."""
    egress = EgressProxy(network or NetworkConfig(), PackagesConfig(enabled=True, **packages), directory)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(_without_proxies())
        stack.push_async_callback(egress.aclose)
        doors = []
        for number in range(count):
            listener = _listener()
            port = listener.getsockname()[1]
            door = egress.open(listener, NetworkPolicy(), sandbox=f"sandbox-{number}", owner="somebody")
            where = f"http://127.0.0.1:{port}"
            client = httpx2.AsyncClient(base_url=where, timeout=SECONDS, trust_env=False, verify=False)
            await stack.enter_async_context(client)
            doors.append(IndexDoor(egress, door, port, client))
        yield doors


@asynccontextmanager
async def index_door(directory: Path, *indexes: IndexServer, **packages: Any) -> AsyncIterator[IndexDoor]:
    """One, to those indexes in that order; the first is the npm registry too."""
    where = {"pypi": tuple(index.simple for index in indexes), "npm": indexes[0].url + "/"}
    async with index_doors(directory, **{**where, **packages}) as (door,):
        yield door


def until(condition: Any) -> None:
    """Waits in a thread of the server's until it is so."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.005)
