"""The official package `mcp`, which not everybody installs."""

from __future__ import annotations

import importlib.util

from cloche import errors

ADVICE = 'MCP needs one more package: pip install "cloche[mcp]"'


def check_installed() -> None:
    """Raises Unavailable, which says what to install. Imports nothing."""
    if importlib.util.find_spec("mcp") is None:
        raise errors.Unavailable(ADVICE)
