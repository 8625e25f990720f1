"""JSON from outside: the cost of a text is measured before it is parsed, as a small text can be large in memory.

Parsers hold the interpreter's lock: the server answers nobody else meanwhile. The bounds below keep that short for any
text. What is long in a legitimate text are strings: code, images, files. They count for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import msgspec

from cloche.errors import InvalidRequest

JsonExcess = Literal["values", "depth", "digits", "length"]

_VALUE_SIGNS = (b"[", b"{", b",")  # a value has one, at least
_STEP_BYTES = 1 << 16
_BRACKETS = b"[]{}"
_NOT_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_STEPS = bytes.maketrans(_BRACKETS, b"\x01\xff\x01\xff")  # as signed bytes: down by one, up by one
_DIGITS = b"0123456789"
_ONLY_DIGITS = bytes(ord("0") if byte in _DIGITS else ord(" ") for byte in range(256))


class JsonBounds(NamedTuple):
    """The bounds of a text, outside of its strings."""

    values: int = 200_000  # names count too
    depth: int = 200
    digits: int = 400  # of one number: a parser takes the square of their number in time
    plain_bytes: int = 8 << 20  # everything outside of strings, such as spaces


BOUNDS = JsonBounds()
SMALL_BYTES = 1 << 16  # a text of so many bytes can break no bound but that of depth


class TooComplexJson(InvalidRequest, ValueError):
    """A text that would take too long to parse. `excess` names the bound."""

    def __init__(self, excess: JsonExcess, bounds: JsonBounds):
        super().__init__(
            {
                "values": f"it has more than {bounds.values} values: put long content into a string",
                "depth": f"it is nested too deeply: {bounds.depth} levels are possible",
                "digits": f"it has a number of more than {bounds.digits} digits",
                "length": f"it has more than {bounds.plain_bytes} bytes outside of its strings",
            }[excess]
        )
        self.excess = excess


class JsonMeter:
    """Measures a text piece by piece, as it arrives, at about a nanosecond per byte.

    Exact for valid JSON, and for an invalid text up to its first flaw, which is where a parser stops.
    """

    def __init__(self, bounds: JsonBounds = BOUNDS):
        self._bounds = bounds
        self._plain = _PlainText()
        self._values = self._depth = self._length = 0
        self._digits = b""  # the end of what came, as a number may go on

    def feed(self, piece: bytes) -> None:
        """Raises TooComplexJson."""
        for plain in self._plain.split(piece):
            self._length += len(plain)
            self._values += _count_signs(plain) + plain.count(b":")
            self._check("length", self._length > self._bounds.plain_bytes)
            self._check("values", self._values > self._bounds.values)
            self._measure_depth(plain)
            self._measure_digits(plain)

    def _check(self, excess: JsonExcess, exceeded: bool) -> None:
        if exceeded:
            raise TooComplexJson(excess, self._bounds)

    def _measure_depth(self, plain: bytes) -> None:
        steps = memoryview(plain.translate(_STEPS, _NOT_BRACKETS)).cast("b")
        self._check("depth", max(accumulate(steps, initial=self._depth)) > self._bounds.depth)
        self._depth += sum(steps)

    def _measure_digits(self, plain: bytes) -> None:
        most = self._bounds.digits
        digits = self._digits + plain.translate(_ONLY_DIGITS)
        self._check("digits", b"0" * (most + 1) in digits)
        self._digits = digits[-most:]


class _PlainText:
    """Takes the strings out of a text that comes in pieces."""

    def __init__(self) -> None:
        self._in_string = 0
        self._is_escaped = False  # the next byte

    def split(self, piece: bytes) -> Iterator[bytes]:
        """Yields a part at a time: all parts at once would be large themselves."""
        for start in range(0, len(piece), _STEP_BYTES):
            yield self._strip_strings(piece[start : start + _STEP_BYTES])

    def _strip_strings(self, step: bytes) -> bytes:
        if self._is_escaped:
            step = step[1:]
        self._is_escaped = (len(step) - len(step.rstrip(b"\\"))) % 2 == 1
        if self._is_escaped:
            step = step[:-1]
        # Without escapes each quote begins or ends a string.
        parts = step.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        plain = b"".join(parts[self._in_string :: 2])
        self._in_string = (self._in_string + len(parts) - 1) % 2
        return plain


def _count_signs(content: bytes) -> int:
    return sum(map(content.count, _VALUE_SIGNS))


def check_json(raw: bytes | str, bounds: JsonBounds = BOUNDS) -> None:
    """Raises TooComplexJson. It is what every decoder of a text from outside does first."""
    content = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
    if len(content) > SMALL_BYTES or content.count(b"[") + content.count(b"{") > bounds.depth:
        JsonMeter(bounds).feed(content)


def parse_json(raw: bytes | str, kind: Any = Any) -> Any:
    """Parses a text within the bounds. Raises TooComplexJson, and everything that msgspec raises."""
    check_json(raw)
    return msgspec.json.decode(raw, type=kind)


def count_json_values(content: bytes, most: int) -> int:
    """Approximate number of values. Signs inside strings count too, unless there seem to be over `most`."""
    count = _count_signs(content)
    return count if count <= most else sum(map(_count_signs, _PlainText().split(content)))


def decode_lenient_utf8(raw: bytes | str) -> str:
    """The characters of a text. Python's own parser would also read UTF-16, in which quotes cannot be told as bytes."""
    return raw if isinstance(raw, str) else raw.decode("utf-8-sig", "surrogatepass")
