"""Snapshots: E2B's Python SDK makes, lists and deletes them, and makes sandboxes from them."""

from __future__ import annotations

import httpx
import pytest
from e2b import SandboxException
from e2b.exceptions import SandboxNotFoundException
from e2b_code_interpreter import Sandbox

from cloche import errors
from cloche.api.dialect import NotSupported
from cloche.api.e2b.snapshots import (
    E2bSnapshotQuery,
    decode_snapshot_name,
    decode_snapshot_query,
    encode_snapshot,
    matches_snapshot_ref,
    select_snapshot_page,
)
from cloche.model import Snapshot


@pytest.fixture(scope="module")
def api(server):
    with httpx.Client(base_url=f"{server.url}/e2b", headers={"X-API-Key": server.key}, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def source(server):
    """A sandbox of which snapshots are made."""
    made = Sandbox.create(envs={"OWN": "1"}, **server.e2b)
    made.files.write("kept.txt", "kept")
    yield made
    made.kill()


@pytest.fixture
def snapshot(server, source):
    made = source.create_snapshot()
    yield made
    Sandbox.delete_snapshot(made.snapshot_id, **server.e2b)


@pytest.fixture
def create(server):
    made = []

    def creating(template: str, **how) -> Sandbox:
        made.append(Sandbox.create(template, **how, **server.e2b))
        return made[-1]

    yield creating
    for box in made:
        box.kill()


def test_sandboxes_made_from_a_snapshot_have_its_files_and_environment_each_their_own(source, snapshot, create):
    one, other = create(snapshot.snapshot_id), create(snapshot.snapshot_id, envs={"OWN": "2"})
    one.files.write("kept.txt", "changed")
    assert (other.files.read("kept.txt"), source.files.read("kept.txt")) == ("kept", "kept")
    said = [each.commands.run("echo $OWN $E2B_SANDBOX_ID").stdout.split() for each in (one, other)]
    assert said == [["1", one.sandbox_id], ["2", other.sandbox_id]]
    assert source.is_running()


def test_a_snapshot_outlives_its_sandbox_and_a_sandbox_its_snapshot(server, create):
    box = create("base")
    box.files.write("kept.txt", "kept")
    snapshot = box.create_snapshot()
    box.kill()
    again = create(snapshot.snapshot_id)
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **server.e2b) is True
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **server.e2b) is False
    assert again.files.read("kept.txt") == "kept"
    with pytest.raises(SandboxException, match="404: template"):
        Sandbox.create(snapshot.snapshot_id, **server.e2b)


def test_a_name_means_the_newest_snapshot_that_has_it(server, source, create):
    older = source.create_snapshot(name="newest-wins")
    source.files.write("newer.txt", "newer")
    newer = source.create_snapshot(name="newest-wins")
    assert older.names == newer.names == ["newest-wins"]
    assert older.snapshot_id != newer.snapshot_id
    assert create("newest-wins").files.exists("newer.txt")
    assert not create(older.snapshot_id).files.exists("newer.txt")
    for _ in range(2):
        assert Sandbox.delete_snapshot("newest-wins", **server.e2b) is True
    assert Sandbox.delete_snapshot("newest-wins", **server.e2b) is False


def test_a_paused_sandbox_has_snapshots_made_of_it_too(server, create):
    box = create("base")
    box.files.write("kept.txt", "kept")
    for keep_memory in (True, False):
        box.pause(keep_memory=keep_memory)
        snapshot = box.create_snapshot()
        assert not box.is_running()
        assert create(snapshot.snapshot_id).files.read("kept.txt") == "kept"
        Sandbox.delete_snapshot(snapshot.snapshot_id, **server.e2b)
        box.connect()


