"""Files that the host reads for its owner: whatever a program puts there, the host reads a file of the sandbox or none."""

# ruff: noqa: E501 - a hostile program reads better with one try per line

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from cloche import errors
from cloche.model import MIB

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(60)]

REFUSED = (errors.FileError, errors.FileNotFound, errors.InvalidPath)


async def read_or_refuse(box, path: str, **how) -> bytes | None:
    try:
        return await asyncio.wait_for(box.files.read(path, **how), 10)
    except REFUSED:
        return None


@pytest.mark.parametrize("user", ["user", "root"])
@pytest.mark.parametrize(
    "target",
    [
        "/etc/shadow",
        "/proc/1/environ",
        "/proc/self/environ",
        "/proc/self/mem",
        "/proc/1/root/etc/shadow",
        "/proc/kcore",
    ],
)
async def test_a_symlink_to_a_secret_reads_nothing(box, single, user, target):
    await box.commands.run(f"ln -s {target} /mnt/data/out.csv")
    content = await read_or_refuse(box, "/mnt/data/out.csv", user=user)
    if content and "environ" in target:
        pytest.fail(f"init's environment could be read: {content[:200]!r}")
    assert not content


async def test_a_symlink_to_a_file_of_the_host_reads_nothing(box, host):
    await box.commands.run(f"ln -s {host.file} out; ln -s ../../../../..{host.file} up; ln -s / top")
    for path in ("out", "up", f"top{host.file}", f"../../../../../..{host.file}", host.file):
        assert await read_or_refuse(box, path) is None
        with pytest.raises(REFUSED):
            await box.files.open_read(path)


async def test_a_symlink_where_the_host_writes_writes_nothing_outside(box, host):
    before = Path(host.file).read_text()
    await box.commands.run(
        f"ln -s {host.file} out; ln -s /etc/passwd passwd; ln -s /proc/sys/kernel/core_pattern core; ln -s loop loop"
    )
    for path in ("out", "passwd", "core", "loop", "/etc/passwd", "/usr/bin/x", "/proc/sys/kernel/core_pattern"):
        try:
            await box.files.write(path, b"|/tmp/evil", user="root")
        except errors.ClocheError:
            pass
    assert Path(host.file).read_text() == before
    assert "evil" not in Path("/proc/sys/kernel/core_pattern").read_text()
    assert (await box.commands.run("cat /etc/passwd")).stdout.startswith("root:x:0:0")


@pytest.mark.parametrize(
    "make",
    [
        "mkfifo out",
        "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('out')\"",
        "ln -s /dev/zero out",
        "ln -s /dev/tty out",
        "ln -s /dev/ptmx out",
        "ln -s /proc/self/fd/0 out",
        "ln -s /dev/random out",
        "mkdir out",
        "ln -s out out",
        "ln -s /dev/stdin out",
    ],
)
async def test_special_files_are_not_read_and_do_not_hang(box, make):
    assert (await box.commands.run(make)).exit_code == 0
    assert await read_or_refuse(box, "out") is None
    assert (await box.commands.run("echo on")).stdout == "on\n"


async def test_a_fifo_where_the_host_writes_does_not_hang(box):
    await box.commands.run("mkfifo out; mkdir ro; mkfifo ro/out; chmod 555 ro")
    for path in ("out", "ro/out"):
        try:
            await asyncio.wait_for(box.files.write(path, b"x" * 300_000), 10)
        except errors.ClocheError:
            pass
    assert (await box.commands.run("echo on")).stdout == "on\n"


async def test_a_file_swapped_for_a_symlink_while_the_host_reads_is_never_followed_out(box, host):
    code = f"""
import os, time
end = time.monotonic() + 4
open("a", "w").write("mine" * 10); os.symlink({host.file!r}, "b"); os.symlink("/etc/shadow", "c"); os.mkdir("d"); open("d/x", "w").write("mine")
while time.monotonic() < end:
    for name in ("b", "a", "c"):
        try: os.link(name, "n", follow_symlinks=False); os.rename("n", "out")
        except OSError: pass
    try: os.rename("d", "e"); os.symlink({os.path.dirname(host.file)!r}, "d"); os.unlink("d"); os.rename("e", "d")
    except OSError: pass
"""
    swapping = asyncio.create_task(box.commands.run(["python3", "-c", code], timeout_seconds=20))
    seen: set[bytes | None] = set()
    while not swapping.done():
        for path in ("out", "d/of-the-host", "d/x"):
            seen.add(await read_or_refuse(box, path))
        try:
            await box.files.write("out", b"mine" * 10)
            await box.files.list(".", depth=3)
            await box.files.stat("out")
            await box.files.move("out", "moved")
        except errors.ClocheError:
            pass
    assert seen <= {None, b"mine" * 10, b"mine", b""}


