"""A tunnel after CONNECT or SOCKS: any protocol, but a host named inside must be the one that was allowed."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable

from cloche.egress import forward, http1, streams
from cloche.egress.client_hello import ClientHello, follow_handshake, looks_like_tls, read_hello
from cloche.egress.connect import Dialler, Streams
from cloche.egress.door import EgressConnection, request_deadline
from cloche.egress.relay import relay_streams
from cloche.egress.rules import Destination, PolicyDenied
from cloche.egress.streams import EgressRefusal, buffered_bytes

TLS_PORT = 443
MAX_LINE_BYTES = 16 << 10
_LEADING_SPACE = re.compile(rb"[\r\n\t ]*")
_WORD = re.compile(rb"[\x21-\x7e]*")
_SPACES = b"\t\v\f\r \x1c\x1d\x1e\x1f\x85\xa0"  # white space in one language or another


Intercept = Callable[[EgressConnection, Destination, bytes], Awaitable[None]]


class _HttpDetected(Exception):
    """The program speaks HTTP. Not an error: it ends the relay that runs beside."""

    def __init__(self, line: bytes):
        self.line = line


class _TlsDetected(Exception):
    """The program speaks TLS to a host that has secrets."""

    def __init__(self, hello: ClientHello):
        self.hello = hello


class EgressTunnel:
    """`established` is sent to the program when it may speak. `intercept` serves hosts that get secrets."""

    def __init__(
        self,
        visit: EgressConnection,
        destination: Destination,
        dialler: Dialler,
        intercept: Intercept,
        established: bytes,
    ):
        self._visit = visit
        self._destination = destination
        self._dialler = dialler
        self._intercepted = intercept
        self._established = established
        self._has_secrets = bool(visit.door.secrets_for(destination.host))

    async def run(self) -> None:
        """Raises EgressRefusal."""
        if self._destination.port != TLS_PORT:
            await self._tunnel_any()
        elif self._has_secrets:
            self._dialler.check(self._visit, self._destination)
            await self._intercept_hello(await self._await_hello())
        else:
            far = await self._dialler.connect(self._visit, self._destination)
            hello = await self._await_hello()
            if hello is not None:
                await relay_streams(self._visit, far, self._pass_handshake(hello))

    def _send_established(self) -> None:
        self._visit.writer.write(self._established)
        self._visit.say_no = streams.silent_refusal

    async def _await_hello(self) -> ClientHello | None:
        """The checked ClientHello; None where the program sent nothing."""
        self._send_established()
        async with request_deadline(self._visit):
            first = await self._visit.reader.read(1)
            return await self._read_checked_hello(first) if first else None

    async def _read_checked_hello(self, first: bytes) -> ClientHello:
        self._visit.say_no = streams.tls_refusal
        hello = await read_hello(self._visit.reader, first)
        self._check_name(hello)
        return hello

    def _check_name(self, hello: ClientHello) -> None:
        expected = self._destination.host if self._destination.address is None else None
        if hello.name != expected:
            named = f"names {hello.name}" if hello.name is not None else "names no server"
            raise PolicyDenied(f"the connection is for {self._destination.host}, and its TLS handshake {named}"[:400])

    async def _pass_handshake(self, hello: ClientHello) -> AsyncIterator[bytes]:
        yield hello.raw
        async for part in follow_handshake(self._visit.reader, hello, self._check_name):
            yield part
        self._visit.say_no = streams.silent_refusal

    async def _intercept_hello(self, hello: ClientHello | None) -> None:
        if hello is not None:
            await self._intercepted(self._visit, self._destination, hello.raw)

    async def _tunnel_any(self) -> None:
        """The program's first bytes decide; until then the server may speak, as those of SSH and SMTP do."""
        far = await self._dialler.connect(self._visit, self._destination)
        self._send_established()
        try:
            await relay_streams(self._visit, far, self._opening_bytes())
        except _TlsDetected as spoken:
            far[1].transport.abort()  # the connection uses TLS of the proxy
            await self._intercept_hello(spoken.hello)
        except _HttpDetected as spoken:
            await self._forward_http(far, spoken.line)

    async def _opening_bytes(self) -> AsyncIterator[bytes]:
        """The program's first bytes, where they may go on unchanged."""
        first = await self._visit.reader.read(1)
        said = await self._read_first(first) if first else first
        if isinstance(said, bytes):
            yield said
        elif self._has_secrets:
            raise _TlsDetected(said)
        else:
            async for part in self._pass_handshake(said):
                yield part

    async def _read_first(self, first: bytes) -> bytes | ClientHello:
        async with request_deadline(self._visit):
            if first != b"\x16":
                return await self._read_text(first)
            first += await self._visit.reader.read(1)
            return await self._read_checked_hello(first) if looks_like_tls(first) else first

    async def _read_text(self, first: bytes) -> bytes:
        """The program's first bytes, up to where they are the first line of HTTP, or cannot be one any more.

        Of HTTP's first line not even a part may go on before it is known to be for the host that was allowed.
        """
        line, reader = FirstLineDetector(), self._visit.reader
        line.take(first)
        while not line.is_over:
            await reader.readexactly(line.take(bytes(buffered_bytes(reader)[: MAX_LINE_BYTES + 1])))
            if line.is_over or not (more := await reader.read(1)):
                break
            line.take(more)
        if line.is_http:
            raise _HttpDetected(bytes(line.said))
        return bytes(line.said)

    async def _forward_http(self, far: Streams, line: bytes) -> None:
        visit, destination = self._visit, self._destination
        visit.say_no = streams.http_refusal
        async with request_deadline(visit):
            head = await http1.read_head(visit.reader, line)
        if head is None or visit.attempt.received_bytes:
            raise EgressRefusal(f"{destination} sent data before a request, which no HTTP server does")
        forward.check_host(head, destination)
        if not head.target.startswith("/"):
            raise http1.BadRequest("the target of a request inside of a tunnel must begin with /")
        await forward.ForwardedRequest(visit, head, destination, far, upgrades=True).run(head.target)


