"""Files through E2B's Python SDK, as its documentation has them."""

from __future__ import annotations

import io

import pytest
from e2b import FileNotFoundException, FileType, InvalidArgumentException, NotEnoughSpaceException
from e2b.exceptions import AuthenticationException, SandboxException

BIG = bytes(range(256)) * 20_000  # 5 MB
FILL = """
with open("/tmp/filler", "wb", 0) as filler:
    try:
        while filler.write(bytes(1 << 20)):
            pass
    except OSError:
        pass
"""


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("gzip", [False, True])
@pytest.mark.parametrize("content", [b"", b"x", BIG], ids=["empty", "small", "big"])
def test_written_content_is_read_back(box, content, gzip, streamed):
    info = box.files.write("some/where/file.bin", io.BytesIO(content) if streamed else content, gzip=gzip)
    assert (info.path, info.name, info.type) == ("/home/user/some/where/file.bin", "file.bin", FileType.FILE)
    assert bytes(box.files.read("some/where/file.bin", format="bytes", gzip=gzip)) == content
    assert b"".join(box.files.read("~/some/where/file.bin", format="stream")) == content


def test_a_file_belongs_to_the_user_in_any_directory(box, single):
    box.run_code("import os; os.makedirs('/home/user/made/by/root'); open('/home/user/made/by/root/f', 'w')")
    for path in ("made/by/root/f", "made/by/root/g", "made/by/root/deeper/h"):
        box.files.write(path, "mine")
        info = box.files.get_info(path)
        assert (info.owner, info.group, info.mode, info.permissions) == ("user", "user", 0o644, "-rw-r--r--")
    made = box.files.get_info("made/by/root/deeper")
    assert (made.owner, made.mode, made.permissions) == ("user", 0o755, "drwxr-xr-x")
    assert box.files.get_info("made/by/root").owner == ("user" if single else "root")
    box.files.remove("made")
    assert not box.files.exists("made")


def test_root_is_another_user_with_another_home(box, single):
    box.files.write("here.txt", "r", user="root")
    info = box.files.get_info("/root/here.txt", user="root")
    assert (info.owner, info.path) == ("user" if single else "root", "/root/here.txt")
    with pytest.raises(AuthenticationException):
        box.files.read("here.txt", user="nobody")
    with pytest.raises(AuthenticationException):
        box.files.get_info("here.txt", user="nobody")


def test_an_existing_file_stays_the_same_one_with_its_mode(box):
    box.files.write("tool.sh", "old and long")
    ran = box.run_code("import os; os.chmod('tool.sh', 0o750); os.link('tool.sh', 'other'); os.stat('other').st_ino")
    box.files.write("tool.sh", "new")
    assert box.files.read("other") == "new"
    assert box.files.get_info("tool.sh").mode == 0o750
    assert box.run_code("os.stat('tool.sh').st_ino").text == ran.text


def test_many_files_are_written_at_once_with_slashes_spaces_and_letters_of_all_kinds(box):
    names = ["a/b/c.txt", "/tmp/x y.txt", "ünï/çödé.txt", 'quo"te.txt', "semi;colon=.txt"]
    written = box.files.write_files([{"path": name, "data": name} for name in names if '"' not in name])
    written.append(box.files.write('quo"te.txt', 'quo"te.txt'))
    assert {info.name for info in written} == {name.rpartition("/")[2] for name in names}
    for name in names:
        assert box.files.read(name) == name
    with pytest.raises(InvalidArgumentException, match="same path"):
        box.files.write_files([{"path": "twice", "data": "1"}, {"path": "/home/user/twice", "data": "2"}])


def test_a_symlink_is_described_by_its_target(box):
    box.files.write("d/file", "123")
    box.run_code("import os; os.chdir('/home/user/d')")
    box.run_code("os.symlink('file', 'one'); os.symlink('one', 'two'); os.symlink('.', 'dir'); os.symlink('no', 'bad')")
    two, directory = box.files.get_info("d/two"), box.files.get_info("d/dir")
    assert (two.type, two.symlink_target, two.mode) == (FileType.FILE, "/home/user/d/file", 0o644)
    assert two.permissions == "Lrwxrwxrwx"
    assert (directory.type, directory.symlink_target) == (FileType.DIR, "/home/user/d")
    assert [entry.name for entry in box.files.list("d")] == ["dir", "file", "one", "two"]  # broken ones are left out
    assert [entry.path for entry in box.files.list("d/dir")][:2] == ["/home/user/d/dir/dir", "/home/user/d/dir/file"]
    assert box.files.read("d/two") == "123"
    assert box.files.write("d/two", "4").path == "/home/user/d/two"
    assert box.files.read("d/file") == "4"


