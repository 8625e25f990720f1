"""What a nursery says before it ends."""

from __future__ import annotations

import asyncio
import os
import subprocess

from cloche.model import KIB


class LastWords:
    """The last few KiB that a nursery wrote to its stderr."""

    def __init__(self, process: subprocess.Popen[bytes]):
        if process.stderr is None:
            raise ValueError("the nursery's stderr must be a pipe")
        self._pipe = process.stderr
        self._tail = b""
        os.set_blocking(self._pipe.fileno(), False)
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._read)

    def _read(self) -> None:
        try:
            piece = os.read(self._pipe.fileno(), 64 * KIB)
        except BlockingIOError:
            return
        if piece:
            self._tail = (self._tail + piece)[-8 * KIB :]
        else:
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())

    def text(self) -> str:
        self._read()
        return self._tail.decode(errors="replace").strip()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._pipe.close()
