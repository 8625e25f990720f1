"""What clients of one tenant can make the server's process hold, over real sockets on which they stop reading."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from tests.conftest import RunningServer

from cloche.model import MIB

pytestmark = [pytest.mark.timeout(120), pytest.mark.long]

READERS = 12


@pytest.fixture
def undisturbed() -> None:
    """The neighbour of the other tests lives in another process than this server's."""


def held_bytes(server: RunningServer) -> int:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=f"{server.url}/api/v1", headers={"x-api-key": server.key}, timeout=60) as client:
        yield client


@pytest.fixture
def sandbox(client: httpx2.Client) -> Iterator[str]:
    made = client.post("/sandboxes", json={})
    assert made.status_code < 300, made.text
    yield made.json()["id"]
    client.delete(f"/sandboxes/{made.json()['id']}")


@contextlib.contextmanager
def stalled(server: RunningServer, request: str, count: int) -> Iterator[None]:
    """So many clients that ask for that, and read nothing of the answer."""
    place = urlsplit(server.url)
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(socket.create_connection((place.hostname, place.port or 80)))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(f"{request}\r\nhost: {place.netloc}\r\nx-api-key: {server.key}\r\n\r\n".encode())
        yield


def most_held(server: RunningServer, seconds: float) -> int:
    end, most = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        most = max(most, held_bytes(server))
        time.sleep(0.05)
    return most


@pytest.mark.parametrize("query", ["whole=true", "whole=false"])
def test_a_large_file_is_never_held_whole(server: RunningServer, client: httpx2.Client, sandbox: str, query: str):
    """A sparse file costs a sandbox nothing, and may claim all of its space: a gigabyte for each who asks for it."""
    ran = client.post(f"/sandboxes/{sandbox}/commands", json={"command": "truncate -s 900M /mnt/data/claims"})
    assert ran.status_code < 300, ran.text
    before = held_bytes(server)
    path = f"/api/v1/sandboxes/{sandbox}/files/content?path=/mnt/data/claims&{query}"
    with stalled(server, f"GET {path} HTTP/1.1", READERS):
        assert most_held(server, 3) - before < 200 * MIB
    assert client.get(f"/sandboxes/{sandbox}/files/content", params={"path": "/mnt/data/claims"}).status_code == 200


def test_a_file_over_the_limit_is_refused_when_it_is_asked_for_whole(client: httpx2.Client, sandbox: str):
    client.post(f"/sandboxes/{sandbox}/commands", json={"command": "truncate -s 3G /mnt/data/claims"})
    refused = client.get(f"/sandboxes/{sandbox}/files/content", params={"path": "/mnt/data/claims", "whole": "true"})
    assert refused.status_code >= 400 and "can be read at once" in refused.text
