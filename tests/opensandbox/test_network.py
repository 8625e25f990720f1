"""`networkPolicy` at creation, and read and changed while a sandbox runs, with requests of OpenSandbox's clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from tests.conftest import RunningServer, serving
from tests.network.far_server import Trust, own_trust
from tests.opensandbox.conftest import CREATE, Lifecycle, said
from tests.web_site import Site, fetch, web_site

from cloche import errors
from cloche.api.opensandbox import network_schema as wire
from cloche.network_policy import NetworkPolicy, NetworkRule, Secret

OPERATOR = """
[network]
allow = ["*.example.test:*"]
internal = ["127.0.0.1"]
hosts = {"api.example.test" = "127.0.0.1", "other.example.test" = "127.0.0.1", "foreign.test" = "127.0.0.1"}
"""
API, OTHER = "api.example.test", "other.example.test"


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with web_site() as running:
        yield running


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> Trust:
    """An authority that the server's host trusts, and a certificate of it."""
    return own_trust(tmp_path_factory.mktemp("trust"), [API, OTHER])


@pytest.fixture(scope="module")
def sealed_site(trust: Trust) -> Iterator[Site]:
    """The same, which speaks TLS."""
    with web_site(trust.server) as running:
        yield running


@pytest.fixture(scope="module")
def networked(bare_dir: str, trust: Trust, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose operator lets sandboxes reach names below example.test."""
    config = tmp_path_factory.mktemp("networked") / "cloche.toml"
    config.write_text(OPERATOR)
    with serving(bare_dir, env={"CLOCHE_CONFIG": str(config), "SSL_CERT_FILE": str(trust.bundle)}) as running:
        yield running


@pytest.fixture(scope="module")
def reaching(networked: RunningServer) -> Iterator[Lifecycle]:
    made = Lifecycle(networked)
    with made.http:
        yield made


class Egress:
    """The port of the egress sidecar, as the SDK uses it: by the endpoint's address and headers, without a key."""

    def __init__(self, lifecycle: Lifecycle, id: str):
        answer = lifecycle.http.get(f"/sandboxes/{id}/endpoints/18080", params={"use_server_proxy": "false"}).json()
        self.headers = answer["headers"]
        self.http = httpx2.Client(base_url=f"http://{answer['endpoint']}", headers=self.headers, timeout=60)

    def policy(self, method: str = "GET", body: Any = None) -> dict[str, Any]:
        answer = self.http.request(method, "/policy", **({} if body is None else {"json": body}))
        assert answer.status_code == 200, answer.text
        return answer.json()


def policy(*allowed: str, default: str = "deny", denied: tuple[str, ...] = ()) -> dict[str, Any]:
    rules = [{"action": "deny", "target": each} for each in denied]
    return {"defaultAction": default, "egress": [*rules, *({"action": "allow", "target": each} for each in allowed)]}


def reached(lifecycle: Lifecycle, id: str, *places: str) -> str:
    return said(lifecycle.execd(id).run(fetch(*places)), "stdout")


def made(lifecycle: Lifecycle, **asked: Any) -> str:
    answer = lifecycle.create(**asked)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


# -- at creation


def test_litellms_policy_reaches_nothing(reaching: Lifecycle, site: Site):
    assert reached(reaching, made(reaching), site.at(API)) == "unreachable\n"


def test_a_sandbox_reaches_the_targets_that_are_allowed_and_no_other(reaching: Lifecycle, site: Site):
    id = made(reaching, networkPolicy=policy(API))
    assert reached(reaching, id, site.at(API), site.at(OTHER), site.at("foreign.test")) == (
        "hello\nrefused 403\nrefused 403\n"
    )


def test_rules_are_asked_in_their_order_and_then_the_default(reaching: Lifecycle, site: Site):
    id = made(reaching, networkPolicy=policy("*.example.test", default="allow", denied=(OTHER,)))
    assert reached(reaching, id, site.at(API), site.at(OTHER)) == "hello\nrefused 403\n"


def test_without_a_policy_a_sandbox_reaches_the_operators_hosts_only(reaching: Lifecycle, site: Site):
    """As LiteLLM asks with allow_internet_access: OpenSandbox allows everything then."""
    body = {name: value for name, value in CREATE.items() if name != "networkPolicy"}
    id = reaching.http.post("/sandboxes", json=body).json()["id"]
    assert reached(reaching, id, site.at(API), site.at("foreign.test")) == "hello\nrefused 403\n"
    shown = reaching.http.get(f"/sandboxes/{id}/networkpolicy").json()
    assert shown["mode"] == "allow_all" and "*.example.test:*" in shown["reason"]


def test_a_server_without_a_network_accepts_no_policy_and_refuses_allow_rules(lifecycle: Lifecycle, site: Site):
    body = {name: value for name, value in CREATE.items() if name != "networkPolicy"}
    id = lifecycle.http.post("/sandboxes", json=body).json()["id"]
    assert reached(lifecycle, id, site.at(API)) == "unreachable\n"
    assert lifecycle.http.get(f"/sandboxes/{id}/networkpolicy").json()["mode"] == "deny_all"
    for asked in (policy(API), policy(default="allow")):
        answer = lifecycle.create(networkPolicy=asked)
        assert answer.status_code == 400 and "network.allow" in answer.json()["message"]


def test_hosts_outside_the_operators_rules_are_refused_by_name(reaching: Lifecycle):
    answer = reaching.create(networkPolicy=policy("foreign.test"))
    assert (answer.status_code, answer.json()["code"]) == (400, "SANDBOX::INVALID_PARAMETER")
    assert "foreign.test" in answer.json()["message"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"defaultAction": "perhaps"}, "networkPolicy.defaultAction"),
        ({"egress": [{"action": "maybe", "target": "a.test"}]}, "networkPolicy.egress[0].action"),
        ({"egress": [{"action": "allow"}]}, "networkPolicy.egress[0].target"),
        ({"egress": [{"action": "deny", "target": "ok.test"}, {"action": "allow", "target": "*"}]}, "defaultAction"),
        ({"egress": [{"action": "allow", "target": "https://a.test/"}]}, "egress[0].target"),
        ({"egress": [{"action": "allow", "target": "a.test:443"}]}, "without a port"),
        ({"egress": [{"action": "allow", "target": "a..test"}]}, "egress[0].target"),
        ({"egress": {"a": 1}}, "networkPolicy.egress"),
        ({"egress": [{"action": "deny", "target": f"{n}.test"} for n in range(1001)]}, "1000 rules"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_in_words(reaching: Lifecycle, asked: dict, says: str):
    answer = reaching.create(networkPolicy=asked)
    assert answer.status_code == 400 and says in answer.json()["message"]


# -- while it runs


def test_a_policy_is_changed_while_the_sandbox_runs(reaching: Lifecycle, site: Site):
    id = made(reaching, networkPolicy=policy(API))
    egress = Egress(reaching, id)
    assert egress.policy() == {
        "status": "ok",
        "mode": "enforcing",
        "enforcementMode": "proxy",
        "reason": "within what this server's operator allows: *.example.test:*",
        "policy": policy(API),
    }
    changed = egress.policy("PATCH", [{"action": "deny", "target": API}, {"action": "allow", "target": OTHER}])
    assert changed["policy"]["egress"] == [{"action": "deny", "target": API}, {"action": "allow", "target": OTHER}]
    assert reached(reaching, id, site.at(API), site.at(OTHER)) == "refused 403\nhello\n"
    assert egress.policy("DELETE", [OTHER.upper(), "never.there"])["policy"] == policy(denied=(API,))
    assert reached(reaching, id, site.at(OTHER)) == "refused 403\n"
    assert egress.policy() == reaching.http.get(f"/sandboxes/{id}/networkpolicy").json()


def test_a_sandbox_that_began_without_a_network_gets_one(reaching: Lifecycle, site: Site):
    id = made(reaching)
    assert reached(reaching, id, site.at(API)) == "unreachable\n"
    patched = reaching.http.patch(f"/sandboxes/{id}/networkpolicy", json=[{"action": "allow", "target": API}])
    assert patched.json()["policy"] == policy(API)
    assert reached(reaching, id, site.at(API)) == "hello\n"
    reset = reaching.http.put(f"/sandboxes/{id}/networkpolicy", json={})
    assert reset.json()["mode"] == "deny_all"
    assert reached(reaching, id, site.at(API)) == "refused 403\n"


def test_changes_at_once_are_all_made(reaching: Lifecycle):
    id = made(reaching)
    targets = [f"{n}.example.test" for n in range(20)]

    def allow(target: str) -> int:
        rules = [{"action": "allow", "target": target}]
        return reaching.http.patch(f"/sandboxes/{id}/networkpolicy", json=rules).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(allow, targets)) == {200}
    shown = reaching.http.get(f"/sandboxes/{id}/networkpolicy").json()["policy"]["egress"]
    assert sorted(rule["target"] for rule in shown) == sorted(targets)


