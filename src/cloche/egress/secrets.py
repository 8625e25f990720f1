"""Adds secrets to the headers of a request: as headers of their own, or in place of a program's
placeholders.

Nothing else of a request is changed, neither its URL nor its body: servers log and store those.
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

# Masks secrets' values in servers' answers with asterisks of the same length.
#
# A server that echoes a request (many do, when they report an error) would hand a program the value that the
# proxy added for it. It is recognised as it is, in base64 at any offset, in hex, percent-encoded, and escaped
# as in HTML and JSON. That is a safety net for hosts that may hold the secret anyway, and not a wall: a server
# can always encode it in another way, and wrapping base64 into lines is one.
#
# Which bytes are held back until more have come depends on lengths and ends of lines, never on a value: a
# program can have a server send any text, and would see that a guess waits which is the beginning of a value. A
# whole value that was guessed right is covered, which reveals no more than trying it with the server does.

MIN_PART = 4  # of a value: something shorter is in every text
SLICE_SECONDS = 0.002  # of looking, before others have their turn
# CPython searches a long text in a short one by the plain method, with the product of both as the worst case.
_LONG_BYTES = 100
_SHORT_BYTES = 30_000
_OCCURRENCES_AT_ONCE = 100
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*[ \t]+(?P<rest>\S.*)")


class SecretForm(NamedTuple):
    """One way to write a value. None has an end of a line or a NUL in it."""

    content: bytes
    period: int  # the value repeats after this number of bytes; 0: it does not, or hardly


class SecretMask:
    """The forms to look for, of some secrets' values. A search longer than a slice holds `turn`."""

    def __init__(self, forms: Iterable[SecretForm], turn: asyncio.Lock):
        self.turn = turn
        self.forms = sorted(set(forms))
        longest = max((len(form.content) for form in self.forms), default=1)
        self.held_bytes = 1 << (longest - 1).bit_length()  # a power of 2: hides the length of a value

    @classmethod
    def of(cls, *values: str) -> SecretMask:
        return cls((form for value in values for form in secret_forms(value)), asyncio.Lock())

    async def texts(self, texts: Sequence[str]) -> list[str]:
        """Whole texts of one line each, such as headers, with the values in them covered."""
        whole = MaskedStream(self)
        covered = (await whole.feed("\n".join(texts).encode("latin-1")) + whole.end()).decode("latin-1")
        return covered.split("\n") if texts else []

    def cover_steps(self, content: bytes, copy: bytearray, fresh: int) -> Iterator[None]:
        """Covers the values found in `copy`, a copy of `content`, some more with each step.

        Matches that end before `fresh` were covered before. Occurrences may overlap: all are covered.
        """
        padded = content + bytes(_SHORT_BYTES)
        for form in self.forms:
            start = max(fresh - len(form.content) + 1, 0)
            is_quick = len(form.content) < _LONG_BYTES or len(content) - start >= _SHORT_BYTES
            for count, (at, end) in enumerate(_find_occurrences(form, content if is_quick else padded, start)):
                copy[at:end] = b"*" * (end - at)
                if count % _OCCURRENCES_AT_ONCE == 0:
                    yield
            yield


class MaskedStream:
    """A body, part by part. Its last bytes wait for the next part, and whole lines do not."""

    def __init__(self, mask: SecretMask):
        self._mask = mask
        self._held = b""
        self._held_covered = bytearray()

    async def feed(self, part: bytes) -> bytes:
        """The bytes that can be passed on by now."""
        content, covered = self._held + part, self._held_covered + part
        steps = self._mask.cover_steps(content, covered, len(self._held))
        if not _finish_in_slice(steps):
            async with self._mask.turn:
                while not _finish_in_slice(steps):
                    await asyncio.sleep(0)
        lines = max(content.rfind(b"\n"), content.rfind(b"\r")) + 1
        ready = max(lines, len(content) - self._mask.held_bytes, 0)
        self._held, self._held_covered = content[ready:], covered[ready:]
        return bytes(covered[:ready])

    def end(self) -> bytes:
        """The remaining bytes."""
        return bytes(self._held_covered)


def _finish_in_slice(steps: Iterator[None]) -> bool:
    until = time.monotonic() + SLICE_SECONDS
    return not any(time.monotonic() > until for _ in steps)