def test_path_errors_are_explained(box):
    box.files.write("file", "x")
    box.files.make_dir("dir")
    with pytest.raises(FileNotFoundException, match="path '/home/user/none' does not exist"):
        box.files.read("none")
    with pytest.raises(InvalidArgumentException, match="is a directory"):
        box.files.read("dir")
    with pytest.raises(InvalidArgumentException, match="is a directory"):
        box.files.write("dir", "x")
    with pytest.raises(InvalidArgumentException):
        box.files.list("file")
    with pytest.raises(FileNotFoundException):
        box.files.list("none")
    with pytest.raises(InvalidArgumentException, match="in the way"):
        box.files.make_dir("file/below")
    with pytest.raises(FileNotFoundException):
        box.files.rename("none", "some")
    assert box.files.make_dir("dir") is False
    assert not box.files.exists("file/below")
    box.files.remove("none")


def test_a_move_makes_directories_and_takes_metadata_along_also_to_another_mount(box):
    box.files.write("a", "1", metadata={"Author": "me"})
    moved = box.files.rename("a", "/tmp/new/b")
    assert (moved.path, moved.metadata, moved.owner) == ("/tmp/new/b", {"author": "me"}, "user")
    assert box.files.get_info("/tmp/new").owner == "user"
    assert not box.files.exists("a")


def test_metadata_are_extended_attributes_that_an_upload_replaces(box):
    box.files.write("a", "1", metadata={"one": "1", "two": "2"})
    assert box.run_code("import os; os.getxattr('a', 'user.e2b.one')").text == "b'1'"
    box.run_code("os.setxattr('a', 'user.mine', b'x'); os.setxattr('a', 'user.e2b.three', b'3')")
    assert box.files.get_info("a").metadata == {"one": "1", "two": "2", "three": "3"}
    assert box.files.write("a", "2", metadata={"two": "two"}).metadata == {"two": "two"}
    assert box.files.write("a", "3").metadata is None
    assert box.run_code("os.listxattr('a')").text == "['user.mine']"


def test_a_full_disk_is_said_and_leaves_the_old_file(box):
    box.files.write("kept", "old")
    box.run_code(FILL)
    with pytest.raises(NotEnoughSpaceException):
        box.files.write("kept", BIG)
    with pytest.raises(NotEnoughSpaceException):
        box.files.write("new", b"x" * 200_000)
    assert box.files.read("kept") == "old"
    assert not box.files.exists("new")
    box.files.remove("/tmp/filler")
    box.files.write("kept", BIG)


def test_a_file_that_is_not_one_cannot_be_read(box):
    box.run_code("import os; os.mkfifo('/home/user/pipe'); os.symlink('/proc/self/mem', '/home/user/mem')")
    for path in ("pipe", "mem", "/proc/self/mem", "/dev/zero"):
        with pytest.raises(SandboxException):
            box.files.read(path)
    with pytest.raises(SandboxException):
        box.files.write("pipe", "x")
    assert box.files.exists("pipe")


@pytest.mark.parametrize("moment", [1e12, -1e12])
def test_a_file_of_an_impossible_age_is_a_file(box, moment):
    box.files.write_files([{"path": "d/odd", "data": "text"}, {"path": "d/plain", "data": ""}])
    assert box.run_code(f"import os; os.utime('/home/user/d/odd', ({moment}, {moment}))").error is None
    assert [entry.name for entry in box.files.list("d")] == ["odd", "plain"]
    assert box.files.get_info("d/odd").modified_time.year in (1, 9999)
    assert box.files.read("d/odd") == "text"


async def test_the_async_sdk_does_the_same(async_box):
    files = async_box.files
    await files.write("a/b", BIG, metadata={"k": "v"})
    assert bytes(await files.read("a/b", format="bytes")) == BIG
    info = await files.get_info("a/b")
    assert (info.size, info.metadata, info.owner) == (len(BIG), {"k": "v"}, "user")
    assert [entry.path for entry in await files.list("/home/user", depth=2)] == ["/home/user/a", "/home/user/a/b"]
    assert await files.exists("a/b")
    await files.rename("a/b", "c")
    await files.remove("a")
    assert [entry.name for entry in await files.list(".")] == ["c"]
    with pytest.raises(FileNotFoundException):
        await files.read("a/b")
