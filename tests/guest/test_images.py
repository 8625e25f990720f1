"""Images of files: all that can be in a directory comes back as it was, and no bytes lead out of the places."""

from __future__ import annotations

import errno
import os
import random
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cloche.guest.files import image_format as form
from cloche.guest.files import ranges
from cloche.guest.files.image_reader import ImageReader
from cloche.guest.files.image_writer import ImageWriter


def image_of(*places: Path) -> bytes:
    """Places are named by their numbers."""
    fd = os.memfd_create("image")
    try:
        ImageWriter(fd, [(str(number), str(path)) for number, path in enumerate(places)]).write()
        return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)


def unpack(image: bytes, *places: Path) -> None:
    """Raises what the fork of init would end with."""
    read, write = os.pipe()
    feeding = threading.Thread(target=_feed, args=(write, image))
    feeding.start()
    umask = os.umask(0)
    try:
        ImageReader(read, {str(number): str(path) for number, path in enumerate(places)}).read()
    finally:
        os.umask(umask)
        os.close(read)
        feeding.join()


@contextmanager
def like_a_fork() -> Iterator[None]:
    """What is left open is closed, as when a fork ends."""
    before = open_files()
    try:
        yield
    finally:
        for fd in open_files() - before:
            os.close(fd)


def open_files() -> set[int]:
    listed = {int(name) for name in os.listdir("/proc/self/fd")}
    return {fd for fd in listed if os.path.lexists(f"/proc/self/fd/{fd}")}


def _feed(pipe: int, image: bytes) -> None:
    try:
        rest = memoryview(image)
        while rest:
            rest = rest[os.write(pipe, rest) :]
    except BrokenPipeError:
        pass
    finally:
        os.close(pipe)


def tree(top: Path) -> dict:
    """All that is said of each entry; links that share one say so."""
    found, known = {}, {}
    waiting = [os.fsencode(top)]
    while waiting:
        path = waiting.pop()
        about = os.lstat(path)
        told = [about.st_mode, about.st_uid, about.st_gid, about.st_mtime_ns]
        if stat.S_ISDIR(about.st_mode):
            waiting += [path + b"/" + os.fsencode(name) for name in os.listdir(path)]
        elif stat.S_ISLNK(about.st_mode):
            told.append(os.readlink(path))
        elif stat.S_ISREG(about.st_mode):
            told += [about.st_size, about.st_blocks, Path(os.fsdecode(path)).read_bytes()]
            told.append({name: os.getxattr(path, name) for name in os.listxattr(path)})
        told.append(known.setdefault(about.st_ino, len(known)) if about.st_nlink > 1 else None)
        found[path[len(os.fsencode(top)) :]] = told
        if path == os.fsencode(top):
            found[b""] = told[:4]
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    (tmp_path / "other").mkdir()
    return tmp_path / "other"


def fill(place: Path) -> None:
    inner = place / "a" / "b"
    inner.mkdir(parents=True)
    (place / "empty").mkdir()
    (place / "empty file").touch()
    (inner / "text").write_text("hello")
    (inner / "big").write_bytes(os.urandom(form.INLINE_BYTES + 12345))
    (inner / "just").write_bytes(os.urandom(form.INLINE_BYTES))
    os.link(inner / "text", place / "same")
    os.link(inner / "big", place / "empty" / "same big")
    (place / "leads").symlink_to("/etc/passwd")
    (place / "nowhere").symlink_to("x" * 4000)
    os.link(place / "leads", place / "leads too", follow_symlinks=False)
    os.mkfifo(place / "pipe", 0o640)
    os.link(place / "pipe", place / "pipe too")
    with open(place / "holes", "wb") as file:
        file.seek(10 << 20)
        file.write(b"middle")
        file.truncate(20 << 20)
    with open(place / "hole", "wb") as file:
        file.truncate(1 << 40)
    (place / os.fsdecode(b"\xff\xfe\n'\"")).write_bytes(b"odd")
    (place / ("n" * 255)).write_bytes(b"long")
    (place / "read only").mkdir()
    (place / "read only" / "x").write_bytes(b"x")
    os.chmod(place / "read only" / "x", 0o400)
    os.chmod(place / "same", 0o4751)
    os.chmod(place / "read only", 0o555)
    os.utime(place / "same", ns=(1, 2))
    os.utime(place / "empty", ns=(3, 4_000_000_007))
    os.utime(place / "leads", ns=(5, 6), follow_symlinks=False)
    os.chmod(place, 0o1770)


