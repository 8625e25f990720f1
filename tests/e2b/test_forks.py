"""Forks: copies of a sandbox that runs on."""

from __future__ import annotations

import httpx
import pytest
from e2b.exceptions import SandboxNotFoundException
from e2b_code_interpreter import Sandbox


@pytest.fixture(scope="module")
def api(server):
    with httpx.Client(base_url=f"{server.url}/e2b", headers={"X-API-Key": server.key}, timeout=60) as client:
        yield client


def test_forks_have_the_files_and_settings_of_the_sandbox_and_are_their_own(server):
    box = Sandbox.create(envs={"OWN": "1"}, metadata={"a": "b"}, timeout=300, **server.e2b)
    box.files.write("kept.txt", "kept")
    forks = box.fork(count=2, timeout=60)
    assert len({box.sandbox_id, *(each.sandbox_id for each in forks)}) == 3
    forks[0].files.write("kept.txt", "changed")
    assert [each.files.read("kept.txt") for each in (box, *forks)] == ["kept", "changed", "kept"]
    for each in forks:
        assert each.commands.run("echo $OWN $E2B_SANDBOX_ID").stdout.split() == ["1", each.sandbox_id]
        assert each.get_info().metadata == {"a": "b"}
        assert each.get_info().end_at < box.get_info().end_at
        assert each.run_code("1 + 1").text == "2"
    for each in (box, *forks):
        assert each.kill() is True


def test_impossible_forks_are_refused(server, box, api):
    path = f"/sandboxes/{box.sandbox_id}/fork"
    for body in ({"count": 0}, {"count": 1000}, {"timeout": -1}, {"count": "two"}):
        refused = api.post(path, json=body)
        assert (refused.status_code, refused.json()["code"]) == (400, 400), body
    box.kill()
    with pytest.raises(SandboxNotFoundException):
        box.fork()
