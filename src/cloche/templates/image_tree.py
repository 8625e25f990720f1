"""The files of an image: its layers, merged in memory, and then written to a new directory.

Layers are hostile. A link of theirs is followed in memory only, where nothing lies beside the image; on disk there is
none until every directory and file is written. Members of archives are read by a parser of our own: that of the
standard library reads headers of any size, and loops for ever on some.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import IO, Literal, NamedTuple

from cloche import errors
from cloche.model import GIB, KIB

MAX_IMAGE_BYTES = 64 * GIB
MAX_IMAGE_FILES = 500_000
MAX_DEPTH = 64
MAX_PATH = 2048
_MAX_HEADER_BYTES = 64 * KIB
_MAX_HEADERS = 8  # of one member
_MAX_LINKS = 16  # on the way to one path
_BLOCK = 512
_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"

MemberKind = Literal["file", "directory", "symlink", "hardlink", "device"]
_KINDS: dict[bytes, MemberKind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hardlink",
    b"2": "symlink",
    b"5": "directory",
    b"3": "device",
    b"4": "device",
    b"6": "device",  # a pipe
}


class TarMember(NamedTuple):
    name: str
    kind: MemberKind
    mode: int
    size: int
    target: str
    offset: int  # of its bytes in the archive


def read_members(file: IO[bytes]) -> Iterator[TarMember]:
    """The members of an uncompressed tar. Raises InvalidRequest for one that is damaged, or of unknown kind."""
    for _ in range(MAX_IMAGE_FILES):
        member = _read_member(file)
        if member is None:
            return
        after = member.offset + -(-member.size // _BLOCK) * _BLOCK
        yield member
        file.seek(after)
    raise errors.TooLarge(f"an archive of an image can hold {MAX_IMAGE_FILES} files")


def _read_member(file: IO[bytes]) -> TarMember | None:
    extended: dict[str, str] = {}
    for _ in range(_MAX_HEADERS):
        block = file.read(_BLOCK)
        if not block.strip(b"\0") and len(block) in (0, _BLOCK):
            return None
        _check_block(block)
        kind, size = block[156:157], _parse_number(block[124:136])
        if kind in (b"x", b"g", b"L", b"K"):
            extended |= _parse_extension(kind, _read_header(file, size))
            continue
        return _make_member(block, kind, extended, size, file.tell())
    raise errors.InvalidRequest(f"the archive has a member with more than {_MAX_HEADERS} headers")


def _check_block(block: bytes) -> None:
    if len(block) < _BLOCK:
        raise errors.InvalidRequest("the archive is cut off")
    if sum(block[:148]) + 8 * 32 + sum(block[156:]) != _parse_number(block[148:156]):
        raise errors.InvalidRequest("the archive is damaged: a header has a wrong checksum")


def _parse_number(field: bytes) -> int:
    if field[0] & 0x80:
        number = int.from_bytes(field[1:], "big")
        if field[0] != 0x80 or number > MAX_IMAGE_BYTES:
            raise errors.InvalidRequest("the archive has a number that no file has")
        return number
    digits = field.partition(b"\0")[0].strip() or b"0"
    if digits.strip(b"01234567"):
        raise errors.InvalidRequest("the archive is damaged: a header has a number that is none")
    return int(digits, 8)


def _read_header(file: IO[bytes], size: int) -> bytes:
    if size > _MAX_HEADER_BYTES:
        raise errors.InvalidRequest(f"the archive has a header of {size} bytes: {_MAX_HEADER_BYTES} are allowed")
    content = file.read(-(-size // _BLOCK) * _BLOCK)
    if len(content) < size:
        raise errors.InvalidRequest("the archive is cut off")
    return content[:size]


def _parse_extension(kind: bytes, content: bytes) -> dict[str, str]:
    """Fields of the next member by their names in PAX headers."""
    if kind in (b"L", b"K"):
        return {"path" if kind == b"L" else "linkpath": os.fsdecode(content.rstrip(b"\0"))}
    fields = {}
    while content:
        length, _, _ = content.partition(b" ")
        if not length.isdigit() or len(length) > 6 or not len(length) + 1 < int(length) <= len(content):
            raise errors.InvalidRequest("the archive is damaged: a header's field has a wrong length")
        key, _, value = content[len(length) + 1 : int(length) - 1].partition(b"=")
        fields[key.decode("utf-8", "replace")] = os.fsdecode(value)
        content = content[int(length) :]
    if any(key.startswith("GNU.sparse") for key in fields):
        raise errors.InvalidRequest("the archive has a sparse file: make it without (tar without --sparse)")
    return {key: fields[key] for key in ("path", "linkpath", "size") if key in fields and kind == b"x"}


def _make_member(block: bytes, kind: bytes, extended: dict[str, str], size: int, offset: int) -> TarMember:
    name = os.fsdecode(block[:100].partition(b"\0")[0])
    if block[257:263] == b"ustar\0" and (prefix := block[345:500].partition(b"\0")[0]):
        name = f"{os.fsdecode(prefix)}/{name}"
    name = extended.get("path", name)
    if kind not in _KINDS:
        raise errors.InvalidRequest(f"the archive has a member of a kind that no image has: {name[:200]!r}")
    meant = _KINDS[kind]
    if meant == "file" and name.endswith("/"):
        meant = "directory"
    if "size" in extended:
        if not extended["size"].isascii() or not extended["size"].isdigit() or len(extended["size"]) > 15:
            raise errors.InvalidRequest("the archive has a size that is none")
        size = int(extended["size"])
    target = extended.get("linkpath", os.fsdecode(block[157:257].partition(b"\0")[0]))
    return TarMember(name, meant, _parse_number(block[100:108]), size if meant == "file" else 0, target, offset)


def split_path(path: str) -> list[str]:
    """The names in a path of an archive. Raises InvalidRequest for one that leads out of it, or is too long."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or "\0" in path:
        raise errors.InvalidRequest(f"the archive has a path that leads out of it: {path[:200]!r}")
    if len(parts) > MAX_DEPTH or len(path) > MAX_PATH or any(len(os.fsencode(part)) > 255 for part in parts):
        raise errors.InvalidRequest(f"the archive has a path that is too long: {path[:200]!r}")
    return parts


