"""The cache of fetched packages: a directory that several processes of this host can share, with a size
limit.

A file appears under its name only when it is whole: it is written beside it, and renamed. Its space is
reserved before it is written, so that arriving and kept files are within the limit together. The least
recently used files are removed first; a file that is removed while it is read can be read on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cloche.egress.packages.replies import NoCacheRoom

FREE_BYTES = 1 << 30  # of the disk, which packages do not take
MAX_FILES = 50_000
ABANDONED_SECONDS = 24 * 3600.0  # of a temporary file without a writer
SCANS_PER_LIMIT = 100  # the directory is looked through when a hundredth of the limit was added
TARGET_SHARE = 0.9  # of the limit, so that not every file has to make room for itself
STRONG_HASHES = frozenset({"sha256", "sha384", "sha512"})


class FileDigest(NamedTuple):
    algorithm: str
    hex: str

    def new(self) -> hashlib._Hash:
        return hashlib.new(self.algorithm, usedforsecurity=False)


def file_key(url: str, digest: FileDigest | None) -> str:
    """Files with the same strong hash are one file, from any index. Others are identified by their URL."""
    if digest is not None and digest.algorithm in STRONG_HASHES:
        return f"{digest.algorithm}-{digest.hex}"
    return url_key(url)


def url_key(url: str) -> str:
    return "url-" + hashlib.sha256(url.encode()).hexdigest()


class CacheReservation:
    """Reserved space of the cache for a file that arrives. Its owner gives it back, by `leave` or `Cache.keep`."""

    def __init__(self, cache: PackageCache):
        self._cache = cache
        self._taken_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Extends the reservation to `size_bytes` in all. Raises NoCacheRoom and keeps its size."""
        more_bytes = size_bytes - self._taken_bytes
        if more_bytes > 0:
            is_full = self._cache.take(more_bytes)
            self._taken_bytes = size_bytes
            if is_full:
                with contextlib.suppress(OSError):  # it is over its limit then, until the next one comes
                    self._cache.make_room()

    def leave(self) -> None:
        """Gives the reservation back. It can be called again."""
        self._cache.give_back(self._taken_bytes)
        self._taken_bytes = 0


