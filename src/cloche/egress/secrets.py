"""Secrets into the headers of a request: headers of their own, or values where a program wrote a placeholder.

Nothing else of a request is looked at, neither its URL nor its body: those are what servers log and store.
"""

from __future__ import annotations

import asyncio
import base64
import html
import json
import re
import time
import urllib.parse
from asyncio import IncompleteReadError, StreamReader
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import NamedTuple

from cloche.egress import http1
from cloche.egress.http1 import BadAnswer
from cloche.egress.relay import CHUNK_BYTES, Count
from cloche.network_policy import FRAMING_HEADERS, MAX_SECRETS_BYTES, NetworkPolicy, Secret

# Secrets' values in what a server answers, covered with asterisks of the same length.
#
# A server that echoes a request (many do, when they report an error) would hand a program the value that the proxy
# added
# for it. It is recognised as it is, in base64 at any offset, in hex, percent-encoded, and escaped as in HTML and
# JSON.
# That is a net under those who may hold the secret anyway, and not a wall: a server can always say it in another way,
# and
# wrapping base64 into lines is one.
#
# What is held back until more has come depends on lengths and ends of lines, and never on what a value is: a program
# can
# have a server say whatever it likes, and would see a guess wait that is the beginning of a value. A whole value that
# was
# guessed right is covered, which tells no more than trying it with the server does.

MIN_PART = 4  # of a value: something shorter is in every text
SLICE_SECONDS = 0.002  # of looking, before others have their turn
# CPython looks for something long in something short by the plain method, whose worst case is the product of both.
_LONG_BYTES = 100
_SHORT_BYTES = 30_000
_OCCURRENCES_AT_ONCE = 100
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*[ \t]+(?P<rest>\S.*)")


class Form(NamedTuple):
    """One way to write a value. None has an end of a line or a NUL in it."""

    content: bytes
    period: int  # after so many bytes it repeats itself throughout; 0: it does not, or hardly


class Mask:
    """What is looked for, for some secrets' values. Who looks for longer than a slice holds `turn`."""

    def __init__(self, forms: Iterable[Form], turn: asyncio.Lock):
        self.turn = turn
        self.forms = sorted(set(forms))
        longest = max((len(form.content) for form in self.forms), default=1)
        self.held_bytes = 1 << (longest - 1).bit_length()  # a power of 2: how long a value is is nobody's business

    @classmethod
    def of(cls, *values: str) -> Mask:
        return cls((form for value in values for form in forms_of(value)), asyncio.Lock())

    async def texts(self, texts: Sequence[str]) -> list[str]:
        """Whole texts of one line each, such as headers, with what is found in them covered."""
        whole = MaskedStream(self)
        covered = (await whole.feed("\n".join(texts).encode("latin-1")) + whole.end()).decode("latin-1")
        return covered.split("\n") if texts else []

    def covering(self, content: bytes, copy: bytearray, fresh: int) -> Iterator[None]:
        """Covers in `copy`, a copy of `content`, what is found there; some more of it with each step.

        What ends before `fresh` was covered before. Occurrences may overlap: all are covered.
        """
        padded = content + bytes(_SHORT_BYTES)
        for form in self.forms:
            start = max(fresh - len(form.content) + 1, 0)
            is_quick = len(form.content) < _LONG_BYTES or len(content) - start >= _SHORT_BYTES
            for count, (at, end) in enumerate(_occurrences(form, content if is_quick else padded, start)):
                copy[at:end] = b"*" * (end - at)
                if count % _OCCURRENCES_AT_ONCE == 0:
                    yield
            yield


