"""Quotas over HTTP: what clients are told of them, and what admins set and see. Nobody hears of anybody else's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import e2b
import httpx2
import openai
import pytest
from e2b_code_interpreter import Sandbox
from tests.conftest import RunningServer, serving, wait_until, with_template
from tests.server.test_keys import cloche

from cloche.store.audit_reader import AuditQuery, read_last

EVERYBODY = {"CLOCHE_QUOTAS_KEY_EXECUTIONS_PER_MINUTE": "1000"}


@pytest.fixture(scope="module")
def data_dir_of_place(template, tmp_path_factory) -> Path:
    return with_template(tmp_path_factory.mktemp("quotas") / "data", template)


@pytest.fixture(scope="module")
def place(data_dir_of_place) -> Iterator[RunningServer]:
    """A server at which every key may run 1000 things in a minute."""
    with serving(data_dir_of_place, env=EVERYBODY) as server:
        yield server


@pytest.fixture
def admin(place) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=place.url, headers={"x-api-key": place.key}) as client:
        yield client


class User:
    def __init__(self, admin: httpx2.Client, owner: str, **amounts: float | None):
        made = admin.post("/admin/keys", json={"owner": owner}).json()
        self.owner, self.key, self.key_id = owner, made["key"], made["id"]
        self.http = httpx2.Client(base_url=admin.base_url, headers={"x-api-key": self.key}, timeout=60)
        assert admin.put(f"/admin/quotas/{owner}", json=amounts).status_code == 200

    def box(self) -> str:
        made = self.http.post("/api/v1/sandboxes", json={})
        assert made.status_code == 201, made.text
        return str(made.json()["id"])

    def run(self, id: str, code: str = "1") -> httpx2.Response:
        return self.http.post(f"/api/v1/sandboxes/{id}/run", json={"code": code})


def policies(answer: httpx2.Response) -> dict[str, dict[str, int]]:
    return _items(answer.headers["ratelimit-policy"])


def left(answer: httpx2.Response) -> dict[str, dict[str, int]]:
    return _items(answer.headers["ratelimit"])


def _items(header: str) -> dict[str, dict[str, int]]:
    """A list of strings with parameters, as structured fields have them."""
    found = {}
    for item in header.split(", "):
        name, *parameters = item.split(";")
        assert re.fullmatch('"[a-z-]+"', name)
        found[name[1:-1]] = {each[0]: int(each[2:]) for each in parameters}
    return found


def inside(place: RunningServer, box: Sandbox, port: int) -> httpx2.Response:
    """What that port answers to somebody with no key, but a secret of the sandbox."""
    headers = {
        "E2b-Sandbox-Id": box.sandbox_id,
        "E2b-Sandbox-Port": str(port),
        "X-Access-Token": box._envd_access_token,
    }
    return httpx2.get(f"{place.url}/e2b/files?path=/etc/hostname&username=user", headers=headers)


# --- what clients are told


def test_answers_carry_the_quota_and_the_remainder(admin):
    user = User(admin, "told", executions_per_minute=5, sandboxes=3)
    id = user.box()
    answer = user.run(id)
    assert policies(answer) == {
        "executions": {"q": 5, "w": 60},
        "sandboxes": {"q": 3},
        "key-executions": {"q": 1000, "w": 60},
    }
    assert {name: each["r"] for name, each in left(answer).items()} == {
        "executions": 4,
        "sandboxes": 2,
        "key-executions": 999,
    }
    assert 0 < left(answer)["executions"]["t"] <= 60
    assert left(user.http.get("/v1/containers"))["executions"]["r"] == 4  # in every dialect
    assert left(user.http.get("/e2b/v2/sandboxes"))["executions"]["r"] == 4


def test_requests_without_a_key_learn_nothing(place):
    for path in ("/health", "/api/v1/usage", "/e2b/v2/sandboxes"):
        answer = httpx2.get(place.url + path)
        assert not [name for name in answer.headers if name.startswith("ratelimit")]


def test_requests_over_a_quota_are_429_with_a_retry_time(admin):
    user = User(admin, "over", executions_per_minute=1, sandboxes=1)
    id = user.box()
    assert user.run(id).status_code == 200
    refused = user.run(id)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert left(refused)["executions"]["r"] == 0
    another = user.http.post("/api/v1/sandboxes", json={})
    assert (another.status_code, "retry-after" in another.headers) == (429, False)
    assert "kill one" in another.json()["error"]["message"]
    counted = dict(line.split(" ") for line in admin.get("/metrics").text.splitlines() if not line.startswith("#"))
    for name in ("executions_per_minute", "sandboxes"):
        assert float(counted[f'cloche_quota_refused_total{{quota="{name}"}}']) >= 1
    assert float(counted["cloche_data_free_bytes"]) > 0


def test_e2bs_client_sees_a_limit_also_with_a_sandboxes_own_token(admin, place):
    user = User(admin, "e2b", executions_per_minute=2, sandboxes=1)
    options = {**place.e2b, "api_key": user.key}
    with Sandbox.create(**options) as box:
        assert box.run_code("6*7").text == "42"
        assert box.commands.run("echo hi").stdout == "hi\n"
        with pytest.raises(e2b.RateLimitException):
            Sandbox.create(**options)
        assert left(inside(place, box, 49983))["executions"]["r"] == 0
        assert "ratelimit" not in inside(place, box, 8000).headers  # whoever visits a program is told nothing
        with pytest.raises(Exception, match=r"executions_per_minute|429"):
            box.commands.run("echo hi")
        with pytest.raises(Exception, match=r"executions_per_minute|429"):
            box.run_code("1")


def test_openais_client_sees_a_limit(admin, place):
    user = User(admin, "openai", sandboxes=0)
    client = openai.OpenAI(api_key=user.key, base_url=place.url + "/v1", max_retries=0)
    with pytest.raises(openai.RateLimitError, match="sandboxes"):
        client.containers.create(name="one")


def test_files_count_as_stored(admin, place):
    user = User(admin, "files", stored_bytes=1000)
    client = openai.OpenAI(api_key=user.key, base_url=place.url + "/v1", max_retries=0)
    kept = client.files.create(file=("a.txt", b"x" * 900), purpose="assistants")
    with pytest.raises(openai.RateLimitError, match="stored_bytes"):
        client.files.create(file=("b.txt", b"x" * 900), purpose="assistants")
    client.files.delete(kept.id)
    client.files.create(file=("b.txt", b"x" * 900), purpose="assistants")


# --- what is seen and set


def test_responses_conversations_and_runs_count_as_stored(admin):
    user = User(admin, "keeper", stored_bytes=0)
    turn = {"model": "cloche/echo", "input": "hello"}
    asked = {"/v1/responses": turn, "/v1/conversations": {}, f"/api/v1/sandboxes/{user.box()}/runs": {"code": "1"}}
    for path, body in asked.items():
        refused = user.http.post(path, json=body)
        assert refused.status_code == 429 and "stored_bytes" in refused.text, path
    assert user.http.post("/v1/responses", json={**turn, "store": False}).status_code == 200


def test_an_owner_sees_only_their_own_usage(admin):
    user, other = User(admin, "sees", sandboxes=9), User(admin, "hidden")
    other.box()
    user.run(user.box())
    used = user.http.get("/api/v1/usage").json()
    assert (used["owner"], used["sandboxes"], used["executions"], used["quota"]["sandboxes"]) == ("sees", 1, 1, 9)
    assert [(each["key_id"], each["sandboxes"]) for each in used["keys"]] == [(user.key_id, 1)]
    assert "hidden" not in user.http.get("/api/v1/usage").text
    for path in ("/admin/usage", "/admin/usage/hidden", "/admin/quotas", "/admin/quotas/hidden"):
        assert user.http.get(path).status_code == 403
    assert user.http.put("/admin/quotas/sees", json={}).status_code == 403


def test_admins_see_all_owners(admin):
    user = User(admin, "watched", memory_bytes=8 << 30)
    user.box()
    found = {each["owner"]: each for each in admin.get("/admin/usage").json()}
    assert found["watched"] == admin.get("/admin/usage/watched").json()
    assert found["watched"]["memory_bytes"] == 2 << 30
    assert found["watched"]["quota"]["memory_bytes"] == 8 << 30


def test_a_quota_of_a_key_holds_for_that_key_and_the_one_that_takes_its_place(admin):
    user = User(admin, "keyed")
    path = f"/admin/keys/{user.key_id}/quota"
    assert admin.put(path, json={"sandboxes": 1, "executions_per_minute": None}).status_code == 200
    first = user.http.post("/api/v1/sandboxes", json={})
    assert "key-executions" not in first.headers.get("ratelimit-policy", "")  # null: no limit at all
    assert user.http.post("/api/v1/sandboxes", json={}).status_code == 429
    rotated = admin.post(f"/admin/keys/{user.key_id}/rotate").json()
    user.http.headers["x-api-key"] = rotated["key"]
    assert user.http.post("/api/v1/sandboxes", json={}).status_code == 429
    assert admin.get(f"/admin/keys/{rotated['id']}/quota").json()["own"]["sandboxes"] == 1
    user.http.delete(f"/api/v1/sandboxes/{first.json()['id']}")
    assert user.http.post("/api/v1/sandboxes", json={}).status_code == 201
    assert admin.delete(f"/admin/keys/{rotated['id']}/quota").status_code == 204
    assert user.http.post("/api/v1/sandboxes", json={}).status_code == 201


@pytest.mark.parametrize(
    "body", ['{"sandboxes": -1}', '{"sandboxes": "many"}', '{"boxes": 1}', "[]", "{", '{"lifetime_seconds": 0}']
)
def test_a_quota_that_makes_no_sense_is_explained(admin, body):
    refused = admin.put("/admin/quotas/somebody", content=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")
    assert admin.get("/admin/quotas/somebody").json()["own"] == {}


def test_there_is_no_quota_of_a_key_that_is_not_there(admin):
    assert admin.get("/admin/keys/knothing/quota").status_code == 404
    assert admin.put("/admin/quotas/a%20b", json={}).status_code == 400


def test_the_command_sets_quotas_of_a_running_server_at_once(admin, data_dir_of_place):
    user = User(admin, "commanded", sandboxes=5, lifetime_seconds=600)
    amounts = ("--sandboxes", "0", "--memory-bytes", "4GiB", "--lifetime-seconds", "default")
    done = cloche(data_dir_of_place, "quota", "set", "commanded", *amounts)
    assert done.returncode == 0, done.stderr
    assert user.http.post("/api/v1/sandboxes", json={}).status_code == 429
    assert admin.get("/admin/quotas/commanded").json()["own"] == {"sandboxes": 0, "memory_bytes": 4 << 30}
    assert re.search("commanded +0 of 0 ", cloche(data_dir_of_place, "usage", "commanded").stdout)
    wanted = AuditQuery(owner="commanded", what="quota.set")
    wait_until(lambda: len(read_last(data_dir_of_place / "audit", wanted, 10)) == 2)  # within a second
    assert read_last(data_dir_of_place / "audit", wanted, 1)[0].about == "sandboxes=0 memory_bytes=4294967296"


def test_without_a_server_the_command_changes_the_store(tmp_path):
    amounts = ("--executions-per-minute", "unlimited", "--sandboxes", "7")
    assert cloche(tmp_path, "quota", "set", "alice", *amounts).returncode == 0
    (alice,) = json.loads(cloche(tmp_path, "quota", "show", "--json").stdout)["own"]
    assert alice["own"] == {"sandboxes": 7, "executions_per_minute": None}
    assert cloche(tmp_path, "quota", "reset", "alice").returncode == 0
    said = read_last(tmp_path / "audit", AuditQuery(what="quota.set"), 10)
    assert [(line.owner, line.by, line.about) for line in said] == [
        ("alice", "local", "sandboxes=7 executions_per_minute=unlimited"),
        ("alice", "local", "default"),
    ]
