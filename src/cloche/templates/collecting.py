"""Versions of templates that nothing needs any more. Whoever uses one holds it, also for other processes to see."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cloche.config.sections import Disk
from cloche.model import Template
from cloche.templates.catalogue import Catalogue

FRESH_SECONDS = 3600.0  # in which whoever built one comes to use it
DAY_SECONDS = 86400.0


class Unneeded(NamedTuple):
    template: Template
    why: str


def hold(template: Template) -> int | None:
    """A descriptor for as long as that version is used: until it is closed, nobody collects the version.

    None where it cannot be held: it lies where we cannot write, and so cannot be collected by us, either.
    """
    try:
        fd = os.open(Path(template.root, "template.json"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
    except OSError:
        os.close(fd)
        return None
    with contextlib.suppress(OSError):
        os.utime(fd)  # which says when it was last used
    return fd


def unneeded(catalogue: Catalogue, in_use: Collection[str], disk: Disk, now: float) -> list[Unneeded]:
    """Only looks. `in_use` are what sandboxes and snapshots are made from, as NAME@VERSION.

    What a name means stays, and the version before it, to which one can go back. Where templates lie elsewhere (a
    symlink), others may have them, too: none goes.
    """
    if catalogue.directory.is_symlink():
        return []
    found: list[Unneeded] = []
    by_name: dict[str, list[Template]] = {}
    for template in catalogue.list():
        by_name.setdefault(template.name, []).append(template)
    for name, versions in by_name.items():
        needed = _meant(versions, catalogue.pinned(name)) | {each.version for each in versions if each.ref in in_use}
        found += _surplus(versions, needed, disk, now)
    return found


def _meant(versions: Sequence[Template], pin: str | None) -> set[str]:
    """The version that the name means, and the one before; the newest, too, should it be unpinned."""
    order = [each.version for each in versions]  # the newest first
    meant = order.index(pin) if pin in order else 0
    return {order[0], *order[meant : meant + 2]}


def _surplus(versions: Sequence[Template], needed: Collection[str], disk: Disk, now: float) -> Iterator[Unneeded]:
    for number, template in enumerate(versions, 1):
        age = now - max(template.created_at, _used_at(template))
        if template.version in needed or age < FRESH_SECONDS:
            continue
        if number > disk.template_versions:
            yield Unneeded(template, f"there are {disk.template_versions} newer ones")
        elif age > disk.template_days * DAY_SECONDS:
            yield Unneeded(template, f"it was not used for {age / DAY_SECONDS:.0f} days")


def _used_at(template: Template) -> float:
    try:
        return os.stat(Path(template.root, "template.json")).st_mtime
    except OSError:
        return time.time()


def collect(catalogue: Catalogue, template: Template) -> bool:
    """Removes that version, unless somebody holds it or it was pinned meanwhile: whether it is gone."""
    root = Path(template.root)
    try:
        with catalogue.locked(template.name), catalogue.scratch(template.name) as scratch:
            if catalogue.pinned(template.name) == template.version:
                return False
            with (root / "template.json").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                root.rename(scratch / "removed")
        return True
    except OSError:  # it is held, or gone, or not ours
        return False