@pytest.mark.parametrize(
    ("method", "body"),
    [
        ("PATCH", b""),
        ("PATCH", b"[]"),
        ("PATCH", b"{}"),
        ("PATCH", b'[{"action": "allow", "target": "foreign.test"}]'),
        ("PATCH", b'[{"action": "allow", "target": 7}]'),
        ("DELETE", b""),
        ("DELETE", b"[]"),
        ("DELETE", b"[7]"),
        ("PUT", b"[]"),
        ("PUT", b'{"defaultAction": 7}'),
        ("PUT", b"{"),
    ],
)
def test_a_change_that_makes_no_sense_changes_nothing(reaching: Lifecycle, method: str, body: bytes):
    id = made(reaching, networkPolicy=policy(API))
    egress = Egress(reaching, id)
    answer = egress.http.request(method, "/policy", content=body)
    assert answer.status_code == 400 and answer.json().keys() == {"code", "message"}
    assert egress.policy()["policy"] == policy(API)
    reaching.http.delete(f"/sandboxes/{id}")


def test_only_the_sandboxs_own_token_opens_the_port(reaching: Lifecycle):
    mine, other = Egress(reaching, made(reaching)), Egress(reaching, made(reaching))
    execd = reaching.execd(made(reaching))
    for headers in ({}, other.headers, dict(execd.http.headers)):
        answer = httpx2.get(f"{mine.http.base_url}policy", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, "UNAUTHORIZED")
    assert httpx2.get(f"{mine.http.base_url}policy", headers=mine.headers).status_code == 200


