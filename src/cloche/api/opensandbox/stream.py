"""execd's event streams: frames of code, commands and bash sessions.

Frames are server-sent events in ASCII: clients split them as `str.splitlines` does. A failed program sends one `error`
and no `execution_complete`.
"""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from cloche.api.dialect import encode_sse, event_stream
from cloche.api.encoding import ascii_json
from cloche.api.http import StreamResponse
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Exited
from cloche.model import Stream

SSE_PING_SECONDS = 3.0
MAX_LINE_LETTERS = 64 << 10
COMMAND_ERROR = "CommandExecError"
_LINE_END = re.compile(r"\r\n|\r|\n")

Fields = dict[str, Any]


def execd_stream(frames: AsyncGenerator[bytes, None], sandbox: Sandbox) -> StreamResponse:
    """The response with these frames, and a ping after three silent seconds."""
    return event_stream(
        frames,
        at_once=True,
        quiet_seconds=SSE_PING_SECONDS,
        keepalive=lambda: encode_frame({"type": "ping", "text": "pong"}),
        until=sandbox.wait_ended,
    )


def encode_init_frame(id: str) -> bytes:
    """The first frame. It names the context or the command, by which a client interrupts."""
    return encode_frame({"type": "init", "text": id})


def encode_frame(fields: Mapping[str, Any]) -> bytes:
    return encode_sse(ascii_json({**fields, "timestamp": int(time.time() * 1000)}))


def error_fields(name: str, value: str, traceback: str = "") -> Fields:
    said = {"ename": name, "evalue": value, "traceback": traceback.splitlines()}
    return {"type": "error", "error": said}


def complete_fields(seconds: float) -> Fields:
    return {"type": "execution_complete", "execution_time": round(seconds * 1000)}


def encode_exit_frame(exited: Exited, seconds: float) -> bytes:
    """The last frame of a program's, which took so long."""
    if exited.exit_code:
        return encode_frame(error_fields(COMMAND_ERROR, str(exited.exit_code), describe_exit(exited)))
    return encode_frame(complete_fields(seconds))


def describe_exit(exited: Exited) -> str:
    return exited.reason or f"exit status {exited.exit_code}"


class LineFrames:
    """The output of a command as frames: one for each line, without its end. An empty line has the text "\\n"."""

    def __init__(self, stream: Stream):
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._after_return = False

    def feed(self, data: bytes) -> bytes:
        return self._encode_lines(self.feed_text(self._decoder.decode(data)))

    def feed_text(self, text: str) -> list[str]:
        """The lines that are complete now; of a line that is too long, its parts."""
        if self._after_return and text:
            self._after_return = False
            text = text.removeprefix("\n")
        self._after_return = self._after_return or text.endswith("\r")
        *lines, rest = _LINE_END.split(self._rest + text)
        while len(rest) > MAX_LINE_LETTERS:
            lines.append(rest[:MAX_LINE_LETTERS])
            rest = rest[MAX_LINE_LETTERS:]
        self._rest = rest
        return lines

    def finish(self) -> bytes:
        """The frame of a last line without an end."""
        rest = self._rest + self._decoder.decode(b"", final=True)
        self._rest = ""
        return self._encode_lines([rest] if rest else [])

    def encode_text(self, text: str) -> bytes:
        return self._encode_lines(self.feed_text(text))

    def _encode_lines(self, lines: list[str]) -> bytes:
        return b"".join(encode_frame({"type": self._stream, "text": line or "\n"}) for line in lines)
