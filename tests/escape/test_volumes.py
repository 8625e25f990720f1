"""Hostile programs in sandboxes with volumes: what one can do there ends with the volume, and with its owner."""

# ruff: noqa: E501 - a hostile program reads better with one try per line

from __future__ import annotations

import secrets

import pytest
import pytest_asyncio

from cloche import errors
from cloche.config.sections import VolumeLimits
from cloche.engine.sandboxes.volumes import VOLUME_PATH
from cloche.model import MIB, SandboxSpec

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(60)]

REFUSED = (errors.FileError, errors.FileNotFound, errors.InvalidPath)
MANY = 'for n in range(9999): open(f"/mnt/v/d{n}", "w").close()'


@pytest_asyncio.fixture(loop_scope="session")
async def volume(engine, monkeypatch):
    monkeypatch.setattr(engine.volumes, "_limits", VolumeLimits(bytes=8 * MIB))
    made = await engine.volumes.create(f"e-{secrets.token_hex(4)}", "local")
    yield made
    await engine.volumes.remove(made.id, "local")


@pytest_asyncio.fixture(loop_scope="session")
async def one(engine, volume):
    made = await engine.create(SandboxSpec(volumes={"/mnt/v": volume.name}))
    yield made
    await made.kill()


@pytest_asyncio.fixture(loop_scope="session")
async def other(engine, volume):
    """Another sandbox with the same volume."""
    made = await engine.create(SandboxSpec(volumes={"/mnt/v": volume.name}))
    yield made
    await made.kill()


async def test_a_directory_of_a_volume_is_no_way_out_of_it(engine, one, volume):
    await one.commands.run(
        "ln -s / /mnt/v/root; mkdir -p /mnt/v/in; ln -s ../.. /mnt/v/in/up; touch /mnt/v/file", user="root"
    )
    for place in ("root", "root/etc", "in/up", "in/up/etc", "file", "never", "in/never"):
        with pytest.raises(errors.Unavailable):
            await engine.create(SandboxSpec(volumes={"/mnt/w": f"{volume.name}/{place}"}))
    for place in ("..", "in/..", ".", "in//in", "/in"):
        with pytest.raises(errors.InvalidRequest):
            await engine.create(SandboxSpec(volumes={"/mnt/w": f"{volume.name}/{place}"}))


@pytest.mark.parametrize("user", ["user", "root"])
async def test_a_read_only_volume_cannot_be_written(engine, one, volume, user):
    await one.commands.run("mkdir -p /mnt/v/in && echo kept > /mnt/v/in/f && chmod -R 777 /mnt/v/in")
    box = await engine.create(SandboxSpec(volumes={"/mnt/w": f"{volume.name}/in:ro"}))
    tries = ("echo x > /mnt/w/f", "rm /mnt/w/f", "touch /mnt/w/g", "chmod 600 /mnt/w/f", "mount -o remount,bind,rw /mnt/w", "mkdir /mnt/w/d", "mv /mnt/w/f /mnt/w/g", "ls /mnt/w/../v")  # fmt: skip
    for each in tries:
        assert (await box.commands.run(each, user=user)).exit_code != 0, each
    for path in ("/mnt/w/f", "/mnt/w/g"):
        with pytest.raises(errors.FileError):
            await box.files.write(path, b"x", user=user)
    assert (await box.commands.run("cat /mnt/w/f; ls /mnt/w", user=user)).stdout == "kept\nf\n"
    await box.kill()


@pytest.mark.parametrize("user", ["user", "root"])
async def test_nothing_about_the_mount_can_be_changed(one, user):
    tries = (
        "mount -o remount,bind,suid,dev /mnt/v", "mount -o remount,size=1g /mnt/v", "umount /mnt/v", "umount -l /mnt/v",
        "mount --bind / /mnt/v", "mount -t tmpfs x /mnt/v", "mount -o remount,rw /mnt", "umount -l /mnt", "rmdir /mnt/v", "mv /mnt/v /mnt/w", "touch /mnt/x", "mkdir /mnt/w", "unshare -m true", "nsenter -t 1 -m true",
    )  # fmt: skip
    for each in tries:
        assert (await one.commands.run(each, user=user)).exit_code != 0, each
    seen = (await one.commands.run("grep ' /mnt' /proc/self/mountinfo", user=user)).stdout.splitlines()
    kinds = {line.split()[4]: set(line.split()[5].split(",")) for line in seen}
    assert kinds.keys() == {"/mnt", "/mnt/data", "/mnt/v"}
    assert "ro" in kinds["/mnt"] and {"rw", "nosuid", "nodev"} <= kinds["/mnt/v"]


