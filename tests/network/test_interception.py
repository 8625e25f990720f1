"""TLS that ends at the proxy, spoken to byte by byte: a door on loopback, a server behind it, and both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio
import uvloop
from tests.network.conftest import read_all
from tests.network.far_server import ADDRESS, FarServer, own_trust
from websockets.asyncio.server import ServerConnection, serve
from websockets.sync.client import connect

from cloche.config.sections import NetworkConfig, PackagesConfig
from cloche.egress import EgressProxy
from cloche.egress.authority import CertificateAuthority
from cloche.egress.door import SandboxEgress
from cloche.network_policy import NetworkEntry, NetworkPolicy, Secret

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture"),
]

VALUE = "Bearer sk-7Jd0vXq9Zt4WmB2YcLpR"
NAMES = ["api.test", "other.test"]
POLICY = NetworkPolicy(
    allow=("api.test:*", "unproven.test:*", "gone.test:*"),
    secrets=tuple(
        Secret(domain=each, header="Authorization", value=VALUE) for each in ("api.test", "unproven.test", "gone.test")
    ),
)


@pytest.fixture(scope="module", params=[pytest.param("asyncio", marks=pytest.mark.long), "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return asyncio.DefaultEventLoopPolicy() if request.param == "asyncio" else uvloop.EventLoopPolicy()


@pytest.fixture(autouse=True)
def _nothing_of_ours_breaks(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert "network.broken" not in capfd.readouterr().err


@pytest.fixture(scope="module", autouse=True)
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with an authority that this host trusts, for as long as the module runs."""
    directory = tmp_path_factory.mktemp("trust")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(directory / "bundle.pem"))
        yield directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def far(trusted: Path) -> AsyncIterator[FarServer]:
    async with FarServer(own_trust(trusted, NAMES)) as server:
        yield server


class Entrance(NamedTuple):
    """The door as a program sees it."""

    door: SandboxEgress
    port: int
    far: FarServer

    def client_tls(self) -> ssl.SSLContext:
        assert self.door.authority is not None
        return ssl.create_default_context(cadata=self.door.authority.certificate_pem.decode())

    async def speak(
        self, *requests: bytes, host: str = "api.test", name: str | None = None, stays: bool = True
    ) -> bytes:
        """What comes back for requests that are sent one after the other, each when the one before is answered.

        Who `stays` waits for the end after the last.
        """
        return await asyncio.to_thread(self._speak, requests, host, name or host, stays)

    def _speak(self, requests: tuple[bytes, ...], host: str, name: str, stays: bool) -> bytes:
        context = self.client_tls()
        with socket.create_connection(("127.0.0.1", self.port), 20) as plain:
            plain.sendall(f"CONNECT {host}:{self.far.port} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            said = plain.recv(4096)
            if not said.startswith(b"HTTP/1.1 200"):
                return said
            with context.wrap_socket(plain, server_hostname=name) as tls:
                return b"".join(self._ask(tls, each, stays and each is requests[-1]) for each in requests)

    def _ask(self, tls: ssl.SSLSocket, request: bytes, last: bool) -> bytes:
        tls.sendall(request.replace(b"HOST", f"api.test:{self.far.port}".encode()))
        answer = bytearray()
        with contextlib.suppress(ConnectionResetError, ssl.SSLEOFError):
            while part := tls.recv(65536):
                answer += part
                if not last and b"\r\n\r\n" in answer:
                    break
        return bytes(answer)

    async def entry(self, before: int) -> NetworkEntry:
        """The one line that the log has got since it had so many."""
        while self.door.journal.count == before:
            await asyncio.sleep(0.01)
        [entry] = self.door.journal.entries[before:]
        return entry


@contextlib.asynccontextmanager
async def opened(far: FarServer, **limits: float) -> AsyncIterator[Entrance]:
    hosts = dict.fromkeys([*NAMES, "unproven.test"], ADDRESS) | {"gone.test": "127.0.0.10"}
    egress = EgressProxy(
        NetworkConfig(allow=("*:*",), hosts=hosts, internal=("127.0.0.0/8",), **limits), PackagesConfig()
    )
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    door = egress.open(listener, POLICY, sandbox="i0", owner="tests")
    door.authority = await asyncio.to_thread(CertificateAuthority)
    yield Entrance(door, listener.getsockname()[1], far)
    await egress.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def entrance(far: FarServer) -> AsyncIterator[Entrance]:
    async with opened(far) as entrance:
        yield entrance


def get(path: str, *headers: str, close: bool = True) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "Host: HOST", *headers, *(["Connection: close"] if close else [])]
    return "\r\n".join([*lines, "", ""]).encode()


