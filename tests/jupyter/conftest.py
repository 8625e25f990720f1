"""Kernels over the wire, as clients without Jupyter's own libraries speak it: HTTP, and JSON or binary WebSockets."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx2
import pytest
from tests.conftest import RunningServer
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from cloche.api.jupyter.messages import V1_PROTOCOL


class JupyterClient:
    """The REST half, with a key."""

    def __init__(self, server: RunningServer, base: str = "/jupyter"):
        self.server = server
        self.base = base
        headers = {"Authorization": f"token {server.key}"}
        self.http = httpx2.Client(base_url=server.url + base, headers=headers, timeout=60)

    def start(self, **asked: Any) -> str:
        answer = self.http.post("/api/kernels", json=asked) if asked else self.http.post("/api/kernels")
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def channels(self, kernel: str, *, v1: bool = False) -> Channels:
        url = f"{self.server.url.replace('http', 'ws')}{self.base}/api/kernels/{kernel}/channels"
        return Channels(f"{url}?token={self.server.key}&session_id={uuid.uuid4().hex}", v1)


class Channels:
    """A WebSocket of a kernel."""

    def __init__(self, url: str, v1: bool = False):
        self.v1 = v1
        self._connecting = connect(url, subprotocols=[Subprotocol(V1_PROTOCOL)] if v1 else None, max_size=None)
        self.session = uuid.uuid4().hex

    def __enter__(self) -> Channels:
        self.socket = self._connecting.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._connecting.__exit__(*raised)

    def send(self, msg_type: str, content: dict[str, Any], channel: str = "shell") -> str:
        id = uuid.uuid4().hex
        header = {"msg_id": id, "msg_type": msg_type, "session": self.session, "username": "u", "version": "5.3"}
        if self.v1:
            self.socket.send(join_v1([channel.encode(), *map(dumped, (header, {}, {}, content))]))
        else:
            whole = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": channel}
            self.socket.send(json.dumps(whole))
        return id

    def receive(self) -> dict[str, Any]:
        data = self.socket.recv(60)
        if isinstance(data, str):
            found: dict[str, Any] = json.loads(data)
            assert found["msg_type"] == found["header"]["msg_type"]
            return found
        channel, header, parent, _metadata, content = split_v1(data)
        return {
            "channel": channel.decode(),
            "header": json.loads(header),
            "msg_type": json.loads(header)["msg_type"],
            "parent_header": json.loads(parent),
            "content": json.loads(content),
        }

    def until(self, id: str, msg_type: str) -> list[dict[str, Any]]:
        """The messages about that request, up to the first of that type."""
        found = []
        while True:
            message = self.receive()
            if message["parent_header"].get("msg_id") == id:
                found.append(message)
                if message["msg_type"] == msg_type:
                    return found

    def until_idle(self, id: str) -> list[dict[str, Any]]:
        """The messages about a request, up to the end of it."""
        found = self.until(id, "status")
        while found[-1]["content"].get("execution_state") != "idle":
            found += self.until(id, "status")
        return found

    def ask(self, msg_type: str, content: dict[str, Any], channel: str = "shell") -> dict[str, Any]:
        """The content of the reply."""
        id = self.send(msg_type, content, channel)
        reply = msg_type.replace("request", "reply")
        return dict(next(each["content"] for each in self.until_idle(id) if each["msg_type"] == reply))

    def execute(self, code: str, **more: Any) -> list[dict[str, Any]]:
        return self.until_idle(self.send("execute_request", {"code": code, **more}))


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def join_v1(parts: list[bytes]) -> bytes:
    """A message of the binary subprotocol, written down a second time: by its description, not by our encoder."""
    offsets = [8 * (len(parts) + 2)]
    for part in parts:
        offsets.append(offsets[-1] + len(part))
    return b"".join(number.to_bytes(8, "little") for number in (len(offsets), *offsets)) + b"".join(parts)


def split_v1(data: bytes) -> list[bytes]:
    count = int.from_bytes(data[:8], "little")
    offsets = [int.from_bytes(data[8 * n : 8 * n + 8], "little") for n in range(1, count + 1)]
    return [data[start:end] for start, end in pairwise(offsets)]


def contents(messages: list[dict[str, Any]], msg_type: str) -> list[dict[str, Any]]:
    return [each["content"] for each in messages if each["msg_type"] == msg_type]


def printed(messages: list[dict[str, Any]], name: str = "stdout") -> str:
    return "".join(each["text"] for each in contents(messages, "stream") if each["name"] == name)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[JupyterClient]:
    made = JupyterClient(server)
    with made.http:
        yield made


@pytest.fixture
def kernel(client: JupyterClient) -> Iterator[str]:
    id = client.start()
    yield id
    client.http.delete(f"/api/kernels/{id}")


@pytest.fixture(params=[False, pytest.param(True, id="v1")])
def channels(client: JupyterClient, kernel: str, request: pytest.FixtureRequest) -> Iterator[Channels]:
    with client.channels(kernel, v1=request.param) as made:
        yield made
