"""Notices of Cloche to the readers of a program's output."""

from __future__ import annotations

import sys


def print_notice(what: str) -> None:
    """One line on the program's stderr, told apart from its own by its beginning."""
    print(f"[cloche] {what}", file=sys.stderr)
