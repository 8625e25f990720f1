"""Files: done by the guest under the caller's identity; symlinks and `..` never leave the sandbox."""

from __future__ import annotations

import asyncio
import os
import tracemalloc

import pytest

from cloche import errors
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.init_client import check_regular_file
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import FileAttributes, Limits, SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("size", [0, 1, 256 << 10, (256 << 10) + 1, 5_000_000])
async def test_written_content_is_read_back(box: Sandbox, size: int):
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


async def test_a_listing_has_every_entry(box: Sandbox):
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
async def test_file_system_errors_have_their_own_type(box: Sandbox, work, error):
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


async def test_descriptors_that_are_no_files_are_refused():
    read, write = os.pipe()
    kernel = os.open("/proc/self/status", os.O_RDONLY)
    for fd in (read, write, kernel):
        with pytest.raises(errors.PermissionDenied):
            check_regular_file(fd)
        os.close(fd)


async def test_a_sparse_file_does_not_become_our_memory(box: Sandbox):
    await box.context().execute("f = open('sparse', 'wb'); f.truncate(1 << 40); f.close()").result()
    with pytest.raises(errors.FileError, match="stream"):
        await box.files.read("sparse")


async def test_a_large_file_is_in_our_memory_once(box: Sandbox):
    await box.context().execute("f = open('large', 'wb'); f.truncate(200 << 20); f.close()").result()
    tracemalloc.start()
    try:
        content = await box.files.read("large")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(content) == 200 << 20
    assert peak < 300 << 20


async def broken_upload(error: BaseException):
    yield b"x" * 2_000_000
    raise error


@pytest.mark.parametrize("error", [RuntimeError("the source failed"), BrokenPipeError("so did this one")])
async def test_an_upload_that_fails_leaves_the_old_file(box: Sandbox, error: Exception):
    await box.files.write("kept", b"old")
    with pytest.raises(type(error)):
        await box.files.write("kept", broken_upload(error))
    assert await box.files.read("kept") == b"old"
    with pytest.raises(type(error)):
        await box.files.write("new", broken_upload(error))
    found = await box.commands.run(["ls", "-A"])
    assert found.stdout == "kept\n"


async def test_an_upload_that_is_cancelled_leaves_the_old_file(box: Sandbox):
    await box.files.write("kept", b"old")
    sent = asyncio.Event()

    async def endless():
        yield b"x" * 2_000_000
        sent.set()
        await asyncio.Event().wait()

    upload = asyncio.create_task(box.files.write("kept", endless()))
    await sent.wait()
    upload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upload
    assert (await box.commands.run(["ls", "-A"])).stdout == "kept\n"
    assert await box.files.read("kept") == b"old"


async def test_a_file_that_can_only_be_overwritten_is_replaced_when_all_has_come(box: Sandbox, engine: Engine):
    if engine.config.backend == "plain-unsafe":
        pytest.skip("has one user only")
    await box.files.write("shut/file", b"old and long", user="root", mode=0o666)
    with pytest.raises(RuntimeError):
        await box.files.write("shut/file", broken_upload(RuntimeError()))
    assert await box.files.read("shut/file") == b"old and long"
    await box.files.write("shut/file", b"new")
    assert await box.files.read("shut/file") == b"new"
    await box.files.write("shut/file", bytes(3_000_000))
    assert await box.files.read("shut/file") == bytes(3_000_000)


async def test_an_open_pipe_does_not_hold_up_an_upload(box: Sandbox):
    """As when the caller's program forks meanwhile: the child has every descriptor of ours."""
    children = []

    async def forking():
        yield b"a" * 300_000
        pid = os.fork()
        if not pid:
            os.read(hold[0], 1)
            os._exit(0)
        children.append(pid)
        yield b"b"

    hold = os.pipe()
    try:
        info = await asyncio.wait_for(box.files.write("forked", forking()), 30)
        assert info.size_bytes == 300_001
    finally:
        os.write(hold[1], b"x")
        os.waitpid(children[0], 0)
        os.close(hold[0])
        os.close(hold[1])


@pytest.mark.parametrize("content", [7, None, [b"a", 7], [1, 2], {"a": 1}.values(), "\ud800"])
async def test_content_that_is_neither_bytes_nor_text_is_refused(box: Sandbox, content):
    await box.files.write("kept", b"old")
    with pytest.raises(errors.InvalidRequest):
        await box.files.write("kept", content)
    assert await box.files.read("kept") == b"old"


