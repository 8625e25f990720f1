"""Named volumes: whose they are, who has them when, and what of them lasts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.conftest import with_template

from cloche import errors
from cloche.config import Config, PoolConfig
from cloche.config.sections import VolumeLimits
from cloche.engine.engine import Engine
from cloche.engine.sandboxes import volumes
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.isolation.cell import pid_of
from cloche.model import MIB, SandboxSpec, Template
from cloche.templates import catalogue

pytestmark = pytest.mark.asyncio(loop_scope="session")

Opening = Callable[[Config], Engine]
ME = "local"


@pytest.fixture
def small(own_config: Config, template: Template, tmp_path: Path) -> Config:
    """Volumes of 4 MiB, two for each owner, and a data directory in which nobody else leaves anything."""
    if own_config.backend == "plain-unsafe":
        pytest.skip("there are no volumes without walls: see below")
    limits = VolumeLimits(bytes=4 * MIB, per_owner=2)
    data_dir = str(with_template(tmp_path / "small", template))
    return msgspec.structs.replace(own_config, data_dir=data_dir, pool=PoolConfig(ready=0), volumes=limits)


async def said(box: Sandbox, command: str, user: str = "user") -> str:
    result = await box.commands.run(command, user=user)
    return result.stdout + result.stderr


def zygote_of(box: Sandbox) -> int:
    """The parent of the cradle, which is the parent of every cell's init."""
    return parent_of(parent_of(pid_of(box._cell._pidfd)))


def parent_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))


def with_volume(name: str = "v", **how) -> SandboxSpec:
    return SandboxSpec(volumes={"/mnt/v": name}, **how)


async def cleared(engine: Engine) -> None:
    for owner in (ME, "other"):
        for each in await engine.volumes.list(owner):
            await engine.volumes.remove(each.id, owner)


async def test_without_walls_there_are_none(opening: Opening, own_config: Config):
    if own_config.backend != "plain-unsafe":
        pytest.skip("it has walls")
    async with opening(own_config) as engine:
        await engine.volumes.create("v", ME)
        with pytest.raises(errors.Unavailable, match="volumes require isolation"):
            await engine.create(with_volume())
        await engine.volumes.remove("v", ME)
        assert (await said(await engine.create(SandboxSpec()), "echo on")) == "on\n"


async def test_volume_contents_survive_their_sandboxes_and_the_process(opening: Opening, small: Config):
    """With owners, modes, times, links and holes; and its image is all that is left of it on the disk."""
    async with opening(small) as engine:
        await engine.volumes.create("v", ME)
        box = await engine.create(with_volume())
        make = "cd /mnt/v; echo a > a; ln a b; ln -s a c; mkdir -m 700 d; truncate -s 1G hole; touch -d @5 d"
        await said(box, make)
        await said(box, "echo r > /mnt/v/root; chmod 600 /mnt/v/root", user="root")
        look = "cd /mnt/v; stat -c '%n %a %U %h %Y %s %F' *"
        before = await said(box, look)
    async with opening(small) as engine:
        box = await engine.create(with_volume())
        assert await said(box, look) == before
        await box.kill()
        await cleared(engine)
    assert list(Path(small.data_dir, "images").iterdir()) == []


