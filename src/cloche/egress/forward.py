"""One HTTP request and its answer, rewritten from their parsed form, never copied."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from cloche.egress import http1, streams
from cloche.egress.connect import Streams
from cloche.egress.door import EgressConnection
from cloche.egress.http1 import UNTIL_CLOSED, BadAnswer, BadRequest, HttpHead
from cloche.egress.relay import CHUNK_BYTES, TransferMeter, copy_stream, disconnect_reason, run_both, send_counted
from cloche.egress.rules import Destination, InvalidDestination, parse_authority

MAX_INTERIM_ANSWERS = 20
_FRAMING_NAMES = ("host", "content-length", "transfer-encoding", "expect")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class UnsupportedExpectation(BadRequest):
    status = 417


def split_target(target: str) -> tuple[Destination, str]:
    """The host of `http://host/path`, and the path. Raises BadRequest, InvalidDestination."""
    scheme, separator, rest = target.partition("://")
    if separator and scheme.lower() == "https":
        raise BadRequest("https:// is not fetched here: use CONNECT, as every client does that knows HTTPS_PROXY")
    if not separator or scheme.lower() != "http":
        raise BadRequest("the request's target is neither http://HOST/PATH nor a path of the proxy itself")
    ends = [at for at in map(rest.find, "/?#") if at >= 0]
    authority, path = rest[: min(ends, default=len(rest))], rest[min(ends, default=len(rest)) :]
    if "@" in authority or "#" in path:
        raise BadRequest("a target has neither a user nor a fragment")
    return parse_authority(authority, 80), path if path.startswith("/") else f"/{path}"


def check_host(head: HttpHead, destination: Destination) -> None:
    """The `Host` that a server would go by must be the one that was allowed. Raises BadRequest, PolicyDenied."""
    host = head.single_value("host")
    if host is None:
        if head.start[2] == "HTTP/1.1":
            raise BadRequest("the request has no Host")
        return
    try:
        named = parse_authority(host, destination.port)
    except InvalidDestination as bad:
        raise BadRequest(f"the Host of the request: {bad}") from None
    if named != destination:
        raise BadRequest(f"the request is for {destination}, and its Host is {named}")


class ForwardedRequest:
    """One request and its answer. `upgrades` where it may become something else than HTTP, as a WebSocket does."""

    def __init__(
        self, visit: EgressConnection, head: HttpHead, destination: Destination, far: Streams, upgrades: bool = False
    ):
        self._visit = visit
        self._head = head
        self._destination = destination
        self._reader, self._writer = far
        self._meter = TransferMeter(visit)
        self._length = head.body_length
        self._upgrade = head.single_value("upgrade") if upgrades and _asks_to_upgrade(head) else None

    async def run(self, path: str) -> None:
        """Raises EgressRefusal."""
        self._check_expected()
        try:
            async with self._meter.limit_idle():
                await self._run_exchange(path)
        except OSError:  # the end of a connection can be the end of a body: this must not look like one
            self._visit.attempt.stop(disconnect_reason(self._visit, self._reader))
            self._visit.reset()

    async def _run_exchange(self, path: str) -> None:
        await self._send_part(http1.write_head(f"{self._head.method} {path} HTTP/1.1", self._request_headers()))
        if not await self._exchange_messages():
            return
        await run_both(
            copy_stream(self._visit.reader, self._writer, self._meter.count_sent),
            copy_stream(self._reader, self._visit.writer, self._meter.count_received),
        )

    async def _exchange_messages(self) -> bool:
        """The body goes while the answer comes, which may well end first. Whether it is not HTTP any more then."""
        up, down = asyncio.ensure_future(self._send_body()), asyncio.ensure_future(self._pass_on_answer())
        try:
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            if up.done() and not down.done():
                up.result()
            return await down
        finally:
            up.cancel()
            down.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    def _check_expected(self) -> None:
        expected = self._head.single_value("expect")
        if expected is None:
            return
        if expected.lower() != "100-continue":
            raise UnsupportedExpectation("the only expectation is 100-continue")
        if self._length != 0 and self._head.start[2] == "HTTP/1.1":
            self._visit.writer.write(_CONTINUE)

    def _request_headers(self) -> list[tuple[str, str]]:
        default = self._destination.port == 80
        bare = str(self._destination).removesuffix(":80") if default else str(self._destination)
        headers = [("Host", bare), *http1.end_to_end_headers(self._head, _FRAMING_NAMES)]
        if self._length is None:
            headers.append(("Transfer-Encoding", "chunked"))
        elif self._length or self._head.all("content-length"):
            headers.append(("Content-Length", str(self._length)))
        if self._upgrade is not None:
            return [*headers, ("Connection", "Upgrade"), ("Upgrade", self._upgrade)]
        return [*headers, ("Connection", "close")]

    async def _send_body(self) -> None:
        """Where the server does not take it any more, it may have answered already."""
        async for part in http1.read_body(self._visit.reader, self._length):
            if not await self._try_send(_frame_chunk(part, self._length is None)):
                return
        if self._length is None:
            await self._try_send(b"0\r\n\r\n")

    async def _try_send(self, part: bytes) -> bool:
        try:
            await self._send_part(part)
        except OSError:
            return False
        return True

    async def _send_part(self, part: bytes) -> None:
        await send_counted(part, self._writer, self._meter.count_sent)

    async def _pass_on_answer(self) -> bool:
        answer = await self._final_answer()
        if answer.status == 101:
            self._visit.say_no = streams.silent_refusal
            await self._reply_part(http1.write_head(_status_line(answer), self._answer_headers(answer, 0, "Upgrade")))
            return True
        has_body = self._head.method != "HEAD" and answer.status not in (204, 304)
        length = answer.answer_length if has_body else 0
        chunks = length is None and self._head.start[2] == "HTTP/1.1"
        self._visit.say_no = streams.silent_refusal  # half an answer cannot be taken back
        await self._reply_part(
            http1.write_head(_status_line(answer), self._answer_headers(answer, length, "close", chunks))
        )
        async for part in self._answer_body(length):
            await self._reply_part(_frame_chunk(part, chunks))
        if chunks:
            await self._reply_part(b"0\r\n\r\n")
        return False

    async def _final_answer(self) -> HttpHead:
        """Past those that only announce one. Raises BadAnswer."""
        for _ in range(MAX_INTERIM_ANSWERS):
            try:
                answer = await http1.read_answer(self._reader)
            except OSError:
                raise BadAnswer(f"{self._destination} ended the connection before it answered") from None
            if answer.status == 101 and self._upgrade is None:
                raise BadAnswer(f"{self._destination} wants to speak something else than HTTP")
            if answer.status >= 200 or answer.status == 101:
                return answer
            await asyncio.sleep(0)  # they may all be there already, and others have their turn
        raise BadAnswer(f"{self._destination} announces an answer and never gives one")

    def _answer_headers(
        self, answer: HttpHead, length: int | None, connection: str, chunks: bool = False
    ) -> list[tuple[str, str]]:
        headers = http1.end_to_end_headers(answer, ("content-length", "transfer-encoding"))
        if chunks:
            headers.append(("Transfer-Encoding", "chunked"))
        elif length is not None and length >= 0 and connection == "close":
            headers += _length_headers(answer, self._head.method, length)
        if connection == "Upgrade" and self._upgrade is not None:
            headers.append(("Upgrade", self._upgrade))
        return [*headers, ("Connection", connection)]

    async def _answer_body(self, length: int | None) -> AsyncIterator[bytes]:
        if length != UNTIL_CLOSED:
            async for part in http1.read_body(self._reader, length, BadAnswer):
                yield part
            return
        while part := await self._reader.read(CHUNK_BYTES):
            yield part

    async def _reply_part(self, part: bytes) -> None:
        await send_counted(part, self._visit.writer, self._meter.count_received)


def _length_headers(answer: HttpHead, method: str, length: int) -> list[tuple[str, str]]:
    """The length of HEAD and 304 answers is that of the body they do not send; 204 has none."""
    if method == "HEAD" or answer.status == 304:
        said = answer.answer_length if not answer.all("transfer-encoding") else None
        return [("Content-Length", str(said))] if said is not None and said >= 0 else []
    return [] if answer.status == 204 else [("Content-Length", str(length))]


def _asks_to_upgrade(head: HttpHead) -> bool:
    """Whether the request upgrades to a WebSocket. HTTP/2 would name hosts again, unread."""
    named = {each.strip().lower() for value in head.all("connection") for each in value.split(",")}
    is_websocket = [value.lower() for value in head.all("upgrade")] == ["websocket"]
    return is_websocket and "upgrade" in named and head.method == "GET" and head.body_length == 0


def _status_line(answer: HttpHead) -> str:
    return f"HTTP/1.1 {answer.start[1]} {answer.start[2]}"


def _frame_chunk(part: bytes, chunks: bool) -> bytes:
    return b"%x\r\n%b\r\n" % (len(part), part) if chunks else part
