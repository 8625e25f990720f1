"""Requests as an attacker would write them, byte for byte, and answers as far as they could tell something."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

SECONDS = 20.0  # an answer that takes as long has let somebody in
SAID_BY_CLOCKS = ("date", "openai-processing-ms", "retry-after", "ratelimit", "ratelimit-policy")
"""Headers whose values differ between two requests that mean the same; that they are there does not."""


class Answer(NamedTuple):
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str:
        return next((value for each, value in self.headers if each == name), "")


class Wire:
    """One connection to a server, for whoever sends these headers with every request."""

    def __init__(self, url: str, headers: dict[str, str] | None = None):
        self.place = urlsplit(url).netloc
        self.headers = {"x-request-id": "of-this-test", **(headers or {})}
        self._connection = http.client.HTTPConnection(self.place, timeout=SECONDS)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """`body`: bytes as they are, anything else as JSON."""
        sent = {**self.headers, **(headers or {})}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            sent.setdefault("content-type", "application/json")
        try:
            return self._asked(method, path, body, sent)
        except (http.client.RemoteDisconnected, ConnectionError):  # the server closed it after the answer before
            self._connection.close()
            return self._asked(method, path, body, sent)

    def made(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """What the server says of a request that must work."""
        answer = self.ask(method, path, body, headers)
        assert 200 <= answer.status < 300, (method, path, answer)
        return answer.json() if answer.body else None

    def close(self) -> None:
        self._connection.close()

    def _asked(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        self._connection.request(method, path, body, headers)
        response = self._connection.getresponse()
        return Answer(response.status, _kept(response.getheaders()), response.read())


def _kept(headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    named = [(name.lower(), value) for name, value in headers]
    return tuple(sorted((name, "" if name in SAID_BY_CLOCKS else value) for name, value in named))


def open_socket(wire: Wire) -> Callable[..., Answer]:
    """How a WebSocket is asked for; what answers it before it is open, or says first and last when it is."""

    def opened(method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        sent = {**wire.headers, **(headers or {})}
        host = sent.pop("host", wire.place).partition(":")[0]
        address, port = wire.place.split(":")
        try:
            uri = f"ws://{host}:{port}{path}"
            with connect(uri, address=(address, int(port)), additional_headers=sent, open_timeout=SECONDS) as socket:
                return Answer(101, (), str(socket.recv(timeout=SECONDS)).encode())
        except InvalidStatus as refused:
            kept = _kept(refused.response.headers.raw_items())
            return Answer(refused.response.status_code, kept, refused.response.body or b"")
        except ConnectionClosed as closed:
            return Answer(101, (), str(closed).encode())

    return opened


def form(fields: dict[str, str], filename: str, content: bytes) -> tuple[bytes, dict[str, str]]:
    """A form with a file, and its header."""
    edge = "edge-of-this-test"
    parts = [
        f'--{edge}\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'.encode() for k, v in fields.items()
    ]
    head = f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n\r\n'
    body = b"".join([*parts, head.encode(), content, f"\r\n--{edge}--\r\n".encode()])
    return body, {"content-type": f"multipart/form-data; boundary={edge}"}
