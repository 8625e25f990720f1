"""Code in a session, and its result as Azure encodes it."""

from __future__ import annotations

import ast
import base64
import math
import re
from typing import Any

from cloche.api.dialect import Json
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import AnyEvent, Bundle, Display, Ended, Output, Raised

IMAGES = {"image/png": "png", "image/jpeg": "jpeg"}
MAX_PLAIN_CHARACTERS = 100_000  # of a value that may be a number or a text of its own
MAX_INTEGER = 2**53 - 1  # that every reader of JSON takes as it is
_ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class CellResult:
    """The outcome of one cell: its streams, its value, and whether it succeeded."""

    def __init__(self) -> None:
        self.stdout = self.stderr = ""
        self.result: Any = ""
        self.ended = Ended(outcome="died", reason="unknown cause")

    @property
    def succeeded(self) -> bool:
        return self.ended.outcome == "ok"

    @property
    def milliseconds(self) -> int:
        return round(self.ended.usage.wall_seconds * 1000)

    def add(self, event: AnyEvent) -> None:
        match event:
            case Output(stream="stdout"):
                self.stdout += event.text
            case Output():
                self.stderr += event.text
            case Display():
                self._add_display(event.data, event.main)
            case Raised():
                self.stderr += _ANSI_COLOURS.sub("", event.traceback)
            case Ended():
                self.ended = event
                if not self.stderr and not self.succeeded:
                    self.stderr = event.reason or event.outcome

    def _add_display(self, data: Bundle, main: bool) -> None:
        """A picture is the result, unless the cell has a value."""
        for mime, format in IMAGES.items():
            if isinstance(picture := data.get(mime), bytes):
                self.result = {"type": "image", "format": format, "base64_data": base64.b64encode(picture).decode()}
                return
        if main and isinstance(text := data.get("text/plain"), str):
            self.result = _plain_value(text)


def _plain_value(text: str) -> Any:
    """Numbers and texts as themselves, all other values as IPython shows them."""
    if len(text) > MAX_PLAIN_CHARACTERS:
        return text
    try:
        value = ast.literal_eval(text) if text[:1] in "'\"-0123456789TFN" else text
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    if isinstance(value, int):
        return value if -MAX_INTEGER <= value <= MAX_INTEGER else text
    return value if isinstance(value, str) or (isinstance(value, float) and math.isfinite(value)) else text


async def run_cell(sandbox: Sandbox, code: str, seconds: float | None) -> CellResult:
    """Runs code in the session's kernel. Raises Gone, InvalidRequest."""
    result = CellResult()
    async with sandbox.context().execute(code, timeout_seconds=seconds) as cell:
        while events := await cell.next_events():
            for event in events:
                result.add(event)
    return result


def encode_first(result: CellResult) -> Json:
    """As API version 2024-02-02-preview."""
    return {
        "properties": {
            "status": "Success" if result.succeeded else "Failure",
            "stdout": result.stdout,
            "stderr": result.stderr,
            "result": result.result,
            "executionTimeInMilliseconds": result.milliseconds,
        }
    }


def encode_streams(stdout: str, stderr: str, milliseconds: int, result: Any = "") -> Json:
    """The result in later API versions."""
    return {
        "stdout": stdout,
        "stderr": stderr,
        "executionResult": result,
        "executionTimeInMilliseconds": milliseconds,
    }