# -- what is added


async def test_the_server_gets_the_secret_and_the_programs_own_headers(entrance: Entrance) -> None:
    before = entrance.door.journal.count
    answer = await entrance.speak(get("/first", "Authorization: Bearer mine", "X-Mine: 1", "Accept-Encoding: gzip"))
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"GET /first\n")
    seen = entrance.far.asked("/first").headers
    assert (seen["authorization"], seen["x-mine"]) == (VALUE, "1")
    assert seen["accept-encoding"] == "identity"
    assert seen["host"] == f"api.test:{entrance.far.port}"
    entry = await entrance.entry(before)
    assert (entry.verdict, entry.host, entry.port) == ("allowed", "api.test", entrance.far.port)
    assert entry.sent_bytes > 50 and entry.received_bytes > 50


async def test_several_requests_on_one_connection_each_get_it(entrance: Entrance) -> None:
    paths = [f"/several/{number}" for number in range(3)]
    await entrance.speak(*(get(path, close=path == paths[-1]) for path in paths))
    seen = [entrance.far.asked(path) for path in paths]
    assert [each.headers["authorization"] for each in seen] == [VALUE] * 3
    assert len({each.connection for each in seen}) == 1  # the server's connection is kept as well


@pytest.mark.parametrize("shape", ["length", "chunks", "expect"])
async def test_bodies_go_through_whole(entrance: Entrance, shape: str) -> None:
    body = bytes(range(256)) * 2000
    extra = "Expect: 100-continue" if shape == "expect" else "X-None: 0"
    if shape == "chunks":
        framing, sent = "Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    else:
        framing, sent = f"Content-Length: {len(body)}", body
    path = f"/body/{shape}"
    head = f"POST {path} HTTP/1.1\r\nHost: HOST\r\n{framing}\r\n{extra}\r\nConnection: close\r\n\r\n".encode()
    answer = await entrance.speak(head + sent)
    assert b"HTTP/1.1 200 " in answer
    assert answer.startswith(b"HTTP/1.1 100 ") is (shape == "expect")
    seen = entrance.far.asked(path)
    assert seen.body == body
    assert seen.headers["authorization"] == VALUE and "expect" not in seen.headers


async def test_a_large_answer_streams(entrance: Entrance) -> None:
    answer = await entrance.speak(get("/large"))
    assert answer.endswith(b"x" * 1000)
    assert len(answer.partition(b"\r\n\r\n")[2]) == 20 << 20


async def test_an_answer_to_head_has_no_body(entrance: Entrance) -> None:
    answer = await entrance.speak(b"HEAD /head HTTP/1.1\r\nHost: HOST\r\n\r\n", get("/after-head"))
    assert b"content-length: 11" in answer.lower() and answer.endswith(b"GET /after-head\n")


async def test_a_hundred_programs_at_once_are_all_served(entrance: Entrance) -> None:
    answers = await asyncio.gather(*(entrance.speak(get(f"/at-once/{number}")) for number in range(100)))
    assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
    assert all(entrance.far.asked(f"/at-once/{each}").headers["authorization"] == VALUE for each in range(100))


# -- what comes back


@pytest.mark.parametrize("path", ["/echo", "/trickle", "/until-closed"])
async def test_an_echo_is_covered_with_as_many_asterisks(entrance: Entrance, path: str) -> None:
    answer = await entrance.speak(get(path))
    assert answer.startswith(b"HTTP/1.1 200 ")
    text = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", answer)  # of chunks
    assert b'"authorization": "' + b"*" * len(VALUE) + b'"' in text
    assert b"7Jd0" not in text


async def test_an_encoded_answer_is_refused_because_it_cannot_be_masked(entrance: Entrance) -> None:
    before = entrance.door.journal.count
    answer = await entrance.speak(get("/gzip"))
    assert answer.startswith(b"HTTP/1.1 502 ") and b"encoding" in answer
    assert (await entrance.entry(before)).verdict == "failed"


