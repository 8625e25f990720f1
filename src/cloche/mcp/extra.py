"""The official package `mcp`, which not everybody installs."""

from __future__ import annotations

import importlib.util

from cloche import errors

ADVICE = 'MCP needs one more package: pip install "cloche[mcp]"'


def is_installed() -> bool:
    """Imports nothing."""
    return importlib.util.find_spec("mcp") is not None


def check_installed() -> None:
    """Raises Unavailable, which says what to install."""
    if not is_installed():
        raise errors.Unavailable(ADVICE)
