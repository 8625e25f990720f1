"""Files: done by the guest under the caller's identity; symlinks and `..` never leave the sandbox."""

from __future__ import annotations

import asyncio
import os

import pytest

from cloche import errors
from cloche.engine.descriptors import check_regular
from cloche.engine.engine import Engine
from cloche.engine.sandbox import Sandbox
from cloche.model import Limits, SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("size", [0, 1, 256 << 10, (256 << 10) + 1, 5_000_000])
async def test_what_is_written_is_read(box: Sandbox, size: int):
    content = os.urandom(size)
    info = await box.files.write("a/b.bin", content)
    assert (info.size_bytes, info.kind, info.name) == (size, "file", "b.bin")
    assert await box.files.read("a/b.bin") == content
    assert b"".join([chunk async for chunk in await box.files.open_read("a/b.bin")]) == content


async def test_chunks_are_streamed_in(box: Sandbox):
    async def chunks():
        for number in range(50):
            yield bytes([number]) * 50_000

    info = await box.files.write("big", chunks())
    assert info.size_bytes == 2_500_000
    assert (await box.files.read("big"))[-1] == 49
    await box.files.write("list", [b"a", b"b"])
    assert await box.files.read("list") == b"ab"
    await box.files.write("text", "é")
    assert await box.files.read("text") == "é".encode()


async def test_the_program_sees_the_callers_files_and_the_other_way_round(box: Sandbox):
    await box.files.write("in.txt", b"in")
    answer = await box.context().execute("open('out.txt', 'w').write(open('in.txt').read() + ' and out')").result()
    assert answer.outcome == "ok"
    assert await box.files.read("out.txt") == b"in and out"


async def test_a_listing_has_what_is_there(box: Sandbox):
    await box.files.write("d/one", b"1")
    await box.files.write("d/deep/two", b"22")
    assert [info.name for info in await box.files.list("d")] == ["deep", "one"]
    deep = await box.files.list("d", depth=2)
    assert [(info.name, info.kind, info.size_bytes) for info in deep if info.kind == "file"] == [
        ("two", "file", 2),
        ("one", "file", 1),
    ]
    with pytest.raises(errors.InvalidRequest):
        await box.files.list("d", depth=0)


async def test_stat_move_remove(box: Sandbox):
    await box.files.write("a", b"1")
    assert await box.files.exists("a")
    moved = await box.files.move("a", "sub/b")
    assert moved.name == "b"
    assert not await box.files.exists("a")
    assert (await box.files.stat("sub/b")).size_bytes == 1
    assert not await box.files.make_dir("sub")
    assert await box.files.make_dir("new/deeper")
    await box.files.remove("sub")
    assert not await box.files.exists("sub/b")


async def test_a_name_that_is_no_text_is_listed(box: Sandbox):
    made = await box.context().execute("open(b'\\xff\\xfe', 'w').close()").result()
    assert made.outcome == "ok"
    assert len([info for info in await box.files.list(".") if "fe" in info.name]) == 1


@pytest.mark.parametrize("path", ["", "a\0b", "\ud800", None, 7, b"a", "x" * 5000])
async def test_a_path_that_names_nothing_is_refused(box: Sandbox, path):
    for work in (box.files.read, box.files.stat, box.files.list, box.files.remove, box.files.make_dir):
        with pytest.raises(errors.InvalidPath):
            await work(path)


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (lambda files: files.read("nowhere"), errors.FileNotFound),
        (lambda files: files.read("."), errors.IsADirectory),
        (lambda files: files.write(".", b""), errors.IsADirectory),
        (lambda files: files.list("file"), errors.NotADirectory),
        (lambda files: files.stat("file/below"), errors.NotADirectory),
        (lambda files: files.remove("nowhere"), errors.FileNotFound),
        (lambda files: files.move("nowhere", "b"), errors.FileNotFound),
    ],
)
async def test_what_the_file_system_says_is_an_error_of_its_own(box: Sandbox, work, error):
    await box.files.write("file", b"")
    with pytest.raises(error) as caught:
        await work(box.files)
    assert str(caught.value)


async def test_an_error_names_the_path(box: Sandbox):
    with pytest.raises(errors.FileNotFound, match="no/where"):
        await box.files.read("no/where")


async def test_dots_and_symlinks_stay_inside(box: Sandbox, engine: Engine, tmp_path):
    if engine.config.backend == "plain-unsafe":
        pytest.skip("has no inside")
    secret = tmp_path / "secret"
    secret.write_text("host")
    await box.context().execute(f"import os; os.symlink({str(secret)!r}, 'link'); os.symlink('/', 'root')").result()
    for path in ("link", f"root{secret}", f"../../../../../..{secret}", f"/../..{secret}"):
        with pytest.raises(errors.NotFound):
            await box.files.read(path)
    assert (await box.files.stat("link")).target == str(secret)


async def test_a_door_into_the_kernel_is_not_read_by_the_host(box: Sandbox):
    await box.context().execute("import os; os.mkfifo('fifo'); os.symlink('/dev/zero', 'zero')").result()
    for path in ("fifo", "zero"):
        with pytest.raises(errors.ClocheError):
            await box.files.read(path)


def test_descriptors_that_are_no_files_are_refused():
    read, write = os.pipe()
    kernel = os.open("/proc/self/status", os.O_RDONLY)
    for fd in (read, write, kernel):
        with pytest.raises(errors.PermissionDenied):
            check_regular(fd)
        os.close(fd)


async def test_a_sparse_file_does_not_become_our_memory(box: Sandbox):
    await box.context().execute("f = open('sparse', 'wb'); f.truncate(1 << 40); f.close()").result()
    with pytest.raises(errors.FileError, match="stream"):
        await box.files.read("sparse")


async def test_a_full_disk_is_an_error_and_loses_nothing(engine: Engine):
    if engine.config.backend == "plain-unsafe":
        pytest.skip("has no limit of its own")
    box = await engine.create(SandboxSpec(limits=Limits(space_bytes=8 << 20)))
    try:
        await box.files.write("kept", b"kept")
        with pytest.raises(errors.NoSpace):
            await box.files.write("kept", bytes(32 << 20))
        assert await box.files.read("kept") == b"kept"
        assert (await box.context().execute("1").result()).text == "1"
    finally:
        await box.kill()


async def test_a_watch_sees_what_happens_below(box: Sandbox):
    await box.files.make_dir("w/sub")
    async with box.files.watch("w", recursive=True) as changes:
        await box.files.write("w/sub/new", b"1")
        await box.files.remove("w/sub/new")
        seen = []
        while ("removed", "new") not in seen:
            change = await asyncio.wait_for(anext(changes), 10)
            seen.append((change.kind, os.path.basename(change.path)))
    assert ("written", "new") in seen or ("created", "new") in seen
    with pytest.raises(StopAsyncIteration):
        while True:
            await anext(changes)


async def test_a_watch_of_nothing_is_refused(box: Sandbox):
    with pytest.raises(errors.FileNotFound):
        async with box.files.watch("nowhere"):
            pass


async def test_the_end_of_a_sandbox_ends_a_watch_with_an_error(engine: Engine):
    box = await engine.create(SandboxSpec())
    async with box.files.watch(".") as changes:
        waiting = asyncio.create_task(anext(changes))
        await asyncio.sleep(0)
        await box.kill()
        with pytest.raises(errors.SandboxLost):
            await waiting
