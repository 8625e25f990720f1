"""The server's secret, from which sandbox tokens are derived: it survives restarts."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from cloche import errors

SECRET_BYTES = 32


def server_secret(path: Path) -> bytes:
    """The secret in that file, which only its owner can read; made where there is none. Raises Unavailable."""
    try:
        if not path.exists():
            _write_secret(path)
        secret = path.read_bytes()
    except OSError as error:
        raise errors.Unavailable(f"cannot read or make the server's secret {path}: {error}") from None
    if len(secret) != SECRET_BYTES:
        raise errors.Unavailable(f"{path} does not hold {SECRET_BYTES} bytes: remove it, and a new one is made")
    return secret


def _write_secret(path: Path) -> None:
    """Writes the secret atomically, also when two servers start at once: the first one's stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