class MaskedStream:
    """A body, part by part. Its last bytes wait for the next part, and whole lines do not."""

    def __init__(self, mask: Mask):
        self._mask = mask
        self._held = b""
        self._held_covered = bytearray()

    async def feed(self, part: bytes) -> bytes:
        """What can be passed on by now."""
        content, covered = self._held + part, self._held_covered + part
        steps = self._mask.covering(content, covered, len(self._held))
        if not _ends_in_a_slice(steps):
            async with self._mask.turn:
                while not _ends_in_a_slice(steps):
                    await asyncio.sleep(0)
        lines = max(content.rfind(b"\n"), content.rfind(b"\r")) + 1
        ready = max(lines, len(content) - self._mask.held_bytes, 0)
        self._held, self._held_covered = content[ready:], covered[ready:]
        return bytes(covered[:ready])

    def end(self) -> bytes:
        """What is left."""
        return bytes(self._held_covered)


def _ends_in_a_slice(steps: Iterator[None]) -> bool:
    until = time.monotonic() + SLICE_SECONDS
    return not any(time.monotonic() > until for _ in steps)


class Masks:
    """Of one sandbox. Each is made once, until the policy changes: that takes long where values are.

    `turn` is one for all sandboxes: however many have values that take long to look for, the loop has to wait for one
    of them at a time.
    """

    def __init__(self, turn: asyncio.Lock) -> None:
        self._turn = turn
        self._policy: NetworkPolicy | None = None
        self._forms: dict[str, frozenset[Form]] = {}
        self._made: dict[tuple[str, ...], Mask] = {}
        self._making = asyncio.Lock()

    async def of(self, policy: NetworkPolicy, secrets: Sequence[Secret]) -> Mask:
        """For some of that policy's secrets."""
        async with self._making:
            if policy is not self._policy:
                self._policy, self._forms, self._made = policy, {}, {}
            values = tuple(sorted({each.value for each in secrets}))
            if values not in self._made:
                self._made[values] = await asyncio.to_thread(self._make, values, self._forms)
            return self._made[values]

    def _make(self, values: tuple[str, ...], known: dict[str, frozenset[Form]]) -> Mask:
        for value in values:
            if value not in known:
                known[value] = forms_of(value)
        return Mask((form for value in values for form in known[value]), self._turn)


# -- looking