class ImageNode:
    """A file, directory or symlink. Hard links are one node with several names."""

    __slots__ = ("children", "kind", "layer", "mode", "offset", "size", "target", "written")

    def __init__(self, kind: Literal["file", "directory", "symlink"], layer: int, mode: int = 0o755):
        self.kind = kind
        self.layer = layer  # the number of the layer that it is from
        self.mode = mode
        self.children: dict[str, ImageNode] = {}
        self.target = ""
        self.size = 0
        self.offset = 0
        self.written = ""  # its first path on disk


class ImageTree:
    """The merged layers. Holds their files open until it is closed."""

    def __init__(self) -> None:
        self.root = ImageNode("directory", -1)
        self._layers: list[IO[bytes]] = []
        self._files = 0
        self._bytes = 0

    def close(self) -> None:
        for layer in self._layers:
            layer.close()

    def add_layer(self, path: str | os.PathLike[str]) -> None:
        """Merges an uncompressed layer over those before. Raises InvalidRequest, TooLarge."""
        file = open(path, "rb")  # noqa: SIM115 - until `close`
        self._layers.append(file)
        number = len(self._layers) - 1
        members = []
        for member in read_members(file):
            members.append((split_path(member.name), member))
            self._files += 1
            self._bytes += member.size
            if self._files > MAX_IMAGE_FILES or self._bytes > MAX_IMAGE_BYTES:
                raise errors.TooLarge(f"an image can hold {MAX_IMAGE_FILES} files and {MAX_IMAGE_BYTES // GIB} GiB")
        for parts, _ in members:  # they hide files of the layers below only, wherever in the layer they stand
            if parts and parts[-1].startswith(_WHITEOUT):
                self._hide(parts)
        for parts, member in members:
            if parts and not parts[-1].startswith(_WHITEOUT):
                self._add(parts, member, number)

    def _hide(self, parts: list[str]) -> None:
        directory = self._walk(parts[:-1])
        hidden = parts[-1].removeprefix(_WHITEOUT)
        if hidden in ("", ".", ".."):
            raise errors.InvalidRequest(f"the archive has a whiteout of nothing: {'/'.join(parts)[:200]!r}")
        if directory is None:
            return
        if parts[-1] == _OPAQUE:
            directory.children.clear()
        elif not hidden.startswith(_WHITEOUT):  # which are notes of aufs
            directory.children.pop(hidden, None)

    def _add(self, parts: list[str], member: TarMember, layer: int) -> None:
        if member.kind == "device":
            if parts[0] == "dev":  # sandboxes have a /dev of their own
                return
            raise errors.InvalidRequest(f"the archive has a device or a pipe: {member.name[:200]!r}")
        directory = self._walk(parts[:-1], layer)
        if directory is None:
            raise errors.InvalidRequest(f"the archive has {member.name[:200]!r} in no directory")
        there = directory.children.get(parts[-1])
        if there is not None and there.kind == member.kind == "directory":
            there.mode, there.layer = member.mode, layer
            return
        if there is not None and there.layer == layer and member.kind != "hardlink":
            raise errors.InvalidRequest(f"the archive has {member.name[:200]!r} twice")
        directory.children[parts[-1]] = self._make_node(member, layer)

    def _make_node(self, member: TarMember, layer: int) -> ImageNode:
        if member.kind == "hardlink":
            parts = split_path(member.target)
            directory = self._walk(parts[:-1])
            node = directory.children.get(parts[-1]) if directory and parts else None
            if node is None or node.kind == "directory":
                raise errors.InvalidRequest(f"the archive has a hard link to no file of it: {member.name[:200]!r}")
            return node
        assert member.kind != "device"
        node = ImageNode(member.kind, layer, member.mode)
        node.size, node.offset, node.target = member.size, member.offset, member.target
        if member.kind == "symlink" and (not node.target or "\0" in node.target or len(node.target) > 4000):
            raise errors.InvalidRequest(f"the archive has a symlink to nothing: {member.name[:200]!r}")
        return node

    def _walk(self, parts: Sequence[str], layer: int | None = None) -> ImageNode | None:
        """The directory at that path, by the image's own links. With `layer`, missing directories are made."""
        found = self._follow(parts, layer)
        return found[0] if found is not None and found[0].kind == "directory" else None

    def find(self, path: str) -> tuple[ImageNode, str] | None:
        """The file or directory at an absolute path of the image, by the image's own links, and its real path."""
        return self._follow([part for part in path.split("/") if part not in ("", ".")], None)

    def _follow(self, parts: Sequence[str], layer: int | None) -> tuple[ImageNode, str] | None:
        way: list[tuple[ImageNode, str]] = [(self.root, "")]
        todo = list(reversed(parts))
        links = 0
        while todo:
            part = todo.pop()
            node, path = way[-1]
            if part == "..":
                way = way[:-1] or way
                continue
            if node.kind != "directory":
                return None
            child = node.children.get(part)
            if child is None:
                if layer is None or len(way) > MAX_DEPTH or len(path) > MAX_PATH:
                    return None
                child = node.children[part] = ImageNode("directory", layer)
            if child.kind == "symlink":
                links += 1
                if links > _MAX_LINKS:
                    return None
                way = way[:1] if child.target.startswith("/") else way
                todo.extend(part for part in reversed(child.target.split("/")) if part not in ("", "."))
                continue
            way.append((child, f"{path}/{part}"))
        return way[-1]

    def read_file(self, node: ImageNode, limit: int) -> bytes:
        """The first bytes of a file."""
        file = self._layers[node.layer]
        file.seek(node.offset)
        return file.read(min(node.size, limit))

    def make_directory(self, name: str) -> ImageNode:
        """The directory of that name in the root; anything else there is replaced."""
        there = self.root.children.get(name)
        if there is None or there.kind != "directory":
            there = self.root.children[name] = ImageNode("directory", -1)
        return there

    # -- to disk

    def write(self, directory: str | os.PathLike[str]) -> None:
        """Writes everything below the new directory. Owners, set-uid bits and times are dropped; modes become 755 or
        644."""
        os.mkdir(directory, 0o755)
        root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._write_directory(self.root, root, root, "")
            _write_symlinks(self.root, root)  # last: nothing above was written through one of them
        finally:
            os.close(root)

    def _write_directory(self, node: ImageNode, root: int, here: int, path: str) -> None:
        for name, child in node.children.items():
            if child.kind == "directory":
                os.mkdir(name, 0o755, dir_fd=here)
                inner = os.open(name, _DIRECTORY_FLAGS, dir_fd=here)
                try:
                    self._write_directory(child, root, inner, f"{path}{name}/")
                finally:
                    os.close(inner)
            elif child.kind == "file" and child.written:
                os.link(child.written, name, src_dir_fd=root, dst_dir_fd=here, follow_symlinks=False)
            elif child.kind == "file":
                self._write_file(child, name, here)
                child.written = f"{path}{name}"

    def _write_file(self, node: ImageNode, name: str, here: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o755 if node.mode & 0o111 else 0o644, dir_fd=here)
        try:
            done = 0
            while done < node.size:
                sent = os.sendfile(fd, self._layers[node.layer].fileno(), node.offset + done, node.size - done)
                if not sent:
                    raise errors.InvalidRequest(f"the archive is cut off in {name[:200]!r}")
                done += sent
        finally:
            os.close(fd)


_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _write_symlinks(node: ImageNode, here: int) -> None:
    for name, child in node.children.items():
        if child.kind == "symlink":
            os.symlink(child.target, name, dir_fd=here)
        elif child.kind == "directory":
            inner = os.open(name, _DIRECTORY_FLAGS, dir_fd=here)
            try:
                _write_symlinks(child, inner)
            finally:
                os.close(inner)
