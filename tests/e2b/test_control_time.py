"""How long a sandbox lives, and what is said of one that timed out."""

from __future__ import annotations

import time
from datetime import datetime

import httpx
import pytest
from e2b.exceptions import SandboxNotFoundException, TimeoutException
from e2b_code_interpreter import Sandbox


@pytest.fixture(scope="module")
def api(server):
    with httpx.Client(base_url=f"{server.url}/e2b", headers={"X-API-Key": server.key}, timeout=60) as client:
        yield client


def end_of(api, box: Sandbox) -> str:
    return api.get(f"/sandboxes/{box.sandbox_id}").json()["endAt"]


def seconds_left(api, box: Sandbox) -> float:
    return datetime.fromisoformat(end_of(api, box)).timestamp() - time.time()


def until_gone(box: Sandbox) -> None:
    deadline = time.monotonic() + 30
    while box.is_running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not box.is_running()


def test_a_timeout_moves_the_end_both_ways(api, box):
    box.set_timeout(1000)
    assert 900 < seconds_left(api, box) <= 1000
    box.set_timeout(100)
    assert 50 < seconds_left(api, box) <= 100


def test_a_sandbox_ends_when_its_time_is_over(server):
    box = Sandbox.create(timeout=1, **server.e2b)
    until_gone(box)


def test_a_timeout_of_0_is_now(api, box):
    box.set_timeout(0)
    until_gone(box)
    with pytest.raises(SandboxNotFoundException):
        box.set_timeout(10)


def test_that_it_timed_out_and_when_is_said_everywhere(api, box):
    box.set_timeout(0)
    until_gone(box)
    said = f"sandbox {box.sandbox_id} timed out at 20"
    for answer in (
        api.get(f"/sandboxes/{box.sandbox_id}"),
        api.delete(f"/sandboxes/{box.sandbox_id}"),
        api.post(f"/v2/sandboxes/{box.sandbox_id}/connect", json={}),
        api.post(f"/sandboxes/{box.sandbox_id}/timeout", json={"timeout": 5}),
    ):
        assert (answer.status_code, answer.json()["code"]) == (404, 404)
        assert said in answer.json()["message"]
    with pytest.raises(TimeoutException, match=said):
        box.run_code("1")
    with pytest.raises(TimeoutException, match=said):
        box.files.list("/")


def test_connecting_never_shortens(server, api, box):
    box.set_timeout(1000)
    before = end_of(api, box)
    again = Sandbox.connect(box.sandbox_id, timeout=10, **server.e2b)
    assert end_of(api, box) == before  # to the microsecond
    assert again._envd_access_token == box._envd_access_token
    assert again.run_code("1 + 1").text == "2"


def test_connecting_gives_at_least_the_time_asked_for(server, api, box):
    Sandbox.connect(box.sandbox_id, timeout=2000, **server.e2b)
    assert 1900 < seconds_left(api, box) <= 2000


def test_connecting_without_a_timeout_gives_5_minutes(api, box):
    box.set_timeout(10)
    made = api.post(f"/v2/sandboxes/{box.sandbox_id}/connect", json={})
    assert (made.status_code, made.json()["sandboxID"]) == (200, box.sandbox_id)
    assert 250 < seconds_left(api, box) <= 300


def test_version_1_of_connecting_wants_a_timeout(api, box):
    missing = api.post(f"/sandboxes/{box.sandbox_id}/connect", json={})
    assert (missing.status_code, missing.json()["message"][:7]) == (400, "timeout")
    assert api.post(f"/sandboxes/{box.sandbox_id}/connect", json={"timeout": 5}).status_code == 200


def test_a_sandbox_that_runs_cannot_be_resumed(api, box):
    answer = api.post(f"/sandboxes/{box.sandbox_id}/resume", json={"timeout": 15})
    assert (answer.status_code, answer.json()["code"]) == (409, 409)


def test_a_refresh_only_ever_extends(api, box):
    box.set_timeout(100)
    before = end_of(api, box)
    assert api.post(f"/sandboxes/{box.sandbox_id}/refreshes").status_code == 204
    assert end_of(api, box) == before
    assert api.post(f"/sandboxes/{box.sandbox_id}/refreshes", json={"duration": 3000}).status_code == 204
    assert 2900 < seconds_left(api, box) <= 3000


def test_no_sandbox_outlives_the_servers_longest_lifetime(api, box):
    api.post(f"/sandboxes/{box.sandbox_id}/timeout", json={"timeout": 86400})
    info = api.get(f"/sandboxes/{box.sandbox_id}").json()
    started, ends = (datetime.fromisoformat(info[name]).timestamp() for name in ("startedAt", "endAt"))
    assert ends - started == pytest.approx(86400, abs=0.01)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("timeout", {"timeout": -1}, "timeout"),
        ("timeout", {"timeout": 86401}, "timeout"),
        ("timeout", {"timeout": "1"}, "timeout"),
        ("timeout", {}, "timeout"),
        ("connect", {"timeout": 86401}, "timeout"),
        ("refreshes", {"duration": 3601}, "duration"),
        ("refreshes", {"duration": -1}, "duration"),
    ],
)
def test_a_bad_time_is_a_400_that_names_the_field(api, box, path, body, field):
    answer = api.post(f"/sandboxes/{box.sandbox_id}/{path}", json=body)
    assert (answer.status_code, answer.json()["code"]) == (400, 400)
    assert field in answer.json()["message"]
    assert box.is_running()
