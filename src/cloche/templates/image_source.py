"""Where images come from: archives of `docker save`, OCI layouts (directories or archives), archives of a root, and
directories that are one.

Everything in them is hostile. A layer is checked against the digest that the image's configuration has of it before
anything of it is parsed, and every size is bounded.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, NoReturn, TypeVar

import msgspec

from cloche import errors
from cloche.model import GIB, MIB, Struct
from cloche.templates.image_tree import MAX_IMAGE_BYTES, MAX_IMAGE_FILES, read_members

MAX_LAYERS = 128
_MAX_JSON_BYTES = 4 * MIB
_MAX_ARCHIVE_MEMBERS = 4096  # of an archive of layers, not of a layer
_MAX_RATIO, _RATIO_FROM = 200, 1 * GIB  # of a layer to its compressed form, from that size on
_CHUNK = 1 * MIB
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_SKIPPED = ("dev", "proc", "run", "sys", "tmp")  # of a root directory: sandboxes have their own
Message = TypeVar("Message")


class ImageLayers(NamedTuple):
    """An image, checked and decompressed, and not yet parsed."""

    reference: str  # the name in the archive; often empty
    digest: str  # of its configuration, or of its files
    env: Sequence[str]  # "PATH=/usr/bin", ...
    layers: Sequence[Path]  # uncompressed, the lowest first


class _Descriptor(Struct):
    digest: str
    mediaType: str = ""
    platform: dict[str, str] = {}
    annotations: dict[str, str] | None = None


class _Manifest(Struct):
    """Of an image, or an index of several."""

    config: _Descriptor | None = None
    layers: list[_Descriptor] = []
    manifests: list[_Descriptor] = []


class _SavedImage(Struct):
    Config: str
    Layers: list[str]
    RepoTags: list[str] | None = None


class _ProgramConfig(Struct):
    Env: list[str] | None = None


class _RootFs(Struct):
    diff_ids: list[str]


class _ImageConfig(Struct):
    rootfs: _RootFs
    os: str = "linux"
    architecture: str = ""
    config: _ProgramConfig | None = None


def read_image(source: Path, scratch: Path) -> ImageLayers:
    """The image there, with its layers as files in `scratch`. Raises InvalidRequest, TooLarge."""
    if source.is_dir():
        if not (source / "oci-layout").is_file():
            return _pack_root(source, scratch)
        return _read_layout(DirectoryFiles(source), scratch)
    archive = scratch / "archive"
    with source.open("rb") as reading:
        digest = _decompress(reading, archive)
    with archive.open("rb") as file:
        files = ArchiveFiles(file)
        if "cloche-template.json" in files.names:
            raise errors.InvalidRequest(f"{source.name} is an exported template, which has a name: import it without")
        if "index.json" in files.names:
            return _read_layout(files, scratch)
        if "manifest.json" in files.names:
            return _read_saved(files, scratch)
    if not any(name.split("/")[0] in ("bin", "usr") for name in files.names):
        raise errors.InvalidRequest(
            f"{source.name} is neither of `docker save`, nor an OCI layout, nor the files of a root"
        )
    return ImageLayers("", digest, (), [archive])


# -- the files of an archive or a layout


class ArchiveFiles:
    def __init__(self, file: IO[bytes]):
        self._file = file
        self._parts: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        self.names: set[str] = set()
        for member in read_members(file):
            name = os.path.normpath(member.name)
            self.names.add(name)
            if member.kind == "file":
                self._parts[name] = (member.offset, member.size)
            elif member.kind == "symlink":  # from one layer to an equal one
                self._links[name] = os.path.normpath(f"{os.path.dirname(name)}/{member.target}")

    def copy_to(self, name: str, target: Path, limit: int) -> None:
        """Writes the file of that name to `target`. Raises InvalidRequest where there is none."""
        name = os.path.normpath(name)
        part = self._parts.get(self._links.get(name, name))
        if part is None:
            raise errors.InvalidRequest(f"the archive is incomplete: {name[:200]!r} is missing")
        offset, size = part
        if size > limit:
            raise errors.TooLarge(f"{name[:200]!r} has {size} bytes: {limit} are allowed")
        self._file.seek(offset)
        with target.open("wb") as writing:
            while size and (chunk := self._file.read(min(size, _CHUNK))):
                writing.write(chunk)
                size -= len(chunk)
        if size:
            raise errors.InvalidRequest("the archive is cut off")


class DirectoryFiles:
    def __init__(self, directory: Path):
        self._directory = directory

    def copy_to(self, name: str, target: Path, limit: int) -> None:
        """As that of `ArchiveFiles`. Follows no link below the directory."""
        try:
            with _open_below(self._directory, name) as reading:
                if os.fstat(reading.fileno()).st_size > limit:
                    raise errors.TooLarge(f"{name[:200]!r} has more than {limit} bytes")
                with target.open("wb") as writing:
                    shutil.copyfileobj(reading, writing, _CHUNK)
        except OSError as error:
            raise errors.InvalidRequest(f"the layout is incomplete: {name[:200]!r}: {error.strerror}") from None


def _open_below(directory: Path, name: str) -> IO[bytes]:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    here = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in name.split("/"):
        try:
            there = os.open(part, flags, dir_fd=here)
        finally:
            os.close(here)
        here = there
    file = os.fdopen(here, "rb")
    if not stat.S_ISREG(os.fstat(here).st_mode):
        file.close()
        raise errors.InvalidRequest(f"the layout is damaged: {name[:200]!r} is no file")
    return file


LayoutFiles = ArchiveFiles | DirectoryFiles


def _read_json(files: LayoutFiles, name: str, kind: type[Message], scratch: Path, digest: str = "") -> Message:
    file = scratch / "message"
    files.copy_to(name, file, _MAX_JSON_BYTES)
    content = file.read_bytes()
    if digest:
        _check_digest(name, digest, f"sha256:{hashlib.sha256(content).hexdigest()}")
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.InvalidRequest(f"{name[:200]!r} of the image is damaged: {error}") from None


def _check_digest(name: str, expected: str, found: str) -> None:
    if expected != found:
        raise errors.InvalidRequest(
            f"{name[:200]!r} of the image is damaged: it has the digest {found}, not {expected}"
        )


def _blob_name(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise errors.InvalidRequest(f"the image names something by a digest that is none: {digest[:200]!r}")
    return "blobs/" + digest.replace(":", "/")


# -- the kinds of images


def _read_layout(files: LayoutFiles, scratch: Path) -> ImageLayers:
    index = _read_json(files, "index.json", _Manifest, scratch)
    chosen = _choose_manifest(index)
    reference = (chosen.annotations or {}).get("org.opencontainers.image.ref.name", "")
    manifest = _read_json(files, _blob_name(chosen.digest), _Manifest, scratch, chosen.digest)
    if manifest.manifests:  # an index of platforms
        chosen = _choose_manifest(manifest)
        manifest = _read_json(files, _blob_name(chosen.digest), _Manifest, scratch, chosen.digest)
    if manifest.config is None:
        raise errors.InvalidRequest("the image has no configuration")
    digest = manifest.config.digest
    config = _read_json(files, _blob_name(digest), _ImageConfig, scratch, digest)
    layers = [(_blob_name(each.digest), each.digest) for each in manifest.layers]
    return _read_layers(files, layers, config, digest, reference, scratch)


def _choose_manifest(index: _Manifest) -> _Descriptor:
    """The one of this machine's platform. Raises InvalidRequest unless there is exactly one."""
    fitting = [each for each in index.manifests if each.platform.get("architecture", _machine()) == _machine()]
    if len(fitting) != 1:
        names = [(each.annotations or {}).get("org.opencontainers.image.ref.name", each.digest) for each in fitting]
        said = ", ".join(names)[:500] or "none"
        raise errors.InvalidRequest(f"the archive must have exactly one image for linux/{_machine()}; it has {said}")
    return fitting[0]


