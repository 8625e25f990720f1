"""The Python of an imported image: its own, found without running it; or the host's, made to run beside any system."""

from __future__ import annotations

import hashlib
import os
import re
import struct
import sysconfig
from pathlib import Path
from typing import NamedTuple

from cloche import errors
from cloche.image_layout import PRIVATE_LOADER
from cloche.templates.image_tree import ImageNode, ImageTree
from cloche.templates.pythons import OLDEST_PYTHON

_PROGRAM = re.compile(r"python3\.(\d+)")
_VERSION = re.compile(rb"\0(3\.\d+\.\d+)\0")
_MAX_PROGRAM_BYTES = 128 << 20
_MACHINES = {"x86_64": 62, "aarch64": 183}


class ImagePython(NamedTuple):
    version: str  # "3.13.5"; "3.13" where the program does not tell
    prefix: str  # in the image
    site: str  # of a virtual environment that comes first on its PATH; empty: there is none
    packages: frozenset[str]  # the names of the packages that it has, normalized

    @property
    def minor_version(self) -> str:
        return ".".join(self.version.split(".")[:2])


def find_image_python(tree: ImageTree, search_path: str) -> ImagePython | None:
    """The CPython 3.10 or newer that is first on the image's PATH. Nothing of the image is run."""
    for directory in dict.fromkeys((*search_path.split(":"), "/usr/local/bin", "/usr/bin")):
        found = tree.find(f"{directory}/python3")
        if found is not None and directory.startswith("/"):
            python = _describe_python(tree, directory, *found)
            if python is not None:
                return python
    return None


def _describe_python(tree: ImageTree, directory: str, program: ImageNode, path: str) -> ImagePython | None:
    match = _PROGRAM.fullmatch(os.path.basename(path))
    prefix = os.path.dirname(os.path.dirname(path))
    if match is None or (3, int(match[1])) < OLDEST_PYTHON or not _is_program(tree, program):
        return None
    minor = f"3.{match[1]}"
    if not prefix or tree.find(f"{prefix}/lib/python{minor}/os.py") is None:
        return None
    site = ""
    if tree.find(f"{directory}/../pyvenv.cfg") is not None:
        site = os.path.normpath(f"{directory}/../lib/python{minor}/site-packages")
    libraries = [tree.find(f"{place}/libpython{minor}.so.1.0") for place in (f"{prefix}/lib", "/usr/lib")]
    candidates = [program, *(library[0] for library in libraries if library)]
    versions = [_read_version(tree, each, minor) for each in candidates]
    version = next(filter(None, versions), minor)
    return ImagePython(version, prefix, site, _list_packages(tree, prefix, minor, site))


def _is_program(tree: ImageTree, node: ImageNode) -> bool:
    """Whether it is an ELF file for this machine."""
    if node.kind != "file":
        return False
    head = tree.read_file(node, 20)
    machine = _MACHINES.get(os.uname().machine)
    return head[:4] == b"\x7fELF" and len(head) == 20 and machine == int.from_bytes(head[18:20], "little")


def _read_version(tree: ImageTree, node: ImageNode, minor: str) -> str | None:
    if node.kind != "file":
        return None
    versions = {match.decode() for match in _VERSION.findall(tree.read_file(node, _MAX_PROGRAM_BYTES))}
    return next((each for each in sorted(versions) if each.startswith(minor + ".")), None)


def _list_packages(tree: ImageTree, prefix: str, minor: str, site: str) -> frozenset[str]:
    packages = set()
    places = (f"{prefix}/lib/python{minor}/site-packages", "/usr/lib/python3/dist-packages", site)
    for place in filter(None, places):
        found = tree.find(place)
        for name in found[0].children if found else ():
            if match := re.fullmatch(r"([\w.]+)-[^-]+\.dist-info", name):
                packages.add(re.sub(r"[-_.]+", "-", match[1]).lower())
    return frozenset(packages)


# A program of the host's, for a root that may lack the host's libraries, or have others.

_PT_DYNAMIC, _PT_INTERP = 2, 3
_DT_NULL, _DT_RPATH, _DT_RUNPATH = 0, 15, 29
_LIBRARIES = b"$ORIGIN/sys\0"  # a link beside the program: see `make_private_program`


