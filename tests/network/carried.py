"""Packages of this test run's own environment, to be carried into sandboxes that can install none."""

from __future__ import annotations

import io
import zipfile
from importlib.util import find_spec
from pathlib import Path

_HTTPX = ("httpx", "httpcore", "h11", "idna", "certifi", "anyio", "sniffio", "typing_extensions")


def httpx_archive() -> bytes:
    """httpx and all that it needs, as a file for `sys.path`. It is what clients of models speak HTTP with."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path, name in (found for package in _HTTPX for found in _files(package)):
            archive.write(path, name)
    return packed.getvalue()


def _files(package: str) -> list[tuple[Path, str]]:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return []  # newer versions of the others do without it
    origin = Path(spec.origin)
    if origin.name != "__init__.py":
        return [(origin, origin.name)]
    root = origin.parent.parent
    return [(path, str(path.relative_to(root))) for path in origin.parent.rglob("*") if path.suffix in (".py", ".pem")]