def _read_saved(files: ArchiveFiles, scratch: Path) -> ImageLayers:
    saved = _read_json(files, "manifest.json", list[_SavedImage], scratch)
    if len(saved) != 1:
        raise errors.InvalidRequest(f"the archive must have exactly one image; it has {len(saved)}")
    [image] = saved
    config = _read_json(files, image.Config, _ImageConfig, scratch)
    digest = f"sha256:{hashlib.sha256((scratch / 'message').read_bytes()).hexdigest()}"
    reference = ", ".join(image.RepoTags or ())
    return _read_layers(files, [(name, "") for name in image.Layers], config, digest, reference, scratch)


def _machine() -> str:
    return _MACHINES.get(os.uname().machine, os.uname().machine)


def _read_layers(
    files: LayoutFiles,
    layers: Sequence[tuple[str, str]],
    config: _ImageConfig,
    digest: str,
    reference: str,
    scratch: Path,
) -> ImageLayers:
    """`layers`: name and digest of each as it lies there; an archive of `docker save` has no such digest."""
    if config.os != "linux" or config.architecture not in ("", _machine()):
        found = f"{config.os}/{config.architecture}"[:100]
        raise errors.InvalidRequest(f"the image is for {found}, and this machine is linux/{_machine()}")
    if len(layers) != len(config.rootfs.diff_ids) or len(layers) > MAX_LAYERS:
        raise errors.InvalidRequest(f"the image has layers without digests, or more than {MAX_LAYERS} of them")
    unpacked = []
    left = MAX_IMAGE_BYTES
    for number, ((name, packed_digest), digest_of_layer) in enumerate(zip(layers, config.rootfs.diff_ids, strict=True)):
        layer = scratch / f"layer-{number}"
        _unpack_layer(files, name, packed_digest, digest_of_layer, layer, left)
        left -= layer.stat().st_size
        unpacked.append(layer)
    env = (config.config and config.config.Env) or ()
    return ImageLayers(reference[:200], digest, env, unpacked)