def test_a_foreign_sandbox_is_not_there(reaching: Lifecycle):
    for method in ("GET", "PUT", "PATCH", "DELETE"):
        answer = reaching.http.request(method, "/sandboxes/i00000000000000000000/networkpolicy", content=b"[]")
        assert (answer.status_code, answer.json()["code"]) == (404, "SANDBOX::SANDBOX_NOT_FOUND")


# -- the credential vault

TOKEN = "sk-very-secret-0123456789"
MANY = [f"{number}.example.test" for number in range(5000)]
TOO_MANY_HEADERS = [{"name": f"X-{number}", "credential": "token"} for number in range(101)]


def binding(name: str, host: str = API, /, **auth: Any) -> dict[str, Any]:
    """As the SDK sends it, with its defaults."""
    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    match = {"hosts": [host], "schemes": ["https"], "ports": [443], "methods": methods, "paths": ["/*"]}
    return {"name": name, "match": match, "auth": auth or {"type": "bearer", "credential": "token"}}


def credential(name: str = "token", value: str = TOKEN) -> dict[str, Any]:
    return {"name": name, "source": {"type": "inline", "value": value}}


def test_credentials_are_sent_where_they_are_bound_and_seen_nowhere(reaching: Lifecycle, sealed_site: Site):
    id = made(reaching, networkPolicy=policy(API, OTHER), credentialProxy={"enabled": True})
    egress = Egress(reaching, id)
    keys = [{"name": "X-Client-Id", "credential": "id"}, {"name": "X-Client-Secret", "credential": "token"}]
    bindings = [binding("api"), binding("other", OTHER, type="customHeaders", headers=keys)]
    asked = {"credentials": [credential(), credential("id", "me")], "bindings": bindings}
    answer = egress.http.post("/credential-vault", json=asked)
    assert answer.status_code == 201 and TOKEN not in answer.text
    state = answer.json()
    assert [each["name"] for each in state["bindings"]] == ["api", "other"]
    assert state["bindings"][0] == {**binding("api"), "revision": 1, "auth": {"type": "bearer"}}
    del sealed_site.seen[:]
    code = fetch(sealed_site.at(API), sealed_site.at(OTHER), scheme="https") + "print(dict(os.environ))"
    printed = said(reaching.execd(id).run(code), "stdout")
    assert printed.startswith("hello\nhello\n") and TOKEN not in printed
    first, second = sealed_site.seen
    assert first["authorization"] == f"Bearer {TOKEN}" and "x-client-id" not in first
    assert (second["x-client-id"], second["x-client-secret"]) == ("me", TOKEN) and "authorization" not in second
    for path in ("", "/credentials", "/credentials/token", "/bindings", "/bindings/api"):
        shown = egress.http.get(f"/credential-vault{path}")
        assert shown.status_code == 200 and TOKEN not in shown.text
    assert TOKEN not in egress.http.get("/policy").text


