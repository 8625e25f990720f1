"""Removal of directories with contents made by others."""

from __future__ import annotations

import contextlib
import os
import subprocess


def remove_tree(directory: str | os.PathLike) -> None:
    """Removes a directory and all in it as far as it can, however deep: `shutil` ends where Python's stack does."""
    path = os.fspath(directory)
    _run_quietly("rm", "-rf", "--one-file-system", "--", path)
    if os.path.lexists(path):  # an ordinary user must first have the right to look into what they own
        _run_quietly("chmod", "-R", "u+rwx", "--", path)
        _run_quietly("rm", "-rf", "--one-file-system", "--", path)


def _run_quietly(*command: str) -> None:
    with contextlib.suppress(OSError):
        subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
