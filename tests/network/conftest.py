"""Doors without a sandbox, for what takes many cases, and servers that they lead to: real ones, on loopback.

The names lead to addresses of this process alone, so that several can run these tests at once. A door that a test has
opened writes one line for each connection, or the test fails.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.network.index_server import IndexDoor, IndexServer, index_door, index_server

from cloche.config.sections import NetworkConfig, PackagesConfig
from cloche.egress import EgressProxy
from cloche.egress.connect import ResolveName
from cloche.egress.door import SandboxEgress
from cloche.network_policy import NetworkEntry, NetworkPolicy

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
SECONDS = 20.0  # after which something that is certain to happen has failed to


def address_of(number: int) -> str:
    """Of this process, on loopback."""
    process = os.getpid()
    return f"127.{100 + number}.{process >> 8 & 255}.{process & 255}"


GOOD, OTHER = address_of(1), address_of(2)
HOSTS = {
    **dict.fromkeys(("good.test", "api.good.test", "a.b.good.test"), GOOD),
    **dict.fromkeys(("other.test", "notgood.test"), OTHER),
}


class Doorway:
    """A door that the test listens at, and what can be said at it."""

    def __init__(self, egress: EgressProxy, door: SandboxEgress, port: int):
        self.egress = egress
        self.door = door
        self.port = port
        self.visits = 0

    async def open(self) -> Streams:
        self.visits += 1
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def say(self, *parts: bytes, ends: bool = False) -> bytes:
        """All that is answered, until the connection ends or is reset. `ends` says that nothing more will come."""
        reader, writer = await self.open()
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            if ends:
                writer.write_eof()
        except ConnectionError:
            pass  # it was refused before all was said
        answer = await read_all(reader)
        writer.close()
        return answer

    async def connect(self, authority: str) -> Streams:
        """A tunnel."""
        reader, writer = await self.open()
        writer.write(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        return reader, writer

    async def lines(self, count: int) -> list[NetworkEntry]:
        """The log, as soon as it has so many lines."""
        async with asyncio.timeout(SECONDS):
            while self.door.journal.count < count:
                await asyncio.sleep(0.002)
        assert self.door.journal.count == count
        return self.door.journal.entries

    async def line(self) -> NetworkEntry:
        """The one line of the log."""
        return (await self.lines(1))[0]


async def read_all(reader: asyncio.StreamReader) -> bytes:
    found = b""
    async with asyncio.timeout(SECONDS):
        try:
            while part := await reader.read(65536):
                found += part
        except ConnectionError:
            pass
    return found


Opening = Callable[..., Doorway]


@pytest_asyncio.fixture
async def opening() -> AsyncIterator[Opening]:
    """Opens doors: `opening(allow=..., deny=..., rules=...)`, with settings of [network] and a resolver if wanted,
    or `beside` another, as two sandboxes of one host are, of one `owner` or of two."""
    opened: list[Doorway] = []
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))

    def open_one(
        *,
        beside: Doorway | None = None,
        owner: str = "somebody",
        resolve: ResolveName | None = None,
        settings: Any = None,
        **rules: Any,
    ) -> Doorway:
        chosen = {"allow": ("*:*",), "internal": ("127.100.0.0/14",), "hosts": HOSTS, **(settings or {})}
        egress = beside.egress if beside else EgressProxy(NetworkConfig(**chosen), PackagesConfig(), resolve=resolve)
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        listener.setblocking(False)
        port = listener.getsockname()[1]
        door = egress.open(listener, NetworkPolicy(**rules), sandbox="sbx", owner=owner)
        opened.append(Doorway(egress, door, port))
        return opened[-1]

    yield open_one
    for doorway in opened:
        await doorway.egress.aclose()
        assert doorway.door.journal.count == doorway.visits, "one line for each connection"
    assert not faults


@pytest.fixture
def index() -> Iterator[IndexServer]:
    """A package index that has nothing yet."""
    with index_server() as server:
        yield server


@pytest_asyncio.fixture
async def door(index: IndexServer, tmp_path: Path) -> AsyncIterator[IndexDoor]:
    """A door to the host's package index, which fetches from `index` and has nothing kept."""
    async with index_door(tmp_path / "packages", index) as door:
        yield door


class Server:
    """A real server, and what it was told."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.port = 0
        self.heard = bytearray()
        self.visits = 0


Serving = Callable[..., Any]


@asynccontextmanager
async def serving_at(
    handler: Handler, host: str = GOOD, port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    """A server until the block is left. What it reads by `Heard` is in `heard`."""
    found = Server(host)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.visits += 1
        try:
            await handler(_Listening(reader, found), writer)  # type: ignore[arg-type]
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            writer.close()

    try:
        server = await asyncio.start_server(serve, host, port, ssl=tls)
    except PermissionError:
        pytest.skip(f"port {port} is for root alone here")
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()


class _Listening:
    """A reader that remembers."""

    def __init__(self, reader: asyncio.StreamReader, server: Server):
        self._reader, self._server = reader, server

    async def read(self, count: int) -> bytes:
        return self._kept(await self._reader.read(count))

    async def readexactly(self, count: int) -> bytes:
        return self._kept(await self._reader.readexactly(count))

    async def readuntil(self, end: bytes) -> bytes:
        return self._kept(await self._reader.readuntil(end))

    async def readline(self) -> bytes:
        return self._kept(await self._reader.readline())

    def _kept(self, part: bytes) -> bytes:
        self._server.heard += part
        return part


def answering(answer: bytes) -> Handler:
    """Reads a request's head, and answers that."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()

    return handle


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(65536):
        writer.write(part)
        await writer.drain()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for good.test and other.test that vouches for itself, in one file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "good.test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("good.test"), x509.DNSName("other.test")]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "good.pem"
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(secret + made.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.fixture(scope="session")
def server_tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@pytest.fixture(scope="session")
def client_tls(certificate: Path) -> Iterator[ssl.SSLContext]:
    yield ssl.create_default_context(cafile=str(certificate))