def _unpack_layer(files: LayoutFiles, name: str, packed_digest: str, digest: str, layer: Path, limit: int) -> None:
    packed = layer.with_suffix(".packed")
    files.copy_to(name, packed, limit)
    with packed.open("rb") as reading:
        if packed_digest:
            _check_digest(name, packed_digest, f"sha256:{hashlib.file_digest(reading, 'sha256').hexdigest()}")
            reading.seek(0)
        found = _decompress(reading, layer, limit)
    packed.unlink()
    _check_digest(name, digest, found)


def _decompress(reading: IO[bytes], target: Path, limit: int = MAX_IMAGE_BYTES) -> str:
    """Writes the uncompressed bytes to `target`. Returns their digest."""
    size = os.fstat(reading.fileno()).st_size
    digest = hashlib.sha256()
    written = 0
    with _open_uncompressed(reading) as plain, target.open("xb") as writing:
        while chunk := plain.read(_CHUNK):
            written += len(chunk)
            if written > limit or (written > _RATIO_FROM and written > size * _MAX_RATIO):
                raise errors.TooLarge(f"the image is larger than {limit / GIB:.0f} GiB, or a bomb: {size} bytes of it")
            digest.update(chunk)
            writing.write(chunk)
    return f"sha256:{digest.hexdigest()}"


@contextlib.contextmanager
def _open_uncompressed(reading: IO[bytes]) -> Iterator[IO[bytes]]:
    magic = reading.read(4)
    reading.seek(0)
    try:
        if magic[:2] == b"\x1f\x8b":
            yield gzip.GzipFile(fileobj=reading)  # type: ignore[misc]  # it reads like one
        elif magic == b"\x28\xb5\x2f\xfd":
            with _start_zstd(reading) as process:
                assert process.stdout is not None
                yield process.stdout
                if process.wait() != 0:
                    raise errors.InvalidRequest("a layer of the image is damaged: zstd cannot read it")
        else:
            yield reading
    except (zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise errors.InvalidRequest(f"a layer of the image is damaged: {error}") from None


@contextlib.contextmanager
def _start_zstd(reading: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    program = shutil.which("zstd")
    if program is None:
        raise errors.InvalidRequest("a layer of the image is compressed by zstd: install the program zstd")
    command = [program, "--decompress", "--stdout", "--quiet"]
    process = subprocess.Popen(command, stdin=reading, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with process:
        try:
            yield process
        finally:
            process.kill()


# -- a root directory


def _pack_root(directory: Path, scratch: Path) -> ImageLayers:
    """As an image of one layer. Follows no link, and no other program that changes the directory leads it out."""
    if not any((directory / name).is_dir() for name in ("bin", "usr")):
        raise errors.InvalidRequest(
            f"{directory} is neither an OCI layout nor a root directory: it has no bin and no usr"
        )
    layer = scratch / "layer-0"
    with tarfile.open(layer, "x:", format=tarfile.PAX_FORMAT) as archive:
        _pack_files(archive, directory)
    with layer.open("rb") as reading:
        digest = hashlib.file_digest(reading, "sha256").hexdigest()
    return ImageLayers("", f"sha256:{digest}", (), [layer])


def _pack_files(archive: tarfile.TarFile, directory: Path) -> None:
    known: dict[tuple[int, int], str] = {}  # files with several names
    top = os.fspath(directory)
    files = size = 0
    for path, directories, names, here in os.fwalk(directory, onerror=_refuse_unreadable, follow_symlinks=False):
        inside = os.path.relpath(path, top)
        directories.sort()
        if inside == ".":
            directories[:] = [name for name in directories if name not in _SKIPPED]
        for name in sorted([*names, *directories]):
            member = _describe_file(here, name, f"{inside}/{name}".removeprefix("./"), known)
            files, size = files + 1, size + member.size
            if files > MAX_IMAGE_FILES or size > MAX_IMAGE_BYTES:
                raise errors.TooLarge(f"an image can hold {MAX_IMAGE_FILES} files and {MAX_IMAGE_BYTES // GIB} GiB")
            _pack_file(archive, member, here, name)
            archive.members = []  # type: ignore[attr-defined]  # else all of them are kept


def _refuse_unreadable(error: OSError) -> NoReturn:
    raise error


def _describe_file(here: int, name: str, path: str, known: dict[tuple[int, int], str]) -> tarfile.TarInfo:
    status = os.stat(name, dir_fd=here, follow_symlinks=False)
    member = tarfile.TarInfo(path)
    member.mode = stat.S_IMODE(status.st_mode)
    key = (status.st_dev, status.st_ino)
    if stat.S_ISDIR(status.st_mode):
        member.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=here)
    elif not stat.S_ISREG(status.st_mode):
        raise errors.InvalidRequest(f"the directory has a device, a pipe or a socket: {path[:200]!r}")
    elif key in known:
        member.type, member.linkname = tarfile.LNKTYPE, known[key]
    else:
        member.size = status.st_size
        if status.st_nlink > 1:
            known[key] = path
    return member


def _pack_file(archive: tarfile.TarFile, member: tarfile.TarInfo, here: int, name: str) -> None:
    if not member.isreg():
        archive.addfile(member)
        return
    with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here), "rb") as file:
        archive.addfile(member, file)
