"""TLS termination at the proxy for hosts that get secrets: requests are read and sent on with the secrets
added.

The program speaks with a stand-in that the sandbox's own authority vouches for; the far server is reached
over TLS of the proxy's own, and must prove its identity as to any client. Only HTTP/1.1 is spoken, since only
a protocol that is understood can be rewritten.

A lazy-import border: it needs `cryptography`, and only a sandbox with secrets needs it.
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
from cloche.egress.door import EgressConnection
from cloche.egress.http1 import UNTIL_CLOSED, BadAnswer, BadRequest, HttpHead
from cloche.egress.relay import CHUNK_BYTES, TransferMeter, copy_stream
from cloche.egress.rules import Destination
from cloche.egress.secrets import MaskedStream, SecretMask, SecretMasks, add_secrets
from cloche.egress.streams import BUFFER_BYTES, EgressRefusal, RequestTooSlow, http_refusal
from cloche.network_policy import FRAMING_HEADERS, Secret

if TYPE_CHECKING:
    from cloche.egress.door import SandboxEgress

# The server side of TLS on a program's connection, as a stream of plain text.
#
# It works over memory, and not by the event loop's own upgrade of a transport: the program's first bytes were
# already read from that transport, and both loops that we run on would lose them.


class TlsServerStream:
    """After `complete_handshake`, use as `async with`: then `reader` has the plain text.

    `first` are the bytes of the connection that were read already.
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

    async def complete_handshake(self) -> None:
        """Raises ssl.SSLError, OSError."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._flush_outgoing()
                await self._receive_some()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    await self._flush_outgoing()  # the alert
                raise
        await self._flush_outgoing()

    async def __aenter__(self) -> TlsServerStream:
        self._decrypting = asyncio.create_task(self._decrypt_stream())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._decrypting is not None:
            self._decrypting.cancel()
            await asyncio.wait([self._decrypting])  # another reader can take the remaining data
        if error is None:
            with contextlib.suppress(ssl.SSLError):  # the other side's word of leave is not waited for
                self._tls.unwrap()
            with contextlib.suppress(OSError):
                await self._flush_outgoing()

    async def write(self, content: bytes) -> None:
        """Returns when there is room for more. Raises OSError."""
        left = memoryview(content)
        while left:  # it may take one record at a time
            left = left[self._tls.write(left) :]
        await self._flush_outgoing()

    # -- the transport interface for a StreamReader

    def pause_reading(self) -> None:
        self._room.clear()

    def resume_reading(self) -> None:
        self._room.set()

    # -- inside

    async def _flush_outgoing(self) -> None:
        if self._writer.is_closing():
            raise ConnectionResetError("the program has gone")
        if self._outgoing.pending:
            self._writer.write(self._outgoing.read())
            await self._writer.drain()

    async def _receive_some(self) -> None:
        part = await self._reader.read(BUFFER_BYTES)
        if part:
            self._incoming.write(part)
        else:
            self._incoming.write_eof()

    async def _decrypt_stream(self) -> None:
        try:
            while plain := await self._read_plain():
                self.reader.feed_data(plain)
                await self._room.wait()
        except OSError:  # includes ssl.SSLError: the data does not belong to this TLS session
            pass
        self.reader.feed_eof()

    async def _read_plain(self) -> bytes:
        while True:
            try:
                return self._tls.read(BUFFER_BYTES)
            except ssl.SSLWantReadError:
                await self._flush_outgoing()
                await self._receive_some()
            except ssl.SSLZeroReturnError:
                return b""


# Requests of a program to one host that gets secrets, one after the other, and the answers to them.

MAX_REQUESTS = 1000  # of one connection
KEEP_ALIVE_SECONDS = 2.0  # servers close idle connections, some after 5 s: a request must not hit that
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
WEBSOCKET = "websocket"
# With them frames would be compressed, and could not be inspected.
_EXTENSIONS = "sec-websocket-extensions"


class MethodNotForwarded(EgressRefusal):
    """TRACE has a request echoed, with all that was added to it."""

    status = 405


class NotHttp(EgressRefusal):
    """The protocol is not HTTP: only understood protocols can be rewritten and inspected."""

    status = 501


class InterceptedRequests:
    """The requests on one intercepted connection. `trust` has the authorities that must vouch for the far
    server.
    """

    def __init__(
        self,
        visit: EgressConnection,
        destination: Destination,
        end: TlsServerStream,
        dialler: Dialler,
        trust: ssl.SSLContext,
        masks: SecretMasks,
    ):
        self._visit = visit
        self._destination = destination
        self._end = end
        self._dialler = dialler
        self._trust = trust
        self._masks = masks
        self._meter = TransferMeter(visit)
        self._far: Streams | None = None  # kept from one request to the next
        self._used_at = 0.0
        self._answering = False  # whether something of an answer has been passed on

    async def serve(self) -> None:
        """Serves requests until there are no more. A refusal is sent to the program, and is the last answer."""
        try:
            async with self._meter.limit_idle():
                await self._serve_requests()
            self._visit.attempt.end("allowed")
        except EgressRefusal as refusal:
            await self._answer_refusal(refusal)
        except OSError as error:
            await self._answer_refusal(
                BadAnswer(f"the connection to {self._destination} broke: {_error_reason(error)}")
            )

    async def _serve_requests(self) -> None:
        for _ in range(MAX_REQUESTS):
            self._answering = False
            head = await http1.read_head(self._end.reader)
            if head is None or not await self._exchange_one(head):
                return

    async def _exchange_one(self, head: HttpHead) -> bool:
        """False where no other request can follow."""
        self._check_request(head)
        self._meter.count_sent(len(http1.write_head(" ".join(head.start), head.headers)))
        far = await self._open_connection()
        door = self._visit.door
        policy, secrets = door.policy, door.secrets_for(self._destination.host)
        mask = await self._masks.of(policy, secrets)
        far[1].write(self._rewritten_head(head, secrets))
        await far[1].drain()
        if head.body_length == 0:
            return await self._pass_on_answer(head, mask, far)
        if head.single_value("expect") is not None:
            await self._end.write(CONTINUE)
        return await self._exchange_with_body(head, mask, far)

    async def _exchange_with_body(self, head: HttpHead, mask: SecretMask, far: Streams) -> bool:
        """The body goes while the answer comes: a server may well answer before it has read all of it."""
        async with _run_together(self._send_body(head, far[1]), self._pass_on_answer(head, mask, far)) as (up, down):
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            if up.done() and not down.done():
                up.result()
            return bool(await down) and up.done()

    # -- the request

    def _check_request(self, head: HttpHead) -> None:
        """Raises EgressRefusal; PolicyDenied, too, where the policy has changed meanwhile."""
        self._visit.door.rulebooks.check(self._destination)
        if head.method in ("TRACE", "CONNECT"):
            raise MethodNotForwarded(f"{head.method} is not passed on to hosts that get secrets")
        if not head.target.startswith("/") and (head.method, head.target) != ("OPTIONS", "*"):
            raise BadRequest("the target of a request to a host with secrets must begin with /")
        forward.check_host(head, self._destination)
        if (head.single_value("expect") or "100-continue").lower() != "100-continue":
            raise forward.UnsupportedExpectation("the only expectation is 100-continue")
        if "upgrade" in _header_words(head, "connection") and not _is_websocket(head):
            raise NotHttp("with hosts that get secrets only HTTP/1.1 and WebSockets are spoken")

    def _rewritten_head(self, head: HttpHead, secrets: Sequence[Secret]) -> bytes:
        """The request's head as it goes on. Raises BadRequest where the secrets make it too long."""
        own = http1.end_to_end_headers(head, without=(*FRAMING_HEADERS, _EXTENSIONS))
        host = str(self._destination).removesuffix(":443")
        headers = [("host", host), *add_secrets(own, secrets), ("accept-encoding", "identity"), *_framing_headers(head)]
        return http1.write_head(f"{head.method} {head.target} HTTP/1.1", headers)

    async def _open_connection(self) -> Streams:
        """The connection of the request before, where it is still good."""
        far = self._far
        if far is not None and not far[0].at_eof() and not far[1].is_closing():
            if time.monotonic() - self._used_at < KEEP_ALIVE_SECONDS:
                return far
            far[1].transport.abort()
        self._far = far = await self._dialler.connect(self._visit, self._destination, self._trust)
        return far

    async def _send_body(self, head: HttpHead, writer: asyncio.StreamWriter) -> None:
        chunked = head.body_length is None
        async for part in http1.read_body(self._end.reader, head.body_length):
            self._meter.count_sent(len(part))
            try:
                writer.write(_frame_chunk(part, chunked))
                await writer.drain()
            except OSError:
                return  # its answer says why, if it has sent one
        if chunked:
            writer.write(b"0\r\n\r\n")

    # -- the answer

    async def _pass_on_answer(self, head: HttpHead, mask: SecretMask, far: Streams) -> bool:
        """False where no other request can follow."""
        answer = await self._final_answer(head, far[0])
        if answer.status == 101:
            return await self._become_websocket(answer, mask, far)
        length = 0 if head.method == "HEAD" or answer.status in (204, 304) else answer.answer_length
        if length != 0 and any(each.lower() not in ("", "identity") for each in answer.all("content-encoding")):
            raise BadAnswer(f"{self._destination} answered in an encoding, though none was requested")
        modern, endless = head.start[2] == "HTTP/1.1", length in (None, UNTIL_CLOSED)
        goes_on = modern and "close" not in _header_words(head, "connection")
        framing = [("transfer-encoding", "chunked")] if modern and endless else []
        framing.append(("connection", "keep-alive" if goes_on else "close"))
        await self._pass_on_head(answer, mask, framing)
        if length != 0:
            await self._pass_on_body(_answer_body(far[0], length), MaskedStream(mask), modern and endless)
        if length == UNTIL_CLOSED or answer.start[0] != "HTTP/1.1" or "close" in _header_words(answer, "connection"):
            far[1].transport.abort()
        self._used_at = time.monotonic()
        return goes_on

    async def _final_answer(self, head: HttpHead, reader: asyncio.StreamReader) -> HttpHead:
        """Past those that only announce one. Raises BadAnswer."""
        for _ in range(forward.MAX_INTERIM_ANSWERS):
            answer = await http1.read_answer(reader)
            if answer.status == 101 and not (_is_websocket(head) and _is_websocket(answer)):
                raise BadAnswer(f"{self._destination} wants to speak something else than HTTP")
            if answer.status >= 200 or answer.status == 101:
                return answer
        raise BadAnswer(f"{self._destination} announces an answer and never gives one")

    async def _pass_on_head(self, answer: HttpHead, mask: SecretMask, framing: list[tuple[str, str]]) -> None:
        own = http1.end_to_end_headers(answer, without=("transfer-encoding",))
        reason, *values = await mask.texts([answer.start[2], *(value for _, value in own)])
        headers = [*zip((name for name, _ in own), values, strict=True), *framing]
        raw = http1.write_head(f"HTTP/1.1 {answer.status} {reason}", headers)
        self._meter.count_received(len(raw))
        self._answering = True
        await self._end.write(raw)

    async def _pass_on_body(self, body: AsyncIterator[bytes], masked: MaskedStream, chunked: bool) -> None:
        async for part in body:
            self._meter.count_received(len(part))
            await self._end.write(_frame_chunk(await masked.feed(part), chunked))
        await self._end.write(_frame_chunk(masked.end(), chunked))
        if chunked:
            await self._end.write(b"0\r\n\r\n")

    async def _become_websocket(self, answer: HttpHead, mask: SecretMask, far: Streams) -> bool:
        """Passes on frames. The server's are inspected: they are neither compressed nor masked."""
        if answer.all(_EXTENSIONS):
            raise BadAnswer(f"{self._destination} uses extensions of WebSockets that were not requested")
        await self._pass_on_head(answer, mask, [("connection", "Upgrade"), ("upgrade", WEBSOCKET)])
        down = self._pass_on_frames(far[0], mask)
        async with _run_together(copy_stream(self._end.reader, far[1], self._meter.count_sent), down) as both:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        return False  # the end of one direction ends both: a WebSocket cannot be half-open

    async def _pass_on_frames(self, reader: asyncio.StreamReader, mask: SecretMask) -> None:
        try:
            async for frame in secrets.masked_frames(reader, mask, self._meter.count_received):
                await self._end.write(frame)
        except asyncio.IncompleteReadError:
            raise BadAnswer(f"{self._destination} broke off in the middle of a message") from None

    async def _answer_refusal(self, refusal: EgressRefusal) -> None:
        """Sends a refusal in place of an answer. Where one has begun already, the connection is reset."""
        self._visit.attempt.end(refusal.verdict, str(refusal))
        if self._answering:
            self._visit.reset()
            return
        with contextlib.suppress(OSError):
            await self._end.write(http_refusal(refusal))


