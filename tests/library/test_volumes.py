"""Named volumes in the library, in this process and on a server."""

from __future__ import annotations

import asyncio

import pytest

import cloche


@pytest.fixture
def volume(library):
    for each in cloche.volumes.list():
        cloche.volumes.remove(each)
    made = cloche.volumes.create("shared")
    yield made
    cloche.volumes.remove(made)


def test_sandboxes_share_a_volume(volume):
    with cloche.Sandbox(volumes={"/mnt/one": volume}) as one, cloche.Sandbox(volumes={"/mnt/two": "shared"}) as two:
        one.run("open('/mnt/one/a', 'w').write('told')")
        assert two.run("print(open('/mnt/two/a').read())").stdout == "told\n"
        assert two.files.read("/mnt/two/a") == b"told"
        assert two.info().volumes == {"/mnt/two": "shared"}
        with pytest.raises(cloche.errors.VolumeConflict, match="in use"):
            cloche.volumes.remove("shared")


def test_volume_contents_survive_their_sandboxes(volume):
    for number in range(2):
        with cloche.Sandbox(volumes={"/mnt/v": volume.name}) as box:
            assert box.commands.run("echo x >> /mnt/v/a; wc -l < /mnt/v/a").stdout == f"{number + 1}\n"


def test_volumes_are_found_by_id_and_name(volume):
    assert cloche.volumes.get(volume.id) == cloche.volumes.get("shared") == cloche.volumes.list()[0] == volume
    with pytest.raises(cloche.errors.VolumeConflict, match="already"):
        cloche.volumes.create("shared")
    for wrong in ("nobodys", "../shared"):
        with pytest.raises(cloche.errors.VolumeNotFound):
            cloche.volumes.get(wrong)


def test_the_same_with_await(volume):
    async def main() -> str:
        (found,) = await cloche.AsyncVolumes().list()
        async with cloche.AsyncSandbox(volumes={"/mnt/v": found}) as box:
            return (await box.commands.run("ls -d /mnt/v")).stdout

    assert asyncio.run(main()) == "/mnt/v\n"


@pytest.mark.parametrize(
    "volumes", ["shared", ["shared"], {"/mnt/v": 1}, {1: "shared"}, {"/etc": "shared"}, {"/mnt/v": ""}]
)
def test_invalid_volumes_are_refused(library, volumes):
    with pytest.raises(cloche.errors.InvalidRequest):
        cloche.Sandbox(volumes=volumes)