async def test_chunks_may_be_text(box: Sandbox):
    await box.files.write("mixed", ["é", b"-", bytearray(b"x"), memoryview(b"y")])
    assert await box.files.read("mixed") == "é-xy".encode()


@pytest.mark.parametrize("mode", [-1, 0o10000, "644", 0.5, True])
async def test_a_mode_that_is_none_is_refused(box: Sandbox, mode):
    with pytest.raises(errors.InvalidRequest, match="mode"):
        await box.files.write("a", b"", mode=mode)


@pytest.mark.parametrize("user", ["nobody", "", 0, b"root", ["root"]])
async def test_a_user_that_does_not_exist_is_refused(box: Sandbox, user):
    for work in (box.files.read, box.files.stat, box.files.list, box.files.remove, box.files.make_dir):
        with pytest.raises(errors.InvalidRequest, match="user"):
            await work("a", user=user)
    with pytest.raises(errors.InvalidRequest, match="user"):
        box.files.watch(".", user=user)


async def test_files_and_trees_move_between_the_places_of_a_sandbox(box: Sandbox):
    made = """if True:
        import os, pathlib, tempfile
        top = pathlib.Path(tempfile.mkdtemp(dir='/tmp'))
        (top / 'tree/deep').mkdir(parents=True)
        (top / 'tree/deep/file').write_text('1')
        (top / 'tree/link').symlink_to('/nowhere')
        (top / 'tree/deep').chmod(0o500)
        with open(top / 'sparse', 'wb') as f: f.truncate(1 << 40); f.seek(1 << 30); f.write(b'data')
        print(top)
    """
    top = (await box.context().execute(made).result()).stdout.strip()
    tree = await box.files.move(f"{top}/tree", "moved/tree")
    assert (tree.kind, tree.name) == ("directory", "tree")
    assert await box.files.read("moved/tree/deep/file") == b"1"
    assert (await box.files.stat("moved/tree/deep")).mode == 0o500
    assert (await box.files.stat("moved/tree/link")).target == "/nowhere"
    sparse = await box.files.move(f"{top}/sparse", "sparse")
    assert sparse.size_bytes == 1 << 40
    assert await box.files.list(top) == []
    there = (await box.context().execute("f = open('sparse', 'rb'); f.seek(1 << 30); f.read(5)").result()).text
    assert there == "b'data\\x00'"


async def test_a_file_moved_to_a_directory_lands_in_it(box: Sandbox):
    await box.files.make_dir("d")
    await box.files.write("a", b"1")
    info = await box.files.move("a", "d")
    assert (info.kind, info.name, info.path) == ("file", "a", (await box.files.stat("d/a")).path)
    top = (await box.commands.run("mktemp -d -p /tmp")).stdout.strip()
    info = await box.files.move("d/a", top)
    assert (info.kind, info.path) == ("file", f"{top}/a")
    assert await box.files.read(f"{top}/a") == b"1"
    await box.files.remove(top)


async def test_foreign_files_are_not_moved(box: Sandbox, engine: Engine):
    if engine.config.backend == "plain-unsafe":
        pytest.skip("has one user only")
    for path in ("/proc/self/environ", "/etc/passwd", "/usr", "/proc", "/"):
        with pytest.raises((errors.FileError, errors.FileNotFound)):
            await box.files.move(path, "taken")
    assert await box.files.list() == []


@pytest.mark.long
async def test_many_long_names_are_listed_and_too_many_are_an_error(box: Sandbox):
    made = """if True:
        import os
        for n in range(20_000): os.close(os.open(f'{n:0250}', os.O_CREAT | os.O_WRONLY))
    """
    assert (await box.context().execute(made).result()).outcome == "ok"
    found = await box.files.list()
    assert len(found) == 20_000
    assert found[-1].name == f"{19_999:0250}"
    await box.files.write("one more", b"")
    with pytest.raises(errors.FileError, match="20,000"):
        await box.files.list()
    assert (await box.context().execute("1").result()).text == "1"


async def test_a_deep_tree_is_listed(box: Sandbox):
    made = """if True:
        import os
        for n in range(1500): os.mkdir('d'); os.chdir('d')
    """
    try:
        assert (await box.context().execute(made).result()).outcome == "ok"
        assert len(await box.files.list(depth=10_000)) == 1500
        async with box.files.watch(".", recursive=True):
            pass
    finally:
        await box.files.remove("d")


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


