"""Ranges of files: where data and holes are, and moves of bytes between files and pipes by the kernel.

gVisor's kernel answers some of these calls with EINVAL: it tells nothing of the holes of files in memory, and splices
nothing into a pipe of the host's. Then all is data, and bytes are copied through here.
"""

from __future__ import annotations

import errno
import os

_COPIED_BYTES = 256 << 10


def next_data(fd: int, at: int, size: int) -> int:
    """The next place from `at` on that has data; `size`, the end of the file, if there is none."""
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return at
        if error.errno != errno.ENXIO:
            raise
        return size  # nothing but a hole up to the end


def next_hole(fd: int, at: int, size: int) -> int:
    """The next hole; `size` if there is none."""
    try:
        return min(os.lseek(fd, at, os.SEEK_HOLE), size)
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.EINVAL):
            raise
        return size  # cut short meanwhile


def send_some(out: int, fd: int, at: int, count: int) -> int:
    """Sends up to `count` bytes of a file from `at` on; 0 at its end."""
    try:
        return os.sendfile(out, fd, at, min(count, 1 << 30))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return write_whole(out, os.pread(fd, min(count, _COPIED_BYTES), at))


def splice_some(pipe: int, target: int, count: int) -> int:
    """Moves up to `count` bytes from a pipe to the place in a file where that is; 0 at the pipe's end."""
    try:
        return os.splice(pipe, target, min(count, 1 << 30))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return write_whole(target, os.read(pipe, min(count, _COPIED_BYTES)))


def write_whole(fd: int, data: bytes) -> int:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
    return len(data)
