"""What was built: `<data_dir>/templates/<name>/<version>/`, each with a `template.json`."""

from __future__ import annotations

import fcntl
import fnmatch
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from cloche import errors
from cloche.config import DEFAULT_ALIASES
from cloche.model import Template

_ORPHANS_SECONDS = 60.0
_SCRATCH = ".scratch-"  # directories that are not whole: being built, or being removed


class Catalogue:
    """The templates of one data directory. Holds no state: what it says is what is on disk now."""

    def __init__(self, data_dir: str | os.PathLike[str], aliases: Mapping[str, str] = DEFAULT_ALIASES):
        self.directory = Path(data_dir).absolute() / "templates"
        self._aliases = aliases

    def list(self) -> list[Template]:
        """All versions of all templates, by name, the newest of each first."""
        found = [template for file in self.directory.glob("*/*/template.json") if (template := _read(file))]
        return sorted(found, key=lambda each: (each.name, -each.created_at))

    def resolve(self, ref: str) -> Template:
        """The template that "name" (its newest version), "name@version-prefix" or an alias means.

        Raises TemplateNotFound that names what exists.
        """
        name, _, version = ref.partition("@")
        known = self.list()
        for candidate in dict.fromkeys((name, self.unalias(name))):
            matches = [each for each in known if each.name == candidate and each.version.startswith(version)]
            if matches and version and len(matches) > 1:
                raise errors.TemplateNotFound(f"{ref!r} could be any of {_refs(matches)}: give more digits")
            if matches:
                return matches[0]
        advice = "build one with `cloche template build`"
        raise errors.TemplateNotFound(f"no template {ref!r}; there is {_refs(known) or 'none'}: {advice}")

    def unalias(self, name: str) -> str:
        """The template's name behind an alias such as "python:3.12"; `name` itself where it is none."""
        matches = (target for pattern, target in self._aliases.items() if fnmatch.fnmatchcase(name, pattern))
        return next(matches, name)

    def get(self, name: str, version: str) -> Template | None:
        """Exactly that version, if it was built."""
        return _read(self.directory / name / version / "template.json")

    def remove(self, ref: str) -> Template:
        """Deletes that version and returns what it was. Raises TemplateNotFound.

        Sandboxes that run from it lose files they have not read yet.
        """
        template = self.resolve(ref)
        with self.locked(template.name), self.scratch(template.name) as scratch:
            Path(template.root).rename(scratch / "removed")  # gone at once, not file by file
        return template

    @contextmanager
    def locked(self, name: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Excludes other processes that change the templates of that name; calls `on_wait` if one has to be awaited."""
        parent = self.directory / name
        _make_readable_directory(parent)
        with (parent / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever left scratch directories held this lock, so is dead.
            for leftover in parent.glob(_SCRATCH + "*"):
                _remove_patiently(leftover)
            yield

    @contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """A directory beside the versions, removed afterwards. Only while `locked`."""
        path = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=self.directory / name))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _remove_patiently(directory: Path) -> None:
    """What a killed builder had started may still write there for a while."""
    deadline = time.monotonic() + _ORPHANS_SECONDS
    while directory.exists() and time.monotonic() < deadline:
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.05)


def write(template: Template, directory: Path) -> None:
    """Writes `template.json` there, whole or not at all."""
    draft = directory / ".template.json"
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(template)) + b"\n")
    draft.chmod(0o644)
    draft.rename(directory / "template.json")


def _read(file: Path) -> Template | None:
    if file.parent.name.startswith("."):
        return None
    try:
        template = msgspec.json.decode(file.read_bytes(), type=Template)
    except (OSError, msgspec.DecodeError):
        return None
    # Where it lies is where it was found, also after the data directory was moved.
    return msgspec.structs.replace(template, root=str(file.parent))


def _refs(templates: list[Template]) -> str:
    return ", ".join(each.ref for each in templates)


def _make_readable_directory(path: Path) -> None:
    for each in (path.parent, path):
        if not each.is_dir():
            each.mkdir(parents=True, exist_ok=True)
            each.chmod(0o755)
