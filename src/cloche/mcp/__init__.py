"""The Model Context Protocol: a code interpreter for agents, over stdio and over HTTP.

The tools are written once, over the library's seam (`cloche.sdk.backend`): a sandbox of the engine in this process, or
one on a server. The package `mcp` is an extra, which is imported when the first client comes.
"""

from __future__ import annotations

import importlib.util

from cloche import errors

# The official package `mcp`, which not everybody installs.

ADVICE = 'MCP needs one more package: pip install "cloche[mcp]"'


def is_installed() -> bool:
    """Imports nothing."""
    return importlib.util.find_spec("mcp") is not None


def check_installed() -> None:
    """Raises Unavailable, which says what to install."""
    if not is_installed():
        raise errors.Unavailable(ADVICE)