class SecretMasks:
    """The masks of one sandbox. Each is made once, until the policy changes: that takes long for long values.

    `turn` is one for all sandboxes: however many have values that take long to look for, the loop has to wait for
    one of them at a time.
    """

    def __init__(self, turn: asyncio.Lock) -> None:
        self._turn = turn
        self._policy: NetworkPolicy | None = None
        self._forms: dict[str, frozenset[SecretForm]] = {}
        self._made: dict[tuple[str, ...], SecretMask] = {}
        self._making = asyncio.Lock()

    async def of(self, policy: NetworkPolicy, secrets: Sequence[Secret]) -> SecretMask:
        """The mask for some of that policy's secrets."""
        async with self._making:
            if policy is not self._policy:
                self._policy, self._forms, self._made = policy, {}, {}
            values = tuple(sorted({each.value for each in secrets}))
            if values not in self._made:
                self._made[values] = await asyncio.to_thread(self._make_mask, values, self._forms)
            return self._made[values]

    def _make_mask(self, values: tuple[str, ...], known: dict[str, frozenset[SecretForm]]) -> SecretMask:
        for value in values:
            if value not in known:
                known[value] = secret_forms(value)
        return SecretMask((form for value in values for form in known[value]), self._turn)


# -- looking


def _find_occurrences(form: SecretForm, content: bytes, start: int) -> Iterator[tuple[int, int]]:
    """Takes time in proportion to `content` alone: a repeating form may match at every byte, and counts as one
    run.
    """
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
    """The end of the repetition that goes on after `end`. Searched in steps that double, and then halve."""
    step, grows = period, True
    while step:
        fits = end + step <= len(content)
        if fits and content[end : end + step] == content[end - period : end + step - period]:
            end += step
            step = step * 2 if grows else step // 2
        else:
            step, grows = step // 2, False
    return end


