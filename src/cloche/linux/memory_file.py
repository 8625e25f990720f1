"""Files without a name."""

from __future__ import annotations

import os


def open_unnamed_file(name: str, flags: int = 0) -> int:
    """A descriptor of a new file in memory; in /tmp where the sandbox may have none that no limit on space sees."""
    try:
        return os.memfd_create(name, flags)
    except OSError:
        cloexec = os.O_CLOEXEC if flags & os.MFD_CLOEXEC else 0
        fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR | cloexec, 0o600)
        os.set_inheritable(fd, not cloexec)
        return fd
