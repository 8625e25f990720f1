"""Making directories, for whoever shall own them."""

from __future__ import annotations

import os

MODE = 0o755


def make(path: str, owner: tuple | None = None) -> bool:
    """Makes a directory and those above it, all of them `owner`'s; else the caller's. False if it was there.

    Not os.makedirs, which recurses: a path may have two thousand parts.
    """
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for each in reversed(missing):
        _make_one(each, owner)
    return bool(missing)


def _make_one(path: str, owner: tuple | None) -> None:
    try:
        os.mkdir(path, MODE)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        return  # somebody was faster
    if owner is not None:
        os.lchown(path, *owner)