class PackageCache:
    """The cache. Every method blocks: call it in threads. `limit_bytes` covers kept and arriving files
    together.
    """

    def __init__(self, directory: Path, limit_bytes: int):
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._counts = threading.Lock()
        self._arriving_bytes = 0  # of this process: for them room was taken
        self._kept_bytes = limit_bytes  # as far as this process knows, and at first it does not: it looks
        self._added_bytes = 0  # since it looked

    def open(self, key: str, max_age_seconds: float | None = None) -> int | None:
        """A descriptor of the file kept under that key, which becomes the most recently used."""
        try:
            fd = os.open(self._key_path(key), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        status = os.fstat(fd)
        if max_age_seconds is not None and not 0 <= time.time() - status.st_mtime < max_age_seconds:
            os.close(fd)
            return None
        with contextlib.suppress(OSError):
            os.utime(fd, ns=(time.time_ns(), status.st_mtime_ns))
        return fd

    def read(self, key: str) -> bytes | None:
        fd = self.open(key)
        if fd is None:
            return None
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def write(self, key: str, content: bytes) -> None:
        """Where there is room. It is no error if there is none: it is a cache."""
        with contextlib.suppress(NoCacheRoom, OSError), self.room() as room:
            room.take(len(content))
            with self.open_temporary() as (fd, path):
                _write_all(fd, content)
                self.keep(path, key, len(content), room)

    def has_room(self, size_bytes: int) -> bool:
        """Whether that many bytes can be kept beside the arriving files, and the disk has some left then."""
        return self._fits_limits(size_bytes, self._free_bytes())

    def _free_bytes(self) -> int:
        """The free bytes of the disk; 0 where it cannot be written to."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            return shutil.disk_usage(self._directory).free
        except OSError:
            return 0

    def _fits_limits(self, size_bytes: int, free_bytes: int) -> bool:
        size_bytes += self._arriving_bytes
        return size_bytes <= self._limit_bytes and free_bytes - size_bytes > FREE_BYTES

    @contextlib.contextmanager
    def room(self) -> Iterator[CacheReservation]:
        """An empty reservation, given back after the block."""
        room = CacheReservation(self)
        try:
            yield room
        finally:
            room.leave()

    def take(self, size_bytes: int) -> bool:
        """See `Room`. Whether others must make room for it. Raises NoCacheRoom."""
        free_bytes = self._free_bytes()  # before the lock, which the event loop takes, too
        with self._counts:
            if not self._fits_limits(size_bytes, free_bytes):
                raise NoCacheRoom("there is no room on this host")
            self._arriving_bytes += size_bytes
            return self._kept_bytes + self._arriving_bytes > self._limit_bytes

    def give_back(self, size_bytes: int) -> None:
        with self._counts:
            self._arriving_bytes -= size_bytes

    @contextlib.contextmanager
    def open_temporary(self) -> Iterator[tuple[int, Path]]:
        """A new file to be written and then kept; if it is not kept, it is gone after the block. Raises OSError."""
        fd, path = self.create()
        try:
            yield fd, path
        finally:
            os.close(fd)
            self.discard(path)

    def create(self) -> tuple[int, Path]:
        """As `open_temporary`; the caller closes and discards the file. Raises OSError."""
        path = self._directory / f"tmp-{os.getpid()}-{secrets.token_hex(8)}"
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), path

    def discard(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def keep(self, path: Path, key: str, size_bytes: int, room: CacheReservation) -> None:
        """A file for which there is room. Raises OSError."""
        target = self._key_path(key)
        target.parent.mkdir(exist_ok=True, mode=0o700)
        os.replace(path, target)
        room.leave()
        with self._counts:
            self._kept_bytes += size_bytes
            self._added_bytes += size_bytes
            is_time = self._added_bytes * SCANS_PER_LIMIT >= self._limit_bytes  # others may have added to it, too
        if is_time:
            self.make_room()

    def make_room(self) -> None:
        """Removes the least recently used files, until the rest is within the limit."""
        with self._counts:
            self._added_bytes = 0
            limit_bytes = self._limit_bytes - self._arriving_bytes
        kept = sorted(self._kept_files())
        left_bytes = sum(size for _, size, _ in kept)
        if left_bytes > limit_bytes or len(kept) > MAX_FILES:
            left_bytes = self._remove_oldest(kept, left_bytes, limit_bytes)
        with self._counts:
            self._kept_bytes = left_bytes + self._added_bytes

    def _remove_oldest(self, kept: list[tuple[float, int, Path]], left_bytes: int, limit_bytes: int) -> int:
        """Removes files from the first on. Returns how many bytes are left."""
        surplus_files = len(kept) - int(MAX_FILES * TARGET_SHARE) if len(kept) > MAX_FILES else 0
        for number, (_, size_bytes, path) in enumerate(kept):
            if left_bytes <= limit_bytes * TARGET_SHARE and number >= surplus_files:
                break
            self.discard(path)
            left_bytes -= size_bytes
        return left_bytes

    def _kept_files(self) -> Iterator[tuple[float, int, Path]]:
        """When it was used, its size and where it is. Another process may be removing them meanwhile."""
        for path in [*self._directory.glob("*/*"), *self._directory.glob("tmp-*")]:
            with contextlib.suppress(OSError):
                status = path.stat()
                if not path.name.startswith("tmp-"):
                    yield status.st_atime, status.st_size, path
                elif time.time() - status.st_mtime > ABANDONED_SECONDS:
                    self.discard(path)

    def _key_path(self, key: str) -> Path:
        return self._directory / hashlib.sha256(key.encode()).hexdigest()[:2] / key


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
