"""Networks over `/api/v1`: what is asked for, told, replaced and logged."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
from tests.conftest import RunningServer, serving
from tests.network.neighbour import Neighbour, living_next_door

from cloche.engine.sandboxes.network import DOOR_PORT

SECRET = {"domain": "api.test", "header": "Authorization", "value": "Bearer hush-hush"}


@pytest.fixture(scope="module")
def there() -> Iterator[Neighbour]:
    with living_next_door() as neighbour:
        yield neighbour


@pytest.fixture(scope="module")
def running(there: Neighbour, bare_dir: str, tmp_path_factory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with serving(bare_dir, env=there.variables("*.test:*", "api.test:*", deny=("other.test",)), log=log) as server:
        yield server
    assert "hush" not in log.read_text()


@pytest.fixture(scope="module")
def api(running: RunningServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(
        base_url=f"{running.url}/api/v1/", headers={"x-api-key": running.key}, timeout=60, trust_env=False
    ) as client:
        yield client


@pytest.fixture
def box(api: httpx2.Client, there: Neighbour) -> Iterator[str]:
    asked = {"network": {"allow": [there.at("api.test"), "api.test"]}, "secrets": [SECRET]}
    id = api.post("sandboxes", json=asked).raise_for_status().json()["id"]
    yield id
    api.delete(f"sandboxes/{id}")


def said(api: httpx2.Client, box: str, code: str) -> str:
    return str(api.post(f"sandboxes/{box}/run", json={"code": code}).json()["stdout"])


def test_a_policy_is_told_without_the_values_of_its_secrets(api: httpx2.Client, box: str, there: Neighbour):
    answer = api.get(f"sandboxes/{box}/network")
    assert answer.json() == {
        "allow": [there.at("api.test"), "api.test"],
        "deny": [],
        "rules": [],
        "secrets": [{"domain": "api.test", "header": "Authorization", "name": None}],
    }
    assert "hush" not in answer.text and "hush" not in api.get(f"sandboxes/{box}").text


def test_the_log_has_the_attempts(api: httpx2.Client, box: str, there: Neighbour):
    assert said(api, box, there.fetch("api.test")) == "hello"
    assert said(api, box, there.fetch("www.api.test")) == "refused"
    logged = api.get(f"sandboxes/{box}/network/log").json()
    seen = [(each["verdict"], each["host"], each["port"]) for each in logged["entries"]]
    assert seen == [("allowed", "api.test", there.port), ("denied", "www.api.test", there.port)]
    assert logged["dropped"] == 0
    assert set(logged["entries"][0]) == {
        "at",
        "protocol",
        "host",
        "port",
        "verdict",
        "reason",
        "sent_bytes",
        "received_bytes",
        "seconds",
    }


def test_a_policy_is_replaced_whole_and_secrets_stay_unless_they_are_named(api: httpx2.Client, box: str):
    there = f"sandboxes/{box}/network"
    kept = api.put(there, json={"allow": ["*.test"]}).raise_for_status().json()
    assert (kept["allow"], [each["domain"] for each in kept["secrets"]]) == (["*.test"], ["api.test"])
    assert api.put(there, json={"allow": ["*.test"], "secrets": []}).json()["secrets"] == []
    assert api.put(there, json={}).json() == {"allow": [], "deny": [], "rules": [], "secrets": []}
    rules = [{"action": "deny", "host": "api.test"}, {"action": "allow", "host": "*.test"}]
    assert api.put(there, json={"rules": rules}).json()["rules"] == rules == api.get(there).json()["rules"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"network": {"allow": ["https://x.test"]}}, ["no scheme"]),
        ({"network": {"alow": ["x.test"]}}, ["alow", "allow"]),
        ({"network": {"rules": [{"action": "allow", "pattern": "x.test"}]}}, ["pattern"]),
        ({"network": {"allow": ["example.com"]}}, ["example.com", "operator", "network.allow"]),
        ({"secrets": [SECRET]}, ["network"]),
        ({"network": {"allow": ["api.test"]}, "secrets": [{**SECRET, "value": "hush\r\n"}]}, ["line breaks"]),
        ({"network": {"allow": ["api.test"]}, "secrets": [{**SECRET, "value": ["hush"]}]}, ["str"]),
        ({"network": {"allow": ["x.test"] * 1001}}, ["1000"]),
        ({"network": {"rules": [{"action": "deny", "host": "x.test"}] * 1001}}, ["1000"]),
        ({"network": {"allow": ["api.test"]}, "secrets": [SECRET] * 101}, ["100 secrets"]),
    ],
)
def test_invalid_policies_are_refused_without_naming_values(api: httpx2.Client, asked, words):
    refused = api.post("sandboxes", json=asked)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "invalid_request")
    assert all(word in error["message"] for word in words) and "hush" not in refused.text


def test_a_refused_change_changes_nothing(api: httpx2.Client, box: str):
    there = f"sandboxes/{box}/network"
    before = api.get(there).json()
    for bad in (
        {"allow": ["example.com"]},
        {"allow": [":"]},
        {"policy": {}},
        {"allow": ["x.test"], "secrets": [SECRET]},
    ):
        assert api.put(there, json=bad).status_code == 400
    assert api.get(there).json() == before


def test_another_owner_sees_neither_policy_nor_log(api: httpx2.Client, box: str, running: RunningServer):
    added = httpx2.post(
        f"{running.url}/admin/keys", json={"owner": "someone"}, headers={"x-api-key": running.key}, trust_env=False
    )
    foreign = {"x-api-key": added.raise_for_status().json()["key"]}
    for method, path in (("GET", "network"), ("PUT", "network"), ("GET", "network/log")):
        answer = api.request(method, f"sandboxes/{box}/{path}", headers=foreign, content=b"{}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "sandbox_not_found")


@pytest.mark.parametrize("port", [DOOR_PORT, 3000])
def test_the_door_does_not_open_from_outside(running: RunningServer, api: httpx2.Client, box: str, port: int):
    """Whoever reaches a port of a sandbox need not be its owner, and would speak in its name there."""
    asked = httpx2.post(
        f"{running.url}/e2b/sandboxes/{box}/connect",
        json={"timeout": 60},
        headers={"x-api-key": running.key},
        trust_env=False,
    )
    token = asked.raise_for_status().json()["trafficAccessToken"]
    routed = {"E2b-Sandbox-Id": box, "E2b-Sandbox-Port": str(port), "e2b-traffic-access-token": token}
    code = f"import socket; s = socket.socket(); s.settimeout(5); print(s.connect_ex(('127.0.0.1', {DOOR_PORT})))"
    assert said(api, box, code) == "0\n"
    with httpx2.Client(headers=routed, timeout=60, trust_env=False) as outsider:
        answers = [outsider.get(f"{running.url}/e2b{path}") for path in ("/", "/pypi/simple/six/")]
    assert [answer.status_code for answer in answers] == [502, 502]
    assert all("port is not open" in answer.text for answer in answers)
    lines = api.get(f"sandboxes/{box}/network/log").json()["entries"]
    assert not [line for line in lines if line["protocol"] == "package"]


def test_the_document_describes_it(api: httpx2.Client):
    document = api.get("openapi.json").json()
    paths, schemas = document["paths"], document["components"]["schemas"]
    assert set(paths["/api/v1/sandboxes/{id}/network"]) == {"get", "put"}
    assert set(paths["/api/v1/sandboxes/{id}/network/log"]) == {"get"}
    assert {"network", "secrets"} <= set(schemas["CreateSandbox"]["properties"])
    assert "value" not in schemas["SecretInfo"]["properties"]


def test_the_next_request_works(api: httpx2.Client, box: str):
    assert api.put(f"sandboxes/{box}/network", content=b"{not json").status_code == 400
    assert api.get(f"sandboxes/{box}/network").status_code == 200
