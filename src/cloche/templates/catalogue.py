"""The built templates: `<data_dir>/templates/<name>/<version>/`, each with a `template.json`."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

import msgspec

from cloche import errors
from cloche.config import DEFAULT_ALIASES
from cloche.config.sections import DiskConfig
from cloche.model import Template

_ORPHANS_SECONDS = 60.0
_PIN = ".pin"  # beside the versions: the one that the name means
_SCRATCH = ".scratch-"  # directories that are not whole: being built, or being removed


class Catalogue:
    """The templates of one data directory. Holds no state: every method reads the disk."""

    def __init__(self, data_dir: str | os.PathLike[str], aliases: Mapping[str, str] = DEFAULT_ALIASES):
        self.directory = Path(data_dir).absolute() / "templates"
        self._aliases = aliases

    def list(self) -> list[Template]:
        """All versions of all templates, by name, the newest of each first."""
        with errors.using_data_dir(self.directory.parent):
            files = [*self.directory.glob("*/*/template.json")]
        found = [template for file in files if (template := _read_template(file))]
        return sorted(found, key=lambda each: (each.name, -each.created_at, each.version))

    def resolve(self, ref: str) -> Template:
        """The template that "name" (its pinned version, else its newest), "name@version-prefix" or an alias means.

        Raises TemplateNotFound that names the existing ones.
        """
        name, _, version = ref.partition("@")
        known = self.list()
        for candidate in dict.fromkeys((name, self.resolve_alias(name))):
            own = [each for each in known if each.name == candidate]
            pin = None if version or not own else self.pinned(candidate)
            matches = [each for each in own if each.version.startswith(pin or version)]
            if matches and version and len(matches) > 1:
                raise errors.TemplateNotFound(f"{ref!r} could be any of {_join_refs(matches)}: give more digits")
            if matches:
                return matches[0]
            if pin:
                raise errors.TemplateNotFound(_dangling_pin(candidate, pin, own))
        advice = "build one with `cloche template build`"
        raise errors.TemplateNotFound(f"no template {ref!r}; there is {_join_refs(known) or 'none'}: {advice}")

    def resolve_alias(self, name: str) -> str:
        """The template's name behind an alias such as "python:3.12"; `name` itself where it is none."""
        matches = (target for pattern, target in self._aliases.items() if fnmatch.fnmatchcase(name, pattern))
        return next(matches, name)

    def get(self, name: str, version: str) -> Template | None:
        """Exactly that version, if it was built."""
        return _read_template(self.directory / name / version / "template.json")

    def remove(self, ref: str) -> Template:
        """Deletes that version and returns its description. Raises TemplateNotFound; InvalidRequest for a pinned
        one.

        Sandboxes that run from it lose files they have not read yet.
        """
        template = self.resolve(ref)
        with self.locked(template.name), self.scratch_directory(template.name) as scratch:
            if self.pinned(template.name) == template.version:
                advice = f"`cloche template unpin {template.name}` first"
                raise errors.InvalidRequest(f"{template.ref} is pinned: {advice}")
            Path(template.root).rename(scratch / "removed")  # gone at once, not file by file
        return template

    # -- pins

    def pinned(self, name: str) -> str | None:
        """The version that is pinned as the meaning of `name`, whether it is there or not."""
        try:
            text = (self.directory / name / _PIN).read_text("ascii").strip()
        except PermissionError:
            raise  # it may be pinned
        except (OSError, ValueError):  # also of names that no directory can have
            return None
        return text or None

    def versions(self, name: str) -> Sequence[Template]:
        """All versions of that template, the newest first. Raises TemplateNotFound."""
        known = self.list()
        for candidate in (name, self.resolve_alias(name)):
            if found := [each for each in known if each.name == candidate]:
                return found
        raise errors.TemplateNotFound(f"no template {name!r}; there is {_join_refs(known) or 'none'}")

    def pin(self, ref: str) -> Template:
        """Makes the name mean that version ("name@version-prefix") until it is unpinned. Raises TemplateNotFound."""
        template = self.resolve(ref)
        with self.locked(template.name):
            if self.get(template.name, template.version) is None:
                raise errors.TemplateNotFound(f"{template.ref} was removed just now")
            self._write_pin(template.name, template.version)
        return template

    def unpin(self, name: str) -> Template | None:
        """Makes the name mean its newest version again, and returns that. Raises InvalidRequest if none is pinned."""
        if self.pinned(name) is None:
            raise errors.InvalidRequest(f"no version of {name!r} is pinned")
        with self.locked(name):
            (self.directory / name / _PIN).unlink(missing_ok=True)
        return next((each for each in self.list() if each.name == name), None)

    def pin_previous(self, name: str) -> Template:
        """Pins the version before the one that `name` means now. Raises TemplateNotFound, also if there is none."""
        now = self.resolve(name)
        versions = [each.version for each in self.versions(now.name)]
        older = versions[versions.index(now.version) + 1 :]
        if not older:
            raise errors.TemplateNotFound(f"{now.ref} is the oldest version of {now.name!r} that is there")
        return self.pin(f"{now.name}@{older[0]}")

    def _write_pin(self, name: str, version: str) -> None:
        draft = self.directory / name / f"{_PIN}.draft"
        with draft.open("w") as file:
            file.write(version + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.chmod(0o644)
        draft.rename(self.directory / name / _PIN)

    # -- changing it

    @contextmanager
    def locked(self, name: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Excludes other processes that change the templates of that name; calls `on_wait` if one has to be awaited."""
        parent = self.directory / name
        with errors.using_data_dir(self.directory.parent), self._lock_file(parent) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            # The process that left scratch directories held this lock, so it is dead.
            for leftover in parent.glob(_SCRATCH + "*"):
                _remove_patiently(leftover)
            yield

    def _lock_file(self, parent: Path) -> TextIO:
        _make_readable_directory(parent)
        return (parent / ".lock").open("w")

    def find_abandoned(self) -> Sequence[Path]:
        """Scratch directories of processes that were killed while they changed templates. Removes nothing."""
        found = sorted(self.directory.glob(f"*/{_SCRATCH}*"))
        return [path for path in found if _while_unlocked(path.parent, lambda: None)]

    def remove_abandoned(self) -> None:
        """Removes them, except those that other processes hold or that we may not remove."""
        for path in self.find_abandoned():
            _while_unlocked(path.parent, functools.partial(shutil.rmtree, path, ignore_errors=True))

    @contextmanager
    def scratch_directory(self, name: str) -> Iterator[Path]:
        """A directory beside the versions, removed afterwards. Only while `locked`."""
        path = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=self.directory / name))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _while_unlocked(parent: Path, work: Callable[[], object]) -> bool:
    """Does it with the lock held of the templates of one name. False, and nothing done, if another process holds it."""
    try:
        with (parent / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            work()
    except BlockingIOError:
        return False
    except OSError:
        pass  # not ours to open, and no other process will take it
    return True


def _remove_patiently(directory: Path) -> None:
    """Retries: children of a killed builder may still write there for a while."""
    deadline = time.monotonic() + _ORPHANS_SECONDS
    while directory.exists() and time.monotonic() < deadline:
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.05)


def write_template(template: Template, directory: Path) -> None:
    """Writes `template.json` there, whole or not at all."""
    draft = directory / ".template.json"
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(template)) + b"\n")
    draft.chmod(0o644)
    draft.rename(directory / "template.json")


def _read_template(file: Path) -> Template | None:
    if file.parent.name.startswith("."):
        return None
    try:
        template = msgspec.json.decode(file.read_bytes(), type=Template)
    except (OSError, msgspec.DecodeError):
        return None
    # Where it lies is where it was found, also after the data directory was moved.
    return msgspec.structs.replace(template, root=str(file.parent))


def _dangling_pin(name: str, pin: str, there: Sequence[Template]) -> str:
    advice = f"`cloche template unpin {name}`, or pin another: there is {_join_refs(there)}"
    return f"{name!r} is pinned to version {pin[:12]}, which is gone: {advice}"


def _join_refs(templates: Sequence[Template]) -> str:
    return ", ".join(each.ref for each in templates)


def _make_readable_directory(path: Path) -> None:
    for each in (path.parent, path):
        if not each.is_dir():
            each.mkdir(parents=True, exist_ok=True)
            each.chmod(0o755)


# Garbage collection of template versions. The user of a version holds it, visibly for other processes.

FRESH_SECONDS = 3600.0  # in which the builder of a version comes to use it
DAY_SECONDS = 86400.0


class UnneededVersion(NamedTuple):
    template: Template
    why: str


def hold_template(template: Template) -> int | None:
    """A descriptor for as long as that version is used: until it is closed, the version is not collected.

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


def unneeded_versions(
    catalogue: Catalogue, in_use: Collection[str], disk: DiskConfig, now: float
) -> list[UnneededVersion]:
    """The versions that can be removed; removes nothing. `in_use` are the templates of sandboxes and snapshots,
    as NAME@VERSION.

    The version that a name means stays, and the one before it, for a rollback. Where templates lie elsewhere (a
    symlink), other hosts may have them, too: none goes.
    """
    if catalogue.directory.is_symlink():
        return []
    found: list[UnneededVersion] = []
    by_name: dict[str, list[Template]] = {}
    for template in catalogue.list():
        by_name.setdefault(template.name, []).append(template)
    for name, versions in by_name.items():
        needed = _meant_versions(versions, catalogue.pinned(name)) | {
            each.version for each in versions if each.ref in in_use
        }
        found += _surplus_versions(versions, needed, disk, now)
    return found


def _meant_versions(versions: Sequence[Template], pin: str | None) -> set[str]:
    """The version that the name means, and the one before; the newest, too, should it be unpinned."""
    order = [each.version for each in versions]  # the newest first
    meant = order.index(pin) if pin in order else 0
    return {order[0], *order[meant : meant + 2]}


def _surplus_versions(
    versions: Sequence[Template], needed: Collection[str], disk: DiskConfig, now: float
) -> Iterator[UnneededVersion]:
    for number, template in enumerate(versions, 1):
        age = now - max(template.created_at, _used_at(template))
        if template.version in needed or age < FRESH_SECONDS:
            continue
        if number > disk.template_versions:
            yield UnneededVersion(template, f"there are {disk.template_versions} newer ones")
        elif age > disk.template_days * DAY_SECONDS:
            yield UnneededVersion(template, f"it was not used for {age / DAY_SECONDS:.0f} days")


def _used_at(template: Template) -> float:
    try:
        return os.stat(Path(template.root, "template.json")).st_mtime
    except OSError:
        return time.time()


def collect_version(catalogue: Catalogue, template: Template) -> bool:
    """Removes that version, unless it is held or was pinned meanwhile. Returns whether it is gone."""
    root = Path(template.root)
    try:
        with catalogue.locked(template.name), catalogue.scratch_directory(template.name) as scratch:
            if catalogue.pinned(template.name) == template.version:
                return False
            with (root / "template.json").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                root.rename(scratch / "removed")
        return True
    except OSError:  # it is held, or gone, or not ours
        return False
