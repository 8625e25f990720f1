"""Display frames: bundles on the wire, within the limits of a run. For kernels of every language.

Apart from `display`, since kernels of other languages do not import IPython.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from cloche.guest.kernel import notices
from cloche.guest.kernel.channel import KernelChannel

# Written by tools/generate_tables.py.
BINARY_MIMES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp", "application/pdf"})
FRAME_BYTES = 48 << 20  # a frame's body stays below what the host accepts
JSON_BYTES = 8 << 20  # as does a part that is JSON, which it parses
RUN_FACTOR = 2  # all displays of a run together: this many times what one part may have
DEFAULT_DISPLAY_BYTES = 32 << 20


class EncodedJson(bytes):
    """A value that is JSON already."""


class DisplayWriter:
    """Turns bundles into frames of one channel, within the limits of the run."""

    def __init__(self) -> None:
        self._channel: Any = None
        self._run: Any = None
        self._part_bytes = self._left_bytes = 0
        self._dropped_bytes = 0
        self.ending = False  # nothing of the program follows: frames may wait for the last one

    def start(self, channel: KernelChannel, run: Any, part_bytes: int) -> None:
        self._channel = channel
        self._run = run
        self._part_bytes = min(part_bytes, FRAME_BYTES)
        self._left_bytes = part_bytes * RUN_FACTOR
        self.ending = False

    def stop(self) -> None:
        """Drops all later displays, by a thread or a task: they belong to no run."""
        self._run = None

    def show(
        self, bundle: dict, *, main: bool = False, id: str | None = None, update: bool = False, wait: bool = False
    ) -> None:
        """Sends a bundle; with `wait`, together with the next frame."""
        if self._run is None:
            return
        parts = self._fit_parts(bundle)
        if parts:
            sizes = [[mime, len(data)] for mime, data in parts]
            header = {"ev": "display", "run": self._run, "main": main, "id": id, "update": update, "parts": sizes}
            body = parts[0][1] if len(parts) == 1 else b"".join([data for _mime, data in parts])
            (self._channel.hold if wait or self.ending else self._channel.post)(header, body)
        self._report_dropped()

    def clear(self, wait: bool) -> None:
        if self._run is not None:
            self._channel.post({"ev": "cleared", "run": self._run, "wait": wait})

    def _fit_parts(self, bundle: dict) -> list:
        parts, room = [], min(self._left_bytes, FRAME_BYTES)
        for mime, value in bundle.items():
            data = encode_part(str(mime), value)
            if data is not None and len(data) > JSON_BYTES and str(mime).endswith("json"):
                notices.print_notice(
                    f"{mime} of {len(data)} bytes was left out: {JSON_BYTES} are possible, a file can have more"
                )
                continue
            limit = min(self._part_bytes, room)
            if data is not None and len(data) > limit:
                self._dropped_bytes += len(data)
                data = data[:limit].decode("utf-8", "ignore").encode() if mime == "text/plain" else None
                self._dropped_bytes -= len(data or b"")
            if data or (data is not None and limit > 0):
                parts.append((str(mime), data))
                room -= len(data)
                self._left_bytes -= len(data)
        return parts

    def _report_dropped(self) -> None:
        if self._dropped_bytes:
            dropped, self._dropped_bytes = self._dropped_bytes, 0
            self._channel.send({"ev": "truncated", "run": self._run, "stream": "display", "dropped": dropped})


def encode_part(mime: str, value: Any) -> bytes | None:
    """One part of a display as it is on the wire. None if `value` cannot be of that type."""
    if mime in BINARY_MIMES:
        return _decode_binary(value)
    if mime.endswith("json"):
        return value if isinstance(value, EncodedJson) else json_bytes(value)
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value)  # as Jupyter sends types that it does not know
    if not isinstance(value, str):
        return json_bytes(value)
    return value.encode("utf-8", "backslashreplace")


def _decode_binary(value: Any) -> bytes | None:
    if isinstance(value, str):
        try:
            return binascii.a2b_base64(value)
        except ValueError:
            return None
    return bytes(value) if isinstance(value, (bytes, bytearray, memoryview)) else None


def json_bytes(value: Any) -> bytes | None:
    """Strict JSON, no NaN in it. Values of other types are their str()."""
    try:
        return json.dumps(value, default=str, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, TypeError):
        pass
    try:
        return json.dumps(_strict_json(value, 0), allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, TypeError, RecursionError):
        return None


def _strict_json(value: Any, depth: int) -> Any:
    if depth > 200:
        raise ValueError("nested too deeply")
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(key): _strict_json(one, depth + 1) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict_json(one, depth + 1) for one in value]
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)
