"""Who stops reading keeps nothing of a sandbox that has ended."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from e2b_code_interpreter import Sandbox
from starlette.requests import Request
from tests.conftest import RunningServer, wait_until

from cloche import errors
from cloche.api.e2b.code import CodeServer
from cloche.api.e2b.envd import Envd

BIG = 32 << 20


def stalled(server: RunningServer, request: str) -> socket.socket:
    """A client that asked, and reads nothing of the answer."""
    place = urlsplit(server.url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((place.hostname, place.port))
    client.sendall(request.replace("\n", "\r\n").encode())
    return client


def is_open(server: RunningServer, name: str) -> bool:
    """Whether the server holds a file of that name."""
    for each in Path(f"/proc/{server.process.pid}/fd").iterdir():
        try:
            if name in os.readlink(each):
                return True
        except FileNotFoundError:
            pass
    return False


@pytest.mark.parametrize("dialect", ["e2b", "e2b gzip", "native"])
def test_an_unread_download_ends_with_its_sandbox(server, dialect):
    box = Sandbox.create(**server.e2b)
    name = f"stalled-{box.sandbox_id}"
    box.files.write(name, os.urandom(BIG))
    if dialect == "native":
        path, headers = f"/api/v1/sandboxes/{box.sandbox_id}/files/content", f"X-API-Key: {server.key}"
    else:
        path, accepted = "/e2b/files", "identity;q=0, gzip" if "gzip" in dialect else "identity"
        token = f"X-Access-Token: {box._envd_access_token}\nAccept-Encoding: {accepted}"
        headers = f"E2b-Sandbox-Id: {box.sandbox_id}\nE2b-Sandbox-Port: 49983\n{token}"
    with stalled(server, f"GET {path}?path=/home/user/{name} HTTP/1.1\nHost: x\n{headers}\n\n") as client:
        wait_until(lambda: is_open(server, name))
        box.kill()
        wait_until(lambda: not is_open(server, name))
        client.settimeout(30)
        with pytest.raises(ConnectionResetError):  # nobody takes what came for the whole file
            while client.recv(1 << 20):
                pass


@pytest.mark.parametrize("plane", [CodeServer(), Envd()], ids=["code server", "envd"])
def test_a_request_whose_sandbox_ends_meanwhile_is_told_so_by_every_plane(plane):
    class Resident:
        id = "i1"

    request = Request({"type": "http", "method": "POST", "headers": [], "state": {"e2b_sandbox": Resident()}})
    answer = plane.render_error(errors.SandboxKilled("it was killed"), request)
    assert answer.status_code == 502
    assert answer.body == b'{"sandboxId":"i1","message":"The sandbox was not found: it was killed","code":502}'
