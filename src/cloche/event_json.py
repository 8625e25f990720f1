"""Events as JSON, written and read: over the wire, and in the store."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from cloche.events import (
    AnyEvent,
    Bundle,
    Cleared,
    Display,
    Ended,
    Event,
    Input,
    Output,
    Raised,
    Started,
    ToolsCalled,
    Truncated,
    Wrote,
)

T = TypeVar("T")


def encode(value: object) -> bytes:
    """JSON. A program's lone surrogates pass as escapes."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        plain = json.loads(json.dumps(msgspec.to_builtins(value)), parse_constant=_no_value)
        return json.dumps(plain, separators=(",", ":")).encode()


def decode(raw: bytes | str, kind: type[T] | Any, max_values: int | None = None) -> T:
    """Raises msgspec.ValidationError for what is not such a message, and ValueError for what is no JSON.

    With `max_values`, also for one that only the slow parser takes and that could have more values in it.
    """
    try:
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError):
            # Counted before it is parsed, in strings too: what is small as text can take seconds and a GiB as objects.
            if max_values is not None and _values_in(raw) > max_values:
                raise ValueError(f"it needs care (a lone surrogate?), and has over {max_values} values") from None
            return msgspec.convert(json.loads(raw, parse_constant=_refuse_constant), kind)  # this one knows surrogates
    except RecursionError:  # of either parser
        raise ValueError("it is nested too deeply") from None


class ToldDisplay(Event, tag="display"):
    """A Display whose values named in `binary` are base64."""

    data: Bundle
    main: bool = False
    id: str | None = None
    update: bool = False
    binary: list[str] = []


KeptEvent = Started | Output | ToldDisplay | Cleared | Raised | Input | ToolsCalled | Wrote | Truncated | Ended


def encode_event(event: Event) -> bytes:
    """One event as JSON: a single line."""
    if not isinstance(event, Display):
        return encode(event)
    told = ToldDisplay(data=event.data, main=event.main, id=event.id, update=event.update, binary=binary_in(event.data))
    return encode(told)


def decode_event(raw: bytes) -> AnyEvent:
    """An execution's event. Raises ValueError or msgspec.ValidationError for what is none."""
    event: Any = decode(raw, KeptEvent)
    return display_of(event) if isinstance(event, ToldDisplay) else event


def display_of(told: ToldDisplay) -> Display:
    """Raises ValueError."""
    return Display(data=with_bytes(told.data, told.binary), main=told.main, id=told.id, update=told.update)


def binary_in(bundle: Bundle) -> list[str]:
    return [mime for mime, value in bundle.items() if isinstance(value, bytes)]


def with_bytes(bundle: Bundle, binary: Iterable[str]) -> Bundle:
    """Raises ValueError for a value that is no base64."""
    return {**bundle, **{mime: _unbase64(bundle.get(mime)) for mime in binary}}


def _unbase64(value: object) -> bytes:
    try:
        return base64.b64decode(value, validate=True)  # type: ignore[arg-type]
    except (binascii.Error, TypeError, ValueError):
        raise ValueError("a value that is said to be base64 is not") from None


def _values_in(raw: bytes | str) -> int:
    """How many values it can have at most, roughly."""
    if isinstance(raw, str):
        return sum(map(raw.count, ("[", "{", ",")))
    return sum(map(raw.count, (b"[", b"{", b",")))


def _no_value(constant: str) -> None:
    """JSON has no NaN and no infinity: null, as the fast writer has it."""


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"there is no {constant} in JSON")


# How much of a JSON text there is as objects: what is small as text can be large in memory.

_SIGNS = (b"[", b"{", b",")  # a value has one, at least
_STEP_BYTES = 1 << 20


def count_values(content: bytes, most: int) -> int:
    """About how many values it has. Signs in texts count too, unless there seem to be more than `most`.

    It takes half a second at most for 50 MiB, whatever they are made of: others wait meanwhile.
    """
    count = sum(map(content.count, _SIGNS))
    if count <= most:
        return count
    plain = content.replace(b"\\\\", b"").replace(b'\\"', b"")  # from here on, each quote begins or ends a text
    values = plain.count(b'"') // 4  # or more: a text is a value, or the name of one
    return values if values > most else _signs_between_texts(plain)


def _signs_between_texts(plain: bytes) -> int:
    """Step by step: as many small pieces at once would be large themselves."""
    count, in_text = 0, 0
    for start in range(0, len(plain), _STEP_BYTES):
        pieces = plain[start : start + _STEP_BYTES].split(b'"')
        count += sum(map(b"".join(pieces[in_text::2]).count, _SIGNS))
        in_text = (in_text + len(pieces) - 1) % 2
    return count