def test_a_vault_is_changed_while_the_sandbox_runs(reaching: Lifecycle, sealed_site: Site):
    id = made(reaching, networkPolicy=policy(API))
    egress, path = Egress(reaching, id), "/credential-vault"
    sent: list[str | None] = []

    def send() -> None:
        del sealed_site.seen[:]
        reaching.execd(id).run(fetch(sealed_site.at(API), scheme="https"))
        sent.append(sealed_site.seen[0].get("x-key"))

    assert egress.http.post(path, json={"credentials": [], "bindings": []}).json()["revision"] == 1
    send()
    key = binding("key", type="apiKey", name="X-Key", credential="token")
    changes = {"expectedRevision": 1, "credentials": {"add": [credential()]}, "bindings": {"add": [key]}}
    assert egress.http.patch(path, json=changes).json()["bindings"][0]["auth"] == {"type": "apiKey", "name": "X-Key"}
    send()
    stale = egress.http.patch(path, json=changes)
    assert (stale.status_code, stale.json()["code"]) == (409, "SANDBOX::CONFLICT")
    state = egress.http.patch(path, json={"credentials": {"replace": [credential(value="sk-new")]}}).json()
    assert state["credentials"] == [{"name": "token", "sourceType": "inline", "revision": 3}]
    send()
    assert egress.http.delete(path).status_code == 204
    send()
    assert sent == [None, TOKEN, "sk-new", None]
    assert egress.http.get(path).status_code == 404


def test_a_policy_cannot_remove_hosts_of_a_credential(reaching: Lifecycle):
    egress = Egress(reaching, made(reaching, networkPolicy=policy(API)))
    asked = {"credentials": [credential()], "bindings": [binding("api")]}
    assert egress.http.post("/credential-vault", json=asked).status_code == 201
    refused = egress.http.request("DELETE", "/policy", json=[API])
    assert refused.status_code == 400 and API in refused.json()["message"]
    assert egress.http.post("/credential-vault", json=asked).status_code == 409


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"bindings": []}, "credentials"),
        ({"credentials": [credential("")], "bindings": []}, "name"),
        ({"credentials": [credential(), credential()], "bindings": []}, "no other has"),
        ({"credentials": [credential(value="")], "bindings": []}, "value"),
        ({"credentials": [credential(value="k" * 20_000)], "bindings": []}, "16384 bytes"),
        ({"credentials": [credential("k" * 300)], "bindings": []}, "256 letters"),
        ({"credentials": [credential(str(each)) for each in range(101)], "bindings": []}, "100 credentials"),
        ({"credentials": [], "bindings": [binding("a")]}, "'token'"),
        ({"bindings": [binding("a"), binding("b")]}, "same request"),
        ({"bindings": [binding("a"), binding("b", "*.example.test")]}, "same request"),
        ({"bindings": [binding("a", "foreign.test")]}, "not covered"),
        ({"bindings": [binding("a", "127.0.0.1")]}, "binding 'a'"),
        ({"bindings": [binding("a", type="oauth", credential="token")]}, "bearer"),
        ({"bindings": [binding("a", type="apiKey", name="Host", credential="token")]}, "header"),
        ({"bindings": [{**binding("a"), "match": {"hosts": []}}]}, "match.hosts"),
        ({"bindings": [{**binding("a"), "match": {"hosts": [API], "schemes": ["http"]}}]}, "match.schemes"),
        ({"bindings": [{**binding("a"), "match": {"hosts": [API], "ports": [8443]}}]}, "match.ports"),
        ({"bindings": [{**binding("a"), "match": {"hosts": [API], "ports": [443, 8443]}}]}, "match.ports"),
        ({"bindings": [{**binding("a"), "match": {"hosts": [API], "methods": ["GET"]}}]}, "match.methods"),
        ({"bindings": [{**binding(each), "match": {"hosts": MANY}} for each in "ab"]}, "100 secrets"),
        ({"bindings": [binding("a", type="customHeaders", headers=TOO_MANY_HEADERS)]}, "100 secrets"),
        ({"bindings": [{**binding("a"), "match": {"hosts": [API], "paths": ["/v1/*"]}}]}, "match.paths"),
        ({"bindings": [{**binding("a"), "match": {"hosts": [API], "path": "/v1/*"}}]}, "path"),
    ],
)
def test_a_vault_that_makes_no_sense_is_refused_in_words(reaching: Lifecycle, asked: dict, says: str):
    egress = Egress(reaching, made(reaching, networkPolicy=policy("*.example.test")))
    body = asked if set(asked) != {"bindings"} or not asked["bindings"] else {"credentials": [credential()], **asked}
    answer = egress.http.post("/credential-vault", json=body)
    assert answer.status_code == 400 and says in answer.json()["message"]
    assert TOKEN not in answer.text
    assert egress.http.get("/credential-vault").status_code == 404


