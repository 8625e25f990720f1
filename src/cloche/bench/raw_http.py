"""HTTP over a bare socket: http.client takes 0.2 ms to read a response's head, which would be measured too.

A leaf: the load generator of `tools/bench` imports this and nothing else of the benchmark, since it reports its
own share of a core.
"""

from __future__ import annotations

import socket
from typing import NamedTuple

from cloche.bench.samples import WrongAnswer, expect_answer

SANDBOXES_PATH = "/api/v1/sandboxes"
HTTP_ANSWER_SECONDS = 120.0
RECEIVED_BYTES = 1 << 16


class HttpAnswer(NamedTuple):
    status: int
    body: bytes


class RawConnection:
    """One keep-alive connection for short, timed requests."""

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
        while (answer := parse_answer(received)) is None:
            piece = self._socket.recv(RECEIVED_BYTES)
            expect_answer(bool(piece), "the server closed the connection")
            received += piece
        expect_answer(answer.status < 300, (answer.status, answer.body[:200]))
        return answer.body


def parse_answer(received: bytearray) -> HttpAnswer | None:
    """The answer, once it is complete. Raises WrongAnswer if it has no length."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return None
    status = int(received[9:12])
    at = received.find(b"content-length: ", 0, end)
    if at < 0 and status != 204:
        raise WrongAnswer(f"an answer without a length: {bytes(received[:200])!r}")
    size = int(received[at + 16 : received.index(b"\r\n", at)]) if at >= 0 else 0
    if len(received) < end + 4 + size:
        return None
    return HttpAnswer(status, bytes(received[end + 4 :]))