async def test_a_watch_reports_changes_below(box: Sandbox):
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
        with pytest.raises(errors.SandboxKilled):
            await waiting


# -- what is written in place, given to somebody, or said about a file


@pytest.mark.parametrize("size", [3, 1_000_000])
async def test_a_file_that_is_written_in_place_stays_the_same_one(box: Sandbox, size: int):
    await box.files.write("f", b"old content")
    await box.context().execute("import os; os.link('f', 'g'); os.chmod('f', 0o600)").result()
    info = await box.files.write("f", bytes(size), in_place=True)
    assert (info.size_bytes, info.mode) == (size, 0o600)
    assert await box.files.read("g") == bytes(size)


@pytest.mark.parametrize("path", ["old", "new"])
async def test_a_write_in_place_whose_source_fails_changes_nothing(box: Sandbox, path: str):
    await box.files.write("old", b"old")

    async def failing():
        yield bytes(1_000_000)
        raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError):
        await box.files.write(path, failing(), in_place=True)
    assert await box.files.read("old") == b"old"
    assert [info.name for info in await box.files.list(".")] == ["old"]


async def test_files_made_as_root_can_be_owned_by_the_user(box: Sandbox, engine: Engine):
    if engine.config.backend == "plain-unsafe":
        pytest.skip("has one user only")
    info = await box.files.write("a/b/f", b"x", user="root", owner="user")
    directory = await box.files.stat("a/b")
    assert (info.owner, info.group, directory.owner, directory.mode) == ("user", "user", "user", 0o755)
    assert await box.files.make_dir("c/d", user="root", owner="user")
    await box.files.move("a/b/f", "e/f", user="root", owner="user")
    assert [(await box.files.stat(path)).owner for path in ("c", "c/d", "e", "e/f")] == ["user"] * 4


async def test_a_symlink_is_told_with_its_end(box: Sandbox):
    await box.files.write("d/f", b"x", mode=0o640)
    await (
        box.context().execute("import os; os.symlink('d/f', 'a'); os.symlink('a', 'b'); os.symlink('z', 'z')").result()
    )
    top = (await box.files.stat(".")).path
    told = (await box.files.stat("b")).leads_to
    assert told is not None
    assert (told.path, told.kind, told.mode) == (f"{top}/d/f", "file", 0o640)
    loop = (await box.files.stat("z")).leads_to
    assert loop is not None
    assert (loop.path, loop.kind) == (f"{top}/z", None)
    assert (await box.files.stat("d/f")).leads_to is None


async def test_attributes_of_one_space_are_replaced_together(box: Sandbox):
    info = await box.files.write("f", b"", attributes=FileAttributes(space="t", values={"a": "1", "b": "é"}))
    assert info.attributes == {"t.a": "1", "t.b": "é"}
    await box.context().execute("import os; os.setxattr('f', 'user.other', b'\\xff')").result()
    info = await box.files.write("f", b"", attributes=FileAttributes(space="t", values={"b": "2"}), in_place=True)
    assert info.attributes == {"t.b": "2", "other": "\ufffd"}
    with pytest.raises(errors.InvalidRequest):
        FileAttributes(space="t", values={"": "x"})


@pytest.mark.parametrize("size", [1000, 3_000_000])
async def test_an_open_file_is_read_in_parts(box: Sandbox, size: int):
    content = os.urandom(size)
    await box.files.write("f", content)
    async with await box.files.open("f") as file:
        assert file.size_bytes == size
        assert file.modified_at == pytest.approx((await box.files.stat("f")).modified_at, abs=0.01)
        for start, end in ((0, None), (10, 20), (500, None), (size, None), (5, 5)):
            assert b"".join([chunk async for chunk in file.chunks(start, end)]) == content[start:end]


async def test_collecting_gives_all_changes_up_to_now(box: Sandbox):
    await box.files.make_dir("d")
    async with box.files.watch("d", recursive=True) as watch:
        await box.files.write("d/f", b"1", in_place=True, owner="user")
        seen = [(change.kind, change.path.rpartition("/")[2]) for change in await watch.collect()]
        assert seen == [("created", "f"), ("attributes", "f"), ("written", "f")]
        await box.files.write("d/new/g", b"1")
        assert [change.path.rpartition("/")[2] for change in await watch.collect() if change.kind == "created"] == [
            "new",
            "g",
        ]
        assert await watch.collect() == []