# -- what is refused


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /x HTTP/1.1\r\nHost: other.test\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost: HOST\r\nHost: HOST\r\n\r\n", 400),
        (b"GET https://other.test/ HTTP/1.1\r\nHost: HOST\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\nHost: HOST\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost: HOST\r\nX-A: 1\r\n folded\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"TRACE / HTTP/1.1\r\nHost: HOST\r\n\r\n", 405),
        (b"CONNECT other.test:443 HTTP/1.1\r\nHost: other.test\r\n\r\n", 405),
        (b"GET /x HTTP/1.1\r\nHost: HOST\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", 501),
    ],
)
async def test_ambiguous_or_misdirected_requests_never_reach_a_server(
    entrance: Entrance, request_: bytes, status: int
) -> None:
    before, asked = entrance.door.journal.count, len(entrance.far.seen)
    answer = await entrance.speak(request_)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert (await entrance.entry(before)).verdict == "denied"
    assert len(entrance.far.seen) == asked


async def test_a_server_name_that_differs_is_refused(entrance: Entrance) -> None:
    before = entrance.door.journal.count
    with pytest.raises(ssl.SSLError):
        await entrance.speak(get("/sni"), name="other.test")
    assert (await entrance.entry(before)).verdict == "denied"


async def test_a_host_that_is_not_allowed_is_not_spoken_to(entrance: Entrance) -> None:
    assert (await entrance.speak(get("/x"), host="other.test")).startswith(b"HTTP/1.1 403 ")


# -- what goes wrong behind it


@pytest.mark.parametrize(
    ("host", "path", "why"),
    [
        ("unproven.test", "/x", b"certificate"),
        ("gone.test", "/x", b"refuses connections"),
        ("api.test", "/silent", b"closed the connection"),
    ],
)
async def test_a_server_that_fails_is_a_502_that_says_how(entrance: Entrance, host: str, path: str, why: bytes) -> None:
    before = entrance.door.journal.count
    request = get(path).replace(b"HOST", f"{host}:{entrance.far.port}".encode())
    answer = await entrance.speak(request, host=host)
    assert answer.startswith(b"HTTP/1.1 502 ") and why in answer
    assert (await entrance.entry(before)).verdict == "failed"


async def test_half_an_answer_is_not_taken_for_a_whole_one(entrance: Entrance) -> None:
    before = entrance.door.journal.count
    answer = await entrance.speak(get("/dies"))
    assert b"content-length: 1000" in answer.lower() and not answer.endswith(b"0\r\n\r\n")
    assert (await entrance.entry(before)).verdict == "failed"


async def test_a_program_that_stops_in_the_middle_is_let_go(far: FarServer) -> None:
    async with opened(far, idle_seconds=0.3) as entrance:
        assert (await entrance.speak(b"GET /half HTTP/1.1\r\n")).startswith(b"HTTP/1.1 504 ")
        assert (await entrance.entry(0)).verdict == "failed"


async def test_the_total_byte_limit_applies_here_too(far: FarServer) -> None:
    async with opened(far, sandbox_bytes=1 << 20) as entrance:
        assert len(await entrance.speak(get("/large"))) < 2 << 20
        entry = await entrance.entry(0)
    assert entry.verdict == "denied" and "1048576 bytes" in entry.reason


# -- WebSockets

SAID = ("hello", VALUE[:9], "two\nlines\n", "", "x" * 100_000)  # each is answered before the next is said


async def test_a_websocket_gets_the_secret_and_its_echo_is_masked(entrance: Entrance) -> None:
    asked: list[str] = []

    async def answer(socket: ServerConnection) -> None:
        assert socket.request is not None
        asked.append(socket.request.headers["authorization"])
        await socket.send(f"you are {asked[0]}")
        await socket.send([asked[0][:9], asked[0][9:20], "", asked[0][20:]])  # in several frames
        await socket.ping(asked[0])
        async for text in socket:
            await socket.send(f"heard {len(text)}: {text[:40]!s}")

    async with serve(answer, ADDRESS, 0, ssl=entrance.far.tls) as server:
        port = server.sockets[0].getsockname()[1]
        heard = await asyncio.to_thread(_by_websocket, entrance, port)
    assert asked == [VALUE]
    stars = "*" * len(VALUE)
    assert heard[:2] == [f"you are {stars}", stars]
    assert heard[2:] == [f"heard {len(text)}: {text[:40]}" for text in SAID]


