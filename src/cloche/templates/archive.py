"""A template as one file, for machines without a registry: a tar.gz that begins with a list of its
contents.

The list (`cloche-template.json`) has the template's name, the Python that it needs, and of each file the size
and digest. An archive is hostile: names stay below the template's directory, symlinks are made after all
files and lead nowhere else, nothing is larger than was announced, and host paths come from this host alone.
None of the archive's code runs; its packages are untrusted code, like those that a build fetches.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, Literal

import msgspec

from cloche import errors
from cloche.model import GIB, KIB, MIB, Struct, Template
from cloche.templates import build, pythons
from cloche.templates import catalogue as catalogues
from cloche.templates import recipe as recipes
from cloche.templates.build import (
    GUEST_PYTHON,
    ReportProgress,
    TemplateProgress,
    describe_template,
    ignore_progress,
    template_version,
)
from cloche.templates.catalogue import Catalogue
from cloche.templates.pythons import Interpreter
from cloche.templates.recipe import Recipe

CONTENTS_NAME = "cloche-template.json"
ARCHIVE_FORMAT = 1
MAX_CONTENTS_BYTES = 128 * MIB
MAX_ARCHIVE_FILES = 1_000_000
MAX_ARCHIVE_BYTES = 64 * GIB
_CHUNK = 1 * MIB
_MAX_HEADER_BYTES = 64 * KIB
_TOP_ENTRIES = ("env", "template.toml", "lock.txt")  # the parts of a template; template.json is written anew


class ArchiveEntry(Struct):
    """Something below the template's directory."""

    path: str
    kind: Literal["file", "program", "directory", "symlink"]
    size: int = 0
    sha256: str = ""
    target: str = ""


class ArchiveContents(Struct):
    """The first thing in an archive."""

    format: int
    name: str
    version: str
    python_version: str
    platform: str
    created_at: float
    entries: tuple[ArchiveEntry, ...]

    @property
    def size_bytes(self) -> int:
        return sum(entry.size for entry in self.entries)


# -- out


def export_template(template: Template, file: Path, report: ReportProgress = ignore_progress) -> str:
    """Writes the archive, whole or not at all, in place of `file`, and returns its SHA-256. The same template
    gives the same bytes.

    Raises InvalidRequest where the file cannot be written, TemplateNotFound where the template is damaged.
    """
    if not (directory := file.absolute().parent).is_dir():
        raise errors.InvalidRequest(f"cannot export {template.ref}: there is no directory {directory}")
    if template.image is not None:
        raise errors.InvalidRequest(f"{template.ref} is an imported image: import it on the other machine, too")
    interpreter = pythons.query_interpreter(template.python)
    if interpreter is None:
        raise errors.TemplateNotFound(f"{template.ref} needs {template.python}, which is gone: build it again")
    try:
        contents = _list_contents(template, interpreter.platform)
        with _open_draft(file) as writing:
            _write_archive(contents, Path(template.root), writing, report)
        return _file_sha256(file)
    except OSError as error:
        raise errors.InvalidRequest(f"cannot export {template.ref} to {file}: {error}") from None


def _list_contents(template: Template, platform: str) -> ArchiveContents:
    root = Path(template.root)
    entries = tuple(entry for name in _TOP_ENTRIES for entry in _walk_entries(root, name))
    return ArchiveContents(
        format=ARCHIVE_FORMAT,
        name=template.name,
        version=template.version,
        python_version=template.python_version,
        platform=platform,
        created_at=template.created_at,
        entries=entries,
    )


