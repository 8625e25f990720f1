"""Connections that say nothing, or not enough, or too slowly, by the hundred: whoever has something to say is heard."""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from tests.conftest import RunningServer, wait_until
from tests.faults.conftest import Neighbour, in_background, key_of, serving_by

import cloche
from cloche.cli.connection import HttpConnectionLimiter

FEW = 400  # descriptors: a quarter of them are for connections
KINDS = {
    "silent": b"",
    "half a head": b"GET /health HTTP/1.1\r\nHost: x\r\nX-Half: ",
    "half a body": b"POST /api/v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{",
    "idle": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.fixture(scope="module")
def poor(place: Path) -> Iterator[RunningServer]:
    """A server that may have few descriptors."""
    cloche_command = str(Path(sys.executable).with_name("cloche"))
    command = ["sh", "-c", f'ulimit -n {FEW}; exec "$0" "$@"', cloche_command]
    with serving_by(command, place, CLOCHE_POOL_READY="1") as server:
        yield server


@pytest.fixture(scope="module")
def witness(poor: RunningServer) -> Iterator[Neighbour]:
    made = Neighbour(poor)
    yield made
    made.close()


def crowd(server: RunningServer, count: int, said: bytes, source: str = "127.0.0.1") -> list[socket.socket]:
    place = urlsplit(server.url)
    made = []
    for _ in range(count):
        client = socket.create_connection((place.hostname, place.port), timeout=30, source_address=(source, 0))
        made.append(client)
        with contextlib.suppress(OSError):
            client.sendall(said)
    return made


@contextlib.contextmanager
def many(server: RunningServer, count: int, said: bytes, source: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    made = crowd(server, count, said, source)
    try:
        yield made
    finally:
        for client in made:
            client.close()


def is_open(client: socket.socket) -> bool:
    """As far as its client has heard."""
    client.setblocking(False)
    try:
        while client.recv(65536):
            pass
    except BlockingIOError:
        return True
    except ConnectionResetError:
        pass
    return False


def descriptors(server: RunningServer) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def limit_for(server: RunningServer, more: int) -> int:
    """So that there are numbers for that many more, and for none beyond."""
    there = {int(each.name) for each in Path(f"/proc/{server.process.pid}/fd").iterdir()}
    free = (number for number in range(1 << 20) if number not in there)
    return [next(free) for _ in range(more)][-1] + 1


def assert_serves(server: RunningServer) -> None:
    assert httpx2.get(f"{server.url}/health", timeout=30).status_code == 200
    with cloche.Sandbox(url=server.url, api_key=server.key) as box:
        assert box.run("6 * 7").text == "42"


@pytest.mark.parametrize("kind", KINDS)
def test_connections_that_are(poor: RunningServer, witness: Neighbour, kind: str):
    """Three times as many as there is room for. They are closed, the oldest first, and nobody else is."""
    before = descriptors(poor)
    with many(poor, 300, KINDS[kind], "127.0.0.2"):
        assert descriptors(poor) < FEW
        assert_serves(poor)
        witness.assert_unharmed()
    wait_until(lambda: descriptors(poor) <= before + 20)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["silent", "half a body"])
def test_thousands_of_connections_that_are(running: RunningServer, neighbour: Neighbour, kind: str):
    """A server with descriptors for them all keeps them, until their time is over, and serves others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 3000 if hard == resource.RLIM_INFINITY else min(3000, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        with many(running, wanted - 500, KINDS[kind]):
            assert_serves(running)
            neighbour.assert_unharmed()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_active_connections_are_not_closed_for_idle_ones(poor: RunningServer):
    with httpx2.Client(base_url=poor.url, timeout=30) as client:
        assert client.get("/health").status_code == 200
        ours = client.get("/health").extensions["network_stream"].get_extra_info("client_addr")
        with many(poor, 300, b"", "127.0.0.2"):
            again = client.get("/health").extensions["network_stream"].get_extra_info("client_addr")
        assert again == ours


class Visit:
    """A connection of which a crowd knows no more than this."""

    def __init__(self, peer: str, *, waited_for: bool = True, asked: bool = False, owner: str | None = None):
        self.peer, self.is_idle_or_slow, self.has_sent_request, self.gone = peer, waited_for, asked, False
        self.owner = owner

    def abandon(self) -> None:
        self.gone = True


def test_the_owner_with_most_connections_loses_idle_ones_only():
    there = HttpConnectionLimiter(64)
    quiet = [Visit("few") for _ in range(4)]
    busy = [Visit("busy", waited_for=False, asked=True) for _ in range(20)]
    greedy = [Visit("greedy") for _ in range(40)]
    for visit in (*quiet, *busy, *greedy):
        assert there.enter(visit)
    assert there.enter(Visit("new"))
    assert [visit.gone for visit in greedy] == [True] * 4 + [False] * 36
    assert not any(visit.gone for visit in (*quiet, *busy))


def test_where_all_is_under_way_the_newest_is_refused():
    there = HttpConnectionLimiter(64)
    for _ in range(64):
        assert there.enter(Visit("busy", waited_for=False, asked=True))
    assert not there.enter(Visit("new"))


def answered(owner: str, count: int) -> list[Visit]:
    """Connections of that owner on which something is under way, all through one proxy."""
    return [Visit("proxy", waited_for=False, asked=True, owner=owner) for _ in range(count)]


def test_the_newest_connections_of_the_largest_owner_make_room():
    there = HttpConnectionLimiter(64)
    few, many = answered("alice", 4), answered("mallory", 60)
    for visit in (*few, *many):
        assert there.enter(visit)
    assert there.enter(Visit("proxy"))
    assert [visit.gone for visit in many] == [False] * 56 + [True] * 4
    assert not any(visit.gone for visit in few)


def test_a_third_owner_finds_room_unless_all_owners_have_the_same():
    there = HttpConnectionLimiter(64)
    two = [*answered("alice", 32), *answered("bob", 32)]
    assert all(there.enter(visit) for visit in two)
    assert there.enter(Visit("proxy"))
    assert sum(visit.gone for visit in two) == 1
    equals = HttpConnectionLimiter(64)
    assert all(equals.enter(answered(f"owner {number}", 1)[0]) for number in range(64))
    assert not equals.enter(Visit("proxy"))


def test_strangers_go_before_owners_and_owners_with_many_before_those_with_few():
    there = HttpConnectionLimiter(64)
    few = [Visit("proxy", asked=True, owner="alice") for _ in range(2)]
    many = [Visit("proxy", asked=True, owner="mallory") for _ in range(59)]
    strangers = [Visit("proxy", asked=True) for _ in range(3)]
    for visit in (*few, *many, *strangers):
        assert there.enter(visit)
    assert there.enter(Visit("proxy", waited_for=False, asked=True, owner="bob"))
    assert all(visit.gone for visit in strangers)
    assert [visit.gone for visit in many] == [True] + [False] * 58
    assert not any(visit.gone for visit in few)


UPGRADE = (
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@pytest.mark.parametrize(
    ("path", "more"),
    [("/api/v1/runs/{run}/events", ""), ("/api/v1/sandboxes/{box}/execute", UPGRADE)],
    ids=["streams", "websockets"],
)
def test_one_key_cannot_lock_others_out_by(poor: RunningServer, witness: Neighbour, path: str, more: str):
    """More than there is room for, none of them idle. The neighbour loses nothing, and who comes later is served."""
    greedy, late = key_of(poor, "greedy"), key_of(poor, "late")
    with cloche.Sandbox(url=poor.url, api_key=greedy) as box:
        asked = {"code": "import time; time.sleep(3600)"}
        runs = f"{poor.url}/api/v1/sandboxes/{box.id}/runs"
        run = httpx2.post(runs, headers={"x-api-key": greedy}, json=asked, timeout=30).json()["id"]
        said = (
            f"GET {path.format(box=box.id, run=run)} HTTP/1.1\r\nHost: x\r\nX-API-Key: {greedy}\r\n{more}\r\n".encode()
        )
        with contextlib.ExitStack() as stack:
            made = []
            for _ in range(130):  # one after the other, so that each is being answered when the next one comes
                made += stack.enter_context(many(poor, 1, said))
                with contextlib.suppress(ConnectionResetError):
                    made[-1].recv(12)
            for _ in range(10):
                answer = httpx2.get(f"{poor.url}/api/v1/sandboxes", headers={"x-api-key": late}, timeout=30)
                assert answer.status_code == 200
            assert FEW // 8 < sum(is_open(each) for each in made) < FEW // 4
            witness.assert_unharmed()


def test_too_few_descriptors_for_anything_is_said_and_over_when_there_are_more(running: RunningServer, neighbour):
    """Also a connection takes one: who cannot be let in sees it closed. Nothing spins, and what runs goes on."""
    soft, hard = resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE)
    kept = httpx2.Limits(keepalive_expiry=600)  # there will be no room for another connection
    headers = {"x-api-key": running.key}
    with httpx2.Client(base_url=running.url, timeout=60, headers=headers, limits=kept) as client:
        assert client.get("/api/v1/sandboxes").status_code == 200
        resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (limit_for(running, 2), hard))
        try:
            refused = client.post("/api/v1/sandboxes", json={})
            assert refused.status_code == 503 and "too many files open" in refused.text
            with many(running, 20, b""):
                neighbour.assert_streaming()
                assert client.get("/api/v1/sandboxes").status_code == 200
        finally:
            resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert_serves(running)
    neighbour.assert_unharmed()


def test_an_unread_stream_blocks_its_own_program_only(running, mine, neighbour: Neighbour):
    with cloche.Sandbox(**mine) as box:
        code = '{"code": "while True: print(chr(120) * 10000)"}'
        path = f"/api/v1/sandboxes/{box.id}/stream"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {running.key}\r\nContent-Type: application/json\r\n"
        client = crowd(running, 1, f"{head}Content-Length: {len(code)}\r\n\r\n{code}".encode())[0]
        assert client.recv(12) == b"HTTP/1.1 200"
        before = memory(running)
        neighbour.assert_unharmed()
        assert_serves(running)
        assert memory(running) - before < 64 << 20
        client.close()
        wait_until(lambda: box.run("6 * 7").text == "42")  # who has left ends what they asked for


def memory(server: RunningServer) -> int:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.long
def test_uploads_of_a_byte_at_a_time_leave_the_server_to_others(running, mine, neighbour: Neighbour):
    with cloche.Sandbox(**mine) as box:
        path = f"/api/v1/sandboxes/{box.id}/files/content?path=/mnt/data/slow"
        head = f"PUT {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {running.key}\r\nContent-Length: 100000\r\n\r\n"
        stop = threading.Event()
        with many(running, 200, head.encode()) as clients:

            def trickle() -> None:
                while not stop.wait(0.2):
                    for client in clients:
                        client.sendall(b"x")

            trickling = in_background(trickle)
            for _ in range(10):
                assert_serves(running)
            neighbour.assert_unharmed()
            stop.set()
            trickling.result(30)
        assert box.run("6 * 7").text == "42"