def make_private_program(source: Path, target: Path, libraries: str) -> str:
    """Copies a Python to `env/bin/python3.X`, in place of the links there, so that its loader is `PRIVATE_LOADER`, and
    that looks for libraries in `libraries` first, both as sandboxes see them.
    Returns the path of its loader on this host. Raises TemplateBuildFailed.

    Where the libraries are is written behind the loader's name, which becomes shorter, as DT_RPATH: that holds for the
    libraries of all modules, too, and no variable of the environment comes before it.
    """
    program = bytearray(source.read_bytes())
    segments = _program_headers(program, source)
    if _PT_INTERP not in segments or _PT_DYNAMIC not in segments:
        raise errors.TemplateBuildFailed(f"{source} is linked statically: images without Python need another one")
    offset, address, size = segments[_PT_INTERP]
    loader = program[offset : offset + size].rstrip(b"\0").decode()
    names = PRIVATE_LOADER.encode() + b"\0" + _LIBRARIES
    if len(names) > size:
        raise errors.TemplateBuildFailed(
            f"{source} has an unusual loader ({loader}): images without Python need another"
        )
    program[offset : offset + size] = names.ljust(size, b"\0")
    _set_library_path(program, segments[_PT_DYNAMIC], address + len(PRIVATE_LOADER) + 1, source)
    for name in ("python", "python3", target.name):
        (target.parent / name).unlink()
        (target.parent / name).symlink_to(target.name)
    target.unlink()
    target.write_bytes(program)
    target.chmod(0o755)
    (target.parent / "sys").symlink_to(libraries)
    return loader


def copy_loader(source: Path, target: Path, libraries: str) -> str:
    """Copies the host's loader so that it looks for libraries in `libraries`, and not where the image has its own.
    Returns the digest of the host's.

    DT_RPATH of the program does not hold for modules that have a path of their own. Paths in the loader keep their
    length: where one is too short for ours, DT_RPATH has to do.
    """
    loader = source.read_bytes()
    own = libraries.encode()
    changed = loader.replace(b"\0/etc/ld.so.cache\0", b"\0/opt/cloche/none\0")
    for place in (f"/usr{_system_directory()}/", f"{_system_directory()}/", "/usr/lib64/", "/lib64/"):
        if len(place) >= len(own):
            changed = changed.replace(b"\0" + place.encode() + b"\0", b"\0" + own.ljust(len(place), b"/") + b"\0")
    target.write_bytes(changed)
    target.chmod(0o755)
    return hashlib.sha256(loader).hexdigest()


def _system_directory() -> str:
    return f"/lib/{sysconfig.get_config_var('MULTIARCH') or f'{os.uname().machine}-linux-gnu'}"


def _program_headers(program: bytearray, source: Path) -> dict[int, tuple[int, int, int]]:
    """Offset, address and size of segments by their types."""
    if program[:6] != b"\x7fELF\x02\x01":
        raise errors.TemplateBuildFailed(f"{source} is no 64-bit ELF program: images without Python need one")
    (start,) = struct.unpack_from("<Q", program, 32)
    step, count = struct.unpack_from("<HH", program, 54)
    segments = {}
    for number in range(count):
        kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", program, start + number * step)
        segments[kind] = (offset, address, size)
    return segments


def _set_library_path(program: bytearray, dynamic: tuple[int, int, int], address: int, source: Path) -> None:
    """Makes the entry DT_RPATH name the string at that address: in place of the one there is, or of a spare one."""
    offset, _, size = dynamic
    entries = [struct.unpack_from("<QQ", program, at) for at in range(offset, offset + size, 16)]
    tags = [tag for tag, _ in entries]
    strings = next(value for tag, value in entries if tag == 5)  # DT_STRTAB
    end = tags.index(_DT_NULL)
    place = next((at for at, tag in enumerate(tags[:end]) if tag in (_DT_RPATH, _DT_RUNPATH)), end)
    if place == end and end + 1 >= len(tags):
        raise errors.TemplateBuildFailed(f"{source} has no room for the path of its libraries")
    for at, tag in enumerate(tags[:end]):
        if tag == _DT_RUNPATH:  # it would make DT_RPATH void
            struct.pack_into("<Q", program, offset + at * 16, _DT_RPATH)
    struct.pack_into("<QQ", program, offset + place * 16, _DT_RPATH, (address - strings) % (1 << 64))
