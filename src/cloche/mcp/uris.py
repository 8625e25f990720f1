"""Names of a sandbox's files as MCP's resources have them: `sandbox:///mnt/data/plot.png`."""

from __future__ import annotations

from urllib.parse import quote, unquote_to_bytes

from cloche import errors

SCHEME = "sandbox://"
TEMPLATE = "sandbox://{+path}"


def uri_of(path: str) -> str:
    return SCHEME + quote(path.encode("utf-8", "surrogateescape"), safe="/")


def path_of(uri: str) -> str:
    """Raises FileNotFound for what names no file of a sandbox."""
    rest = uri.removeprefix(SCHEME)
    if rest == uri or not rest.startswith("/"):
        raise errors.FileNotFound(
            f"{uri[:200]!r} names no file of a sandbox: that would be like {SCHEME}/mnt/data/a.txt"
        )
    return unquote_to_bytes(rest).decode("utf-8", "surrogateescape")
