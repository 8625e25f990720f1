"""An archive becomes a template of this host: whole or not at all, on an interpreter of this host."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from pathlib import Path

import msgspec

from cloche import errors
from cloche.model import GIB, Template
from cloche.templates import archive, install, lock, pythons
from cloche.templates import catalogue as catalogues
from cloche.templates import recipe as recipes
from cloche.templates.archive import Contents
from cloche.templates.build import describe, digest
from cloche.templates.catalogue import Catalogue
from cloche.templates.progress import Progress, Report, silent
from cloche.templates.pythons import Interpreter
from cloche.templates.recipe import Recipe


def import_archive(catalogue: Catalogue, file: Path, sha256: str | None = None, report: Report = silent) -> Template:
    """The template in that file, which is in the catalogue then; the existing one if that version is there already.

    With `sha256`, the file must have that digest. Raises InvalidRequest or TooLarge for a file that is no whole
    template or does not fit on the disk, TemplateBuildFailed where this host has no Python for it.
    """
    if sha256 is not None:
        _check_digest(file, sha256)
    with archive.reading(file) as (contents, packed):
        if not recipes.is_name(contents.name):
            raise errors.InvalidRequest(f"the archive has a template with a name that none has: {contents.name[:80]!r}")
        interpreter = _interpreter(contents)
        with catalogue.locked(contents.name):
            template = catalogue.get(contents.name, contents.version)
            if template is None:
                template = _add(catalogue, contents, packed, interpreter, report)
    report(Progress(phase="done", detail=template.ref, fraction=1.0))
    return template


def _check_digest(file: Path, sha256: str) -> None:
    try:
        with file.open("rb") as reading:
            found = hashlib.file_digest(reading, "sha256").hexdigest()
    except OSError as error:
        raise errors.InvalidRequest(f"cannot import {file}: {error}") from None
    if found != sha256.lower():
        raise errors.InvalidRequest(f"{file} has the SHA-256 {found}, not {sha256}: it is another file, or damaged")


def _interpreter(contents: Contents) -> Interpreter:
    """One of the same series and platform, for which its packages were compiled; the very same version if there is."""
    own = pythons.own()
    if own and (own.version, own.platform) == (contents.python_version, contents.platform):
        return own
    there = list(pythons.find())
    found = [each for each in there if each.platform == contents.platform]
    if not found:
        have = ", ".join(f"{each.version} ({each.platform})" for each in there) or "none"
        wanted = f"Python {contents.python_version} ({contents.platform})"
        advice = "install such a Python (`uv python install` does), or export the template on a machine like this one"
        raise errors.TemplateBuildFailed(f"the template needs {wanted}; this host has {have}: {advice}")
    same = [each for each in found if each.version == contents.python_version]
    return max(same or found, key=lambda each: each.numbers)


def _add(
    catalogue: Catalogue, contents: Contents, packed: tarfile.TarFile, interpreter: Interpreter, report: Report
) -> Template:
    with catalogue.scratch(contents.name) as scratch:
        _check_room(scratch, contents)
        root = scratch / "root"
        archive.unpack(contents, packed, root, report)
        recipe, locked = _read(root)
        _check_version(contents, recipe, locked, interpreter)
        size_bytes = install.open_to_readers(root)
        final = catalogue.directory / contents.name / contents.version
        template = describe(recipe, interpreter, locked, contents.version, final, size_bytes)
        template = msgspec.structs.replace(template, created_at=contents.created_at)
        catalogues.write(template, root)
        if final.exists():  # damaged, or `get` would have found it
            final.rename(scratch / "damaged")
        root.rename(final)
    return template


def _check_room(directory: Path, contents: Contents) -> None:
    free = shutil.disk_usage(directory).free
    if contents.size_bytes > free:
        have, wanted = f"{free / GIB:.1f} GiB", f"{contents.size_bytes / GIB:.1f} GiB"
        raise errors.InvalidRequest(f"the template takes {wanted}, and {have} are free in {directory.parent}")


def _read(root: Path) -> tuple[Recipe, lock.Lock]:
    try:
        recipe = recipes.parse((root / "template.toml").read_text("utf-8"))
        return recipe, lock.parse((root / "lock.txt").read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise errors.InvalidRequest(f"the archive's recipe or lock is no text: {error}") from None


def _check_version(contents: Contents, recipe: Recipe, locked: lock.Lock, interpreter: Interpreter) -> None:
    """The version is a digest of the recipe, the lock, the Python version and the platform: it cannot be claimed."""
    built_on = msgspec.structs.replace(interpreter, version=contents.python_version)
    if recipe.name != contents.name or digest(recipe, built_on, locked) != contents.version:
        raise errors.InvalidRequest("the archive's recipe and lock are not those of the version that it names")
