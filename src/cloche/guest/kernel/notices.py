"""What we have to say to whoever reads a program's output."""

from __future__ import annotations

import sys


def tell(what: str) -> None:
    """One line on the program's stderr, told apart from its own by its beginning."""
    print(f"[cloche] {what}", file=sys.stderr)
