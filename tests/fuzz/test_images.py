"""Images of files, which whoever owns a sandbox may have written: nothing in them leads out of the places."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import strategies as st
from tests.fuzz.mutations import EXAMPLES, holds, streams
from tests.guest.test_images import image_of, like_a_fork, unpack

from cloche.guest.files import image_format as form

NAMES = st.sampled_from([b"a", b"b", b"..", b".", b"", b"x/y", b"../x", b"/etc/x", b"\0", b"n" * 256, b"kept"])


def record(kind: int, name: bytes, size: int, rest: bytes, flags: int = 0) -> bytes:
    return form.HEAD.pack(kind, flags, 0o755, os.getuid(), os.getgid(), 1, 2, 3, 4, size, len(name), 0) + name + rest


records = st.builds(
    record,
    st.sampled_from([form.DIRECTORY, form.FILE, form.SYMLINK, form.FIFO, form.LINK, form.LEAVE, form.PLACE, 0, 77]),
    NAMES | st.binary(max_size=5),
    st.integers(0, 5) | st.sampled_from([2**63, 2**64 - 1, 4096]),
    st.sampled_from([b"", b"..", b"/etc", b"../..", b"../outside"]) | st.binary(max_size=6),
    st.sampled_from([0, form.SHARED, 255]),
)
made_up = st.lists(records, max_size=8).map(
    lambda parts: form.MAGIC + record(form.PLACE, b"0", 0, b"") + b"".join(parts)
)


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A place, and beside it what nobody may touch."""
    (tmp_path / "place").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("kept")
    return tmp_path


def right(world: Path) -> bytes:
    source = world / "source"
    (source / "d").mkdir(parents=True)
    (source / "d" / "f").write_text("content")
    os.link(source / "d" / "f", source / "same")
    (source / "s").symlink_to("../outside")
    os.mkfifo(source / "p")
    return image_of(source)


def outside(world: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for directory in (world, world / "outside"):
        for entry in os.scandir(directory):
            told = entry.stat(follow_symlinks=False)
            if entry.name not in ("place", "source"):
                found[entry.path] = (
                    told.st_mode,
                    told.st_nlink,
                    0 if entry.is_dir(follow_symlinks=False) else told.st_size,
                )
    return found


@EXAMPLES
def test_no_image_leads_out_of_its_places(world: Path, examples: int) -> None:
    images = made_up | streams(right(world)).map(b"".join)
    before = outside(world)

    def check(image: bytes) -> None:
        with like_a_fork():
            try:
                unpack(image, world / "place")
            except OSError:
                pass
        assert outside(world) == before
        assert (world / "outside" / "kept").read_text() == "kept"

    holds(check, images, examples)
