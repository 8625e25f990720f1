"""A load generator in a process of its own: keep-alive connections, each asking again as soon as it has its answer.

Sockets, one epoll and nothing else, so that what is measured is the server. It says how much of a core it took itself.
It reads a job as JSON on stdin and writes an account as JSON to stdout.
"""

from __future__ import annotations

import json
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

ONE = b'{"code":"1+1"}'
TWO = b'"text":"2"'
ROOT = "/api/v1/sandboxes"
SILENCE_SECONDS = 60.0  # after which a server that says nothing has failed
RECEIVED_BYTES = 1 << 16


class Answer(NamedTuple):
    status: int
    body: bytes


class Failed(Exception):
    """The server did not do what was asked."""


Talk = Generator[bytes, Answer, None]  # gives requests and is sent their answers


class Account:
    """What happened: seconds of each operation, and what was made."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.first_seconds: list[float] = []  # of those that create: until the first result
        self.ids: list[str] = []
        self.failures: list[str] = []

    def as_json(self, wall_seconds: float) -> str:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return json.dumps(
            {**vars(self), "wall_seconds": wall_seconds, "own_cpu_seconds": used.ru_utime + used.ru_stime}
        )


class Job:
    """What every client does: `job` is what the caller sent."""

    def __init__(self, job: dict[str, Any], account: Account):
        self._head = f"host: {job['host']}\r\nauthorization: Bearer {job['key']}\r\ncontent-type: application/json"
        self._ids: list[str] = job["ids"]
        self._clients: int = job["clients"]
        self._left: int = job["count"]
        self._end = time.perf_counter() + job["seconds"]
        self._account = account
        self.talk: Callable[[int], Talk] = getattr(self, job["what"])

    def executions(self, client: int) -> Talk:
        """`1+1` in sandboxes that are there, until the time is over: each client in its own, as far as there are."""
        mine = self._ids[client % len(self._ids) :: self._clients]
        requests = [self._request("POST", f"{ROOT}/{each}/run", ONE) for each in mine]
        turn = 0
        while time.perf_counter() < self._end:
            began = time.perf_counter()
            _expect((yield requests[turn % len(requests)]), 200, TWO)
            self._account.seconds.append(time.perf_counter() - began)
            turn += 1

    def cycles(self, client: int) -> Talk:
        """Sandboxes created, used and destroyed, until the time is over."""
        create = self._request("POST", ROOT, b"{}")
        while time.perf_counter() < self._end:
            began = time.perf_counter()
            sandbox = _id(_expect((yield create), 201))
            _expect((yield self._request("POST", f"{ROOT}/{sandbox}/run", ONE)), 200, TWO)
            self._account.first_seconds.append(time.perf_counter() - began)
            _expect((yield self._request("DELETE", f"{ROOT}/{sandbox}")), 204)
            self._account.seconds.append(time.perf_counter() - began)

    def creations(self, client: int) -> Talk:
        """So many sandboxes in all, that stay."""
        create = self._request("POST", ROOT, b"{}")
        while self._left > 0:
            self._left -= 1
            began = time.perf_counter()
            sandbox = _id(_expect((yield create), 201))
            self._account.seconds.append(time.perf_counter() - began)
            self._account.ids.append(sandbox)

    def roll_call(self, client: int) -> Talk:
        """`1+1` once in every one of those sandboxes."""
        for sandbox in self._ids[client :: self._clients]:
            began = time.perf_counter()
            _expect((yield self._request("POST", f"{ROOT}/{sandbox}/run", ONE)), 200, TWO)
            self._account.seconds.append(time.perf_counter() - began)

    def removals(self, client: int) -> Talk:
        for sandbox in self._ids[client :: self._clients]:
            _expect((yield self._request("DELETE", f"{ROOT}/{sandbox}")), 204)

    def _request(self, method: str, path: str, body: bytes = b"") -> bytes:
        return f"{method} {path} HTTP/1.1\r\n{self._head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


class Connection:
    """One client: a talk over one keep-alive connection, begun with its first request."""

    def __init__(self, address: tuple[str, int], talk: Talk, first: bytes):
        self._talk = talk
        self._received = bytearray()
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(first)

    def read(self) -> None:
        """Takes what has come, and asks on. Raises StopIteration at the end of the talk, Failed or OSError."""
        found = self.socket.recv(RECEIVED_BYTES)
        if not found:
            raise Failed("the server closed the connection")
        self._received += found
        answer = parsed(self._received)
        if answer is not None:
            self._received.clear()
            self.socket.sendall(self._talk.send(answer))


def parsed(received: bytearray) -> Answer | None:
    """The answer, once it is complete. Raises Failed if it has no length."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return None
    status = int(received[9:12])
    at = received.find(b"content-length: ", 0, end)
    if at < 0 and status != 204:
        raise Failed(f"an answer without a length: {bytes(received[:200])!r}")
    size = int(received[at + 16 : received.index(b"\r\n", at)]) if at >= 0 else 0
    if len(received) < end + 4 + size:
        return None
    return Answer(status, bytes(received[end + 4 :]))