def _by_websocket(entrance: Entrance, port: int) -> list[str]:
    with socket.create_connection(("127.0.0.1", entrance.port), 20) as plain:
        plain.sendall(f"CONNECT api.test:{port} HTTP/1.1\r\nHost: api.test:{port}\r\n\r\n".encode())
        assert plain.recv(4096).startswith(b"HTTP/1.1 200")
        with connect(f"wss://api.test:{port}/ws", sock=plain, ssl=entrance.client_tls()) as ws:
            heard = [ws.recv(20), ws.recv(20)]
            for text in SAID:
                ws.send(text)
                heard.append(ws.recv(20))
    return [str(each) for each in heard]


async def test_a_websocket_that_could_be_read_in_two_ways_is_broken_off(entrance: Entrance) -> None:
    """Frames that are compressed or masked, one message within another, and a control frame that is not whole."""
    for frame in (
        b"\xc1\x01a",
        b"\x81\x81\0\0\0\0a",
        b"\x80\x01a",
        b"\x01\x01a\x81\x01b",
        b"\x09\x00",
    ):
        before, said = entrance.door.journal.count, await _after_upgrade(entrance, frame)
        assert said.startswith(b"HTTP/1.1 101 ") and said.partition(b"\r\n\r\n")[2] == b""
        assert (await entrance.entry(before)).verdict == "failed"


async def test_a_websocket_that_ends_within_a_message_has_not_ended_well(entrance: Entrance) -> None:
    """Within a frame, between two of one message, and after a ping that came between them."""
    for frames in (b"\x81\x09half", b"\x01\x04half", b"\x01\x04half\x00\x00", b"\x01\x04half\x89\x00"):
        before = entrance.door.journal.count
        assert (await _after_upgrade(entrance, frames)).startswith(b"HTTP/1.1 101 ")
        entry = await entrance.entry(before)
        assert entry.verdict == "failed" and "in the middle of a message" in entry.reason


async def test_a_program_may_be_the_first_to_end_a_websocket(entrance: Entrance) -> None:
    """TLS cannot pass on that one side alone has ended."""
    before, said = entrance.door.journal.count, await _after_upgrade(entrance, b"", stays=False)
    assert said.startswith(b"HTTP/1.1 101 ")
    entry = await entrance.entry(before)
    assert (entry.verdict, entry.reason) == ("allowed", "")


async def _after_upgrade(entrance: Entrance, frames: bytes, *, stays: bool = True) -> bytes:
    """What a program gets when the server says that and ends; or when it ends itself, and the server waits for it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 OK\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + frames)
        if not stays:
            await read_all(reader)
        writer.close()

    server = await asyncio.start_server(answer, ADDRESS, 0, ssl=entrance.far.tls)
    async with server:
        port = server.sockets[0].getsockname()[1]
        there = entrance._replace(far=_At(port))  # type: ignore[arg-type]
        return await there.speak(get("/ws", "Connection: Upgrade", "Upgrade: websocket", close=False), stays=stays)


class _At(NamedTuple):
    port: int


# -- a policy that changes


async def test_a_head_that_its_placeholders_would_make_too_long_is_refused(entrance: Entrance) -> None:
    long = Secret(domain="api.test", name="A", value="v" * 16_384)
    entrance.door.replace(NetworkPolicy(allow=POLICY.allow, secrets=(*POLICY.secrets, long)))
    try:
        asked = len(entrance.far.seen)
        answer = await entrance.speak(get("/filled", "X-A: " + "$A" * 9))
        assert answer.startswith(b"HTTP/1.1 400 ") and b"with its secrets" in answer
        assert len(entrance.far.seen) == asked
        await entrance.speak(get("/filled", "X-A: $A$A"))
        assert entrance.far.asked("/filled").headers["x-a"] == "v" * 32_768
    finally:
        entrance.door.replace(POLICY)


async def test_a_secret_that_was_taken_away_is_not_added_any_more(entrance: Entrance) -> None:
    entrance.door.replace(NetworkPolicy(allow=POLICY.allow, secrets=POLICY.secrets[1:]))
    try:
        assert not entrance.door.secrets_for("api.test")
    finally:
        entrance.door.replace(POLICY)
    await entrance.speak(get("/again"))
    assert entrance.far.asked("/again").headers["authorization"] == VALUE


async def test_nothing_stays_open(entrance: Entrance) -> None:
    await entrance.speak(get("/last"))
    while entrance.door._visits:
        await asyncio.sleep(0.01)
    running = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]
    assert not [name for name in running if name.startswith("TlsEnd")]