@pytest.mark.parametrize("user", ["user", "root"])
async def test_a_full_volume_does_not_harm_the_sandbox(one, other, user):
    full = await one.commands.run("head -c 64M /dev/zero > /mnt/v/big", user=user)
    assert "No space left" in full.stderr
    many = await one.commands.run(f"rm /mnt/v/big; python3 -c '{MANY}'", user=user)
    assert "No space left" in many.stderr
    assert (await other.commands.run("echo on; ls /mnt/v | head -1")).stdout.startswith("on\nd")
    await one.commands.run("rm -rf /mnt/v/*", user=user)


async def test_setuid_programs_and_devices_in_it_are_of_no_use(one, other, single):
    """What one sandbox's root leaves there gives another one's user nothing."""
    made = "cp $(readlink -f $(which id)) /mnt/v/id; chmod 6755 /mnt/v/id; mknod /mnt/v/null c 1 3; mknod /mnt/v/disk b 8 0; ls /mnt/v"
    assert (await one.commands.run(made, user="root")).stdout == "id\n"
    said = (await other.commands.run("/mnt/v/id", user="user")).stdout
    assert said.startswith("uid=1000(user) gid=1000(user)") and "euid" not in said and "egid" not in said
    assert single or (await other.commands.run("stat -c %U /mnt/v/id")).stdout == "root\n"


async def test_descriptors_of_volumes_and_of_the_nursery_are_in_no_program(one):
    for command in ("ls -l /proc/self/fd", "ls -l /proc/1/fd"):
        for user in ("user", "root"):
            seen = (await one.commands.run(command, user=user)).stdout
            assert "mnt:" not in seen and "/mnt" not in seen and " /\n" not in seen
    run = (
        await one.context()
        .execute(
            "import os; print(*[os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if os.path.islink(f'/proc/self/fd/{n}')])"
        )
        .result()
    )
    assert "mnt" not in run.stdout and "ns" not in run.stdout.replace("anon", "")


async def test_a_sandbox_without_volumes_sees_none_of_them(one, box):
    await one.commands.run("echo secret-of-a-volume > /mnt/v/s")
    for user in ("user", "root"):
        assert (await box.commands.run("ls /mnt; grep -c volume /proc/self/mountinfo", user=user)).stdout == "data\n0\n"


async def test_another_owners_volume_cannot_be_named(engine, volume):
    for ref in (volume.name, volume.id):
        with pytest.raises(errors.VolumeNotFound):
            await engine.create(SandboxSpec(owner="stranger", volumes={"/mnt/v": ref}))


async def test_links_left_in_a_volume_do_not_mislead_the_host(engine, volume, one, host):
    """Symlinks, fifos and odd names: whoever reads or writes the volume from outside stays in the vault."""
    await one.commands.run(
        f"cd /mnt/v; ln -s {host.file} out; ln -s / top; ln -s /etc etc; mkfifo pipe; touch $'a\\xff'; ln -s loop loop",
        user="root",
    )
    async with engine.volumes.files(volume, writes=True) as files:
        for path in ("out", f"top{host.file}", "pipe", "loop"):
            with pytest.raises(REFUSED):
                await files.read(f"{VOLUME_PATH}/{path}")
        for path in ("out", "top/x", "etc/passwd"):
            with pytest.raises(REFUSED):
                await files.write(f"{VOLUME_PATH}/{path}", b"x", below=VOLUME_PATH)
        assert len(await files.list(VOLUME_PATH)) == 6


async def test_when_the_vault_dies_its_sandboxes_keep_their_files_and_another_one_saves_them(engine, volume, one):
    await one.commands.run("echo kept > /mnt/v/a")
    vault = engine.volumes._vaults[volume.id]
    await (await vault.cell()).cell.aclose()
    async with engine.volumes.files(volume, writes=False) as files:
        assert await files.read(f"{VOLUME_PATH}/a") == b"kept\n"
