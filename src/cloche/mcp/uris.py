"""URIs of a sandbox's files as MCP resources: `sandbox:///mnt/data/plot.png`."""

from __future__ import annotations

from urllib.parse import quote, unquote_to_bytes

from cloche import errors

URI_SCHEME = "sandbox://"
URI_TEMPLATE = "sandbox://{+path}"


def path_to_uri(path: str) -> str:
    return URI_SCHEME + quote(path.encode("utf-8", "surrogateescape"), safe="/")


def uri_to_path(uri: str) -> str:
    """The path of the URI. Raises FileNotFound unless it names a file of a sandbox."""
    rest = uri.removeprefix(URI_SCHEME)
    if rest == uri or not rest.startswith("/"):
        raise errors.FileNotFound(
            f"{uri[:200]!r} names no file of a sandbox: that would be like {URI_SCHEME}/mnt/data/a.txt"
        )
    return unquote_to_bytes(rest).decode("utf-8", "surrogateescape")
