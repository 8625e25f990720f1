"""Named volumes: E2B's Python SDK makes them, fills them, and mounts them into several sandboxes at once."""

from __future__ import annotations

import io
import secrets

import httpx
import pytest
from e2b.exceptions import VolumeException, VolumeNotFoundException, VolumePathNotFoundException
from e2b.volume.volume_sync import Volume
from e2b_code_interpreter import Sandbox


@pytest.fixture(scope="module", autouse=True)
def _content_is_here(server):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("E2B_VOLUME_API_URL", f"{server.url}/e2b")
        yield


@pytest.fixture(scope="module")
def opts(server):
    return {"api_key": server.key, "api_url": f"{server.url}/e2b"}


@pytest.fixture(scope="module")
def api(server):
    with httpx.Client(base_url=f"{server.url}/e2b", headers={"X-API-Key": server.key}, timeout=60) as client:
        yield client


@pytest.fixture
def volume(opts):
    made = Volume.create(f"v-{secrets.token_hex(4)}", **opts)
    yield made
    Volume.destroy(made.volume_id, **opts)


@pytest.fixture
def create(server):
    made = []

    def creating(volumes, **how) -> Sandbox:
        made.append(Sandbox.create(volume_mounts=volumes, **how, **server.e2b))
        return made[-1]

    yield creating
    for box in made:
        box.kill()


def test_a_volume_is_made_listed_found_and_removed_by_its_owner(opts):
    made = Volume.create("the-one", **opts)
    try:
        assert [each.name for each in Volume.list(**opts) if each.volume_id == made.volume_id] == ["the-one"]
        assert Volume.connect(made.volume_id, **opts).token == made.token
        with pytest.raises(VolumeException) as taken:
            Volume.create("the-one", **opts)
        assert "already" in str(taken.value)
    finally:
        assert Volume.destroy(made.volume_id, **opts)
    assert not Volume.destroy(made.volume_id, **opts)
    with pytest.raises(VolumeNotFoundException):
        Volume.get_info(made.volume_id, **opts)


def test_files_of_a_volume_are_written_and_read_without_a_sandbox(volume, single):
    assert volume.write_file("/a/b.txt", "hello").path == "/a/b.txt"
    big = bytes(range(256)) * 8192
    volume.write_file("/big", io.BytesIO(big), mode=0o640, uid=0, gid=1000)
    assert volume.read_file("/a/b.txt") == "hello"
    assert bytes(volume.read_file("/big", format="bytes")) == big
    about = volume.get_info("/big")
    assert (about.size, about.mode) == (len(big), 0o640)
    assert single or (about.uid, about.gid) == (0, 1000)
    assert volume.update_metadata("/big", mode=0o600, uid=1000).mode == 0o600
    assert volume.make_dir("/dir").type.value == "directory"
    assert sorted(each.path for each in volume.list("/", depth=2)) == ["/a", "/a/b.txt", "/big", "/dir"]
    volume.remove("/a")
    assert not volume.exists("/a/b.txt")
    with pytest.raises(VolumePathNotFoundException):
        volume.read_file("/a/b.txt")
    with pytest.raises(VolumePathNotFoundException):
        volume.make_dir("/no/such/parent")
    assert volume.make_dir("/no/such/parent", force=True).path == "/no/such/parent"


def test_sandboxes_with_a_volume_see_each_others_files_in_it_and_nothing_else(volume, create):
    volume.write_file("/first", "from outside")
    one, other = create({"/mnt/shared": volume}), create({"/mnt/elsewhere": volume.name})
    one.commands.run("cat /mnt/shared/first > /mnt/shared/second; mkdir /mnt/shared/d; echo > ~/own")
    told = other.run_code(
        "import os; print(sorted(os.listdir('/mnt/elsewhere')), open('/mnt/elsewhere/second').read())"
    )
    assert told.logs.stdout == ["['d', 'first', 'second'] from outside\n"]
    assert not other.files.exists("/home/user/own")
    assert volume.read_file("/second") == "from outside"
    one.commands.run("ln -s second /mnt/shared/link")
    assert (volume.get_info("/link").type.value, volume.get_info("/link").target) == ("symlink", "second")
    volume.remove("/link")
    assert volume.exists("/second") and not volume.exists("/link")
    shown = one.get_info()
    assert [(each["name"], each["path"]) for each in shown.volume_mounts or []] == [(volume.name, "/mnt/shared")]


def test_a_volume_that_is_mounted_is_not_removed(volume, create, opts):
    box = create({"/mnt/v": volume})
    with pytest.raises(VolumeException) as refused:
        Volume.destroy(volume.volume_id, **opts)
    assert "in use" in str(refused.value)
    assert box.is_running()


def test_a_volume_stays_through_pauses_snapshots_and_forks(volume, create, server):
    box = create({"/mnt/v": volume})
    box.commands.run("echo 1 > /mnt/v/kept")
    for memory in (True, False):
        box.pause(keep_memory=memory) if memory is False else box.pause()
        box = box.connect(**server.e2b)
        assert box.files.read("/mnt/v/kept") == "1\n"
    snapshot = box.create_snapshot()
    try:
        made = create({}, template=snapshot.snapshot_id)
        made.commands.run("echo 2 >> /mnt/v/kept")
        assert box.files.read("/mnt/v/kept") == "1\n2\n"
    finally:
        Sandbox.delete_snapshot(snapshot.snapshot_id, **server.e2b)


@pytest.mark.parametrize(
    "path", ["/mnt", "/mnt/data", "/mnt/a/b", "/etc", "/mnt/..", "mnt/x", "/home/user/x", "/mnt/ "]
)
def test_a_place_where_no_volume_can_be_is_refused_with_where_one_can(volume, api, path):
    body = {"templateID": "python", "volumeMounts": [{"name": volume.name, "path": path}]}
    answer = api.post("/sandboxes", json=body)
    assert answer.status_code == 400
    assert "/mnt/NAME" in answer.json()["message"]


def test_a_volume_that_does_not_exist_cannot_be_mounted(api):
    body = {"templateID": "python", "volumeMounts": [{"name": "nobodys", "path": "/mnt/x"}]}
    answer = api.post("/sandboxes", json=body)
    assert (answer.status_code, "nobodys" in answer.json()["message"]) == (404, True)


@pytest.mark.parametrize("name", ["", "a/b", "../x", "x" * 65, "-", "ä"])
def test_a_name_that_is_none_is_refused(api, name):
    assert api.post("/volumes", json={"name": name}).status_code == 400


@pytest.mark.parametrize("token", ["", "Bearer wrong", "Basic abc"])
def test_the_content_of_a_volume_takes_its_own_token(volume, api, token):
    answer = api.get(f"/volumecontent/{volume.volume_id}/dir?path=/", headers={"Authorization": token})
    assert answer.status_code == 401


@pytest.mark.parametrize("query", ["", "path=", "path=/&depth=0", "path=/&depth=x", "path=%00"])
def test_odd_questions_about_content_get_an_answer(volume, api, query):
    headers = {"Authorization": f"Bearer {volume.token}"}
    assert api.get(f"/volumecontent/{volume.volume_id}/dir?{query}", headers=headers).status_code == 400
    assert api.get(f"/volumecontent/{volume.volume_id}/dir?path=/../..", headers=headers).json() == []