class FirstLineDetector:
    """Collects a program's first bytes, in any portions, until it is clear whether they are HTTP to a lenient
    server: empty lines may come before, any word can be a method, however long, and many characters can
    separate.
    """

    def __init__(self) -> None:
        self.said = bytearray()
        self.is_over = False
        self._has_word = False
        self._has_space = False
        self._is_binary = False

    def take(self, part: bytes) -> int:
        """How many of these bytes it takes until it is over. Raises BadRequest where it is too long to ever be."""
        at = self._skip_word(part)
        if self._has_space:
            at = part.find(b"\n", at) + 1 or len(part)
            self.is_over = part[:at].endswith(b"\n")
        nul = part.find(0, 0, at)
        if nul >= 0 and not (self.said + part[:nul]).strip(_SPACES):  # a method cannot begin with it; MySQL's logins do
            at, self._is_binary, self.is_over = nul + 1, True, True
        self.said += part[:at]
        if len(self.said) > MAX_LINE_BYTES:
            raise http1.BadRequest(f"the first line of a possible HTTP request has more than {MAX_LINE_BYTES} bytes")
        return at

    def _skip_word(self, part: bytes) -> int:
        """The index after the leading space and the first word, behind the byte that ends the word."""
        if self._has_space:
            return 0
        at = 0 if self._has_word else _match_length(_LEADING_SPACE, part, 0)
        self._has_word = self._has_word or at < len(part)
        at += _match_length(_WORD, part, at)
        if at == len(part):
            return at
        self._has_space = part[at] in _SPACES
        self.is_over = not self._has_space
        return at + 1

    @property
    def is_http(self) -> bool:
        has_line = self._has_space and not self._is_binary and self.said.endswith(b"\n")
        return has_line and b"HTTP/" in self.said.upper()


def _match_length(pattern: re.Pattern[bytes], part: bytes, at: int) -> int:
    match = pattern.match(part, at)
    return match.end() - at if match else 0
