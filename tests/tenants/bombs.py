"""Bodies that are cheap to send and dear to read, and a client that sends them as an attacker would."""

from __future__ import annotations

import gzip
import http.client
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tests.tenants.wire import SECONDS, Answer

PIECE = 1 << 18
JSON = {"content-type": "application/json"}
FORM = {"content-type": "multipart/form-data; boundary=edge"}


class Bomb(NamedTuple):
    """`make` builds a body of about so many bytes."""

    name: str
    make: Callable[[int], bytes]
    headers: dict[str, str] = JSON


def _many(part: bytes, before: bytes = b'{"zz":[', after: bytes = b"1]}") -> Callable[[int], bytes]:
    return lambda size: before + part * (size // len(part)) + after


def _keys(size: int) -> bytes:
    return b"{" + b",".join(b'"k%d":0' % number for number in range(size // 12)) + b"}"


def _zipped(size: int) -> bytes:
    return gzip.compress(b'{"zz":[' + b"[]," * (size // 3) + b"1]}", 9)


def _noise(size: int) -> bytes:
    return random.Random(size).randbytes(1 << 16) * (size >> 16)


def _parts(size: int) -> bytes:
    part = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n\r\n'
    return part * (size // len(part)) + b"--edge--\r\n"


BOMBS = (
    Bomb("lists", _many(b"[],")),
    Bomb("objects", _many(b"{},")),
    Bomb("numbers", _many(b"1,")),
    Bomb("strings", _many(b'"",')),
    Bomb("keys", _keys),
    Bomb("one key", _many(b'"a":0,', b"{", b'"a":0}')),
    Bomb("deep lists", _many(b"[", b'{"zz":', b"")),
    Bomb("deep objects", _many(b'{"a":', b"", b"")),
    Bomb("one number", _many(b"9", b'{"zz":', b"}")),
    Bomb("long numbers", _many(b"9" * 4000 + b",")),
    Bomb("a long fraction", _many(b"1", b'{"zz":0.', b"}")),
    Bomb("spaces", _many(b" ", b'{"zz":', b"1}")),
    Bomb("a string", _many(b"x", b'{"zz":"', b'"}')),
    Bomb("escapes", _many(b"\\u0041", b'{"zz":"', b'"}')),
    Bomb("backslashes", _many(b"\\\\", b'{"zz":"', b'"}')),
    Bomb("lone surrogates", _many(b"\\ud800", b'{"zz":"', b'"}')),
    Bomb("a wide string", _many(b"x", '{"zz":"😀'.encode(), b'"}')),
    Bomb("quotes", _many(b'"', b"", b"")),
    Bomb("commas", _many(b",", b"", b"")),
    Bomb("UTF-16", lambda size: ('["' + "\u2222" * 9 + '"' + ",[]" * (size // 6)).encode("utf-16")),
    Bomb("noise", _noise),
    Bomb("gzip", _zipped, {**JSON, "content-encoding": "gzip"}),
    Bomb("parts", _parts, FORM),
    Bomb("a part's header", _many(b"x", b"--edge\r\nContent-Disposition: form-data; name=", b""), FORM),
    Bomb("fields", _many(b"a=1&", b"", b""), {"content-type": "application/x-www-form-urlencoded"}),
)


def send(place: str, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
    """Sends until the server answers: it may do so before it has read everything, and reads no more then."""
    host, _, port = place.partition(":")
    named = {"host": place, **headers, "content-length": str(len(body)), "connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
        connection.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode())
        _send_until_answered(connection, body)
        response = http.client.HTTPResponse(connection, method=method)
        response.begin()
        return Answer(response.status, tuple(response.getheaders()), response.read1(1 << 16))


def _send_until_answered(connection: socket.socket, body: bytes) -> None:
    left = memoryview(body)
    while left:
        readable, writable, _ = select.select([connection], [connection], [], SECONDS)
        if readable or not writable:
            return
        try:
            left = left[connection.send(left[:PIECE]) :]
        except ConnectionError:
            return  # its answer is there already


class Watch(NamedTuple):
    """What others saw meanwhile."""

    seconds: list[float]  # of each `/health`, in order of size
    memory_bytes: int  # the most that the server's process had, above the beginning

    def waited(self, share: float) -> float:
        return self.seconds[int(share * (len(self.seconds) - 1))]


@contextmanager
def watching(url: str, pid: int) -> Iterator[Callable[[], Watch]]:
    """Asks `/health` again and again on a connection of its own."""
    begun, stop, seconds = _memory(pid, "VmRSS"), threading.Event(), list[float]()
    with open(f"/proc/{pid}/clear_refs", "w") as peak:
        peak.write("5")
    asking = threading.Thread(target=_ask_health, args=(url.removeprefix("http://"), stop, seconds))
    asking.start()
    try:
        yield lambda: Watch(sorted(seconds), _memory(pid, "VmHWM") - begun)
    finally:
        stop.set()
        asking.join()


def _ask_health(place: str, stop: threading.Event, seconds: list[float]) -> None:
    connection = http.client.HTTPConnection(place, timeout=60)
    while not stop.wait(0.005):
        begun = time.perf_counter()
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        seconds.append(time.perf_counter() - begun)
    connection.close()


def _memory(pid: int, field: str) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field + ":"))
