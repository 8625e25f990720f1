"""Files out of an archive, as a build's COPY places them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from cloche.guest.files import build_copy


def pack(directory: Path, *members: tuple[str, object]) -> str:
    """An archive of files (bytes), directories (None) and whatever TarInfo is given."""
    file = directory / "archive"
    with tarfile.open(file, "w:gz") as archive:
        for name, content in members:
            member = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            data = content if isinstance(content, bytes) else b""
            if content is None:
                member.type, member.mode = tarfile.DIRTYPE, 0o750
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return str(file)


def link(name: str, to: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, to
    return member


def tree(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        found[name] = os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else None
    return found


FOLDER = [("folder", None), ("folder/a.txt", b"a"), ("folder/sub", None), ("folder/sub/b.txt", b"b")]


@pytest.mark.parametrize(
    ("source", "target", "made"),
    [
        ("folder", "to", {"to": None, "to/a.txt": "a", "to/sub": None, "to/sub/b.txt": "b"}),
        ("folder/", "to/", {"to": None, "to/a.txt": "a", "to/sub": None, "to/sub/b.txt": "b"}),
        ("./folder/*", "to", {"to": None, "to/a.txt": "a", "to/sub": None, "to/sub/b.txt": "b"}),
        ("**/*.txt", "to", {"to": None, "to/folder": None, "to/folder/a.txt": "a", "to/folder/sub": None}),
        (".", "to", {"to": None, "to/folder": None, "to/folder/a.txt": "a", "to/folder/sub": None}),
        ("folder/a.txt", "to", {"to": "a"}),
        ("folder/a.txt", "to/", {"to": None, "to/a.txt": "a"}),
        ("folder/a.txt", "deep/to", {"deep": None, "deep/to": "a"}),
        ("folder/a.txt", "there", {"there/a.txt": "a"}),
    ],
)
def test_it_lands_where_a_dockerfile_would_put_it(tmp_path, source, target, made):
    (tmp_path / "root/there").mkdir(parents=True)
    archive = pack(tmp_path, *FOLDER)
    end = "/" if target.endswith("/") else ""
    build_copy.copy_archive(archive, source, str(tmp_path / "root" / target) + end, os.getuid(), None)
    found = tree(tmp_path / "root")
    assert made.items() <= found.items()


def test_links_and_modes_are_kept_and_old_files_replaced(tmp_path):
    root = tmp_path / "root"
    (root / "d/old").mkdir(parents=True)
    (root / "d/l").write_text("a file")
    (root / "d/kept").write_text("kept")
    program = tarfile.TarInfo("d/run")
    program.mode = 0o755
    members = [("d", None), ("d/f", b"text"), ("", program), ("", link("d/l", "f")), ("d/old", b"now a file")]
    members += [("", link("d/h", "d/f", tarfile.LNKTYPE)), ("", link("d/dangling", "/no/where"))]
    build_copy.copy_archive(pack(tmp_path, *members), "d", str(root / "d"), os.getuid(), None)
    assert tree(root / "d") == {
        "dangling": "/no/where",
        "f": "text",
        "h": "text",
        "kept": "kept",
        "l": "f",
        "old": "now a file",
        "run": "",
    }
    assert (root / "d/run").stat().st_mode & 0o777 == 0o755
    build_copy.copy_archive(pack(tmp_path, *members), "d", str(root / "e"), os.getuid(), 0o700)
    assert {path.lstat().st_mode & 0o777 for path in root.glob("e/*") if not path.is_symlink()} == {0o700}


def test_names_that_lead_out_and_devices_are_left_out(tmp_path):
    device = tarfile.TarInfo("d/null")
    device.type = tarfile.CHRTYPE
    members = [("d/../../out", b"x"), ("/tmp/copied-out", b"x"), ("d/in", b"in"), ("", device)]
    build_copy.copy_archive(pack(tmp_path, *members), ".", str(tmp_path / "root"), os.getuid(), None)
    assert tree(tmp_path / "root") == {"d": None, "d/in": "in"}
    assert not (tmp_path / "out").exists() and not Path("/tmp/copied-out").exists()


def test_as_a_program_it_reports_errors(tmp_path):
    (tmp_path / "archive").write_bytes(b"nothing")
    words = [sys.executable, "-I", "-c", Path(build_copy.__file__).read_text()]
    done = subprocess.run(
        [*words, str(tmp_path / "archive"), "a", str(tmp_path / "b"), "0", ""], capture_output=True, text=True
    )
    assert done.returncode == 1 and "could not be opened" in done.stderr and "Traceback" not in done.stderr
