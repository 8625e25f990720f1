"""Removing directories whose contents others made."""

from __future__ import annotations

import contextlib
import os
import subprocess


def remove_tree(directory: str | os.PathLike) -> None:
    """Removes a directory and all in it as far as it can, however deep: `shutil` ends where Python's stack does."""
    with contextlib.suppress(OSError):
        subprocess.run(
            ["rm", "-rf", "--one-file-system", "--", os.fspath(directory)], check=False, stderr=subprocess.DEVNULL
        )
