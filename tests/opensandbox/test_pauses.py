"""Pauses and snapshots by OpenSandbox's lifecycle API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from tests.conftest import RunningServer
from tests.opensandbox.conftest import Execd, Lifecycle, said

import cloche
from cloche import errors


@pytest.fixture
def paused(lifecycle: Lifecycle, sandbox: str) -> Iterator[tuple[str, Execd]]:
    """One that has a variable and a file, and its execd."""
    execd = lifecycle.execd(sandbox)
    with execd.http:
        execd.run("x = 41; open('/mnt/data/f', 'w').write('kept')")
        answer = lifecycle.http.post(f"/sandboxes/{sandbox}/pause")
        assert (answer.status_code, answer.content) == (202, b"")
        yield sandbox, execd


def state(lifecycle: Lifecycle, id: str) -> str:
    answer = lifecycle.http.get(f"/sandboxes/{id}")
    assert answer.status_code == 200
    said: str = answer.json()["status"]["state"]
    return said


def refusal(answer: httpx2.Response) -> tuple[int, str]:
    assert answer.json().keys() == {"code", "message"}
    return answer.status_code, answer.json()["code"]


def test_a_paused_sandbox_goes_on_where_it_was(lifecycle: Lifecycle, paused: tuple[str, Execd]):
    id, execd = paused
    shown: dict[str, Any] = lifecycle.http.get(f"/sandboxes/{id}").json()
    assert shown["status"]["state"] == "Paused" and "expiresAt" not in shown  # its deadline stands still
    assert shown["status"]["lastTransitionAt"] > shown["createdAt"]
    answer = lifecycle.http.post(f"/sandboxes/{id}/resume")
    assert (answer.status_code, answer.content) == (202, b"")
    shown = lifecycle.http.get(f"/sandboxes/{id}").json()
    assert shown["status"]["state"] == "Running" and "expiresAt" in shown
    assert shown["image"]["uri"].startswith("opensandbox/") and shown["entrypoint"][0].startswith("/opt")
    assert said(execd.run("print(x, open('/mnt/data/f').read())"), "stdout") == "41 kept\n"


def test_a_paused_sandbox_is_not_to_be_used(lifecycle: Lifecycle, paused: tuple[str, Execd]):
    id, execd = paused
    assert refusal(lifecycle.http.post(f"/sandboxes/{id}/pause")) == (409, "SANDBOX::CONFLICT")
    assert refusal(lifecycle.http.get(f"/sandboxes/{id}/endpoints/44772")) == (409, "SANDBOX::CONFLICT")
    assert refusal(execd.http.get("/ping")) == (409, "SANDBOX_PAUSED")
    renewal = {"expiresAt": "2999-01-01T00:00:00Z"}
    assert refusal(lifecycle.http.post(f"/sandboxes/{id}/renew-expiration", json=renewal)) == (409, "SANDBOX::CONFLICT")
    assert state(lifecycle, id) == "Paused"


def test_a_sandbox_that_runs_cannot_be_resumed(lifecycle: Lifecycle, sandbox: str):
    assert refusal(lifecycle.http.post(f"/sandboxes/{sandbox}/resume")) == (409, "SANDBOX::CONFLICT")


def test_paused_sandboxes_are_listed_as_such_and_can_be_deleted(lifecycle: Lifecycle, paused: tuple[str, Execd]):
    id, _ = paused

    def listed(*states: str) -> set[str]:
        params = [("state", each) for each in states] + [("pageSize", "200")]
        return {each["id"] for each in lifecycle.http.get("/sandboxes", params=params).json()["items"]}

    assert id in listed() & listed("Paused") & listed("Running", "Paused") and id not in listed("Running")
    assert lifecycle.http.delete(f"/sandboxes/{id}").status_code == 204
    assert refusal(lifecycle.http.get(f"/sandboxes/{id}")) == (404, "SANDBOX::SANDBOX_NOT_FOUND")
    assert refusal(lifecycle.http.post(f"/sandboxes/{id}/resume")) == (404, "SANDBOX::SANDBOX_NOT_FOUND")


def test_metadata_survives_a_pause_without_memory(lifecycle: Lifecycle, server: RunningServer):
    made = lifecycle.create(extensions={"access.renew.extend.seconds": "300", "mine": "1"}).json()
    box = cloche.Sandbox.connect(made["id"], url=server.url, api_key=server.key)
    box.pause(memory=False)
    with pytest.raises(errors.SandboxPaused):
        box.run("1")
    assert lifecycle.http.post(f"/sandboxes/{box.id}/resume").status_code == 202
    shown = lifecycle.http.get(f"/sandboxes/{box.id}").json()
    assert shown["extensions"] == made["extensions"] and shown["entrypoint"] == made["entrypoint"]
    with lifecycle.execd(box.id).http as http:
        assert http.get("/ping").status_code == 200
    box.kill()


def test_snapshots_are_made_listed_used_and_removed(lifecycle: Lifecycle, sandbox: str):
    execd = lifecycle.execd(sandbox)
    execd.run("open('/mnt/data/f', 'w').write('kept')")
    answer = lifecycle.http.post(f"/sandboxes/{sandbox}/snapshots", json={"name": "mine"})
    snapshot = answer.json()
    assert answer.status_code == 202 and answer.headers["location"].endswith("/snapshots/" + snapshot["id"])
    assert (snapshot["sandboxId"], snapshot["name"], snapshot["status"]["state"]) == (sandbox, "mine", "Ready")
    unnamed = lifecycle.http.post(f"/sandboxes/{sandbox}/snapshots").json()
    assert "name" not in unnamed

    def listed(**params: str) -> list[str]:
        found = lifecycle.http.get("/snapshots", params={"sandboxId": sandbox, **params}).json()
        assert found["pagination"]["page"] == 1
        return [each["id"] for each in found["items"]]

    assert listed() == [unnamed["id"], snapshot["id"]] and listed(name="mine") == [snapshot["id"]]
    assert listed(state="Creating") == [] and listed(pageSize="1") == [unnamed["id"]]
    assert lifecycle.http.get(f"/snapshots/{snapshot['id']}").json() == snapshot
    source = {"image": None, "entrypoint": None, "networkPolicy": None, "snapshotId": snapshot["id"]}
    made = lifecycle.create(**source).json()
    shown = lifecycle.http.get(f"/sandboxes/{made['id']}").json()
    assert shown["snapshotId"] == snapshot["id"] and "image" not in shown
    assert said(lifecycle.execd(made["id"]).run("print(open('/mnt/data/f').read())"), "stdout") == "kept\n"
    for each in (snapshot, unnamed):
        assert lifecycle.http.delete(f"/snapshots/{each['id']}").status_code == 204
    assert refusal(lifecycle.http.delete(f"/snapshots/{snapshot['id']}")) == (404, "SNAPSHOT::SNAPSHOT_NOT_FOUND")
    assert refusal(lifecycle.create(**source)) == (404, "SNAPSHOT::SNAPSHOT_NOT_FOUND")
    assert refusal(lifecycle.create(**{**source, "snapshotId": "python"})) == (404, "SNAPSHOT::SNAPSHOT_NOT_FOUND")
    assert lifecycle.http.delete(f"/sandboxes/{made['id']}").status_code == 204


@pytest.mark.parametrize("body", [b"{", b'{"name": 1}', b'{"name": "a b"}', b'{"name": "python"}'])
def test_a_snapshot_that_makes_no_sense_is_refused(lifecycle: Lifecycle, sandbox: str, body: bytes):
    answer = lifecycle.http.post(f"/sandboxes/{sandbox}/snapshots", content=body)
    assert refusal(answer) == (400, "SANDBOX::INVALID_PARAMETER")