def test_everything_is_as_it_was(place, other):
    fill(place)
    (other / "old").mkdir()
    (other / "old" / "file").touch()
    inode = other.stat().st_ino
    before = tree_without_contents_of_holes(place)
    unpack(image_of(place), other)
    assert tree_without_contents_of_holes(other) == before
    assert other.stat().st_ino == inode  # programs have it open
    assert image_of(other) == image_of(other)
    assert os.lstat(other / "same").st_nlink == 2


def tree_without_contents_of_holes(top: Path) -> dict:
    hole = (top / "hole").stat()
    assert (hole.st_size, hole.st_blocks) == (1 << 40, 0)
    with open(top / "hole", "r+b") as file:
        file.truncate(0)
    os.utime(top / "hole", ns=(hole.st_atime_ns, hole.st_mtime_ns))
    found = tree(top)
    with open(top / "hole", "r+b") as file:
        file.truncate(1 << 40)
    os.utime(top / "hole", ns=(hole.st_atime_ns, hole.st_mtime_ns))
    return found


def test_attributes_and_access_lists_come_back(place, other):
    (place / "file").write_bytes(b"x")
    (place / "directory").mkdir()
    try:
        for name in ("file", "directory"):
            os.setxattr(place / name, "user.a", b"\0value" * 500)
            os.setxattr(place / name, "user.empty", b"")
    except OSError:
        pytest.skip("this file system has no attributes")
    os.chmod(place / "file", 0o444)
    before = tree(place)
    unpack(image_of(place), other)
    assert tree(other) == before
    assert os.getxattr(other / "directory", "user.a") == b"\0value" * 500


def test_sockets_and_unfinished_writes_are_left_out(place, other):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "socket"))
    (place / ".cloche-0123456789abcdef").write_bytes(b"half")
    (place / ".cloche-mine").write_bytes(b"whole")
    unpack(image_of(place), other)
    assert os.listdir(other) == [".cloche-mine"]


def test_a_socket_of_the_new_sandbox_stays(place, other):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(other / "socket"))
        unpack(image_of(place), other)
        assert os.listdir(other) == ["socket"]


def test_a_place_in_another_is_saved_once(place, other):
    (place / "inner").mkdir()
    (place / "inner" / "file").touch()
    (other / "inner").mkdir()
    unpack(image_of(place, place / "inner"), other, other / "inner")
    assert tree(other) == tree(place)


def test_a_tree_deeper_than_directories_are_kept_open(place, other):
    depth = 700
    here = os.open(place, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("first", os.O_CREAT, dir_fd=here))
    os.link("first", "second", src_dir_fd=here, dst_dir_fd=here)
    os.close(here)
    image = image_of(place)
    unpack(image, other)
    assert image_of(other) == image
    for path in (other, place):
        unpack(head(form.END, magic=True), path)
        assert os.listdir(path) == []


def test_files_that_change_meanwhile_still_make_an_image(place, other):
    (place / "big").write_bytes(os.urandom(3 << 20))
    over = threading.Event()

    def change() -> None:
        number = 0
        while not over.is_set():
            number += 1
            with open(place / "big", "r+b") as file:
                file.truncate((number % 7) * 300_000)
                file.truncate(3 << 20)
            for name in (f"d{number % 5}", f"e{number % 3}"):
                (place / name).mkdir(exist_ok=True)
                (place / name / "x").write_bytes(b"x" * (number % 9000))
                os.rename(place / name / "x", place / f"{name}.moved")
                os.rename(place / name, place / f"{name}-{number % 2}")
                os.rmdir(place / f"{name}-{number % 2}")

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(40):
            unpack(image_of(place), other)
    finally:
        over.set()
        changing.join()
    assert (other / "big").stat().st_size <= 3 << 20


# --- hostile bytes