def test_they_are_listed_in_pages_by_sandbox_and_by_name(server, source, create):
    other = create("base")
    made = [source.create_snapshot(), source.create_snapshot(name="listed"), other.create_snapshot()]
    ids = [each.snapshot_id for each in made]
    pages = Sandbox.list_snapshots(limit=1, sandbox_id=source.sandbox_id, **server.e2b)
    assert [each.snapshot_id for each in pages.next_items()] == [ids[1]]
    assert pages.has_next
    assert [each.snapshot_id for each in pages.next_items()] == [ids[0]]
    assert not pages.has_next
    everything = [each.snapshot_id for each in Sandbox.list_snapshots(**server.e2b).next_items()]
    assert everything[:3] == ids[::-1]
    named = Sandbox.list_snapshots(name="listed", **server.e2b).next_items()
    assert [(each.snapshot_id, each.names) for each in named] == [(ids[1], ["listed"])]
    assert Sandbox.list_snapshots(name="unlisted", **server.e2b).next_items() == []
    for id in ids:
        Sandbox.delete_snapshot(id, **server.e2b)


def test_a_foreign_snapshot_is_unknown(server, snapshot):
    admin = {"X-API-Key": server.key}
    made = httpx.post(f"{server.url}/admin/keys", headers=admin, json={"owner": "snapshot-stranger"}).json()
    theirs = {**server.e2b, "api_key": made["key"]}
    assert Sandbox.list_snapshots(**theirs).next_items() == []
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **theirs) is False
    with pytest.raises(SandboxException, match="404: template"):
        Sandbox.create(snapshot.snapshot_id, **theirs)
    httpx.delete(f"{server.url}/admin/keys/{made['id']}", headers=admin)


def test_invalid_snapshots_and_names_are_refused(server, source, api):
    path = f"/sandboxes/{source.sandbox_id}/snapshots"
    refused = api.post(path, json={"memory": True})
    assert (refused.status_code, "not memory" in refused.json()["message"]) == (501, True)
    for name in ("no spaces", "python", "../up", "x" * 200):
        refused = api.post(path, json={"name": name})
        assert (refused.status_code, refused.json()["code"]) == (400, 400), name
    assert api.post("/sandboxes/i00000000000000000000/snapshots", json={}).status_code == 404
    assert api.get("/snapshots", params={"nextToken": "%%"}).status_code == 400
    with pytest.raises(SandboxNotFoundException):
        Sandbox.create_snapshot("i" + "0" * 20, **server.e2b)


# -- what goes over the wire


def made(id: str, at: float, name: str | None = None) -> Snapshot:
    return Snapshot(id=id, owner="o", sandbox="i1", template="python@1", image="x", bytes=1, created_at=at, name=name)


def test_a_body_names_a_snapshot_or_does_not():
    assert decode_snapshot_name(b"") is None
    assert decode_snapshot_name(b'{"name":"n","memory":false}') == "n"
    with pytest.raises(NotSupported):
        decode_snapshot_name(b'{"memory":true}')
    with pytest.raises(errors.InvalidRequest):
        decode_snapshot_name(b'{"name":1}')


def test_pages_of_snapshots_of_the_same_moment_miss_none():
    found = [made(id, 1.0) for id in ("sa", "sb", "sc")]
    first, token = select_snapshot_page(found, E2bSnapshotQuery(limit=2))
    assert [each.id for each in first] == ["sc", "sb"]
    assert token is not None
    rest, end = select_snapshot_page(found, decode_snapshot_query({"limit": "2", "nextToken": token}))
    assert ([each.id for each in rest], end) == (["sa"], None)


@pytest.mark.parametrize(
    ("name", "ref", "does"),
    [
        ("n", "n", True),
        ("n", "n:default", True),
        ("n:v1", "n", True),
        ("n:v1", "n:v1", True),
        ("n:v1", "n:v2", False),
        ("n", "m", False),
        (None, "sx", True),
        (None, "", False),
    ],
)
def test_a_snapshot_answers_to_its_id_and_its_name_with_a_tag_or_without(name, ref, does):
    assert matches_snapshot_ref(made("sx", 1.0, name), ref) is does


def test_a_snapshot_is_shown_as_clients_read_it():
    assert encode_snapshot(made("sx", 1.0, "n")) == {"snapshotID": "sx", "names": ["n"]}
    assert encode_snapshot(made("sx", 1.0)) == {"snapshotID": "sx", "names": []}
