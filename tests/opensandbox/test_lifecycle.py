"""OpenSandbox's lifecycle API, with the requests of its clients."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import httpx2
import pytest
from tests.conftest import RunningServer
from tests.opensandbox.conftest import CREATE, Lifecycle
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

import cloche


def has_null(value: object) -> bool:
    if isinstance(value, dict):
        return any(has_null(each) for each in value.values())
    return value is None or (isinstance(value, list) and any(has_null(each) for each in value))


def test_a_sandbox_as_litellm_asks_for_it_runs_at_once(lifecycle: Lifecycle):
    answer = lifecycle.create()
    assert answer.status_code == 202
    made = answer.json()
    assert made["status"]["state"] == "Running"
    assert made["entrypoint"] == CREATE["entrypoint"]
    assert made["createdAt"] < made["expiresAt"]
    found = lifecycle.http.get(f"/sandboxes/{made['id']}").json()
    assert found == {**made, "image": CREATE["image"]}
    assert not has_null(found)
    assert lifecycle.http.delete(f"/sandboxes/{made['id']}").status_code == 204
    for method in ("GET", "DELETE"):
        gone = lifecycle.http.request(method, f"/sandboxes/{made['id']}")
        assert (gone.status_code, gone.json()["code"]) == (404, "SANDBOX::SANDBOX_NOT_FOUND")
        assert "killed" in gone.json()["message"]


def test_requested_settings_hold_inside(lifecycle: Lifecycle):
    asked = {"env": {"A": "1"}, "metadata": {"name": "demo"}, "resourceLimits": {"cpu": "500m", "memory": "512Mi"}}
    made = lifecycle.create(**asked).json()
    assert made["metadata"] == {"name": "demo"}
    events = lifecycle.execd(made["id"]).run("import os\nprint(os.environ['A'], os.getcwd(), os.getuid())")
    assert events[2]["text"] == "1 /mnt/data 1000\n"
    with connected(lifecycle, made["id"]) as box:
        limits = box.info().limits
        assert (limits.cpus, limits.memory_bytes) == (0.5, 512 * 2**20)
    assert lifecycle.http.get(f"/sandboxes/{made['id']}").status_code == 404


def connected(lifecycle: Lifecycle, id: str) -> cloche.Sandbox:
    """By the library: an ordinary sandbox, whoever made it. Leaving it ends the sandbox."""
    url = str(lifecycle.http.base_url).partition("/opensandbox")[0]
    return cloche.Sandbox.connect(id, url=url, api_key=lifecycle.http.headers["open-sandbox-api-key"])


def test_the_api_is_there_without_v1_too(server: RunningServer):
    bare = Lifecycle(server, "/opensandbox")
    id = bare.create().json()["id"]
    assert bare.execd(id).run("print(1)")[2]["text"] == "1\n"
    assert bare.http.delete(f"/sandboxes/{id}").status_code == 204


def test_a_sandbox_without_a_timeout_never_expires(lifecycle: Lifecycle):
    id = lifecycle.create(timeout=None).json()["id"]
    assert "expiresAt" not in lifecycle.http.get(f"/sandboxes/{id}").json()
    assert lifecycle.http.post(f"/sandboxes/{id}/pause").status_code == 202
    assert lifecycle.http.post(f"/sandboxes/{id}/resume").status_code == 202
    assert "expiresAt" not in lifecycle.http.get(f"/sandboxes/{id}").json()
    lifecycle.http.delete(f"/sandboxes/{id}")


def test_metadata_are_merged(lifecycle: Lifecycle, sandbox: str):
    path = f"/sandboxes/{sandbox}/metadata"
    assert lifecycle.http.patch(path, json={"a": "1", "b": "2"}).json()["metadata"] == {"a": "1", "b": "2"}
    assert lifecycle.http.patch(path, json={"a": None, "c": "3"}).json()["metadata"] == {"b": "2", "c": "3"}
    for bad in ({"opensandbox.io/x": "1"}, {"a": 1}, []):
        assert lifecycle.http.patch(path, json=bad).json()["code"] == "SANDBOX::INVALID_PARAMETER"
    assert lifecycle.http.get(f"/sandboxes/{sandbox}").json()["metadata"] == {"b": "2", "c": "3"}


def test_sandboxes_are_listed_by_metadata_in_pages(lifecycle: Lifecycle):
    made = [lifecycle.create(metadata={"of": "a list & more"}).json()["id"] for _ in range(3)]
    query = {"metadata": "of=a+list+%26+more", "state": ["Running", "Paused"], "pageSize": 2}
    first = lifecycle.http.get("/sandboxes", params=query).json()
    second = lifecycle.http.get("/sandboxes", params={**query, "page": 2}).json()
    assert [each["id"] for each in first["items"] + second["items"]] == made[::-1]
    assert first["pagination"] == {"page": 1, "pageSize": 2, "totalItems": 3, "totalPages": 2, "hasNextPage": True}
    assert second["pagination"]["hasNextPage"] is False
    assert lifecycle.http.get("/sandboxes", params={"state": "Paused"}).json()["items"] == []
    assert not has_null(first)
    for id in made:
        lifecycle.http.delete(f"/sandboxes/{id}")


def test_a_sandbox_of_another_dialect_is_listed_and_usable(lifecycle: Lifecycle, server: RunningServer):
    with cloche.Sandbox(url=server.url, api_key=server.key) as box:
        box.run("x = 6")
        listed = lifecycle.http.get("/sandboxes", params={"pageSize": 200}).json()["items"]
        assert box.id in [each["id"] for each in listed]
        assert lifecycle.execd(box.id).run("print(x * 7)")[2]["text"] == "42\n"


def test_a_deadline_moves_both_ways(lifecycle: Lifecycle, sandbox: str):
    for minutes in (30, 2):
        moment = datetime.now(UTC) + timedelta(minutes=minutes)
        answer = lifecycle.http.post(
            f"/sandboxes/{sandbox}/renew-expiration", json={"expiresAt": moment.isoformat()}
        ).json()
        assert abs(datetime.fromisoformat(answer["expiresAt"]) - moment) < timedelta(seconds=10)
        assert lifecycle.http.get(f"/sandboxes/{sandbox}").json()["expiresAt"] == answer["expiresAt"]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"networkPolicy": {"defaultAction": "allow"}}, "network.allow"),
        ({"networkPolicy": {"egress": [{"action": "allow", "target": "pypi.org"}]}}, "network.allow"),
        ({"networkPolicy": {"defaultAction": "perhaps"}}, "allow or deny"),
        ({"image": {"uri": "no-such"}}, "no template 'no-such'"),
        ({"image": {"uri": "ubuntu:24.04", "auth": {"username": "me"}}}, "nothing is pulled"),
        ({"image": None}, "image.uri, templateId, snapshotId or poolRef"),
        ({"templateId": "python"}, "only one"),
        ({"snapshotId": "s1"}, "only one"),
        ({"entrypoint": ["a\0b"]}, "command"),
        ({"timeout": 0}, "at least 1 s"),
        ({"timeout": 10**9}, "86400 s"),
        ({"timeout": "long"}, "timeout"),
        ({"resourceLimits": {"cpu": "much"}}, "500m"),
        ({"resourceLimits": {"memory": "2Gib"}}, "512Mi"),
        ({"resourceLimits": {"memory": "1Ki"}}, "16 MiB"),
        ({"resourceLimits": {"gpu": "1"}}, "resourceLimits.gpu"),
        ({"volumes": [{"name": "v", "mountPath": "/mnt/v"}]}, "either pvc or host"),
        ({"volumes": [{"mountPath": "/mnt/v", "pvc": {"claimName": "v"}}] * 2}, "two of them"),
        ({"volumes": [{"mountPath": "/usr/v", "pvc": {"claimName": "v-1"}}]}, "choose /mnt/NAME"),
        ({"volumes": [{"mountPath": "/mnt/v", "pvc": {"claimName": "v-1"}, "subPath": "../x"}]}, "not a directory"),
        ({"volumes": [{"mountPath": "/mnt/v", "ossfs": {}}]}, "object storage"),
        ({"metadata": {"opensandbox.io/x": "1"}}, "reserved"),
        ({"env": {"A=B": "1"}}, "A=B"),
        ({"platform": {"os": "windows"}}, "platform"),
        ({"extensions": {"access.renew.extend.seconds": "5"}}, "from 300"),
    ],
)
def test_invalid_requests_are_refused_in_words(lifecycle: Lifecycle, other: dict, says: str):
    answer = lifecycle.create(**other)
    assert answer.status_code == 400
    assert answer.json().keys() == {"code", "message"}
    assert says in answer.json()["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"[" * 100_000])
def test_a_body_that_is_no_request_is_refused(lifecycle: Lifecycle, body: bytes):
    assert lifecycle.http.post("/sandboxes", content=body).status_code == 400


def test_only_a_key_of_this_server_opens_it(server: RunningServer):
    url = f"{server.url}/opensandbox/v1/sandboxes"
    missing = httpx2.get(url, headers={"X-Request-ID": "mine"})
    assert (missing.status_code, missing.json()["code"]) == (401, "MISSING_API_KEY")
    assert missing.headers["x-request-id"] == "mine"
    wrong = httpx2.get(url, headers={"OPEN-SANDBOX-API-KEY": "e2b_" + "1" * 40})
    assert (wrong.status_code, wrong.json()["code"]) == (401, "INVALID_API_KEY")


def test_every_answer_has_the_id_of_its_request(lifecycle: Lifecycle):
    for path in ("/sandboxes", "/sandboxes/never", "/no-such-path"):
        assert lifecycle.http.get(path, headers={"X-Request-ID": "mine"}).headers["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/sandboxes/{id}/proxy/18080/no-such", 404),
        ("GET", "/sandboxes/{id}/endpoints/44772?expires=1", 501),
        ("GET", "/sandboxes/{id}/endpoints/none", 400),
        ("GET", "/sandboxes/{id}/proxy/8080/", 401),
        ("POST", "/sandboxes/{id}/proxy/44772/pty", 501),
        ("GET", "/sandboxes/{id}/proxy/44772/no-such", 404),
        ("GET", "/snapshots/no-such", 404),
        ("DELETE", "/snapshots/no-such", 404),
        ("POST", "/sandboxes/{id}/resume", 409),
        ("POST", "/sandboxes/never/pause", 404),
        ("POST", "/sandboxes/never/resume", 404),
        ("POST", "/sandboxes/never/snapshots", 404),
        ("GET", "/no-such-path", 404),
        ("PUT", "/sandboxes", 405),
    ],
)
def test_missing_routes_and_sandboxes_are_reported(
    lifecycle: Lifecycle, sandbox: str, method: str, path: str, status: int
):
    answer = lifecycle.http.request(method, path.format(id=sandbox))
    assert answer.status_code == status
    assert json.loads(answer.content).keys() == {"code", "message"}


def test_a_websocket_is_refused(server: RunningServer):
    with pytest.raises(InvalidStatus) as refused:
        connect(server.url.replace("http", "ws") + "/opensandbox/v1/sandboxes/never/proxy/44772/pty/1/ws")
    assert refused.value.response.status_code == 501
