"""The program's sys.stdin, sys.stdout and sys.stderr."""

from __future__ import annotations

import io
import sys
from typing import Any


def replace_streams() -> None:
    """New text streams over descriptors 1 and 2, unless they are ours already."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        if not isinstance(getattr(sys, name), StandardOutput):
            stream = StandardOutput(fd)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def reopen_closed() -> None:
    """Gives the program its streams back if an earlier cell closed or removed them."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name, None)
        if stream is None or getattr(stream, "closed", False) is True:
            setattr(sys, name, StandardOutput(fd))


class StandardOutput(io.TextIOWrapper):
    """Line-buffered UTF-8 over a descriptor that it does not own.

    Unencodable characters are escaped, never an error.
    """

    def __init__(self, fd: int):
        raw = io.FileIO(fd, "wb", closefd=False)
        super().__init__(io.BufferedWriter(raw, 8192), "utf-8", "backslashreplace", "\n", line_buffering=True)


class StandardInput(io.TextIOBase):
    """Lines that the caller of the run gives when asked."""

    encoding = "utf-8"

    def __init__(self, line: Any):
        self._line = line

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        return self._line()

    def read(self, size: int | None = -1, /) -> str:
        return "".join(iter(self._line, ""))
