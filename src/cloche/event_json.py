"""Events as JSON: encoding and decoding, for the wire and for the store."""

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


def encode_json(value: object) -> bytes:
    """Encodes a value as JSON. A program's lone surrogates pass as escapes."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        plain = json.loads(json.dumps(msgspec.to_builtins(value)), parse_constant=_null_constant)
        return json.dumps(plain, separators=(",", ":")).encode()


def decode_json(raw: bytes | str, kind: type[T] | Any, max_values: int | None = None) -> T:
    """Decodes JSON into `kind`. Raises msgspec.ValidationError for another value, ValueError for invalid JSON.

    With `max_values`, ValueError also for a text that only the slow parser takes and that could have more values.
    """
    try:
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError):
            # Counted before it is parsed, in strings too: what is small as text can take seconds and a GiB as objects.
            if max_values is not None and _estimate_values(raw) > max_values:
                raise ValueError(f"it needs care (a lone surrogate?), and has over {max_values} values") from None
            return msgspec.convert(json.loads(raw, parse_constant=_refuse_constant), kind)  # this one knows surrogates
    except RecursionError:  # of either parser
        raise ValueError("it is nested too deeply") from None


class DisplayMessage(Event, tag="display"):
    """A Display in which the values named in `binary` are base64."""

    data: Bundle
    main: bool = False
    id: str | None = None
    update: bool = False
    binary: list[str] = []


StoredEvent = Started | Output | DisplayMessage | Cleared | Raised | Input | ToolsCalled | Wrote | Truncated | Ended


def encode_event(event: Event) -> bytes:
    """One event as JSON: a single line."""
    if not isinstance(event, Display):
        return encode_json(event)
    told = DisplayMessage(
        data=event.data, main=event.main, id=event.id, update=event.update, binary=binary_mimes(event.data)
    )
    return encode_json(told)


def decode_execution_event(raw: bytes) -> AnyEvent:
    """Decodes an execution's event. Raises ValueError or msgspec.ValidationError for anything else."""
    event: Any = decode_json(raw, StoredEvent)
    return to_display(event) if isinstance(event, DisplayMessage) else event


def to_display(told: DisplayMessage) -> Display:
    """Decodes the base64 values. Raises ValueError."""
    return Display(data=decode_binary(told.data, told.binary), main=told.main, id=told.id, update=told.update)


def binary_mimes(bundle: Bundle) -> list[str]:
    return [mime for mime, value in bundle.items() if isinstance(value, bytes)]


def decode_binary(bundle: Bundle, binary: Iterable[str]) -> Bundle:
    """The bundle with its `binary` values decoded. Raises ValueError for a value that is not base64."""
    return {**bundle, **{mime: _decode_base64(bundle.get(mime)) for mime in binary}}


def _decode_base64(value: object) -> bytes:
    try:
        return base64.b64decode(value, validate=True)  # type: ignore[arg-type]
    except (binascii.Error, TypeError, ValueError):
        raise ValueError("a value that is said to be base64 is not") from None


def _estimate_values(raw: bytes | str) -> int:
    """The approximate maximum of values in the text."""
    if isinstance(raw, str):
        return sum(map(raw.count, ("[", "{", ",")))
    return sum(map(raw.count, (b"[", b"{", b",")))


def _null_constant(constant: str) -> None:
    """JSON has no NaN and no infinity: both become null, as in the fast encoder."""


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"there is no {constant} in JSON")


# Counting the values of a JSON text before it is parsed: a small text can be large in memory.

_VALUE_SIGNS = (b"[", b"{", b",")  # a value has one, at least
_STEP_BYTES = 1 << 20


def count_json_values(content: bytes, most: int) -> int:
    """Approximate number of values. Signs inside strings count too, unless there seem to be more than `most`.

    It takes at most half a second for 50 MiB of any content: other requests wait meanwhile.
    """
    count = sum(map(content.count, _VALUE_SIGNS))
    if count <= most:
        return count
    plain = content.replace(b"\\\\", b"").replace(b'\\"', b"")  # from here on, each quote begins or ends a text
    values = plain.count(b'"') // 4  # or more: a text is a value, or the name of one
    return values if values > most else _count_signs_outside_strings(plain)


def _count_signs_outside_strings(plain: bytes) -> int:
    """Counts step by step: all pieces at once would be large themselves."""
    count, in_text = 0, 0
    for start in range(0, len(plain), _STEP_BYTES):
        pieces = plain[start : start + _STEP_BYTES].split(b'"')
        count += sum(map(b"".join(pieces[in_text::2]).count, _VALUE_SIGNS))
        in_text = (in_text + len(pieces) - 1) % 2
    return count
