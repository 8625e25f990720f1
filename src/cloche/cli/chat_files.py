"""What a chat saves: images and files. A model names them, so nothing lands outside, and nothing is replaced."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import IO

from cloche import errors

MAX_NAME = 150
MAX_TRIES = 10_000
_SUFFIXES = {"image/png": "png", "image/jpeg": "jpg", "image/gif": "gif", "image/webp": "webp", "image/svg+xml": "svg"}


class SavedFiles:
    """In `directory`, or in a new one below the system's for temporary files. It is made when the first one comes.

    Takes `max_bytes` in all: a file of a sandbox may claim any size.
    """

    def __init__(self, directory: Path | None, max_bytes: int):
        self._directory = directory
        self._left_bytes = max_bytes
        self._images: set[bytes] = set()  # digests: what was shown may be cited as a file as well
        self._known: set[tuple[str, bytes]] = set()

    def image(self, mime: str, content: bytes) -> Path | None:
        """Where it is now. Raises InvalidRequest if it cannot be written."""
        self._images.add(hashlib.sha256(content).digest())
        return self._write(f"image-1.{_SUFFIXES.get(mime, 'bin')}", [content])[0]

    def file(self, name: str, chunks: Iterable[bytes]) -> Path | None:
        """Where it is now; None if exactly that was saved before. Raises InvalidRequest, and what `chunks` does."""
        path, digest = self._write(name, chunks)
        if digest in self._images or (name, digest) in self._known:
            path.unlink()
            return None
        self._known.add((name, digest))
        return path

    def _write(self, name: str, chunks: Iterable[bytes]) -> tuple[Path, bytes]:
        digest = hashlib.sha256()
        try:
            path, file = _new_file(self._place(), safe_name(name))
            with file:
                for chunk in chunks:
                    self._left_bytes -= len(chunk)
                    if self._left_bytes < 0:
                        path.unlink()
                        raise errors.TooLarge(f"not saved: {path.name} (a chat saves only so much in all)")
                    digest.update(chunk)
                    file.write(chunk)
        except OSError as error:
            if isinstance(error, errors.ClocheError):
                raise
            raise errors.InvalidRequest(f"not saved: {safe_name(name)} ({error.strerror})") from None
        return path, digest.digest()

    def _place(self) -> Path:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="cloche-chat-"))
        self._directory.mkdir(parents=True, exist_ok=True)
        return self._directory


def safe_name(name: str) -> str:
    """The last part of a name, which is visible, printable and no directory."""
    last = PurePosixPath(name).name.replace("\\", "_")
    kept = "".join(each if each.isprintable() else "_" for each in last).strip().lstrip(".")
    stem, suffix = os.path.splitext(kept)
    return (stem[: MAX_NAME - len(suffix)] + suffix if len(suffix) < 20 else kept[:MAX_NAME]) or "file"


def _new_file(directory: Path, name: str) -> tuple[Path, IO[bytes]]:
    """A file that was not there: `name`, else `name-2.ext`, and so on; `image-1.png` is followed by `image-2.png`."""
    stem, suffix = os.path.splitext(name)
    for number in range(1, MAX_TRIES):
        tried = f"image-{number}" if stem == "image-1" else stem if number == 1 else f"{stem}-{number}"
        path = directory / (tried + suffix)
        try:
            return path, os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb")
        except FileExistsError:
            continue
    raise errors.InvalidRequest(f"not saved: {name} ({directory} has too many of that name)")