def _walk_entries(root: Path, name: str) -> Iterator[ArchiveEntry]:
    path = root / name
    status = path.stat() if name == "env" else path.lstat()
    if stat.S_ISLNK(status.st_mode):
        yield ArchiveEntry(path=name, kind="symlink", target=os.readlink(path))
    elif stat.S_ISDIR(status.st_mode):
        yield ArchiveEntry(path=name, kind="directory")
        for child in sorted(os.listdir(path)):
            yield from _walk_entries(root, f"{name}/{child}")
    elif stat.S_ISREG(status.st_mode):
        kind: Literal["program", "file"] = "program" if status.st_mode & 0o111 else "file"
        yield ArchiveEntry(path=name, kind=kind, size=status.st_size, sha256=_file_sha256(path))
    else:
        raise OSError(f"{name} is neither a file nor a directory nor a symlink")


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _open_draft(file: Path) -> Iterator[IO[bytes]]:
    """Becomes `file` when the block is left without an error."""
    draft = file.with_name(f".{file.name}.{os.getpid()}.draft")
    try:
        with draft.open("xb") as writing:
            yield writing
            writing.flush()
            os.fsync(writing.fileno())
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def _write_archive(contents: ArchiveContents, root: Path, file: IO[bytes], report: ReportProgress) -> None:
    listed = msgspec.json.encode(contents)
    with (
        gzip.GzipFile("", "wb", compresslevel=5, fileobj=file, mtime=0) as packed,
        tarfile.open(mode="w|", fileobj=packed, format=tarfile.PAX_FORMAT) as archive,
    ):
        archive.addfile(_new_member(CONTENTS_NAME, size=len(listed)), BytesIO(listed))
        step = _report_steps(contents.size_bytes, "packed", report)
        for entry in contents.entries:
            _add_entry(archive, entry, root)
            step(entry.size)


def _add_entry(archive: tarfile.TarFile, entry: ArchiveEntry, root: Path) -> None:
    member = _new_member(entry.path, size=entry.size)
    if entry.kind == "directory":
        member.type, member.mode = tarfile.DIRTYPE, 0o755
    elif entry.kind == "symlink":
        member.type, member.linkname = tarfile.SYMTYPE, entry.target
    elif entry.kind == "program":
        member.mode = 0o755
    if not member.isreg():
        archive.addfile(member)
        return
    with (root / entry.path).open("rb") as reading:
        archive.addfile(member, reading)


