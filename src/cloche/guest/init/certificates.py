"""The CA certificates that programs inside trust: one file at a fixed path. See `engine/sandboxes/network.py`.

Only init's own rights are used, and root's directory: what `user` could replace, nobody should trust.
"""

from __future__ import annotations

import os


def trust(header: dict, body: bytes) -> dict:
    """Makes `path` the certificates of `system`, a file inside or "", and of `body`: a link where the first is all."""
    path, system = header["path"], header["system"]
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    draft = f"{path}.{os.urandom(4).hex()}"
    try:
        if body or not system:
            _write(draft, system, body)
        else:
            os.symlink(system, draft)
        os.rename(draft, path)
    except OSError:
        if os.path.lexists(draft):
            os.unlink(draft)
        raise
    return {}


def _write(path: str, system: str, body: bytes) -> None:
    content = b""
    if system:
        with open(system, "rb") as file:
            content = file.read()
    with open(path, "xb") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(content + b"\n" + body)
