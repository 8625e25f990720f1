"""TLS ended at the proxy, for hosts that get secrets: a program's requests are read, and sent on with secrets added.

The program speaks with a stand-in that the sandbox's own authority vouches for; the far server is spoken to over TLS of
the proxy's own, and must prove who it is as to anybody. Only HTTP/1.1 is spoken, since only what is understood can be
rewritten.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from cloche.egress import forward, http1, secrets, streams
from cloche.egress.connect import Dialler, Streams
from cloche.egress.door import Visit
from cloche.egress.http1 import UNTIL_CLOSED, BadAnswer, BadRequest, Head
from cloche.egress.relay import CHUNK_BYTES, Meter, pump
from cloche.egress.rules import Destination
from cloche.egress.secrets import Mask, MaskedStream, Masks, with_secrets
from cloche.egress.streams import BUFFER_BYTES, Refusal, TooSlow, in_http
from cloche.network_policy import FRAMING_HEADERS, Secret

if TYPE_CHECKING:
    from cloche.egress.door import Door

# TLS that ends here: a program's connection, as the plain text in it.
#
# Over memory, and not by the event loop's own upgrade of a transport: what the program has said already was read from
# that transport, and both loops that we run on would lose it.


class TlsEnd:
    """After `handshake`, use as `async with`: then `reader` has the plain text.

    `first` is what was read of the connection already.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext, first: bytes = b""
    ):
        self.reader = asyncio.StreamReader(BUFFER_BYTES)
        self.reader.set_transport(self)  # type: ignore[arg-type]  # of which it needs the two methods below
        self._reader = reader
        self._writer = writer
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._incoming.write(first)
        self._room = asyncio.Event()
        self._room.set()
        self._decrypting: asyncio.Task[None] | None = None

    async def handshake(self) -> None:
        """Raises ssl.SSLError, OSError."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._flush()
                await self._receive()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    await self._flush()  # the alert
                raise
        await self._flush()

    async def __aenter__(self) -> TlsEnd:
        self._decrypting = asyncio.create_task(self._decrypt())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._decrypting is not None:
            self._decrypting.cancel()
            await asyncio.wait([self._decrypting])  # somebody else may want to read what is left
        if error is None:
            with contextlib.suppress(ssl.SSLError):  # the other side's word of leave is not waited for
                self._tls.unwrap()
            with contextlib.suppress(OSError):
                await self._flush()

    async def write(self, content: bytes) -> None:
        """Returns when there is room for more. Raises OSError."""
        left = memoryview(content)
        while left:  # it may take one record at a time
            left = left[self._tls.write(left) :]
        await self._flush()

    # -- what a StreamReader needs of its transport

    def pause_reading(self) -> None:
        self._room.clear()

    def resume_reading(self) -> None:
        self._room.set()

    # -- inside

    async def _flush(self) -> None:
        if self._writer.is_closing():
            raise ConnectionResetError("the program has gone")
        if self._outgoing.pending:
            self._writer.write(self._outgoing.read())
            await self._writer.drain()

    async def _receive(self) -> None:
        part = await self._reader.read(BUFFER_BYTES)
        if part:
            self._incoming.write(part)
        else:
            self._incoming.write_eof()

    async def _decrypt(self) -> None:
        try:
            while plain := await self._plain():
                self.reader.feed_data(plain)
                await self._room.wait()
        except OSError:  # of which ssl.SSLError is one: what came is not from who began
            pass
        self.reader.feed_eof()

    async def _plain(self) -> bytes:
        while True:
            try:
                return self._tls.read(BUFFER_BYTES)
            except ssl.SSLWantReadError:
                await self._flush()
                await self._receive()
            except ssl.SSLZeroReturnError:
                return b""


# Requests of a program to one host that gets secrets, one after the other, and the answers to them.

MAX_REQUESTS = 1000  # of one connection
KEPT_SECONDS = 2.0  # servers close what is idle, some after 5 s: a request must not meet that
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
WEBSOCKET = "websocket"
# With them frames would be compressed, and nobody could look into them.
_EXTENSIONS = "sec-websocket-extensions"


class NotPassedOn(Refusal):
    """TRACE has a request echoed, with all that was added to it."""

    status = 405


class NotHttp(Refusal):
    """Only what is understood can be rewritten, and looked into."""

    status = 501


class Exchanges:
    """`trust` says whom the far server must be vouched for by."""

    def __init__(
        self, visit: Visit, asked: Destination, end: TlsEnd, dialler: Dialler, trust: ssl.SSLContext, masks: Masks
    ):
        self._visit = visit
        self._asked = asked
        self._end = end
        self._dialler = dialler
        self._trust = trust
        self._masks = masks
        self._meter = Meter(visit)
        self._far: Streams | None = None  # kept from one request to the next
        self._used_at = 0.0
        self._answering = False  # whether something of an answer has been passed on

    async def serve(self) -> None:
        """Until there are no more. Whatever is refused is said to the program, and is the last."""
        try:
            async with self._meter.watching():
                await self._serve()
            self._visit.attempt.end("allowed")
        except Refusal as refusal:
            await self._refuse(refusal)
        except OSError as error:
            await self._refuse(BadAnswer(f"the connection to {self._asked} broke: {_why(error)}"))

    async def _serve(self) -> None:
        for _ in range(MAX_REQUESTS):
            self._answering = False
            head = await http1.read_head(self._end.reader)
            if head is None or not await self._exchange(head):
                return

    async def _exchange(self, head: Head) -> bool:
        """False where no other request can follow."""
        self._check(head)
        self._meter.sent(len(http1.write_head(" ".join(head.start), head.headers)))
        far = await self._connected()
        door = self._visit.door
        policy, secrets = door.policy, door.secrets_for(self._asked.host)
        mask = await self._masks.of(policy, secrets)
        far[1].write(self._rewritten(head, secrets))
        await far[1].drain()
        if head.body_length == 0:
            return await self._answer(head, mask, far)
        if head.one("expect") is not None:
            await self._end.write(CONTINUE)
        return await self._with_body(head, mask, far)

    async def _with_body(self, head: Head, mask: Mask, far: Streams) -> bool:
        """The body goes while the answer comes: a server may well answer before it has read all of it."""
        async with _at_once(self._send_body(head, far[1]), self._answer(head, mask, far)) as (up, down):
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            if up.done() and not down.done():
                up.result()
            return bool(await down) and up.done()

    # -- the request

    def _check(self, head: Head) -> None:
        """Raises Refusal; Denied, too, where the policy has changed meanwhile."""
        self._visit.door.rulebooks.check(self._asked)
        if head.method in ("TRACE", "CONNECT"):
            raise NotPassedOn(f"{head.method} is not passed on to hosts that get secrets")
        if not head.target.startswith("/") and (head.method, head.target) != ("OPTIONS", "*"):
            raise BadRequest("what is asked of a host that gets secrets begins with /")
        forward.check_host(head, self._asked)
        if (head.one("expect") or "100-continue").lower() != "100-continue":
            raise forward.NotExpected("the only expectation is 100-continue")
        if "upgrade" in _words(head, "connection") and not _is_websocket(head):
            raise NotHttp("with hosts that get secrets only HTTP/1.1 and WebSockets are spoken")

    def _rewritten(self, head: Head, secrets: Sequence[Secret]) -> bytes:
        """The request's head as it goes on. Raises BadRequest where the secrets make it too long."""
        own = http1.end_to_end(head, without=(*FRAMING_HEADERS, _EXTENSIONS))
        host = str(self._asked).removesuffix(":443")
        headers = [("host", host), *with_secrets(own, secrets), ("accept-encoding", "identity"), *_framing(head)]
        return http1.write_head(f"{head.method} {head.target} HTTP/1.1", headers)

    async def _connected(self) -> Streams:
        """The connection of the request before, where it is still good."""
        far = self._far
        if far is not None and not far[0].at_eof() and not far[1].is_closing():
            if time.monotonic() - self._used_at < KEPT_SECONDS:
                return far
            far[1].transport.abort()
        self._far = far = await self._dialler.connect(self._visit, self._asked, self._trust)
        return far

    async def _send_body(self, head: Head, writer: asyncio.StreamWriter) -> None:
        chunked = head.body_length is None
        async for part in http1.read_body(self._end.reader, head.body_length):
            self._meter.sent(len(part))
            try:
                writer.write(_framed(part, chunked))
                await writer.drain()
            except OSError:
                return  # its answer says why, if it has sent one
        if chunked:
            writer.write(b"0\r\n\r\n")

    # -- the answer

    async def _answer(self, head: Head, mask: Mask, far: Streams) -> bool:
        """False where no other request can follow."""
        answer = await self._final_answer(head, far[0])
        if answer.status == 101:
            return await self._become_websocket(answer, mask, far)
        length = 0 if head.method == "HEAD" or answer.status in (204, 304) else answer.answer_length
        if length != 0 and any(each.lower() not in ("", "identity") for each in answer.all("content-encoding")):
            raise BadAnswer(f"{self._asked} answered in an encoding, though asked for none")
        modern, endless = head.start[2] == "HTTP/1.1", length in (None, UNTIL_CLOSED)
        goes_on = modern and "close" not in _words(head, "connection")
        framing = [("transfer-encoding", "chunked")] if modern and endless else []
        framing.append(("connection", "keep-alive" if goes_on else "close"))
        await self._pass_on_head(answer, mask, framing)
        if length != 0:
            await self._pass_on_body(_body(far[0], length), MaskedStream(mask), modern and endless)
        if length == UNTIL_CLOSED or answer.start[0] != "HTTP/1.1" or "close" in _words(answer, "connection"):
            far[1].transport.abort()
        self._used_at = time.monotonic()
        return goes_on

    async def _final_answer(self, head: Head, reader: asyncio.StreamReader) -> Head:
        """Past those that only announce one. Raises BadAnswer."""
        for _ in range(forward.MAX_INTERIM_ANSWERS):
            answer = await http1.read_answer(reader)
            if answer.status == 101 and not (_is_websocket(head) and _is_websocket(answer)):
                raise BadAnswer(f"{self._asked} wants to speak something else than HTTP")
            if answer.status >= 200 or answer.status == 101:
                return answer
        raise BadAnswer(f"{self._asked} announces an answer and never gives one")

    async def _pass_on_head(self, answer: Head, mask: Mask, framing: list[tuple[str, str]]) -> None:
        own = http1.end_to_end(answer, without=("transfer-encoding",))
        reason, *values = await mask.texts([answer.start[2], *(value for _, value in own)])
        headers = [*zip((name for name, _ in own), values, strict=True), *framing]
        raw = http1.write_head(f"HTTP/1.1 {answer.status} {reason}", headers)
        self._meter.received(len(raw))
        self._answering = True
        await self._end.write(raw)

    async def _pass_on_body(self, body: AsyncIterator[bytes], masked: MaskedStream, chunked: bool) -> None:
        async for part in body:
            self._meter.received(len(part))
            await self._end.write(_framed(await masked.feed(part), chunked))
        await self._end.write(_framed(masked.end(), chunked))
        if chunked:
            await self._end.write(b"0\r\n\r\n")

    async def _become_websocket(self, answer: Head, mask: Mask, far: Streams) -> bool:
        """What the server says is looked into: its frames are neither compressed nor masked."""
        if answer.all(_EXTENSIONS):
            raise BadAnswer(f"{self._asked} uses extensions of WebSockets that were not asked for")
        await self._pass_on_head(answer, mask, [("connection", "Upgrade"), ("upgrade", WEBSOCKET)])
        down = self._pass_on_frames(far[0], mask)
        async with _at_once(pump(self._end.reader, far[1], self._meter.sent), down) as both:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        return False  # who ends, ends both: half of a WebSocket is none

    async def _pass_on_frames(self, reader: asyncio.StreamReader, mask: Mask) -> None:
        try:
            async for frame in secrets.frames(reader, mask, self._meter.received):
                await self._end.write(frame)
        except asyncio.IncompleteReadError:
            raise BadAnswer(f"{self._asked} broke off in the middle of a message") from None

    async def _refuse(self, refusal: Refusal) -> None:
        """In the place of an answer. Where one has begun already, breaking off is all that can be said."""
        self._visit.attempt.end(refusal.verdict, str(refusal))
        if self._answering:
            self._visit.reset()
            return
        with contextlib.suppress(OSError):
            await self._end.write(in_http(refusal))