def test_only_the_sandboxs_own_token_opens_the_vault(reaching: Lifecycle):
    mine, other = Egress(reaching, made(reaching)), Egress(reaching, made(reaching))
    for method in ("GET", "POST", "PATCH", "DELETE"):
        answer = httpx2.request(method, f"{mine.http.base_url}credential-vault", headers=other.headers)
        assert answer.status_code == 401


# -- the words


def test_targets_stay_as_they_were_given():
    asked = [
        {"action": "allow", "target": "API.example.test"},
        {"action": "deny", "target": "*.example.test"},
        {"action": "allow", "target": "192.0.2.0/24"},
        {"action": "deny", "target": "2001:db8::/32"},
        {"action": "allow", "target": "2001:db8::1"},
    ]
    given = json.dumps({"defaultAction": "ALLOW", "egress": asked})
    made = wire.policy_from_body(
        wire.OpenSandboxNetworkBody(**json.loads(given) | {"egress": [wire.OpenSandboxRule(**each) for each in asked]})
    )
    shown = wire.encode_policy_status(made, NetworkPolicy(allow=("*:*",)))
    assert shown["policy"] == {"defaultAction": "allow", "egress": asked}
    assert "reason" not in shown


def test_of_two_rules_for_a_target_the_first_counts():
    rules = [
        wire.OpenSandboxRule(action="allow", target="A.test"),
        wire.OpenSandboxRule(action="deny", target="a.test"),
    ]
    assert [rule.action for rule in wire.rules_from_body(rules, "rules")] == ["allow"]


def test_a_change_keeps_settings_of_another_dialect():
    """Ports, which OpenSandbox has no words for, and secrets."""
    secret = Secret(domain="api.test", header="X-Key", value="v")
    own = NetworkPolicy(allow=("api.test", "db.test:5432"), deny=("bad.test",), secrets=(secret,))
    changed = wire.merge_rules(
        own, wire.rules_from_body([wire.OpenSandboxRule(action="allow", target="new.test")], "rules")
    )
    assert [rule.host for rule in changed.ordered] == ["new.test:*", "bad.test", "api.test", "db.test:5432"]
    assert changed.secrets == (secret,)
    assert wire.remove_rules(changed, ["new.test"]).ordered == own.ordered


def test_no_action_denies():
    assert wire.rules_from_body([wire.OpenSandboxRule(target="a.test")], "rules") == (
        NetworkRule(action="deny", host="a.test:*"),
    )
    with pytest.raises(errors.InvalidRequest):
        wire.rules_from_body([wire.OpenSandboxRule(action="permit", target="a.test")], "rules")
