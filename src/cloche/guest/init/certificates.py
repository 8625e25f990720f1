"""The certificates that programs inside trust: one file at a fixed path. See `engine/sandboxes/network.py`.

Only init's own rights are used, and root's directory: a file that `user` could replace must not be trusted.
"""

from __future__ import annotations

import os


def write_certificates(header: dict, body: bytes) -> dict:
    """Writes the certificates of `system`, a file inside or "", and of `body` to `path`.

    Without `body` it is a link to `system`.
    """
    path, system = header["path"], header["system"]
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    draft = f"{path}.{os.urandom(4).hex()}"
    try:
        if body or not system:
            _write_bundle(draft, system, body)
        else:
            os.symlink(system, draft)
        os.rename(draft, path)
    except OSError:
        if os.path.lexists(draft):
            os.unlink(draft)
        raise
    return {}


def _write_bundle(path: str, system: str, body: bytes) -> None:
    content = b""
    if system:
        with open(system, "rb") as file:
            content = file.read()
    with open(path, "xb") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(content + b"\n" + body)