@contextlib.asynccontextmanager
async def _at_once(*work: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Whatever has not ended by itself is ended, and has ended, when the block is left."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _body(reader: asyncio.StreamReader, length: int | None) -> AsyncIterator[bytes]:
    return _until_closed(reader) if length == UNTIL_CLOSED else http1.read_body(reader, length, BadAnswer)


async def _until_closed(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(CHUNK_BYTES):
        yield part


def _framed(part: bytes, chunked: bool) -> bytes:
    return b"%x\r\n%b\r\n" % (len(part), part) if chunked and part else part


def _words(head: Head, name: str) -> set[str]:
    return {word.strip().lower() for value in head.all(name) for word in value.split(",")}


def _is_websocket(head: Head) -> bool:
    asked = "upgrade" in _words(head, "connection") and _words(head, "upgrade") == {WEBSOCKET}
    return asked and (head.method == "GET" or head.start[1] == "101") and head.body_length == 0


def _framing(head: Head) -> list[tuple[str, str]]:
    """What says where the request ends, and what becomes of its connection."""
    if _is_websocket(head):
        return [("connection", "Upgrade"), ("upgrade", WEBSOCKET)]
    if head.body_length is None:
        return [("transfer-encoding", "chunked")]
    return [("content-length", str(head.body_length))] if head.all("content-length") else []


def _why(error: OSError) -> str:
    return error.strerror or type(error).__name__


class NobodyVouches(Refusal):
    """The proxy cannot stand in for a host."""

    verdict = "failed"


class Interception:
    """For all doors of one host process."""

    def __init__(self, dialler: Dialler):
        self._dialler = dialler
        self._trust: ssl.SSLContext | None = None
        self._masks: WeakKeyDictionary[Door, Masks] = WeakKeyDictionary()
        self._turn = asyncio.Lock()

    async def intercept(self, visit: Visit, asked: Destination, said: bytes) -> None:
        """Serves the requests of a program that may go to `asked`, until it has no more.

        `said` is what it has said already. Raises Refusal where that is no TLS, or is meant for another host.
        """
        authority = visit.door.authority
        if authority is None:
            raise NobodyVouches(f"{asked.host} has got secrets only now, and programs are not told yet whom to trust")
        trust = await self._trusted()
        context = authority.known(asked.host)
        if context is None:
            context = await asyncio.to_thread(authority.context_for, asked.host)
        end = TlsEnd(visit.reader, visit.writer, context, said)
        visit.say_no = streams.in_silence  # what there is to say, TLS says itself
        await _shake_hands(end, asked, visit.door.config.request_seconds)
        async with end:
            masks = self._masks.setdefault(visit.door, Masks(self._turn))
            await Exchanges(visit, asked, end, self._dialler, trust, masks).serve()

    async def _trusted(self) -> ssl.SSLContext:
        if self._trust is None:
            self._trust = await asyncio.to_thread(_system_trust)
        return self._trust


def _system_trust() -> ssl.SSLContext:
    """Whom the proxy takes servers' word from: this host's authorities, or those of SSL_CERT_FILE.

    It reads all of their certificates, which takes some 20 ms.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


async def _shake_hands(end: TlsEnd, asked: Destination, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await end.handshake()
    except TimeoutError:
        raise TooSlow(f"it took longer than {seconds:g} s over its TLS handshake") from None
    except ssl.SSLError as error:
        raise BadRequest(_why_no_tls(asked, error)) from None


def _why_no_tls(asked: Destination, error: ssl.SSLError) -> str:
    if error.reason == "CALLBACK_FAILED":
        return f"the TLS server name is not {asked.host}"
    return f"no TLS with the program: {error.reason or 'it broke off'}; does it trust $SSL_CERT_FILE?"
