"""What goes through after CONNECT and SOCKS: any protocol, but what names a host must name the one that was allowed."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable

from cloche.egress import forward, http1, streams
from cloche.egress.client_hello import Hello, after_hello, looks_like_tls, read_hello
from cloche.egress.connect import Dialler, Streams
from cloche.egress.door import Visit, patience
from cloche.egress.relay import relay
from cloche.egress.rules import Denied, Destination
from cloche.egress.streams import Refusal, at_hand

TLS_PORT = 443
MAX_LINE_BYTES = 16 << 10
_BEFORE = re.compile(rb"[\r\n\t ]*")
_WORD = re.compile(rb"[\x21-\x7e]*")
_SPACES = b"\t\v\f\r \x1c\x1d\x1e\x1f\x85\xa0"  # what some language or other takes for white space


Intercept = Callable[[Visit, Destination, bytes], Awaitable[None]]


class _SpeaksHttp(Exception):
    """It is not raised for an error, but to end what goes on beside."""

    def __init__(self, line: bytes):
        self.line = line


class _SpeaksTls(Exception):
    """To a host that has secrets."""

    def __init__(self, hello: Hello):
        self.hello = hello


class Tunnel:
    """`established` is what the program is told when it may speak. `intercept` is for hosts that get secrets."""

    def __init__(self, visit: Visit, asked: Destination, dialler: Dialler, intercept: Intercept, established: bytes):
        self._visit = visit
        self._asked = asked
        self._dialler = dialler
        self._intercepted = intercept
        self._established = established
        self._has_secrets = bool(visit.door.secrets_for(asked.host))

    async def run(self) -> None:
        """Raises Refusal."""
        if self._asked.port != TLS_PORT:
            await self._any()
        elif self._has_secrets:
            self._dialler.check(self._visit, self._asked)
            await self._intercept(await self._hello_of_tls())
        else:
            far = await self._dialler.connect(self._visit, self._asked)
            hello = await self._hello_of_tls()
            if hello is not None:
                await relay(self._visit, far, self._handshake(hello))

    def _welcome(self) -> None:
        self._visit.writer.write(self._established)
        self._visit.say_no = streams.in_silence

    async def _hello_of_tls(self) -> Hello | None:
        """None where nothing was said."""
        self._welcome()
        async with patience(self._visit):
            first = await self._visit.reader.read(1)
            return await self._hello(first) if first else None

    async def _hello(self, first: bytes) -> Hello:
        self._visit.say_no = streams.in_tls
        hello = await read_hello(self._visit.reader, first)
        self._check_name(hello)
        return hello

    def _check_name(self, hello: Hello) -> None:
        wanted = self._asked.host if self._asked.address is None else None
        if hello.name != wanted:
            named = f"names {hello.name}" if hello.name is not None else "names no server"
            raise Denied(f"the connection is for {self._asked.host}, and its TLS handshake {named}"[:400])

    async def _handshake(self, hello: Hello) -> AsyncIterator[bytes]:
        yield hello.raw
        async for part in after_hello(self._visit.reader, hello, self._check_name):
            yield part
        self._visit.say_no = streams.in_silence

    async def _intercept(self, hello: Hello | None) -> None:
        if hello is not None:
            await self._intercepted(self._visit, self._asked, hello.raw)

    async def _any(self) -> None:
        """What is said first decides; until then the server may speak, as those of SSH and SMTP do."""
        far = await self._dialler.connect(self._visit, self._asked)
        self._welcome()
        try:
            await relay(self._visit, far, self._opening())
        except _SpeaksTls as spoken:
            far[1].transport.abort()  # it is spoken to over TLS of our own
            await self._intercept(spoken.hello)
        except _SpeaksHttp as spoken:
            await self._http(far, spoken.line)

    async def _opening(self) -> AsyncIterator[bytes]:
        """What was read of the program's first words, where they may go on as they are."""
        first = await self._visit.reader.read(1)
        said = await self._first_said(first) if first else first
        if isinstance(said, bytes):
            yield said
        elif self._has_secrets:
            raise _SpeaksTls(said)
        else:
            async for part in self._handshake(said):
                yield part

    async def _first_said(self, first: bytes) -> bytes | Hello:
        async with patience(self._visit):
            if first != b"\x16":
                return await self._text(first)
            first += await self._visit.reader.read(1)
            return await self._hello(first) if looks_like_tls(first) else first

    async def _text(self, first: bytes) -> bytes:
        """What is said first, up to where it cannot be the first line of HTTP any more, or is one.

        Of HTTP's first line not even a part may go on before it is known to be for the host that was allowed.
        """
        line, reader = FirstLine(), self._visit.reader
        line.take(first)
        while not line.is_over:
            await reader.readexactly(line.take(bytes(at_hand(reader)[: MAX_LINE_BYTES + 1])))
            if line.is_over or not (more := await reader.read(1)):
                break
            line.take(more)
        if line.is_http:
            raise _SpeaksHttp(bytes(line.said))
        return bytes(line.said)

    async def _http(self, far: Streams, line: bytes) -> None:
        visit, asked = self._visit, self._asked
        visit.say_no = streams.in_http
        async with patience(visit):
            head = await http1.read_head(visit.reader, line)
        if head is None or visit.attempt.received_bytes:
            raise Refusal(f"{asked} spoke before it was asked, which no server of HTTP does")
        forward.check_host(head, asked)
        if not head.target.startswith("/"):
            raise http1.BadRequest("what is asked for inside of a tunnel begins with /")
        await forward.Exchange(visit, head, asked, far, upgrades=True).run(head.target)


class FirstLine:
    """What a program says first, in any portions, until it is clear whether it is HTTP, as a lenient server would read
    it: empty lines may come before, any word can be a method, however long, and much can separate."""

    def __init__(self) -> None:
        self.said = bytearray()
        self.is_over = False
        self._has_word = False
        self._has_space = False
        self._is_binary = False

    def take(self, part: bytes) -> int:
        """How many of these bytes it takes until it is over. Raises BadRequest where it is too long to ever be."""
        at = self._past_word(part)
        if self._has_space:
            at = part.find(b"\n", at) + 1 or len(part)
            self.is_over = part[:at].endswith(b"\n")
        nul = part.find(0, 0, at)
        if nul >= 0 and not (self.said + part[:nul]).strip(_SPACES):  # a method cannot begin with it; MySQL's logins do
            at, self._is_binary, self.is_over = nul + 1, True, True
        self.said += part[:at]
        if len(self.said) > MAX_LINE_BYTES:
            raise http1.BadRequest(f"the first line of what could be HTTP has more than {MAX_LINE_BYTES} bytes")
        return at

    def _past_word(self, part: bytes) -> int:
        """Where what may come before, and the first word, have ended: behind what ends the word."""
        if self._has_space:
            return 0
        at = 0 if self._has_word else _length(_BEFORE, part, 0)
        self._has_word = self._has_word or at < len(part)
        at += _length(_WORD, part, at)
        if at == len(part):
            return at
        self._has_space = part[at] in _SPACES
        self.is_over = not self._has_space
        return at + 1

    @property
    def is_http(self) -> bool:
        has_line = self._has_space and not self._is_binary and self.said.endswith(b"\n")
        return has_line and b"HTTP/" in self.said.upper()


def _length(pattern: re.Pattern[bytes], part: bytes, at: int) -> int:
    match = pattern.match(part, at)
    return match.end() - at if match else 0