@pytest.mark.long
async def test_removing_a_tree_that_is_swapped_for_symlinks_removes_nothing_elsewhere(box):
    await box.files.write("/home/user/keep/file", b"kept")
    code = """
import os, time
end = time.monotonic() + 3
while time.monotonic() < end:
    try:
        os.makedirs("tree/a", exist_ok=True); open("tree/a/f", "w").close()
        os.rename("tree/a", "tree/b"); os.symlink("/home/user/keep", "tree/a"); os.unlink("tree/a"); os.rename("tree/b", "tree/a")
    except OSError: pass
"""
    swapping = asyncio.create_task(box.commands.run(["python3", "-c", code], timeout_seconds=20))
    while not swapping.done():
        try:
            await box.files.remove("tree")
        except errors.ClocheError:
            pass
    assert await box.files.read("/home/user/keep/file") == b"kept"


async def test_a_sparse_file_of_a_terabyte_costs_the_host_nothing(box):
    await box.commands.run("truncate -s 1T huge; truncate -s 900M big")
    with pytest.raises(errors.ClocheError):
        await box.files.read("huge")
    stream = await box.files.open_read("huge")
    first = await anext(stream)
    assert len(first) <= MIB
    await stream.aclose()
    assert (await box.files.stat("huge")).size_bytes == 1 << 40


@pytest.mark.long
async def test_a_file_that_shrinks_and_grows_while_it_is_read_is_read_to_some_end(box):
    await box.files.write("changing", bytes(4 * MIB))
    code = """
import os, time
end = time.monotonic() + 2
while time.monotonic() < end:
    os.truncate("changing", 0); os.truncate("changing", 8 << 20)
"""
    changing = asyncio.create_task(box.commands.run(["python3", "-c", code], timeout_seconds=20))
    while not changing.done():
        assert len(await asyncio.wait_for(box.files.read("changing"), 10)) <= 8 * MIB


async def test_hard_links_to_files_of_the_system_give_no_rights_over_them(box, attack):
    for user in ("user", "root"):
        seen = await attack(
            box,
            """
answer = []
for source in ("/etc/passwd", "/usr/bin/env", "/opt/cloche/env/pyvenv.cfg", "/proc/self/environ"):
    for place in ("/mnt/data/l", "/tmp/l", "/etc/l", "/usr/l"):
        answer.append(attempt(lambda: os.link(source, place)))
""",
            user,
        )
        assert not any(each.startswith("done") for each in seen), seen


async def test_files_of_proc_are_not_handed_to_the_host_as_descriptors(box):
    """A descriptor of /proc is a door: what is read through it is the reader's business, not the sandbox's."""
    for path in ("/proc/self/maps", "/proc/1/status", "/proc/meminfo", "/proc/self/mountinfo"):
        stream = None
        try:
            stream = await box.files.open_read(path)
            content = b"".join([chunk async for chunk in stream])
        except errors.ClocheError:
            continue
        assert len(content) <= 1 << 20


async def test_names_that_are_no_text_do_no_harm(box, attack):
    await attack(
        box,
        "os.chdir('/mnt/data'); open(b'\\xff\\xfe', 'w').close(); open('\\n\\x1b]0;title\\x07', 'w').close(); answer = 1",
    )
    names = [each.name for each in await box.files.list("/mnt/data")]
    assert len(names) == 2
    for name in names:
        name.encode("utf-8")


@pytest.mark.long
async def test_a_watch_survives_a_storm_of_changes(box):
    code = "import os\nfor n in range(30_000):\n    open(f'f{n % 50}', 'w').close()\n    os.rename(f'f{n % 50}', f'g{n % 50}')"
    async with box.files.watch("/mnt/data", recursive=True) as changes:
        storm = asyncio.create_task(box.commands.run(["python3", "-c", code], timeout_seconds=30))
        assert (await asyncio.wait_for(anext(changes), 10)).path.startswith("/mnt/data/")
        assert (await storm).exit_code == 0
    assert (await box.commands.run("echo on")).stdout == "on\n"