@contextlib.asynccontextmanager
async def _run_together(*work: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Runs the coroutines as tasks; those that have not ended when the block is left are cancelled and awaited."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _answer_body(reader: asyncio.StreamReader, length: int | None) -> AsyncIterator[bytes]:
    return _until_closed(reader) if length == UNTIL_CLOSED else http1.read_body(reader, length, BadAnswer)


async def _until_closed(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(CHUNK_BYTES):
        yield part


def _frame_chunk(part: bytes, chunked: bool) -> bytes:
    return b"%x\r\n%b\r\n" % (len(part), part) if chunked and part else part


def _header_words(head: HttpHead, name: str) -> set[str]:
    return {word.strip().lower() for value in head.all(name) for word in value.split(",")}


def _is_websocket(head: HttpHead) -> bool:
    upgrades = "upgrade" in _header_words(head, "connection") and _header_words(head, "upgrade") == {WEBSOCKET}
    return upgrades and (head.method == "GET" or head.start[1] == "101") and head.body_length == 0


def _framing_headers(head: HttpHead) -> list[tuple[str, str]]:
    """The headers that say where the request ends and whether its connection is upgraded."""
    if _is_websocket(head):
        return [("connection", "Upgrade"), ("upgrade", WEBSOCKET)]
    if head.body_length is None:
        return [("transfer-encoding", "chunked")]
    return [("content-length", str(head.body_length))] if head.all("content-length") else []


def _error_reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


class NoAuthority(EgressRefusal):
    """The proxy cannot stand in for a host."""

    verdict = "failed"


class TlsInterception:
    """TLS interception for all sandboxes of one host process."""

    def __init__(self, dialler: Dialler):
        self._dialler = dialler
        self._trust: ssl.SSLContext | None = None
        self._masks: WeakKeyDictionary[SandboxEgress, SecretMasks] = WeakKeyDictionary()
        self._turn = asyncio.Lock()

    async def intercept_tls(self, visit: EgressConnection, destination: Destination, said: bytes) -> None:
        """Serves the requests of a program that may go to `destination`, until it has no more.

        `said` are the bytes that it has sent already. Raises EgressRefusal if they are not TLS, or are meant for
        another host.
        """
        authority = visit.door.authority
        if authority is None:
            raise NoAuthority(f"{destination.host} has got secrets only now, and programs do not trust the proxy yet")
        trust = await self._trust_context()
        context = authority.known(destination.host)
        if context is None:
            context = await asyncio.to_thread(authority.context_for, destination.host)
        end = TlsServerStream(visit.reader, visit.writer, context, said)
        visit.say_no = streams.silent_refusal  # TLS reports the failure itself
        await _shake_hands(end, destination, visit.door.config.request_seconds)
        async with end:
            masks = self._masks.setdefault(visit.door, SecretMasks(self._turn))
            await InterceptedRequests(visit, destination, end, self._dialler, trust, masks).serve()

    async def _trust_context(self) -> ssl.SSLContext:
        if self._trust is None:
            self._trust = await asyncio.to_thread(_system_trust)
        return self._trust


def _system_trust() -> ssl.SSLContext:
    """The authorities that vouch for servers: this host's, or those of SSL_CERT_FILE.

    It reads all of their certificates, which takes some 20 ms.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


async def _shake_hands(end: TlsServerStream, destination: Destination, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await end.complete_handshake()
    except TimeoutError:
        raise RequestTooSlow(f"it took longer than {seconds:g} s over its TLS handshake") from None
    except ssl.SSLError as error:
        raise BadRequest(_why_no_tls(destination, error)) from None


def _why_no_tls(destination: Destination, error: ssl.SSLError) -> str:
    if error.reason == "CALLBACK_FAILED":
        return f"the TLS server name is not {destination.host}"
    return f"no TLS with the program: {error.reason or 'it broke off'}; does it trust $SSL_CERT_FILE?"
