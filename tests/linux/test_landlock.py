"""Landlock, laid for real on a child that then tries."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from cloche.linux import landlock
from cloche.linux.syscalls import PR_SET_NO_NEW_PRIVS, prctl

pytestmark = pytest.mark.skipif(landlock.abi_version() == 0, reason="this kernel has no Landlock")


def needs_abi(version: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        landlock.abi_version() < version, reason=f"needs Landlock ABI {version}, here is {landlock.abi_version()}"
    )


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A directory to be writable, and one that is not."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for place in (inside, outside):
        place.mkdir()
        (place / "file").write_text("text")
        (place / "directory").mkdir()
    return inside, outside


def behind(writable: list[str], function: Callable[[], object]) -> Callable[[], object]:
    wall = landlock.LandlockWall(writable)

    def run() -> object:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        wall.raise_wall()
        return function()

    return run


WRITES: dict[str, Callable[[Path], object]] = {
    "write": lambda place: (place / "file").write_text("new"),
    "append": lambda place: os.open(place / "file", os.O_WRONLY | os.O_APPEND),
    "create": lambda place: (place / "new").touch(),
    "make a directory": lambda place: (place / "new").mkdir(),
    "make a pipe": lambda place: os.mkfifo(place / "new"),
    "make a link": lambda place: (place / "new").symlink_to("file"),
    "bind a socket": lambda place: socket.socket(socket.AF_UNIX).bind(str(place / "new")),
    "remove": lambda place: (place / "file").unlink(),
    "remove a directory": lambda place: (place / "directory").rmdir(),
    "move": lambda place: (place / "file").rename(place / "directory" / "file"),
    "truncate": lambda place: os.truncate(place / "file", 0),
}


@pytest.mark.parametrize("action", WRITES)
def test_writing_works_inside_and_fails_outside(action: str, places: tuple[Path, Path], in_child) -> None:
    if action == "truncate" and landlock.abi_version() < 3:
        pytest.skip("needs Landlock ABI 3")
    inside, outside = places
    write = WRITES[action]
    in_child(behind([str(inside)], lambda: bool(write(inside))))
    with pytest.raises(PermissionError):
        in_child(behind([str(inside)], lambda: bool(write(outside))))


def test_reading_and_executing_work_everywhere(places: tuple[Path, Path], in_child) -> None:
    inside, outside = places

    def read() -> tuple[str, list[str], int]:
        return (outside / "file").read_text(), sorted(os.listdir(outside)), os.system("true")

    assert in_child(behind([str(inside)], read)) == ("text", ["directory", "file"], 0)


def test_nothing_is_readable_where_nothing_is_allowed(places: tuple[Path, Path], in_child) -> None:
    inside, outside = places

    def read() -> str:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        landlock.LandlockWall([], read_only=[str(inside)]).raise_wall()
        assert (inside / "file").read_text() == "text"
        return (outside / "file").read_text()

    with pytest.raises(PermissionError):
        in_child(read)


def test_the_wall_holds_for_children_too(places: tuple[Path, Path], in_child) -> None:
    inside, outside = places
    command = f"echo x > {inside}/file && ! echo x 2> /dev/null > {outside}/file"
    assert in_child(behind([str(inside), "/dev/null"], lambda: os.system(command))) == 0
    assert (outside / "file").read_text() == "text"


def test_a_move_out_of_the_writable_place_fails(places: tuple[Path, Path], in_child) -> None:
    inside, outside = places
    with pytest.raises(OSError) as caught:
        in_child(behind([str(inside)], lambda: bool((inside / "file").rename(outside / "moved"))))
    assert caught.value.errno in (errno.EACCES, errno.EXDEV)


def test_a_single_device_can_be_writable(in_child) -> None:
    in_child(behind(["/dev/null"], lambda: Path("/dev/null").write_text("x")))
    with pytest.raises(PermissionError):
        in_child(behind(["/dev/null"], lambda: Path("/dev/full").write_text("x")))


@needs_abi(5)
def test_ioctls_work_only_on_the_devices_named(in_child) -> None:
    def ioctl(path: str) -> Callable[[], bytes]:
        return lambda: fcntl.ioctl(os.open(path, os.O_RDONLY), termios.TIOCGWINSZ, b"\0" * 8)

    with pytest.raises(PermissionError):
        in_child(behind([], ioctl("/dev/zero")))
    with pytest.raises(OSError) as caught:
        in_child(behind(["/dev/zero"], ioctl("/dev/zero")))
    assert caught.value.errno == errno.ENOTTY  # the device's own answer


def test_a_missing_path_raises_and_leaks_nothing() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        landlock.LandlockWall(["/no/such/path"]).raise_wall()
    assert len(os.listdir("/proc/self/fd")) == len(before)
