"""What Cloche says about itself, on stderr: events with names (`execution.ended`) and a few fields.

Never code, output, file contents or keys. As a library it is silent below WARNING; the CLI and the server call
`configure`. The host application's own logging and structlog settings are neither used nor changed.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any, Literal

Format = Literal["console", "json"]
Level = Literal["debug", "info", "warning", "error"]

PRIVATE = frozenset({"code", "output", "stdout", "stderr", "text", "content", "path", "key", "api_key"})
"""Fields that are dropped above DEBUG, should somebody log them by mistake."""

_NUMBERS: dict[Level, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class Log:
    """`log.info("sandbox.ended", sandbox=id, reason=reason)`"""

    def __init__(self) -> None:
        self.level: Level = "warning"
        self.format: Format = "console"

    def debug(self, event: str, **fields: Any) -> None:
        self._write("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write("error", event, fields)

    def _write(self, level: Level, event: str, fields: dict[str, Any]) -> None:
        if _NUMBERS[level] < _NUMBERS[self.level]:
            return
        if level != "debug":
            fields = {name: value for name, value in fields.items() if name not in PRIVATE}
        getattr(_structlog(self.format), level)(event, **fields)


log = Log()


def configure(format: Format = "console", level: Level = "info") -> None:
    """Sets how much is logged and in which form, for the whole process."""
    log.level = level
    log.format = format


class _Stderr:
    """Writes lines to whatever `sys.stderr` is at that moment."""

    def msg(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    debug = info = warning = error = msg


@functools.cache
def _structlog(format: Format) -> Any:
    import structlog  # here, because it takes 0.2 s where `rich` is installed, and most processes log nothing

    render = structlog.processors.JSONRenderer() if format == "json" else structlog.dev.ConsoleRenderer(colors=False)
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    processors: list[Any] = [structlog.processors.add_log_level, stamp, render]
    return structlog.wrap_logger(_Stderr(), wrapper_class=structlog.BoundLogger, processors=processors)