def head(
    kind: int, name: bytes = b"", *, size: int = 0, flags: int = 0, attributes: int = 0, magic: bool = False
) -> bytes:
    ids = (os.getuid(), os.getgid())
    packed = form.HEAD.pack(kind, flags, 0o755, *ids, 0, 0, 0, 0, size, len(name), attributes) + name
    return form.MAGIC * magic + packed


START = head(form.PLACE, b"0", magic=True)
FINISH = head(form.LEAVE) + head(form.END)


def a_file(name: bytes, content: bytes = b"evil") -> bytes:
    return head(form.FILE, name, size=len(content)) + content


def a_symlink(name: bytes, target: bytes, flags: int = 0) -> bytes:
    return head(form.SYMLINK, name, size=len(target), flags=flags) + target


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("as it was")
    return outside


HOSTILE = {
    "up": a_file(b".."),
    "here": head(form.DIRECTORY, b"."),
    "up by a directory": head(form.DIRECTORY, b"..") + a_file(b"precious"),
    "a path": a_file(b"../outside/precious"),
    "an absolute path": a_file(b"/tmp/evil"),
    "a NUL": a_file(b"a\0b"),
    "no name": a_file(b""),
    "a long name": a_file(b"n" * 300),
    "a place in a place": head(form.PLACE, b"0"),
    "an unknown kind": head(77, b"x"),
    "a device": head(10, b"null"),
    "a link to nothing": head(form.LINK, b"x", size=0),
    "a link far away": head(form.LINK, b"x", size=2**64 - 1),
    "an absurd content": head(form.FILE, b"x", size=2**60) + b"x",
    "an absurd target": head(form.SYMLINK, b"x", size=2**40),
    "an absurd file": head(form.PIECES, b"x", size=2**64 - 1),
    "a piece outside": head(form.PIECES, b"x", size=10) + form.PIECE.pack(8, 4) + b"xxxx",
    "a piece far outside": head(form.PIECES, b"x", size=10) + form.PIECE.pack(2**64 - 1, 2**64 - 1),
    "many attributes": head(form.FILE, b"x", attributes=65535) + form.ATTRIBUTE.pack(255, 2**32 - 1),
    "a foreign attribute": head(form.FILE, b"x", attributes=1)
    + form.ATTRIBUTE.pack(16, 1)
    + b"security.selinux"
    + b"x",
    "a NUL in an attribute": head(form.FILE, b"x", attributes=1) + form.ATTRIBUTE.pack(8, 1) + b"user.\0xy" + b"x",
    "left too often": head(form.LEAVE) + head(form.LEAVE),
    "the end in the middle": head(form.END),
    "nothing more": b"",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_image_is_refused(place, outside, what):
    with pytest.raises((OSError, ValueError)) as refused:
        unpack(START + HOSTILE[what] + FINISH * (what not in ("the end in the middle", "nothing more")), place)
    if isinstance(refused.value, OSError):
        assert refused.value.errno in (errno.EBADMSG, errno.EINVAL, errno.EFBIG)
    assert (outside / "precious").read_text() == "as it was"
    assert os.listdir(outside) == ["precious"]


@pytest.mark.parametrize(
    "then",
    [
        head(form.DIRECTORY, b"door") + a_file(b"precious") + head(form.LEAVE),
        a_file(b"door"),
        head(form.FIFO, b"door"),
        head(form.PIECES, b"door", size=4) + form.PIECE.pack(0, 4) + b"evil" + form.PIECE.pack(4, 0),
        head(form.LINK, b"through", size=0),
        head(form.LINK, b"door", size=0),
    ],
    ids=["directory", "file", "fifo", "pieces", "link", "link to itself"],
)
@pytest.mark.parametrize("target", ["outside", "outside/precious"])
def test_no_symlink_of_the_same_image_leads_out(place, outside, then, target):
    door = a_symlink(b"door", os.fsencode(outside.parent / target), flags=form.SHARED)
    try:
        unpack(START + door + then + FINISH, place)
    except OSError:
        pass
    assert (outside / "precious").read_text() == "as it was"
    assert os.listdir(outside) == ["precious"]
    assert (outside / "precious").stat().st_nlink == 1


def test_a_shared_name_that_became_a_way_out_is_not_followed(place, outside):
    """The directory of a shared file is replaced by a symlink before the link is made."""
    image = START + head(form.DIRECTORY, b"d") + head(form.FILE, b"precious", size=1, flags=form.SHARED) + b"x"
    image += head(form.LEAVE) + a_symlink(b"d", os.fsencode(outside)) + head(form.LINK, b"stolen", size=0) + FINISH
    with pytest.raises(OSError):
        unpack(image, place)
    assert (outside / "precious").stat().st_nlink == 1


def test_an_image_cut_short_anywhere_is_refused(place, other):
    (place / "a").mkdir()
    (place / "a" / "file").write_bytes(b"x" * 100)
    (place / "big").write_bytes(os.urandom(form.INLINE_BYTES + 1))
    (place / "leads").symlink_to("a")
    image = image_of(place)
    cuts = {*range(0, 400, 7), *range(0, len(image), 9973), *range(len(image) - 200, len(image), 11)}
    for cut in cuts:
        with pytest.raises(OSError), like_a_fork():
            unpack(image[:cut], other)


def test_an_image_with_changed_bytes_makes_nothing_outside(place, other, outside):
    fill(place)
    (place / "out").symlink_to(outside)
    (place / "holes").unlink()
    (place / "a" / "b" / "big").unlink()
    (place / "a" / "b" / "just").unlink()
    (place / "empty" / "same big").unlink()
    os.chmod(place, 0o700)
    image = image_of(place)
    chance = random.Random(7)
    refused = 0
    for _ in range(150):
        changed = bytearray(image)
        for _ in range(chance.choice((1, 1, 2, 8))):
            changed[chance.randrange(len(form.MAGIC), len(image))] = chance.choice((0, 1, 255, chance.randrange(256)))
        try:
            with like_a_fork():
                unpack(bytes(changed), other)
        except (OSError, ValueError, OverflowError):
            refused += 1
        os.chmod(other, 0o700)
    assert refused > 15
    assert (outside / "precious").read_text() == "as it was"
    assert os.listdir(outside) == ["precious"]
    assert sorted(os.listdir(other.parent)) == ["other", "outside", "place"]


def test_a_hole_that_appears_while_a_file_is_read_does_not_end_the_file(tmp_path: Path, monkeypatch):
    """A piece of no length is the end: of what comes behind it everything would be misread."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    content = os.urandom(300_000)
    (source / "f").write_bytes(content)
    (source / "g").write_bytes(b"behind it")
    real, calls = ranges.next_hole, []

    def hole(fd: int, at: int, size: int) -> int:
        calls.append(at)
        return at if len(calls) == 1 else real(fd, at, size)

    monkeypatch.setattr(ranges, "next_hole", hole)
    unpack(image_of(source), target)
    assert (target / "g").read_bytes() == b"behind it"
    assert (target / "f").stat().st_size == len(content)
    assert (target / "f").read_bytes()[1:] == content[1:]


def test_a_file_that_moves_while_all_is_read_takes_its_space_once(tmp_path: Path):
    source, target = tmp_path / "source", tmp_path / "target"
    target.mkdir()
    for name in ("a", "b"):
        (source / name).mkdir(parents=True)
    (source / "a" / "f").write_bytes(os.urandom(200_000))
    (source / "b" / "f").write_bytes(os.urandom(200_000))

    class Moving(ImageWriter):
        """The first file that is read moves to the other directory, before that one is read."""

        moved = False

        def _write_file(self, name: str) -> None:
            super()._write_file(name)
            if not self.moved:
                self.moved = True
                here = Path(os.readlink(f"/proc/self/fd/{self._way.fd}"))
                os.rename(here / name, source / ("b" if here.name == "a" else "a") / "moved")

    fd = os.memfd_create("image")
    Moving(fd, [("0", str(source))]).write()
    image = os.pread(fd, os.fstat(fd).st_size, 0)
    os.close(fd)
    assert len(image) < 450_000
    unpack(image, target)
    files = [path for path in target.rglob("*") if path.is_file()]
    assert len(files) == 3 and len({path.stat().st_ino for path in files}) == 2