def _occurrences(form: Form, content: bytes, start: int) -> Iterator[tuple[int, int]]:
    """In time that grows with `content` alone: what repeats itself may be there at every byte, and is taken as one."""
    size, period = len(form.content), form.period
    at = content.find(form.content, start)
    while at >= 0:
        end = at + size
        if period:
            run = _end_of_run(content, end, period)
            end = run - (run - end) % period
            yield at, end
            at = content.find(form.content, run - period + 1)
        else:
            yield at, end
            at = content.find(form.content, at + size // 4 + 1)


def _end_of_run(content: bytes, end: int, period: int) -> int:
    """How far what is before `end` goes on to repeat itself. In steps that double, and then halve."""
    step, grows = period, True
    while step:
        fits = end + step <= len(content)
        if fits and content[end : end + step] == content[end - period : end + step - period]:
            end += step
            step = step * 2 if grows else step // 2
        else:
            step, grows = step // 2, False
    return end


def _period(content: bytes) -> int:
    """The shortest, where it is not over a quarter; else 0: then two occurrences begin more than a quarter apart."""
    period = content.find(content[: (len(content) + 1) // 2], 1)
    is_one = 0 < period <= len(content) // 4 and content[period:] == content[:-period]
    return period if is_one else 0


# -- what is looked for


def forms_of(value: str) -> frozenset[Form]:
    contents = {content for part in _secret_parts(value) for content in _contents(part)}
    return frozenset(Form(content, _period(content)) for content in contents)


def _secret_parts(value: str) -> Iterator[str]:
    """The value, and what of it is secret by itself: `token` of `Bearer token`, the password of `Basic ...`."""
    yield value
    match = _SCHEME.fullmatch(value)
    rest = match["rest"] if match else value
    if len(rest) >= MIN_PART:
        yield rest
    decoded = basic_credentials(value)
    if decoded is not None and decoded.isprintable():  # others cannot be in Basic authentication
        yield from (part for part in (decoded, decoded.partition(":")[2]) if len(part) >= MIN_PART)


def basic_credentials(value: str) -> str | None:
    """`user:password` of the value of a header for Basic authentication; None where it is none."""
    scheme, _, encoded = value.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(encoded.strip(), validate=True).decode("utf-8")
    except ValueError:  # what is neither base64 nor ASCII, and what is not UTF-8
        return None


def _contents(part: str) -> Iterator[bytes]:
    """All are ASCII, as values are; what is decoded of one may be not, and is UTF-8 then."""
    raw = part.encode()
    yield raw
    yield html.escape(part).encode()
    escaped = json.dumps(part)[1:-1]
    yield from (escaped.encode(), escaped.replace("/", "\\/").encode())
    yield re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", escaped).encode()  # as Go's encoder has it
    for quote in (urllib.parse.quote, urllib.parse.quote_plus):
        for safe in ("", "/"):
            quoted = quote(part, safe=safe)
            yield quoted.encode()
            yield re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), quoted).encode()
    if len(raw) >= MIN_PART:
        yield from (raw.hex().encode(), raw.hex().upper().encode())
    for offset in range(3):
        yield from _base64_forms(raw, offset)


def _base64_forms(raw: bytes, offset: int) -> Iterator[bytes]:
    """`raw` in base64 after `offset` bytes of something else: the characters that depend on nothing but `raw`.

    And the same where nothing comes after it, as for the password in Basic authentication.
    """
    encoded = base64.b64encode(bytes(offset) + raw)
    first = (offset * 8 + 5) // 6
    certain, to_the_end = encoded[first : (offset + len(raw)) * 8 // 6], encoded[first:].rstrip(b"=")
    for form in (certain, to_the_end):
        if len(form) >= MIN_PART:
            yield form
            yield form.replace(b"+", b"-").replace(b"/", b"_")


# What a program may send, with all secrets in it once: a placeholder is short, and may be there very often.
MAX_FILLED_BYTES = http1.MAX_HEAD_BYTES + MAX_SECRETS_BYTES

Headers = Sequence[tuple[str, str]]

_AUTHORIZATION = ("authorization", "proxy-authorization")


def with_secrets(headers: Headers, secrets: Sequence[Secret]) -> list[tuple[str, str]]:
    """The headers of a request, with what the secrets say. What a program sent under a secret's header is dropped.

    Where two secrets would set the same, the one for the more particular domain does.

    Raises BadRequest where they would be longer than MAX_FILLED_BYTES, before they are.
    """
    ordered = sorted(secrets, key=_particular)
    own = {secret.header.lower(): secret.value for secret in ordered if secret.header is not None}
    values = {secret.name: secret.value for secret in ordered if secret.name is not None}
    kept = [(name, value) for name, value in headers if name not in own]
    room = _Room(sum(len(name) + len(value) for name, value in (*kept, *own.items())))
    return [*((name, _filled(name, value, values, room)) for name, value in kept), *own.items()]


class _Room:
    """How much a request's headers can still grow."""

    def __init__(self, taken_bytes: int):
        self._bytes = MAX_FILLED_BYTES
        self.take(taken_bytes)

    def take(self, count: int) -> None:
        self._bytes -= count
        if self._bytes < 0:
            raise http1.BadRequest(f"with its secrets the head of the request is over {MAX_FILLED_BYTES} bytes")


def _particular(secret: Secret) -> tuple[bool, int]:
    """All are for one host, so that the longer domain is below the shorter one."""
    return not secret.domain.startswith("*"), len(secret.domain)


def _filled(header: str, value: str, values: dict[str, str], room: _Room) -> str:
    if not values or header in FRAMING_HEADERS:
        return value
    credentials = basic_credentials(value) if header in _AUTHORIZATION else None
    if credentials is not None:
        filled = _fill(credentials, values, room)
        return value if filled == credentials else f"Basic {base64.b64encode(filled.encode()).decode()}"
    return _fill(value, values, room)


def _fill(text: str, values: dict[str, str], room: _Room) -> str:
    """In one pass, so that a value that looks like a placeholder stays as it is."""

    def value(match: re.Match[str]) -> str:
        found = values[match[1] or match[2]]
        room.take(len(found))
        return found

    names = "|".join(sorted(values, key=len, reverse=True))
    return re.sub(rf"\$(?:\{{({names})\}}|({names}))", value, text)


# What a server says over a WebSocket, with secrets' values covered in it.
#
# Its frames are understood and written anew: a value may be cut by the header of a frame, and a message ends where
# its
# last frame does, so that nothing of it has to wait longer. Without extensions frames can be cut in any other way.
#
# Raises BadAnswer, IncompleteReadError.

MAX_CONTROL_BYTES = 125
_LAST, _RESERVED, _CONTROL, _OPCODE, _MASKED = 0x80, 0x70, 0x08, 0x0F, 0x80


class Frame(NamedTuple):
    opcode: int
    is_last: bool  # of its message
    length: int


async def frames(reader: StreamReader, mask: Mask, count: Count) -> AsyncIterator[bytes]:
    """As they can go on, until the server ends. `count` is told how many bytes have come."""
    message: MaskedStream | None = None
    opcode = 0
    while (frame := await _read_frame(reader, count)) is not None:
        await asyncio.sleep(0)  # thousands of small ones may be there already: others have their turn
        if frame.opcode & _CONTROL:
            yield await _control(reader, frame, mask, count)
            continue
        if (frame.opcode == 0) != (message is not None):
            raise BadAnswer("the server's WebSocket has frames of one message in another")
        message, opcode = message or MaskedStream(mask), frame.opcode or opcode
        ready, left = b"", frame.length
        async for part in _payload_parts(reader, frame.length, count):
            ready, left = await message.feed(part), left - len(part)
            if ready and (left or not frame.is_last):
                yield _written(opcode, False, ready)
                opcode = 0
        if frame.is_last:
            yield _written(opcode, True, ready + message.end())
            message = None
    if message is not None:
        raise BadAnswer("the server's WebSocket broke off in the middle of a message")


async def _control(reader: StreamReader, frame: Frame, mask: Mask, count: Count) -> bytes:
    """They come between the frames of a message, and are whole."""
    whole = MaskedStream(mask)
    content = [await whole.feed(part) async for part in _payload_parts(reader, frame.length, count)]
    return _written(frame.opcode, True, b"".join(content) + whole.end())


async def _read_frame(reader: StreamReader, count: Count) -> Frame | None:
    try:
        first, second = await reader.readexactly(2)
    except IncompleteReadError as error:
        if error.partial:
            raise
        return None
    if first & _RESERVED or second & _MASKED:
        raise BadAnswer("the server's WebSocket has frames that no server sends without extensions")
    more = {126: 2, 127: 8}.get(second, 0)
    length = int.from_bytes(await reader.readexactly(more), "big") if more else second
    count(2 + more)
    frame = Frame(first & _OPCODE, bool(first & _LAST), length)
    if frame.opcode & _CONTROL and (not frame.is_last or frame.length > MAX_CONTROL_BYTES):
        raise BadAnswer("the server's WebSocket has a control frame that is not whole")
    return frame


async def _payload_parts(reader: StreamReader, length: int, count: Count) -> AsyncIterator[bytes]:
    while length:
        part = await reader.read(min(length, CHUNK_BYTES))
        if not part:
            raise IncompleteReadError(b"", length)
        count(len(part))
        length -= len(part)
        yield part


def _written(opcode: int, is_last: bool, content: bytes) -> bytes:
    first, size = opcode | (_LAST if is_last else 0), len(content)
    if size < 126:
        return bytes((first, size)) + content
    if size < 1 << 16:
        return bytes((first, 126)) + size.to_bytes(2, "big") + content
    return bytes((first, 127)) + size.to_bytes(8, "big") + content
