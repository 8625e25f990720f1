"""A load generator in a process of its own: keep-alive connections, each with one request after another.

Sockets, one epoll and nothing else, so that the server is measured, not the client. It reports its own share
of a core. It reads a job as JSON on stdin and writes an account as JSON to stdout.
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

from cloche.bench.raw_http import RECEIVED_BYTES, SANDBOXES_PATH, HttpAnswer, parse_answer
from cloche.bench.samples import WrongAnswer

ONE_BODY = b'{"code":"1+1"}'
TWO_ANSWER = b'"text":"2"'
SILENCE_SECONDS = 60.0  # after which a server that says nothing has failed


ClientTalk = Generator[bytes, HttpAnswer, None]  # gives requests and is sent their answers


class LoadAccount:
    """The result of a load: seconds of each operation, and the ids created."""

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


class LoadJob:
    """The work of every client: `job` is the caller's JSON."""

    def __init__(self, job: dict[str, Any], account: LoadAccount):
        self._head = f"host: {job['host']}\r\nauthorization: Bearer {job['key']}\r\ncontent-type: application/json"
        self._ids: list[str] = job["ids"]
        self._clients: int = job["clients"]
        self._left: int = job["count"]
        self._end = time.perf_counter() + job["seconds"]
        self._account = account
        self.talk: Callable[[int], ClientTalk] = getattr(self, job["what"])

    def executions(self, client: int) -> ClientTalk:
        """`1+1` in existing sandboxes, until the time is over: each client in its own, as far as there are."""
        mine = self._ids[client % len(self._ids) :: self._clients]
        requests = [self._format_request("POST", f"{SANDBOXES_PATH}/{each}/run", ONE_BODY) for each in mine]
        turn = 0
        while time.perf_counter() < self._end:
            began = time.perf_counter()
            _check_answer((yield requests[turn % len(requests)]), 200, TWO_ANSWER)
            self._account.seconds.append(time.perf_counter() - began)
            turn += 1

    def cycles(self, client: int) -> ClientTalk:
        """Sandboxes created, used and destroyed, until the time is over."""
        create = self._format_request("POST", SANDBOXES_PATH, b"{}")
        while time.perf_counter() < self._end:
            began = time.perf_counter()
            sandbox = _sandbox_id(_check_answer((yield create), 201))
            _check_answer(
                (yield self._format_request("POST", f"{SANDBOXES_PATH}/{sandbox}/run", ONE_BODY)), 200, TWO_ANSWER
            )
            self._account.first_seconds.append(time.perf_counter() - began)
            _check_answer((yield self._format_request("DELETE", f"{SANDBOXES_PATH}/{sandbox}")), 204)
            self._account.seconds.append(time.perf_counter() - began)

    def creations(self, client: int) -> ClientTalk:
        """Creates `count` sandboxes in all, which stay."""
        create = self._format_request("POST", SANDBOXES_PATH, b"{}")
        while self._left > 0:
            self._left -= 1
            began = time.perf_counter()
            sandbox = _sandbox_id(_check_answer((yield create), 201))
            self._account.seconds.append(time.perf_counter() - began)
            self._account.ids.append(sandbox)

    def roll_call(self, client: int) -> ClientTalk:
        """`1+1` once in every one of those sandboxes."""
        for sandbox in self._ids[client :: self._clients]:
            began = time.perf_counter()
            _check_answer(
                (yield self._format_request("POST", f"{SANDBOXES_PATH}/{sandbox}/run", ONE_BODY)), 200, TWO_ANSWER
            )
            self._account.seconds.append(time.perf_counter() - began)

    def removals(self, client: int) -> ClientTalk:
        for sandbox in self._ids[client :: self._clients]:
            _check_answer((yield self._format_request("DELETE", f"{SANDBOXES_PATH}/{sandbox}")), 204)

    def _format_request(self, method: str, path: str, body: bytes = b"") -> bytes:
        return f"{method} {path} HTTP/1.1\r\n{self._head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


class LoadConnection:
    """One client: a talk over one keep-alive connection, begun with its first request."""

    def __init__(self, address: tuple[str, int], talk: ClientTalk, first: bytes):
        self._talk = talk
        self._received = bytearray()
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(first)

    def read(self) -> None:
        """Reads received data and sends the next request. Raises StopIteration at the end, WrongAnswer or OSError."""
        found = self.socket.recv(RECEIVED_BYTES)
        if not found:
            raise WrongAnswer("the server closed the connection")
        self._received += found
        answer = parse_answer(self._received)
        if answer is not None:
            self._received.clear()
            self.socket.sendall(self._talk.send(answer))


def _check_answer(answer: HttpAnswer, status: int, part: bytes = b"") -> bytes:
    if answer.status != status or part not in answer.body:
        raise WrongAnswer(f"{answer.status} {answer.body[:200]!r}")
    return answer.body


def _sandbox_id(body: bytes) -> str:
    return str(json.loads(body)["id"])


def _run_connections(connections: dict[int, LoadConnection], account: LoadAccount) -> None:
    """Runs until every talk has ended, or failed."""
    poll = select.epoll()
    for number in connections:
        poll.register(number, select.EPOLLIN)
    while connections:
        ready = poll.poll(SILENCE_SECONDS)
        if not ready:
            account.failures.append(f"{len(connections)} clients heard nothing for {SILENCE_SECONDS:g} s")
            return
        for number, _ in ready:
            if not _continue_talk(connections[number], account):
                poll.unregister(number)
                connections.pop(number).socket.close()


def _continue_talk(connection: LoadConnection, account: LoadAccount) -> bool:
    """Whether the talk has another request."""
    try:
        connection.read()
    except StopIteration:
        return False
    except (WrongAnswer, OSError) as error:
        account.failures.append(f"{type(error).__name__}: {error}")
        return False
    return True


def main() -> None:
    job = json.loads(sys.stdin.read())
    account = LoadAccount()
    began = time.perf_counter()
    clients = LoadJob(job, account)
    talks = [clients.talk(number) for number in range(job["clients"])]
    begun = [(talk, first) for talk in talks if (first := next(talk, None)) is not None]  # who has nothing to ask
    made = [LoadConnection((job["host"], job["port"]), talk, first) for talk, first in begun]
    _run_connections({each.socket.fileno(): each for each in made}, account)
    sys.stdout.write(account.as_json(time.perf_counter() - began))


class LoadResult(NamedTuple):
    """The account of a load, for the caller."""

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
    def core_share(self) -> float:
        """The share of a core that the generator itself used."""
        return self.own_cpu_seconds / self.wall_seconds


def run_load(
    address: tuple[str, int],
    key: str,
    what: str,
    clients: int,
    *,
    ids: list[str] | None = None,
    count: int = 0,
    seconds: float = 0.0,
) -> LoadResult:
    """Runs a job in another process. Raises RuntimeError if that process fails."""
    host, port = address
    job = {"host": host, "port": port, "key": key, "what": what, "clients": clients}
    job |= {"ids": ids or [], "count": count, "seconds": seconds}
    command = [sys.executable, "-P", __file__]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the load generator failed: {done.stderr[-500:]}")
    return LoadResult(**json.loads(done.stdout))


if __name__ == "__main__":
    main()