def _find_period(content: bytes) -> int:
    """The shortest, where it is not over a quarter; else 0: then two occurrences begin more than a quarter apart."""
    period = content.find(content[: (len(content) + 1) // 2], 1)
    is_one = 0 < period <= len(content) // 4 and content[period:] == content[:-period]
    return period if is_one else 0


# -- patterns


def secret_forms(value: str) -> frozenset[SecretForm]:
    contents = {content for part in _secret_parts(value) for content in _encoded_forms(part)}
    return frozenset(SecretForm(content, _find_period(content)) for content in contents)


def _secret_parts(value: str) -> Iterator[str]:
    """The value and the parts that are secret by themselves: `token` of `Bearer token`, the password of `Basic
    ...`.
    """
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
    except ValueError:  # neither base64 nor ASCII, or not UTF-8
        return None


def _encoded_forms(part: str) -> Iterator[bytes]:
    """The encodings of a part. All are ASCII, as values are; a decoded part may not be, and is UTF-8 then."""
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


# The size limit after all secrets are inserted: a placeholder is short, and can occur very often.
MAX_FILLED_BYTES = http1.MAX_HEAD_BYTES + MAX_SECRETS_BYTES

Headers = Sequence[tuple[str, str]]

_AUTHORIZATION = ("authorization", "proxy-authorization")


def add_secrets(headers: Headers, secrets: Sequence[Secret]) -> list[tuple[str, str]]:
    """The headers of a request, with the secrets added. A program's own value for a secret's header is dropped.

    Where two secrets would set the same, the one for the more specific domain does.

    Raises BadRequest before the headers would become longer than MAX_FILLED_BYTES.
    """
    ordered = sorted(secrets, key=_domain_order)
    own = {secret.header.lower(): secret.value for secret in ordered if secret.header is not None}
    values = {secret.name: secret.value for secret in ordered if secret.name is not None}
    kept = [(name, value) for name, value in headers if name not in own]
    room = _HeaderBudget(sum(len(name) + len(value) for name, value in (*kept, *own.items())))
    return [*((name, _fill_header(name, value, values, room)) for name, value in kept), *own.items()]


class _HeaderBudget:
    """How much a request's headers can still grow."""

    def __init__(self, taken_bytes: int):
        self._bytes = MAX_FILLED_BYTES
        self.take(taken_bytes)

    def take(self, count: int) -> None:
        self._bytes -= count
        if self._bytes < 0:
            raise http1.BadRequest(f"with its secrets the head of the request is over {MAX_FILLED_BYTES} bytes")


def _domain_order(secret: Secret) -> tuple[bool, int]:
    """All are for one host, so that the longer domain is below the shorter one."""
    return not secret.domain.startswith("*"), len(secret.domain)


def _fill_header(header: str, value: str, values: dict[str, str], room: _HeaderBudget) -> str:
    if not values or header in FRAMING_HEADERS:
        return value
    credentials = basic_credentials(value) if header in _AUTHORIZATION else None
    if credentials is not None:
        filled = _fill_placeholders(credentials, values, room)
        return value if filled == credentials else f"Basic {base64.b64encode(filled.encode()).decode()}"
    return _fill_placeholders(value, values, room)


def _fill_placeholders(text: str, values: dict[str, str], room: _HeaderBudget) -> str:
    """Fills all placeholders in one pass, so that a value that looks like a placeholder stays as it is."""

    def value(match: re.Match[str]) -> str:
        found = values[match[1] or match[2]]
        room.take(len(found))
        return found

    names = "|".join(sorted(values, key=len, reverse=True))
    return re.sub(rf"\$(?:\{{({names})\}}|({names}))", value, text)


# Masks secrets' values in the messages of a server over a WebSocket.
#
# Its frames are parsed and written anew: a value may be cut by the header of a frame, and a message ends where
# its last frame does, so that nothing of it has to wait longer. Without extensions frames can be cut in any
# other way.
#
# Raises BadAnswer, IncompleteReadError.

MAX_CONTROL_BYTES = 125
_LAST, _RESERVED, _CONTROL, _OPCODE, _MASKED = 0x80, 0x70, 0x08, 0x0F, 0x80


class WebSocketFrame(NamedTuple):
    opcode: int
    is_last: bool  # of its message
    length: int


async def masked_frames(reader: StreamReader, mask: SecretMask, count: Count) -> AsyncIterator[bytes]:
    """The masked frames, until the server ends. `count` is called with the number of received bytes."""
    message: MaskedStream | None = None
    opcode = 0
    while (frame := await _read_frame(reader, count)) is not None:
        await asyncio.sleep(0)  # thousands of small ones may be there already: others have their turn
        if frame.opcode & _CONTROL:
            yield await _control_frame(reader, frame, mask, count)
            continue
        if (frame.opcode == 0) != (message is not None):
            raise BadAnswer("the server's WebSocket has frames of one message in another")
        message, opcode = message or MaskedStream(mask), frame.opcode or opcode
        ready, left = b"", frame.length
        async for part in _read_parts(reader, frame.length, count):
            ready, left = await message.feed(part), left - len(part)
            if ready and (left or not frame.is_last):
                yield _write_frame(opcode, False, ready)
                opcode = 0
        if frame.is_last:
            yield _write_frame(opcode, True, ready + message.end())
            message = None
    if message is not None:
        raise BadAnswer("the server's WebSocket broke off in the middle of a message")


async def _control_frame(reader: StreamReader, frame: WebSocketFrame, mask: SecretMask, count: Count) -> bytes:
    """They come between the frames of a message, and are whole."""
    whole = MaskedStream(mask)
    content = [await whole.feed(part) async for part in _read_parts(reader, frame.length, count)]
    return _write_frame(frame.opcode, True, b"".join(content) + whole.end())


async def _read_frame(reader: StreamReader, count: Count) -> WebSocketFrame | None:
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
    frame = WebSocketFrame(first & _OPCODE, bool(first & _LAST), length)
    if frame.opcode & _CONTROL and (not frame.is_last or frame.length > MAX_CONTROL_BYTES):
        raise BadAnswer("the server's WebSocket has a control frame that is not whole")
    return frame


async def _read_parts(reader: StreamReader, length: int, count: Count) -> AsyncIterator[bytes]:
    while length:
        part = await reader.read(min(length, CHUNK_BYTES))
        if not part:
            raise IncompleteReadError(b"", length)
        count(len(part))
        length -= len(part)
        yield part


def _write_frame(opcode: int, is_last: bool, content: bytes) -> bytes:
    first, size = opcode | (_LAST if is_last else 0), len(content)
    if size < 126:
        return bytes((first, size)) + content
    if size < 1 << 16:
        return bytes((first, 126)) + size.to_bytes(2, "big") + content
    return bytes((first, 127)) + size.to_bytes(8, "big") + content