async def test_an_unmounted_volume_leaves_memory_and_comes_back(
    opening: Opening, small: Config, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(volumes, "LINGER_SECONDS", 0.01)
    async with opening(small) as engine:
        volume = await engine.volumes.create("v", ME)
        for number in range(3):
            box = await engine.create(with_volume())
            assert await said(box, f"echo {number} >> /mnt/v/a; wc -l < /mnt/v/a") == f"{number + 1}\n"
            await box.kill()
            ends_at = time.monotonic() + 30
            while (await engine.volumes.get("v", ME)).instance is not None and time.monotonic() < ends_at:
                await asyncio.sleep(0.01)
            assert (await engine.volumes.get("v", ME)).instance is None
        async with engine.volumes.files(volume, writes=False) as files:
            assert await files.read("a") == b"0\n1\n2\n"
        await cleared(engine)


async def test_it_is_saved_while_it_is_in_use(opening: Opening, small: Config, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(volumes, "SAVE_SECONDS", 0.02)
    monkeypatch.setattr(volumes, "SAVE_SHARE", 0)
    async with opening(small) as engine:
        await engine.volumes.create("v", ME)
        box = await engine.create(with_volume())
        seen, ends_at = set(), time.monotonic() + 30
        while len(seen) < 3 and time.monotonic() < ends_at:
            seen.add((await engine.volumes.get("v", ME)).image)
            await asyncio.sleep(0.01)
        assert len(seen) == 3
        await box.kill()
        await cleared(engine)
    assert list(Path(small.data_dir, "images").iterdir()) == []


async def test_volumes_are_their_owners_alone(opening: Opening, small: Config):
    async with opening(small) as engine:
        mine = await engine.volumes.create("v", ME)
        theirs = await engine.volumes.create("v", "other")
        assert [each.id for each in await engine.volumes.list(ME)] == [mine.id]
        for ref in (theirs.id, "nobodys"):
            with pytest.raises(errors.VolumeNotFound):
                await engine.create(with_volume(ref))
            with pytest.raises(errors.VolumeNotFound):
                await engine.volumes.remove(ref, ME)
        box, other = await engine.create(with_volume()), await engine.create(with_volume(owner="other"))
        await said(box, "echo mine > /mnt/v/a")
        assert await said(other, "ls /mnt/v") == ""
        await box.kill()
        await other.kill()
        await cleared(engine)


async def test_names_and_numbers_are_bounded(opening: Opening, small: Config):
    async with opening(small) as engine:
        await engine.volumes.create("v", ME)
        with pytest.raises(errors.VolumeConflict):
            await engine.volumes.create("v", ME)
        await engine.volumes.create("w", ME)
        with pytest.raises(errors.InvalidRequest, match="remove one first"):
            await engine.volumes.create("x", ME)
        with pytest.raises(errors.InvalidRequest, match="two paths"):
            await engine.create(SandboxSpec(volumes={"/mnt/a": "v", "/mnt/b": "v"}))
        with pytest.raises(errors.InvalidRequest, match="can have 8"):
            await engine.create(SandboxSpec(volumes={f"/mnt/{number}": "v" for number in range(9)}))
        box = await engine.create(SandboxSpec(volumes={"/mnt/a": "v", "/mnt/b": "w"}))
        assert (
            await said(box, "touch /mnt/a/x; ls /mnt /mnt/a /mnt/b") == "/mnt:\na\nb\ndata\n\n/mnt/a:\nx\n\n/mnt/b:\n"
        )
        await box.kill()
        await cleared(engine)


async def test_one_that_is_in_use_is_not_removed_and_is_let_go_of_when_a_sandbox_is_not_made(
    opening: Opening, small: Config
):
    async with opening(small) as engine:
        await engine.volumes.create("v", ME)
        box = await engine.create(with_volume())
        with pytest.raises(errors.VolumeConflict, match="in use"):
            await engine.volumes.remove("v", ME)
        await box.kill()
        with pytest.raises(errors.VolumeNotFound):
            await engine.create(SandboxSpec(volumes={"/mnt/v": "v", "/mnt/w": "nobodys"}))
        await engine.volumes.remove("v", ME)
        assert await engine.volumes.list(ME) == []


async def test_one_is_removed_though_a_sandbox_that_has_ended_with_it_is_not_all_gone(opening: Opening, small: Config):
    """Nobody can kill that one any more: whoever removes the volume waits for it, and for none that lives."""
    async with opening(small) as engine:
        await engine.volumes.create("v", ME)
        box, other = await engine.create(with_volume()), await engine.create(with_volume())
        zygote = zygote_of(box)
        os.kill(zygote, signal.SIGSTOP)  # which has to collect the first kernel, before an init is gone
        try:
            os.kill(pid_of(box._cell._pidfd), signal.SIGKILL)
            await box.wait_ended()
            with pytest.raises(errors.VolumeConflict, match="in use"):
                await engine.volumes.remove("v", ME)
            killing = asyncio.create_task(other.kill())
            await other.wait_ended()
            removing = asyncio.create_task(engine.volumes.remove("v", ME))
            done, _ = await asyncio.wait([removing], timeout=0.1)
            assert not done
        finally:
            os.kill(zygote, signal.SIGCONT)
        await asyncio.gather(removing, killing)
        assert await engine.volumes.list(ME) == []


async def test_forks_and_a_pause_of_any_kind_keep_it(opening: Opening, small: Config):
    async with opening(small) as engine:
        await engine.volumes.create("v", ME)
        box = await engine.create(with_volume())
        await said(box, "echo 1 > /mnt/v/a; echo own > ~/own")
        for memory in (True, False):
            await engine.pause(box.id, ME, memory=memory)
            box = await engine.resume(box.id, ME)
            assert await said(box, "cat /mnt/v/a ~/own") == "1\nown\n"
        (fork,) = await engine.fork(box.id, ME)
        assert isinstance(fork, Sandbox) and fork.info.volumes == {"/mnt/v": "v"}
        await said(fork, "echo 2 >> /mnt/v/a; echo new > ~/own")
        assert await said(box, "cat /mnt/v/a ~/own") == "1\n2\nown\n"
        for each in (box, fork):
            await each.kill()
        await cleared(engine)


async def test_a_directory_of_one_read_only_stays_so_in_forks_and_after_a_pause(opening: Opening, small: Config):
    async with opening(small) as engine:
        await engine.volumes.create("v", ME)
        whole = await engine.create(SandboxSpec(volumes={"/mnt/v": "v"}))
        await said(whole, "mkdir -p /mnt/v/a/b && echo inside > /mnt/v/a/b/f && echo outside > /mnt/v/f")
        part = await engine.create(SandboxSpec(volumes={"/mnt/w": "v/a/b:ro"}))
        await engine.pause(part.id, ME, memory=False)
        for box in (await engine.resume(part.id, ME), *await engine.fork(part.id, ME)):
            assert isinstance(box, Sandbox)
            assert await said(box, "cat /mnt/w/f; touch /mnt/w/g") == (
                "inside\ntouch: cannot touch '/mnt/w/g': Read-only file system\n"
            )


async def test_many_sandboxes_use_one_at_once(opening: Opening, small: Config):
    async with opening(small) as engine:
        await engine.volumes.create("v", ME)
        boxes = await asyncio.gather(*(engine.create(with_volume()) for _ in range(5)))
        await asyncio.gather(*(said(box, f"echo {number} > /mnt/v/{number}") for number, box in enumerate(boxes)))
        assert await said(boxes[0], "cat /mnt/v/*") == "0\n1\n2\n3\n4\n"
        await asyncio.gather(*(box.kill() for box in boxes))
        await cleared(engine)


DIES = """
import asyncio, os, sys
from cloche.config import Config, PoolConfig as Pool
from cloche.engine.sandboxes import volumes
from cloche.model import SandboxSpec
from cloche.sdk.assembly import assemble_engine as assemble
volumes.SAVE_SECONDS, volumes.SAVE_SHARE = 0.02, 0

async def main():
    async with assemble(Config(data_dir=sys.argv[1], pool=Pool(ready=0))) as engine:
        await engine.volumes.create("v", "local")
        box = await engine.create(SandboxSpec(volumes={"/mnt/v": "v"}))
        await box.commands.run("echo kept > /mnt/v/a")
        before = (await engine.volumes.get("v", "local")).image
        while (await engine.volumes.get("v", "local")).image == before:
            await asyncio.sleep(0.01)
        before = (await engine.volumes.get("v", "local")).image
        while (await engine.volumes.get("v", "local")).image == before:
            await asyncio.sleep(0.01)
        print("saved", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_killed_host_loses_only_changes_after_the_last_image(opening: Opening, small: Config):
    host = subprocess.Popen([sys.executable, "-c", DIES, small.data_dir], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    try:
        assert await asyncio.to_thread(host.stdout.readline) == "saved\n"
        async with opening(small) as engine:  # of another process, while that one lives
            with pytest.raises(errors.VolumeConflict, match="another process"):
                await engine.create(with_volume())
    finally:
        os.kill(host.pid, signal.SIGKILL)
        host.wait()
        host.stdout.close()
    async with opening(small) as engine:
        box = await engine.create(with_volume())
        assert await said(box, "cat /mnt/v/a") == "kept\n"
        await box.kill()
        await cleared(engine)
    assert list(Path(small.data_dir, "images").iterdir()) == []


async def test_sandboxes_of_two_templates_share_one(
    opening: Opening, small: Config, template: Template, tmp_path: Path
):
    """Each has a nursery of its own; the mount goes from one to the other."""
    own = with_template(tmp_path / "data", template)
    another = msgspec.structs.replace(template, name="another", version="a" * 64, imports=())
    place = own / "templates/another" / another.version
    shutil.copytree(own / "templates/python" / template.version, place, symlinks=True)
    catalogue.write_template(another, place)
    async with opening(msgspec.structs.replace(small, data_dir=str(own))) as engine:
        await engine.volumes.create("v", ME)
        one, other = await engine.create(with_volume()), await engine.create(with_volume(template="another"))
        await said(one, "echo one > /mnt/v/a")
        assert await said(other, "cat /mnt/v/a; stat -c %U /mnt/v/a; echo other >> /mnt/v/a") == "one\nuser\n"
        assert await said(one, "cat /mnt/v/a") == "one\nother\n"
        assert other.record.template.startswith("another@")


@pytest.mark.long
async def test_one_sandbox_has_eight_and_nothing_of_them_is_left_in_the_host(
    opening: Opening, small: Config, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(volumes, "LINGER_SECONDS", 0.0)
    limits = VolumeLimits(bytes=4 * MIB, per_owner=8)
    elsewhere = namespaces_held()  # inits of other engines of this process have one each
    async with opening(msgspec.structs.replace(small, volumes=limits)) as engine:
        counts = []
        for _ in range(3):
            for number in range(8):
                await engine.volumes.create(f"v{number}", ME)
            box = await engine.create(SandboxSpec(volumes={f"/mnt/v{number}": f"v{number}" for number in range(8)}))
            assert await said(box, "for each in /mnt/v*; do touch $each/a; done; ls /mnt/v*/a | wc -l") == "8\n"
            assert namespaces_held() >= 8
            await box.kill()
            await cleared(engine)
            ends_at = time.monotonic() + 30
            # The zygote is told, and nobody waits for it. Kernels that start have some, too, for a moment.
            while (held := namespaces_held()) > elsewhere and time.monotonic() < ends_at:
                await asyncio.sleep(0.02)
            counts.append((len(os.listdir("/proc/self/fd")), max(held - elsewhere, 0)))
        assert counts[1] == counts[2] == (counts[2][0], 0)


def namespaces_held() -> int:
    """Descriptors of mount namespaces in the processes below this one."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    waiting, found = [os.getpid()], 0
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        with contextlib.suppress(OSError):
            found += sum(os.readlink(fd).startswith("mnt:") for fd in Path(f"/proc/{pid}/fd").iterdir())
    return found


async def test_when_the_zygote_dies_a_volume_stays_with_its_sandboxes_is_saved_and_comes_back(
    opening: Opening, small: Config, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(volumes, "LINGER_SECONDS", 0.0)
    async with opening(small) as engine:
        await engine.volumes.create("v", ME)
        box = await engine.create(with_volume())
        nursery = await engine.cell_supply.nursery(await engine.template("python")).get()
        os.kill(zygote_of(box), signal.SIGKILL)
        ends_at = time.monotonic() + 30
        while nursery.alive and time.monotonic() < ends_at:
            await asyncio.sleep(0.01)
        assert await said(box, "echo kept > /mnt/v/a; cat /mnt/v/a") == "kept\n"
        with pytest.raises(errors.NurseryFailed, match="has ended"):
            await engine.create(with_volume())
        await box.kill()
        while (await engine.volumes.get("v", ME)).instance is not None and time.monotonic() < ends_at:
            await asyncio.sleep(0.01)
        box = await engine.create(with_volume())
        assert await said(box, "cat /mnt/v/a") == "kept\n"
        await box.kill()
        await cleared(engine)


async def test_when_all_that_had_a_volume_died_it_comes_back_as_it_was_saved_last(
    opening: Opening, small: Config, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(volumes, "LINGER_SECONDS", 0.0)
    async with opening(small) as engine:
        await engine.volumes.create("v", ME)
        box = await engine.create(with_volume())
        assert await said(box, "echo saved > /mnt/v/a; cat /mnt/v/a") == "saved\n"
        (vault,) = engine.volumes._vaults.values()
        assert await engine.volumes._save_volume(vault)
        cell = await vault.cell()
        nursery = await engine.cell_supply.nursery(await engine.template("python")).get()
        os.kill(zygote_of(box), signal.SIGKILL)
        os.kill(pid_of(cell.cell._pidfd), signal.SIGKILL)  # type: ignore[attr-defined]  # a cell of this backend
        await box.kill()
        ends_at = time.monotonic() + 30
        while (nursery.alive or cell.guest.alive) and time.monotonic() < ends_at:
            await asyncio.sleep(0.01)
        box = await engine.create(with_volume())
        assert await said(box, "cat /mnt/v/a") == "saved\n"
        await box.kill()
        await cleared(engine)
