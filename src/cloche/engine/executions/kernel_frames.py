"""Decodes a kernel's frames into events. Pure; a hostile kernel's frame becomes an event or a WireError."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from cloche.engine.sandboxes.init_client import clean_text, require_protocol
from cloche.events import Bundle, Cleared, Display, Input, Raised, Wrote
from cloche.guest import wire
from cloche.isolation.channel import Header
from cloche.mime_types import BINARY_MIMES
from cloche.model import FileInfo

MAX_NAME = 1024
MAX_VALUE = 256 << 10
MAX_TRACEBACK = 1 << 20
MAX_PARTS = 64
MAX_JSON = 8 << 20
# What each of these stands for in memory, at most: a list, a dict, half a string, a place in a list with a number, one
# in a dict. Measured; where they stand inside strings too much is charged.
PARSED_BYTES = ((b"[", 88), (b"{", 184), (b'"', 26), (b",", 40), (b":", 48))
MAX_PATH = 8192
MAX_ATTRIBUTES = 128
_TEXT_FIELDS = ("path", "name", "owner", "group", "target")


def text_field(header: Header, name: str, limit: int = MAX_NAME) -> str:
    value = header.get(name)
    require_protocol(isinstance(value, str), f"{name} is not a string")
    return clean_text(str(value), limit)


def next_count_field(header: Header) -> int | None:
    """The number of the execution that a kernel waits for, if it does."""
    count = header.get("next")
    return count if type(count) is int and 0 <= count < 1 << 53 else None


def number_field(header: Header, name: str) -> float:
    """A finite number ≥ 0; a missing or absurd one is 0: it only informs."""
    value = header.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    return float(value) if 0 <= value < 2**53 else 0.0


def exit_code_field(header: Header) -> int | None:
    """The program's own exit status; None unless it asked to exit."""
    value = header.get("exit")
    return value if type(value) is int and 0 <= value <= 255 else None


def parse_display(header: Header, body: bytes) -> Display:
    id = header.get("id")
    return Display(
        data=parse_bundle(header.get("parts"), body),
        main=header.get("main") is True,
        id=None if id is None else text_field(header, "id"),
        update=header.get("update") is True,
    )


def parse_bundle(parts: object, body: bytes) -> Bundle:
    """The MIME bundle whose values lie one after another in `body`. JSON of more than 8 MiB is left out."""
    return {mime: decode_part(mime, content) for mime, content in _split_parts(parts, body)}


def estimate_parsed_bytes(parts: object, body: bytes) -> int:
    """The memory that the JSON in a bundle takes once it is parsed, estimated too high rather than too low."""
    return sum(_estimate_json_bytes(content) for mime, content in _split_parts(parts, body) if mime.endswith("json"))


def _estimate_json_bytes(content: bytes) -> int:
    width = 1 if content.isascii() else 4
    return width * len(content) + sum(content.count(sign) * size for sign, size in PARSED_BYTES)


def _split_parts(parts: object, body: bytes) -> Iterator[tuple[str, bytes]]:
    if not isinstance(parts, list) or len(parts) > MAX_PARTS:
        raise wire.WireError("parts of a display are not a short list")
    at = 0
    for part in parts:
        mime, length = _parse_part(part)
        require_protocol(at + length <= len(body), "a display is shorter than its parts say")
        if length <= MAX_JSON or not mime.endswith("json"):
            yield mime, body[at : at + length]
        at += length


def decode_part(mime: str, content: bytes) -> Any:
    """The value of one part of a bundle: JSON, bytes or text, by its MIME type."""
    if mime in BINARY_MIMES:
        return content
    if mime.endswith("json"):
        try:
            return _parse_json(content)
        except (ValueError, RecursionError):
            raise wire.WireError(f"a display's {clean_text(mime, 100)} is not JSON") from None
    return content.decode("utf-8", "replace")


def _parse_json(content: bytes) -> Any:
    """On the loop, so the fastest parser first: a figure of 8 MiB takes it 25 ms, the other one 170."""
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        return json.loads(content)  # this one knows NaN and lone surrogates, as Python's own `json.dumps` writes them


def parse_raised(header: Header, body: bytes) -> Raised:
    traceback = body[:MAX_TRACEBACK].decode("utf-8", "replace")
    return Raised(name=text_field(header, "name"), value=text_field(header, "value", MAX_VALUE), traceback=traceback)


def parse_cleared(header: Header) -> Cleared:
    return Cleared(wait=header.get("wait") is True)


def parse_input(header: Header) -> Input:
    return Input(prompt=text_field(header, "prompt", MAX_VALUE), secret=header.get("secret") is True)


def parse_wrote(header: Header) -> Wrote:
    return Wrote(file=parse_file_info(header.get("file")))


def parse_file_info(described: object) -> FileInfo:
    """A file as init or a kernel describes it. Raises WireError."""
    try:
        info = msgspec.convert(described, FileInfo)
    except (msgspec.ValidationError, UnicodeError):  # the latter for lone surrogates in unexpected places
        raise wire.WireError("a file is described badly") from None
    told = {name: value for name in _TEXT_FIELDS if (value := getattr(info, name)) is not None}
    cleaned: dict[str, Any] = {name: clean_text(value, MAX_PATH) for name, value in told.items()}
    if info.leads_to is not None:
        cleaned["leads_to"] = msgspec.structs.replace(info.leads_to, path=clean_text(info.leads_to.path, MAX_PATH))
    if info.attributes:
        given = list(info.attributes.items())[:MAX_ATTRIBUTES]
        cleaned["attributes"] = {clean_text(name, MAX_NAME): clean_text(value, MAX_PATH) for name, value in given}
    return info if cleaned == told else msgspec.structs.replace(info, **cleaned)


def _parse_part(part: object) -> tuple[str, int]:
    if not isinstance(part, list) or len(part) != 2:
        raise wire.WireError("a part of a display is not a pair")
    mime, length = part
    if not isinstance(mime, str) or type(length) is not int or length < 0:
        raise wire.WireError("a part of a display has no MIME type or length")
    return clean_text(mime, 256), length
