"""Pauses, snapshots and forks in our own dialect, by a plain HTTP client."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx2
import pytest
from tests.server.test_native_api import PATIENCE_SECONDS, client, error_of, run


@pytest.fixture(scope="module")
def api(server) -> Iterator[httpx2.Client]:
    with client(server.url, server.key) as made:
        yield made


@pytest.fixture(scope="module")
def stranger(server) -> Iterator[httpx2.Client]:
    """Somebody else with a key of their own."""
    asked = {"owner": "stranger", "role": "user", "name": "test"}
    made = httpx2.post(f"{server.url}/admin/keys", headers={"x-api-key": server.key}, json=asked).json()
    with client(server.url, made["key"]) as other:
        yield other


@pytest.fixture
def box(api: httpx2.Client) -> Iterator[str]:
    """The path of a sandbox."""
    path = f"/sandboxes/{api.post('/sandboxes', json={}).json()['id']}"
    yield path
    api.delete(path)


def test_a_sandbox_is_paused_and_resumed(api: httpx2.Client, box: str):
    run(api, box, "x = 42")
    paused = api.post(f"{box}/pause")
    assert paused.status_code == 200
    info = paused.json()
    assert (info["state"], info["pause_memory"]) == ("paused", True) and info["paused_at"] <= time.time()
    assert api.get(box).json() == info
    refused = api.post(f"{box}/run", json={"code": "x"})
    assert refused.status_code == 409 and error_of(refused)["code"] == "sandbox_paused"
    assert "resume" in error_of(refused)["message"]
    again = api.post(f"{box}/pause")
    assert again.status_code == 409 and error_of(again)["code"] == "sandbox_paused"
    resumed = api.post(f"{box}/resume", json={"timeout_seconds": 50}).json()
    assert resumed["state"] == "running" and time.time() < resumed["deadline_at"] < time.time() + 51
    assert resumed["paused_at"] is None and resumed["pause_memory"] is None
    assert run(api, box, "x")["text"] == "42"


def test_sandboxes_are_listed_by_state(api: httpx2.Client, box: str):
    other = api.post("/sandboxes", json={}).json()["id"]
    api.post(f"/sandboxes/{other}/pause", json={"memory": False})
    listed = {
        state: {each["id"] for each in api.get("/sandboxes", params={"state": state}).json()}
        for state in ("running", "paused")
    }
    assert box.rpartition("/")[2] in listed["running"] - listed["paused"]
    assert other in listed["paused"] - listed["running"]
    assert listed["running"] | listed["paused"] <= {each["id"] for each in api.get("/sandboxes").json()}
    assert api.delete(f"/sandboxes/{other}").status_code == 204
    assert api.get("/sandboxes", params={"state": "ended"}).status_code == 400
    assert error_of(api.post(f"/sandboxes/{other}/resume"))["code"] == "sandbox_killed"


def test_the_deadlines_action_is_set_at_creation(api: httpx2.Client):
    asked = {"timeout_seconds": 0.2, "on_timeout": "pause", "pause_memory": False, "auto_resume": True}
    info = api.post("/sandboxes", json=asked).json()
    assert (info["on_deadline"], info["auto_resume"], info["state"]) == ("pause", True, "running")
    path, ends_at = f"/sandboxes/{info['id']}", time.monotonic() + PATIENCE_SECONDS
    while api.get(path).json()["state"] != "paused" and time.monotonic() < ends_at:
        time.sleep(0.02)
    assert api.get(path).json()["pause_memory"] is False
    assert run(api, path, "6 * 7")["text"] == "42"  # which resumed it
    api.delete(path)


def test_a_snapshot_from_its_making_to_its_end(api: httpx2.Client, box: str):
    api.put(f"{box}/files/content", params={"path": "f"}, content=b"kept")
    made = api.post(f"{box}/snapshots", json={"name": "a/b:c"})
    snapshot = made.json()
    assert made.status_code == 201
    assert set(snapshot) == {"id", "name", "owner", "sandbox", "template", "size_bytes", "created_at", "limits"}
    assert api.get(f"/snapshots/{snapshot['id']}").json() == api.get("/snapshots/a/b:c").json() == snapshot
    assert api.get("/snapshots", params={"sandbox": box.rpartition("/")[2]}).json() == [snapshot]
    other = api.post("/sandboxes", json={"template": "a/b:c", "limits": {"processes": 99}}).json()
    assert other["limits"] == {**snapshot["limits"], "processes": 99}
    assert api.get(f"/sandboxes/{other['id']}/files/content", params={"path": "f"}).content == b"kept"
    assert api.delete("/snapshots/a%2Fb%3Ac").status_code == 204
    gone = api.get(f"/snapshots/{snapshot['id']}")
    assert gone.status_code == 404 and error_of(gone)["code"] == "snapshot_not_found"
    assert api.delete(f"/sandboxes/{other['id']}").status_code == 204


def test_forks_are_made_at_once(api: httpx2.Client, box: str):
    api.put(f"{box}/files/content", params={"path": "f"}, content=b"kept")
    made = api.post(f"{box}/fork", json={"count": 2, "timeout_seconds": 60})
    assert made.status_code == 201 and len(made.json()) == 2
    for each in made.json():
        path = f"/sandboxes/{each['id']}"
        assert api.get(f"{path}/files/content", params={"path": "f"}).content == b"kept"
        assert api.delete(path).status_code == 204


def test_a_stranger_has_nothing_of_it(api: httpx2.Client, stranger: httpx2.Client, box: str):
    snapshot = api.post(f"{box}/snapshots", json={"name": "mine"}).json()
    for paused in (False, True):
        if paused:
            api.post(f"{box}/pause")
        for path in ("pause", "resume", "snapshots", "fork"):
            refused = stranger.post(f"{box}/{path}")
            assert refused.status_code == 404 and error_of(refused)["code"] == "sandbox_not_found"
        assert stranger.delete(box).status_code == stranger.get(box).status_code == 404
    for ref in (snapshot["id"], "mine"):
        assert stranger.get(f"/snapshots/{ref}").status_code == stranger.delete(f"/snapshots/{ref}").status_code == 404
        refused = stranger.post("/sandboxes", json={"template": ref})
        assert error_of(refused)["code"] == "template_not_found"
    assert stranger.get("/snapshots").json() == [] == stranger.get("/sandboxes").json()
    for path in ("/snapshots", "/sandboxes"):
        assert api.get(path, params={"all": True}).status_code == 403  # for the operator only, on the control socket
    assert api.delete("/snapshots/mine").status_code == 204


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause", {"memory": "no"}),
        ("/pause", {"keep": True}),
        ("/resume", {"timeout_seconds": 0}),
        ("/resume", {"seconds": 1}),
        ("/snapshots", {"name": 1}),
        ("/snapshots", {"name": ""}),
        ("/snapshots", {"name": "../etc"}),
        ("/snapshots", {"name": "python"}),
        ("/fork", {"count": 0}),
        ("/fork", {"count": 1000}),
        ("/fork", {"count": "two"}),
        ("/fork", {"timeout_seconds": -1}),
    ],
)
def test_invalid_requests_are_refused_in_words(api: httpx2.Client, box: str, path: str, body: dict):
    refused = api.post(box + path, json=body)
    assert refused.status_code == 400 and error_of(refused)["code"] == "invalid_request"
    assert api.get(box).json()["state"] == "running"


def test_paused_ones_are_counted(server, api: httpx2.Client, box: str):
    def counted() -> float:
        lines = httpx2.get(f"{server.url}/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("cloche_sandboxes_paused "))

    before = counted()
    api.post(f"{box}/pause")
    assert counted() == before + 1
    api.post(f"{box}/resume")
    assert counted() == before
