"""Images: the files of a sandbox, all of them and as they were, in another one."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cloche import errors
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.pauses import images as transfer
from cloche.engine.pauses.images import SandboxImages
from cloche.engine.sandboxes.init_client import InitClient
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Run, fold
from cloche.model import MIB, Limits, SandboxSpec
from cloche.store import images as store

pytestmark = pytest.mark.asyncio(loop_scope="session")

SPACE = Limits().space_bytes
MANY = """
import os
for n in range(3000):
    os.makedirs(f'd{n % 30}', exist_ok=True)
    open(f'd{n % 30}/{n}', 'w').write('x')
"""

FULL_OF_PROCESSES = """
import contextlib, os, time
pids = []
with contextlib.suppress(OSError):
    while len(pids) < 64:
        pids.append(os.fork())
        if not pids[-1]:
            time.sleep(1000)
"""
MARK = """
import contextlib, os
open('marked', 'w').close()
with contextlib.suppress(OSError):  # before Linux 6.6 such files have no attributes
    os.setxattr('marked', 'user.a', b'b')
"""


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "images"


@pytest.fixture
def images(kept: Path) -> SandboxImages:
    return SandboxImages(kept, "hhere")


@pytest_asyncio.fixture(loop_scope="session")
async def fresh(engine: Engine) -> AsyncIterator[Sandbox]:
    sandbox = await engine.create(SandboxSpec())
    yield sandbox
    await sandbox.kill()


def guest_of(box: Sandbox) -> InitClient:
    return box.guest


async def run(box: Sandbox, code: str) -> Run:
    answer = fold([event async for event in box.context().execute(code)])
    assert answer.outcome == "ok", answer
    return answer


async def shell(box: Sandbox, command: str) -> str:
    done = await box.commands.run(command)
    assert done.exit_code == 0, done
    return done.stdout


async def pids(box: Sandbox) -> set[str]:
    return {name for name in (await shell(box, "ls /proc")).split() if name.isdigit()}


def only_for(config: Config, backend: str) -> None:
    if config.backend != backend:
        pytest.skip(f"for {backend}")


async def test_files_come_to_another_sandbox(box: Sandbox, fresh: Sandbox, images: SandboxImages, kept: Path):
    await box.files.write("/mnt/data/a/b.txt", b"hello")
    await box.files.write("/home/user/c.bin", os.urandom(3 * MIB))
    await box.files.write("/workspace/w.txt", b"work")
    await fresh.files.write("/mnt/data/old", b"x")
    saved = await images.save(guest_of(box), SPACE)
    assert [(path.name, path.stat().st_size, path.stat().st_mode & 0o777) for path in kept.iterdir()] == [
        (saved.id, saved.bytes, 0o600)
    ]
    await images.restore(guest_of(fresh), saved.id)
    assert await fresh.files.read("a/b.txt") == b"hello"
    assert await fresh.files.read("/home/user/c.bin") == await box.files.read("/home/user/c.bin")
    assert await fresh.files.read("/workspace/w.txt") == b"work"
    assert not await fresh.files.exists("old")
    await images.remove(saved.id)
    assert os.listdir(kept) == []


async def test_programs_started_before_see_the_restored_files(box: Sandbox, fresh: Sandbox, images: SandboxImages):
    """Its working directory is the same one, and its imports find what was installed."""
    await run(box, "open('here.txt', 'w').write('1')")
    await run(fresh, "before = __import__('os').listdir()")
    await images.restore(guest_of(fresh), (await images.save(guest_of(box), SPACE)).id)
    assert (await run(fresh, "open('here.txt').read()")).results[0].text == "'1'"
    await run(fresh, "open('new.txt', 'w').close()")
    assert await fresh.files.exists("new.txt")


async def test_installed_packages_are_imported(config: Config, box: Sandbox, fresh: Sandbox, images: SandboxImages):
    only_for(config, "namespaces")
    site = "/home/user/.local/lib/python{0.major}.{0.minor}/site-packages"
    found = await run(box, f"__import__('sys').version_info and {site!r}.format(__import__('sys').version_info)")
    directory = found.results[0].text.strip("'")
    await box.files.write(f"{directory}/mine/__init__.py", b"answer = 42")
    await box.files.write(f"{directory}/also.pth", b"/home/user/sources\n")
    await box.files.write("/home/user/sources/editable.py", b"answer = 43")
    saved = await images.save(guest_of(box), SPACE)
    assert await images.restore(guest_of(fresh), saved.id)
    await fresh.context().restart()
    assert (await run(fresh, "import mine, editable; mine.answer, editable.answer")).results[0].text == "(42, 43)"
    assert await shell(fresh, "python3 -c 'import mine, editable; print(mine.answer, editable.answer)'") == "42 43\n"


async def test_a_sandbox_restored_from_an_image_imports_installed_packages(config: Config, engine: Engine):
    """Also where the template has imported another version of it before."""
    only_for(config, "namespaces")
    box = await engine.create(SandboxSpec())
    try:
        where = "import cycler, os, site; os.path.isfile(cycler.__file__) and site.getusersitepackages()"
        directory = (await run(box, where)).results[0].text.strip("'")
        await box.files.write(f"{directory}/cycler/__init__.py", b"answer = 42")
        await engine.pause(box.id, "local", memory=False)
        again = await engine.resume(box.id, "local")
        assert (await run(again, "import cycler; cycler.answer")).results[0].text == "42"
        assert (await run(again, "open('/mnt/data/x', 'w').write('1')")).outcome == "ok"
    finally:
        await engine.kill(box.id, "local")


async def test_a_sandbox_with_as_many_processes_as_it_may_have_is_saved(config: Config, engine: Engine):
    only_for(config, "namespaces")
    box = await engine.create(SandboxSpec(limits=Limits(processes=16)))
    try:
        await run(box, FULL_OF_PROCESSES)
        await engine.pause(box.id, "local")
        await engine.resume(box.id, "local")
        assert (await run(box, "len(pids) > 8, min(os.kill(pid, 0) is None for pid in pids)")).outcome == "ok"
    finally:
        await engine.kill(box.id, "local")


async def test_owners_and_modes_of_all_places(config: Config, box: Sandbox, fresh: Sandbox, images: SandboxImages):
    only_for(config, "namespaces")
    make = (
        "set -e; echo r > /root/r; echo t > /tmp/t; echo v > /var/tmp/v; echo s > /dev/shm/s; echo n > /run/n; "
        "echo a > /app/a; echo w > /workspace/w; chown user /workspace/w; "
        "mkdir /tmp/locked; echo x > /tmp/locked/x; chmod 0 /tmp/locked/x; chown user:root /tmp/locked; "
        "chmod 111 /tmp/locked; mkfifo /tmp/p; "
        "ln -s /etc/passwd /tmp/l; ln /tmp/t /tmp/t2; mkdir /tmp/d; ln /tmp/t /tmp/d/t3; truncate -s 1T /home/user/hole"
    )
    assert (await box.commands.run(make, user="root")).exit_code == 0
    await run(box, MARK)
    places = "/root /tmp /var/tmp /home/user /mnt/data /app /workspace"
    look = f"find {places} -printf '%p %M %U %G %s %b %n %T@ %l\n' | sort"
    before = (await box.commands.run(look, user="root")).stdout
    await images.restore(guest_of(fresh), (await images.save(guest_of(box), SPACE)).id)
    await run(fresh, "import os")
    assert (await fresh.commands.run(look, user="root")).stdout == before
    assert not await fresh.files.exists("/dev/shm/s") and not await fresh.files.exists("/run/n")
    marks = [(await run(each, "os.listxattr('marked')")).results[0].text for each in (box, fresh)]
    assert marks[0] == marks[1]
    unlock = "chmod 755 /tmp/locked; chmod 644 /tmp/locked/x; cat /tmp/locked/x"
    assert (await fresh.commands.run(unlock, user="root")).stdout == "x\n"


async def test_an_image_too_large_is_out_of_space(config: Config, engine: Engine, box: Sandbox, images: SandboxImages):
    only_for(config, "namespaces")
    await run(box, "open('big', 'wb').write(bytes(40 << 20))")
    saved = await images.save(guest_of(box), SPACE)
    small = await engine.create(SandboxSpec(limits=Limits(space_bytes=16 * MIB)))
    try:
        with pytest.raises(errors.NoSpace, match="too small"):
            await images.restore(guest_of(small), saved.id)
    finally:
        await small.kill()


async def test_more_than_allowed_is_too_large_and_leaves_nothing(box: Sandbox, images: SandboxImages, kept: Path):
    await run(box, "open('big', 'wb').write(bytes(40 << 20))")
    with pytest.raises(errors.TooLarge):
        await images.save(guest_of(box), 1 * MIB)
    assert os.listdir(kept) == []
    assert (await images.save(guest_of(box), SPACE)).bytes > 40 << 20


async def test_a_full_disk_of_the_host_is_said_and_leaves_nothing(
    config: Config, box: Sandbox, images: SandboxImages, kept: Path
):
    only_for(config, "namespaces")
    await run(box, "open('big', 'wb').write(bytes(40 << 20))")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, hard))  # as near to a full disk as one comes without a mount
    try:
        with pytest.raises(errors.Unavailable, match="disk is full"):
            await images.save(guest_of(box), SPACE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(kept) == []
    await run(box, "1")


async def test_a_disk_that_is_nearly_full_is_left_to_others(
    box: Sandbox, images: SandboxImages, kept: Path, monkeypatch
):
    monkeypatch.setattr(store, "RESERVE_BYTES", 1 << 62)
    with pytest.raises(errors.Unavailable, match="disk is full"):
        await images.save(guest_of(box), SPACE)
    assert os.listdir(kept) == []


async def test_cancelled_it_leaves_nothing(
    config: Config, box: Sandbox, fresh: Sandbox, images: SandboxImages, kept: Path
):
    only_for(config, "namespaces")
    await run(box, MANY)
    before = open_files()
    for pause_seconds in (0, 0.001, 0.003, 0.01, 0.02):
        saving = asyncio.create_task(images.save(guest_of(box), SPACE))
        await asyncio.sleep(pause_seconds)
        saving.cancel()
        await asyncio.wait([saving])
    for path in kept.iterdir():  # who was faster than the cancellation
        path.unlink()
    saved = await images.save(guest_of(box), SPACE)
    for pause_seconds in (0, 0.001, 0.01):
        restoring = asyncio.create_task(images.restore(guest_of(fresh), saved.id))
        await asyncio.sleep(pause_seconds)
        restoring.cancel()
        await asyncio.wait([restoring])
    assert os.listdir(kept) == [saved.id]
    assert open_files() == before
    await images.restore(guest_of(fresh), saved.id)
    assert await fresh.files.exists("d0/0")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_new_restore_ends_the_abandoned_one(
    config: Config, box: Sandbox, fresh: Sandbox, images: SandboxImages, monkeypatch
):
    """It may have much to unpack yet, and both would empty and fill the same places."""
    only_for(config, "namespaces")
    await run(box, "open('a', 'w').close()")
    saved = await images.save(guest_of(box), SPACE)
    before = await pids(fresh)
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "_wait_pipe_ready", lambda *_: asyncio.Event().wait())
        given_up = asyncio.create_task(images.restore(guest_of(fresh), saved.id))
        unpacker = await newcomers(fresh, before)
        await fresh.commands.run(f"kill -STOP {' '.join(unpacker)}", user="root")
        given_up.cancel()
        await asyncio.wait([given_up])
    await images.restore(guest_of(fresh), saved.id)
    assert await fresh.files.exists("a")
    assert not await pids(fresh) & unpacker


async def newcomers(box: Sandbox, before: set[str]) -> set[str]:
    """Those who were not there before: at least one, and none who has just listed them."""
    found: set[str] = set()
    while not found:
        listed = await pids(box) - before
        found = listed & await pids(box)
    return found


async def signalled(box: Sandbox, images: SandboxImages, monkeypatch: pytest.MonkeyPatch, signal: str) -> None:
    """Saves, and sends the archiver that signal before anything is read from it."""
    before = await pids(box)
    await run(box, "open('big', 'wb').write(bytes(80 << 20))")
    held, ready = asyncio.Event(), transfer._wait_pipe_ready

    async def once_held(*args) -> None:
        await held.wait()
        await ready(*args)

    monkeypatch.setattr(transfer, "_wait_pipe_ready", once_held)
    saving = asyncio.create_task(images.save(guest_of(box), SPACE))
    found = await newcomers(box, before)
    await box.commands.run(f"kill -{signal} {' '.join(found)}", user="root")
    held.set()
    await saving


async def test_a_killed_archiver_is_said(config: Config, box: Sandbox, images: SandboxImages, kept: Path, monkeypatch):
    only_for(config, "namespaces")
    with pytest.raises(errors.Unavailable, match="killed"):
        await signalled(box, images, monkeypatch, "KILL")
    assert os.listdir(kept) == []
    await run(box, "1")


async def test_a_stopped_archiver_is_not_waited_for_without_end(
    config: Config, box: Sandbox, images: SandboxImages, kept: Path, monkeypatch
):
    only_for(config, "namespaces")
    monkeypatch.setattr(transfer, "IDLE_SECONDS", 1.0)
    with pytest.raises(errors.Unavailable, match="did nothing"):
        await signalled(box, images, monkeypatch, "STOP")
    assert os.listdir(kept) == []
    await run(box, "1")


async def test_a_sandbox_that_ends_meanwhile_is_gone(engine: Engine, images: SandboxImages, kept: Path, monkeypatch):
    box = await engine.create(SandboxSpec())
    await run(box, "open('big', 'wb').write(bytes(80 << 20))")
    ready = transfer._wait_pipe_ready

    async def after_its_end(*args) -> None:
        await box.kill()
        await ready(*args)

    monkeypatch.setattr(transfer, "_wait_pipe_ready", after_its_end)
    with pytest.raises(errors.Gone):
        await images.save(guest_of(box), SPACE)
    assert os.listdir(kept) == []


async def test_init_answers_meanwhile(config: Config, box: Sandbox, images: SandboxImages):
    only_for(config, "namespaces")
    await run(box, MANY)
    saving = asyncio.create_task(images.save(guest_of(box), SPACE))
    answered = 0
    while not saving.done():
        await box.files.exists("d0")
        answered += 1
    await saving
    assert answered > 3


async def test_a_damaged_image_is_refused(
    config: Config, box: Sandbox, fresh: Sandbox, images: SandboxImages, kept: Path
):
    only_for(config, "namespaces")
    await run(box, MANY)
    saved = await images.save(guest_of(box), SPACE)
    with open(kept / saved.id, "r+b") as file:
        file.truncate(saved.bytes - 1)
    with pytest.raises(errors.Unavailable, match="damaged"):
        await images.restore(guest_of(fresh), saved.id)
    await run(fresh, "1")


async def test_an_image_that_is_gone_is_not_found(fresh: Sandbox, images: SandboxImages):
    for id in ("mabcdefghij0123456789-hhere", "../../etc/passwd", ""):
        with pytest.raises(errors.NotFound):
            await images.restore(guest_of(fresh), id)


async def test_orphans_of_dead_hosts_are_removed(box: Sandbox, kept: Path):
    mine, dead = SandboxImages(kept, "hmine"), SandboxImages(kept, "hdead")
    known, copied = await dead.save(guest_of(box), SPACE), await mine.save(guest_of(box), SPACE)
    again = await dead.copy(known.id)
    assert again.bytes == known.bytes and again.id != known.id
    (kept / ".draft-mabcdefghij0123456789-hdead").write_bytes(b"half")
    (kept / ".draft-mabcdefghij0123456789-hmine").write_bytes(b"half, so far")
    (kept / "somebody's").write_bytes(b"not ours")
    made_known: set[str] = set()

    def is_live(name: str) -> bool:
        """It was, until now, and this was the last thing that it did."""
        made_known.add(known.id)
        return name == "hmine"

    async def known_now() -> set[str]:
        return made_known

    assert await mine.remove_orphans(known_now, is_live) == 2
    assert {path.name for path in kept.iterdir()} == {
        known.id,
        copied.id,
        ".draft-mabcdefghij0123456789-hmine",
        "somebody's",
    }