def _expect(answer: Answer, status: int, part: bytes = b"") -> bytes:
    if answer.status != status or part not in answer.body:
        raise Failed(f"{answer.status} {answer.body[:200]!r}")
    return answer.body


def _id(body: bytes) -> str:
    return str(json.loads(body)["id"])


def _converse(connections: dict[int, Connection], account: Account) -> None:
    """Until every talk has ended, or failed."""
    poll = select.epoll()
    for number in connections:
        poll.register(number, select.EPOLLIN)
    while connections:
        ready = poll.poll(SILENCE_SECONDS)
        if not ready:
            account.failures.append(f"{len(connections)} clients heard nothing for {SILENCE_SECONDS:g} s")
            return
        for number, _ in ready:
            if not _goes_on(connections[number], account):
                poll.unregister(number)
                connections.pop(number).socket.close()


def _goes_on(connection: Connection, account: Account) -> bool:
    """Whether the talk has more to ask."""
    try:
        connection.read()
    except StopIteration:
        return False
    except (Failed, OSError) as error:
        account.failures.append(f"{type(error).__name__}: {error}")
        return False
    return True


def main() -> None:
    job = json.loads(sys.stdin.read())
    account = Account()
    began = time.perf_counter()
    clients = Job(job, account)
    talks = [clients.talk(number) for number in range(job["clients"])]
    begun = [(talk, first) for talk in talks if (first := next(talk, None)) is not None]  # who has nothing to ask
    made = [Connection((job["host"], job["port"]), talk, first) for talk, first in begun]
    _converse({each.socket.fileno(): each for each in made}, account)
    sys.stdout.write(account.as_json(time.perf_counter() - began))


class Load(NamedTuple):
    """How it went, for the one who asked."""

    seconds: list[float]
    first_seconds: list[float]
    ids: list[str]
    failures: list[str]
    wall_seconds: float
    own_cpu_seconds: float

    @property
    def per_second(self) -> float:
        return len(self.seconds) / self.wall_seconds

    @property
    def cores(self) -> float:
        """The share of a core that the generator itself took."""
        return self.own_cpu_seconds / self.wall_seconds


def run(
    address: tuple[str, int],
    key: str,
    what: str,
    clients: int,
    *,
    ids: list[str] | None = None,
    count: int = 0,
    seconds: float = 0.0,
) -> Load:
    """Runs a job in another process. Raises RuntimeError if that process fails."""
    host, port = address
    job = {"host": host, "port": port, "key": key, "what": what, "clients": clients}
    job |= {"ids": ids or [], "count": count, "seconds": seconds}
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the load generator failed: {done.stderr[-500:]}")
    return Load(**json.loads(done.stdout))