def _new_member(path: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(path)
    member.size, member.mode, member.mtime = size, 0o644, 0
    return member


def _report_steps(total: int, verb: str, report: ReportProgress) -> Callable[[int], None]:
    done = 0
    told = -1

    def on_bytes(count: int) -> None:
        nonlocal done, told
        done += count
        if (percent := done * 100 // max(total, 1)) // 5 > told:
            told = percent // 5
            detail = f"{verb} {done // MIB} of {total // MIB} MiB"
            report(TemplateProgress(phase="archive", detail=detail, fraction=done / max(total, 1)))

    return on_bytes


# -- in


class _PlainMember(tarfile.TarInfo):
    """Refuses the kinds that `export` does not write, and long headers, which tarfile would read into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _PlainMember:
        member = super().frombuf(buf, encoding, errors)
        long = member.type == tarfile.XHDTYPE and member.size > _MAX_HEADER_BYTES
        if long or member.type not in (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.XHDTYPE):
            raise tarfile.ReadError("it has something that is neither a file nor a directory nor a symlink")
        return member


@contextmanager
def open_archive(file: Path) -> Iterator[tuple[ArchiveContents, tarfile.TarFile]]:
    """The checked list of contents of an archive, and the rest of it. Raises InvalidRequest."""
    try:
        with tarfile.open(file, "r|gz", tarinfo=_PlainMember) as archive:
            yield _read_contents(archive), archive
    except (tarfile.TarError, zlib.error, EOFError) as error:
        said = f"{file} is no whole archive of a template: {error}"
        raise errors.InvalidRequest(f"{said}; an image needs a name: give --name") from None
    except OSError as error:
        raise errors.InvalidRequest(f"cannot import {file}: {error}") from None


def _read_contents(archive: tarfile.TarFile) -> ArchiveContents:
    member = archive.next()
    if member is None or member.name != CONTENTS_NAME or not member.isreg() or member.size > MAX_CONTENTS_BYTES:
        advice = "an image needs a name: give --name"
        raise errors.InvalidRequest(f"the file is no template that `cloche template export` wrote; {advice}")
    listed = archive.extractfile(member)
    assert listed is not None
    try:
        contents = msgspec.json.decode(listed.read(), type=ArchiveContents)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.InvalidRequest(f"the archive's list of contents is damaged: {error}") from None
    _check_contents(contents)
    return contents


def _check_contents(contents: ArchiveContents) -> None:
    if contents.format != ARCHIVE_FORMAT:
        raise errors.InvalidRequest(f"the archive has format {contents.format}, and this Cloche reads {ARCHIVE_FORMAT}")
    if len(contents.entries) > MAX_ARCHIVE_FILES or contents.size_bytes > MAX_ARCHIVE_BYTES:
        raise errors.TooLarge(f"an archive can hold {MAX_ARCHIVE_FILES} files and {MAX_ARCHIVE_BYTES // GIB} GiB")
    kinds: dict[str, str] = {}
    for entry in contents.entries:
        _check_entry(entry, kinds)
        kinds[entry.path] = entry.kind
    if [kinds.get(name) for name in _TOP_ENTRIES] != ["directory", "file", "file"]:
        raise errors.InvalidRequest(f"the archive lacks one of {', '.join(_TOP_ENTRIES)}")


def _check_entry(entry: ArchiveEntry, kinds: dict[str, str]) -> None:
    """Each has a place of its own in a directory that was named before: so nothing is written through a link."""
    parts = entry.path.split("/")
    if not entry.path.isprintable() or any(part in ("", ".", "..") for part in parts) or parts[0] not in _TOP_ENTRIES:
        raise errors.InvalidRequest(f"the archive has a path that no template has: {entry.path[:200]!r}")
    parent = "/".join(parts[:-1])
    if entry.path in kinds or (parent and kinds.get(parent) != "directory") or entry.size < 0:
        raise errors.InvalidRequest(f"the archive has {entry.path[:200]!r} twice, or in no directory")
    if entry.kind == "symlink" and not _stays_inside(entry):
        raise errors.InvalidRequest(f"the archive has a symlink that leads out of the template: {entry.path[:200]!r}")


def _stays_inside(entry: ArchiveEntry) -> bool:
    """Whether a symlink leads to something of the template, or to the interpreter as sandboxes see it."""
    target = PurePosixPath(entry.target)
    if not entry.target or "\0" in entry.target:
        return False
    if target.is_absolute():
        return entry.target.startswith(GUEST_PYTHON + "/") and ".." not in target.parts
    steps = os.path.normpath(f"{PurePosixPath(entry.path).parent}/{entry.target}")
    return steps == "env" or steps.startswith("env/")


def unpack_archive(
    contents: ArchiveContents, archive: tarfile.TarFile, root: Path, report: ReportProgress = ignore_progress
) -> None:
    """Unpacks all entries below the new directory `root`. Raises InvalidRequest unless they are exactly the
    listed ones.
    """
    root.mkdir()
    step = _report_steps(contents.size_bytes, "unpacked", report)
    for entry in contents.entries:
        member = archive.next()
        if member is None or member.name != entry.path or member.size != entry.size:
            raise errors.InvalidRequest(f"the archive is incomplete: {entry.path!r} is missing")
        if entry.kind == "directory":
            (root / entry.path).mkdir(mode=0o755)
        elif entry.kind != "symlink":
            _unpack_file(entry, member, archive, root)
            step(entry.size)
    if archive.next() is not None:
        raise errors.InvalidRequest("the archive holds more than it lists")
    for entry in contents.entries:  # last: nothing above was written through one of them
        if entry.kind == "symlink":
            (root / entry.path).symlink_to(entry.target)


def _unpack_file(entry: ArchiveEntry, member: tarfile.TarInfo, archive: tarfile.TarFile, root: Path) -> None:
    source = archive.extractfile(member) if member.isreg() else None
    if source is None:
        raise errors.InvalidRequest(f"the archive is damaged: {entry.path!r} is no file")
    digest = hashlib.sha256()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(root / entry.path, flags, 0o755 if entry.kind == "program" else 0o644), "wb") as file:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            file.write(chunk)
    if digest.hexdigest() != entry.sha256:
        raise errors.InvalidRequest(f"the archive is damaged: {entry.path!r} differs from the archive's list")


# Imports an archive as a template: whole or not at all, on an interpreter of this host.


def import_archive(
    catalogue: Catalogue, file: Path, sha256: str | None = None, report: ReportProgress = ignore_progress
) -> Template:
    """The template in that file, which is in the catalogue then; the existing one if that version is there already.

    With `sha256`, the file must have that digest. Raises InvalidRequest or TooLarge for a file that is no whole
    template or does not fit on the disk, TemplateBuildFailed where this host has no Python for it.
    """
    if sha256 is not None:
        check_digest(file, sha256)
    with open_archive(file) as (contents, packed):
        if not recipes.is_template_name(contents.name):
            raise errors.InvalidRequest(f"the archive has a template with a name that none has: {contents.name[:80]!r}")
        interpreter = _choose_interpreter(contents)
        with catalogue.locked(contents.name):
            template = catalogue.get(contents.name, contents.version)
            if template is None:
                template = _add_template(catalogue, contents, packed, interpreter, report)
    report(TemplateProgress(phase="done", detail=template.ref, fraction=1.0))
    return template


def check_digest(file: Path, sha256: str) -> None:
    """Raises InvalidRequest unless the file has that digest."""
    try:
        with file.open("rb") as reading:
            found = hashlib.file_digest(reading, "sha256").hexdigest()
    except OSError as error:
        raise errors.InvalidRequest(f"cannot import {file}: {error}") from None
    if found != sha256.lower():
        raise errors.InvalidRequest(f"{file} has the SHA-256 {found}, not {sha256}: it is another file, or damaged")


def _choose_interpreter(contents: ArchiveContents) -> Interpreter:
    """One of the same series and platform, for which its packages were compiled; the very same version if there is."""
    own = pythons.own_interpreter()
    if own and (own.version, own.platform) == (contents.python_version, contents.platform):
        return own
    there = list(pythons.find_interpreters())
    found = [each for each in there if each.platform == contents.platform]
    if not found:
        have = ", ".join(f"{each.version} ({each.platform})" for each in there) or "none"
        wanted = f"Python {contents.python_version} ({contents.platform})"
        advice = "install such a Python (`uv python install` does), or export the template on a machine like this one"
        raise errors.TemplateBuildFailed(f"the template needs {wanted}; this host has {have}: {advice}")
    same = [each for each in found if each.version == contents.python_version]
    return max(same or found, key=lambda each: each.version_numbers)


def _add_template(
    catalogue: Catalogue,
    contents: ArchiveContents,
    packed: tarfile.TarFile,
    interpreter: Interpreter,
    report: ReportProgress,
) -> Template:
    with catalogue.scratch_directory(contents.name) as scratch:
        _check_room(scratch, contents)
        root = scratch / "root"
        unpack_archive(contents, packed, root, report)
        recipe, locked = _read_recipe(root)
        _check_version(contents, recipe, locked, interpreter)
        size_bytes = build.make_readable(root)
        final = catalogue.directory / contents.name / contents.version
        template = describe_template(recipe, interpreter, locked, contents.version, final, size_bytes)
        template = msgspec.structs.replace(template, created_at=contents.created_at)
        catalogues.write_template(template, root)
        if final.exists():  # damaged, or `get` would have found it
            final.rename(scratch / "damaged")
        root.rename(final)
    return template


def _check_room(directory: Path, contents: ArchiveContents) -> None:
    free = shutil.disk_usage(directory).free
    if contents.size_bytes > free:
        have, wanted = f"{free / GIB:.1f} GiB", f"{contents.size_bytes / GIB:.1f} GiB"
        raise errors.InvalidRequest(f"the template takes {wanted}, and {have} are free in {directory.parent}")


def _read_recipe(root: Path) -> tuple[Recipe, build.PackageLock]:
    try:
        recipe = recipes.parse_recipe((root / "template.toml").read_text("utf-8"))
        return recipe, build.parse_lock((root / "lock.txt").read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise errors.InvalidRequest(f"the archive's recipe or lock is no text: {error}") from None


def _check_version(
    contents: ArchiveContents, recipe: Recipe, locked: build.PackageLock, interpreter: Interpreter
) -> None:
    """The version is a digest of the recipe, the lock, the Python version and the platform: it cannot be claimed."""
    built_on = msgspec.structs.replace(interpreter, version=contents.python_version)
    if recipe.name != contents.name or template_version(recipe, built_on, locked) != contents.version:
        raise errors.InvalidRequest("the archive's recipe and lock are not those of the version that it names")
