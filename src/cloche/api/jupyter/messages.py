"""Jupyter's messages: decodes those of clients, encodes ours. Pure.

A WebSocket speaks JSON text, or the binary subprotocol `v1.kernel.websocket.jupyter.org`. Of a client's message only
the fields that are used are decoded: the rest, of any size and depth, becomes no objects.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec

from cloche import errors
from cloche.events import decode_json, encode_json
from cloche.json_text import check_json
from cloche.model import Struct

V1_PROTOCOL = "v1.kernel.websocket.jupyter.org"
PROTOCOL_VERSION = "5.3"
USERNAME = "cloche"

MAX_OFFSETS = 64
MAX_HEADER_LETTERS = 4096  # in all its fields: each message that answers a request repeats them
MAX_SLOW_PARSE_BYTES = 1 << 20  # of a message with halves of surrogates, which takes a slow parser
_WORD_BYTES = 8
_EMPTY = msgspec.Raw(b"{}")
_EMPTY_BYTES = b"{}"

Channel = Literal["shell", "control", "stdin", "iopub"]
Text = str | None


class MessageHeader(Struct):
    """A header, as far as replies repeat it."""

    msg_id: str = ""
    msg_type: str = ""
    session: str = ""
    username: Text = ""
    date: Text = None
    version: Text = PROTOCOL_VERSION


class ClientMessage(Struct):
    """A message of a client. `content` is not decoded yet."""

    header: MessageHeader
    channel: str = "shell"
    content: msgspec.Raw = _EMPTY


class ExecuteRequestContent(Struct):
    code: str
    silent: bool = False
    store_history: bool = True
    allow_stdin: bool = False
    stop_on_error: bool = True


class CodeRequestContent(Struct):
    """Of complete_request, inspect_request and is_complete_request."""

    code: str
    cursor_pos: int | None = None
    detail_level: int = 0


class HistoryRequestContent(Struct):
    output: bool = False
    raw: bool = True
    hist_access_type: str = "tail"
    session: int = 0
    start: int = 0
    stop: int | None = None
    n: int | None = None
    pattern: str | None = None
    unique: bool = False


class InputReplyContent(Struct):
    value: str = ""


class CommOpenContent(Struct):
    comm_id: str = ""


class ShutdownRequestContent(Struct):
    restart: bool = False


def decode_text_message(text: str | bytes) -> ClientMessage:
    """Raises InvalidRequest."""
    message: ClientMessage = _decode(text, ClientMessage)
    return _check_header(message)


def decode_binary_message(data: bytes, *, v1: bool) -> ClientMessage:
    """A binary frame: of the subprotocol, or of the old format for messages with buffers. Raises InvalidRequest."""
    if not v1:
        return decode_text_message(_first_part(data))
    parts = split_v1(data)
    try:
        channel = parts[0].decode()
    except UnicodeDecodeError:
        raise errors.InvalidRequest("the name of the channel is not UTF-8") from None
    header: MessageHeader = _decode(parts[1], MessageHeader)
    return _check_header(ClientMessage(channel=channel, header=header, content=msgspec.Raw(parts[4])))


def _check_header(message: ClientMessage) -> ClientMessage:
    fields = msgspec.structs.astuple(message.header)
    if sum(len(each or "") for each in fields) > MAX_HEADER_LETTERS:
        raise errors.InvalidRequest(f"the header of a message can have {MAX_HEADER_LETTERS} letters: use shorter ids")
    return message


def decode_content(message: ClientMessage, kind: Any) -> Any:
    """Raises InvalidRequest."""
    return _decode(bytes(message.content), kind)


def _decode(raw: str | bytes, kind: Any) -> Any:
    try:
        check_json(raw)
        return decode_json(raw, kind, MAX_SLOW_PARSE_BYTES)
    except ValueError as error:  # msgspec's errors too
        raise errors.InvalidRequest(f"this is no message of Jupyter's protocol: {error}") from None


def split_v1(data: bytes) -> list[bytes]:
    """The channel, the four parts of a message, and perhaps buffers. Raises InvalidRequest."""
    words = memoryview(data)
    count = int.from_bytes(words[:_WORD_BYTES], "little")
    if not 6 <= count <= MAX_OFFSETS or len(data) < _WORD_BYTES * (count + 1):
        raise errors.InvalidRequest("this is no message of Jupyter's binary protocol: it has no table of offsets")
    at = [int.from_bytes(words[_WORD_BYTES * n : _WORD_BYTES * (n + 1)], "little") for n in range(1, count + 1)]
    if at != sorted(at) or at[-1] > len(data):
        raise errors.InvalidRequest("this is no message of Jupyter's binary protocol: its offsets are wrong")
    return [bytes(words[start:end]) for start, end in pairwise(at)]


def _first_part(data: bytes) -> bytes:
    """The JSON of a message in the old binary format: a count and offsets of parts, as big-endian 32-bit numbers."""
    count = int.from_bytes(data[:4], "big")
    if not 1 <= count <= MAX_OFFSETS or len(data) < 4 * (count + 1):
        raise errors.InvalidRequest("this is no message of Jupyter's protocol: a binary one needs a table of offsets")
    start = int.from_bytes(data[4:8], "big")
    return data[start : int.from_bytes(data[8:12], "big") if count > 1 else len(data)]


class KernelMessage(Struct):
    """A message to a client: the parts of it as JSON."""

    channel: Channel
    msg_type: str
    msg_id: str
    header: bytes
    parent: bytes
    content: bytes


def make_message(
    channel: Channel, msg_type: str, content: Any, parent: MessageHeader | None, session: str
) -> KernelMessage:
    id = uuid.uuid4().hex
    header = {
        "msg_id": id,
        "msg_type": msg_type,
        "session": session,
        "username": USERNAME,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f".{time.time_ns() // 1000 % 1_000_000:06d}Z",
        "version": PROTOCOL_VERSION,
    }
    return KernelMessage(
        channel=channel,
        msg_type=msg_type,
        msg_id=id,
        header=encode_json(header),
        parent=_EMPTY_BYTES if parent is None else encode_json(parent),
        content=encode_json(content),
    )


def encode_text_message(message: KernelMessage) -> bytes:
    """The message as one JSON object. Its type and id are there twice: some clients read them at the top."""
    top = encode_json({"channel": message.channel, "msg_type": message.msg_type, "msg_id": message.msg_id})
    return b'%s,"header":%s,"parent_header":%s,"metadata":{},"content":%s,"buffers":[]}' % (
        top[:-1],
        message.header,
        message.parent,
        message.content,
    )


def encode_v1_message(message: KernelMessage) -> bytes:
    return join_v1((message.channel.encode(), message.header, message.parent, _EMPTY_BYTES, message.content))


def join_v1(parts: Sequence[bytes]) -> bytes:
    """The binary frame of a channel's name, the four parts of a message, and perhaps buffers."""
    at = _WORD_BYTES * (len(parts) + 2)
    offsets = [at]
    for part in parts:
        at += len(part)
        offsets.append(at)
    words = b"".join(number.to_bytes(_WORD_BYTES, "little") for number in (len(offsets), *offsets))
    return words + b"".join(parts)
