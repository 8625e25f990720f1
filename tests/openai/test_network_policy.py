"""`network_policy` with OpenAI's own client: which hosts code reaches, what is echoed of it, and what never is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from tests.conftest import RunningServer, serving, wait_until, with_template
from tests.network.far_server import Trust, own_trust
from tests.openai.conftest import UPSTREAM_KEY, client_of
from tests.openai.upstream import Code, ScriptedUpstream, Text
from tests.web_site import Site, fetch, web_site

from cloche.gateway.containers import NETWORK_LABEL, describe_network, network_from_label, network_label
from cloche.model import Limits, SandboxInfo, Template
from cloche.network_policy import NetworkPolicy, Secret

OUTPUTS = ["code_interpreter_call.outputs"]
SECRET = "sk-very-secret-0123456789"
OPERATOR = """
[network]
allow = ["*.example.test:*"]
internal = ["127.0.0.1"]
hosts = {"api.example.test" = "127.0.0.1", "other.example.test" = "127.0.0.1", "foreign.test" = "127.0.0.1"}
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with web_site() as running:
        yield running


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> Trust:
    """An authority that the server's host trusts, and a certificate of it."""
    return own_trust(tmp_path_factory.mktemp("trust"), ["api.example.test", "other.example.test"])


@pytest.fixture(scope="module")
def sealed_site(trust: Trust) -> Iterator[Site]:
    """The same, which speaks TLS."""
    with web_site(trust.server) as running:
        yield running


@pytest.fixture(scope="module")
def place(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory of its own, and beside it what the server says."""
    return with_template(tmp_path_factory.mktemp("networked") / "data", template)


@pytest.fixture(scope="module")
def networked(place: Path, gateway_config: Path, trust: Trust) -> Iterator[RunningServer]:
    """A server whose operator lets sandboxes reach names below example.test."""
    config = place.with_name("cloche.toml")
    config.write_text(gateway_config.read_text() + OPERATOR)
    env = {"CLOCHE_CONFIG": str(config), "TEST_UPSTREAM_KEY": UPSTREAM_KEY, "SSL_CERT_FILE": str(trust.bundle)}
    with serving(place, env=env, log=place.with_name("log")) as running:
        yield running


@pytest.fixture(scope="module")
def reaching(networked: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(networked) as made:
        yield made


def allowlist(*domains: str, **secrets: Any) -> dict[str, Any]:
    return {"type": "allowlist", "allowed_domains": list(domains), **secrets}


def tool(policy: dict[str, Any] | None) -> dict[str, Any]:
    container = {"type": "auto"} if policy is None else {"type": "auto", "network_policy": policy}
    return {"type": "code_interpreter", "container": container}


def printed(response: Any) -> str:
    calls = [item for item in response.output if item.type == "code_interpreter_call"]
    return "".join(output.logs for call in calls for output in call.outputs or ())


Ask = Callable[..., Any]
Description = Callable[[Any], str]


@pytest.fixture
def ask(reaching: openai.OpenAI, upstream: ScriptedUpstream) -> Ask:
    """Has a model run that code, in a container with that policy."""

    def ask(code: str, policy: dict[str, Any] | None = None, **more: Any) -> Any:
        model = upstream.play("resp", [Code(code)], [Text("Done.")])
        given = {"tools": [tool(policy)], "include": OUTPUTS, "input": "Go", **more}
        return reaching.responses.create(model=model, **given)

    return ask


@pytest.fixture
def description(upstream: ScriptedUpstream) -> Description:
    """What the model of a response was told of its tool."""

    def description(response: Any) -> str:
        tools = upstream.asked(response.model)[0].body["tools"]
        return str(next(each["description"] for each in tools if each["name"] == "python"))

    return description


# -- the tool


def test_code_reaches_the_domains_of_the_tool_and_no_other(ask: Ask, site: Site):
    code = fetch(site.at("api.example.test"), site.at("other.example.test"), site.at("foreign.test"))
    answer = ask(code, allowlist(site.at("api.example.test")))
    assert printed(answer) == "hello\nrefused 403\nrefused 403\n"


def test_a_wildcard_allows_subdomains(ask: Ask, site: Site):
    answer = ask(fetch(site.at("api.example.test"), site.at("foreign.test")), allowlist(f"*.example.test:{site.port}"))
    assert printed(answer) == "hello\nrefused 403\n"


def test_a_domain_alone_means_the_ports_of_the_web(ask: Ask, site: Site):
    assert printed(ask(fetch(site.at("api.example.test")), allowlist("api.example.test"))) == "refused 403\n"


def test_disabled_reaches_nothing(ask: Ask, description: Description, site: Site):
    answer = ask(fetch(site.at("api.example.test")), {"type": "disabled"})
    assert printed(answer) == "unreachable\n"
    assert "There is no internet access." in description(answer)


def test_the_model_is_told_the_reachable_hosts(ask: Ask, description: Description, site: Site):
    places = (site.at("api.example.test"), "*.example.test")
    told = description(ask("1", allowlist(*places)))
    assert ", ".join(places) in told and "no internet" not in told
    assert "no internet" in description(ask("1"))  # nothing is asked for, and the operator gives nothing by itself


def test_chats_have_it_too(reaching: openai.OpenAI, upstream: ScriptedUpstream, site: Site):
    code = fetch(site.at("api.example.test"), site.at("other.example.test"))
    model = upstream.play("chat", [Code(code)], [Text("Done.")])
    given: Any = {"model": model, "messages": [{"role": "user", "content": "Go"}]}
    reaching.chat.completions.create(**given, tools=[tool(allowlist(site.at("api.example.test")))])
    assert upstream.asked(model)[1].outputs == ["hello\nrefused 403\n"]


# -- the next turn


def test_the_policy_of_a_request_holds_for_its_code_in_the_same_container(
    ask: Ask, reaching: openai.OpenAI, site: Site
):
    code = fetch(site.at("api.example.test"), site.at("other.example.test"))
    first = ask(code, allowlist(site.at("api.example.test")))
    other = ask(code, allowlist(site.at("other.example.test")), previous_response_id=first.id)
    silent = ask(code, previous_response_id=other.id)
    none = ask(code, {"type": "disabled"}, previous_response_id=silent.id)
    assert [printed(each) for each in (first, other, silent, none)] == [
        "hello\nrefused 403\n",
        "refused 403\nhello\n",
        "refused 403\nhello\n",  # it says nothing of it: the container stays as it is
        "refused 403\nrefused 403\n",
    ]
    containers = {container_of(each) for each in (first, other, silent, none)}
    assert len(containers) == 1
    assert reaching.containers.retrieve(containers.pop()).network_policy.type == "disabled"


def container_of(response: Any) -> str:
    return str(next(item.container_id for item in response.output if item.type == "code_interpreter_call"))


def test_a_container_without_a_network_gets_one_in_the_next_turn(ask: Ask, site: Site):
    code = fetch(site.at("api.example.test"))
    first = ask(code)
    second = ask(code, allowlist(site.at("api.example.test")), previous_response_id=first.id)
    assert (printed(first), printed(second)) == ("unreachable\n", "hello\n")
    assert container_of(first) == container_of(second)


def test_turns_at_once_with_different_policies_each_have_their_own(ask: Ask, site: Site):
    """They share a container: what one may reach, the code of the other never can."""
    first = ask("1")
    names = ("api.example.test", "other.example.test")
    code = fetch(*map(site.at, names))
    given = [(names[at % 2], at) for at in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(
            pool.map(lambda each: ask(code, allowlist(site.at(each[0])), previous_response_id=first.id), given)
        )
    for (name, _), answer in zip(given, answers, strict=True):
        wanted = ["hello" if name == each else "refused 403" for each in names]
        assert printed(answer).split("\n")[:-1] == wanted
    assert {container_of(answer) for answer in answers} == {container_of(first)}


def test_a_container_that_expired_is_made_again_with_its_policy(
    ask: Ask, description: Description, reaching: openai.OpenAI, networked: RunningServer, site: Site
):
    secret = {"domain": "api.example.test", "name": "API_KEY", "value": SECRET}
    policy = allowlist(site.at("api.example.test"), domain_secrets=[secret])
    first = ask(fetch(site.at("api.example.test")), policy)
    let_expire(networked, container_of(first))
    assert shown_of(reaching, container_of(first)) == ("allowlist", [site.at("api.example.test")])
    code = fetch(site.at("api.example.test"), site.at("other.example.test"))
    second = ask(code, previous_response_id=first.id)
    assert printed(second).endswith("hello\nrefused 403\n")
    assert container_of(second) != container_of(first)
    assert shown_of(reaching, container_of(second)) == ("allowlist", [site.at("api.example.test")])
    assert "API_KEY" not in description(second)  # secrets are nowhere kept


def let_expire(server: RunningServer, container: str) -> None:
    url = f"{server.url}/api/v1/sandboxes/{container.removeprefix('cntr_')}"
    headers = {"authorization": f"Bearer {server.key}"}
    httpx2.post(f"{url}/renew", json={"seconds": 0.01}, headers=headers).raise_for_status()
    wait_until(lambda: httpx2.get(url, headers=headers).json()["state"] == "ended")


def shown_of(client: openai.OpenAI, container: str) -> tuple[str, list[str] | None]:
    policy = client.containers.retrieve(container).network_policy
    return policy.type, policy.allowed_domains


# -- /v1/containers


def test_a_container_has_the_policy_that_it_was_made_with(
    ask: Ask, description: Description, reaching: openai.OpenAI, site: Site
):
    domains = [site.at("API.example.test"), "*.example.test"]
    made = reaching.containers.create(name="net", network_policy={"type": "allowlist", "allowed_domains": domains})
    assert shown_of(reaching, made.id) == ("allowlist", made.network_policy.allowed_domains)
    assert made.network_policy.allowed_domains == [each.lower() for each in domains]
    listed = next(each for each in reaching.containers.list(limit=100) if each.id == made.id)
    assert (listed.network_policy.type, listed.network_policy.allowed_domains) == shown_of(reaching, made.id)
    code = fetch(site.at("api.example.test"), site.at("other.example.test"))
    used = ask(code, tools=[{"type": "code_interpreter", "container": made.id}])
    assert printed(used) == "hello\nrefused 403\n"
    assert "*.example.test" in description(used)
    reaching.containers.delete(made.id)


def test_a_policy_that_another_dialect_has_changed_is_shown(reaching: openai.OpenAI, networked: RunningServer):
    made = reaching.containers.create(name="net")
    assert made.network_policy.type == "disabled"
    url = f"{networked.url}/opensandbox/v1/sandboxes/{made.id.removeprefix('cntr_')}/networkpolicy"
    rules = [{"action": "allow", "target": "api.example.test"}]
    httpx2.patch(url, json=rules, headers={"OPEN-SANDBOX-API-KEY": networked.key}).raise_for_status()
    assert shown_of(reaching, made.id) == ("allowlist", ["api.example.test:*"])
    reaching.containers.delete(made.id)


# -- secrets


def test_a_secret_is_used_and_not_seen(ask: Ask, sealed_site: Site):
    """The placeholder in a header becomes the secret, for that domain and in no request to another."""
    secret = {"domain": "api.example.test", "name": "API_KEY", "value": SECRET}
    names = ("api.example.test", "other.example.test")
    places = [sealed_site.at(name) for name in names]
    code = fetch(*places, scheme="https", headers="{'Authorization': 'Bearer ' + os.environ['API_KEY']}")
    del sealed_site.seen[:]
    answer = ask(code, allowlist(*places, domain_secrets=[secret]))
    assert printed(answer) == "hello\nhello\n"
    assert [each["authorization"] for each in sealed_site.seen] == [f"Bearer {SECRET}", "Bearer $API_KEY"]


def test_the_next_turn_has_the_secrets_that_it_brings(ask: Ask, sealed_site: Site):
    place = sealed_site.at("api.example.test")
    code = fetch(place, scheme="https", headers="{'X-Key': os.environ['API_KEY']}")

    def policy(value: str) -> dict[str, Any]:
        return allowlist(place, domain_secrets=[{"domain": "api.example.test", "name": "API_KEY", "value": value}])

    del sealed_site.seen[:]
    first = ask(code, policy(SECRET))
    second = ask(code, policy("sk-another-one"), previous_response_id=first.id)
    third = ask(code, previous_response_id=second.id)  # says nothing of it: they stay
    fourth = ask(code, allowlist(place), previous_response_id=third.id)  # brings none
    assert [printed(each) for each in (first, second, third, fourth)] == ["hello\n"] * 4
    assert [each["x-key"] for each in sealed_site.seen] == [SECRET, "sk-another-one", "sk-another-one", "$API_KEY"]


def test_secrets_are_echoed_nowhere(
    ask: Ask,
    description: Description,
    reaching: openai.OpenAI,
    networked: RunningServer,
    upstream: ScriptedUpstream,
    place: Path,
    site: Site,
):
    secret = {"domain": "api.example.test", "name": "API_KEY", "value": SECRET}
    policy = allowlist(site.at("api.example.test"), domain_secrets=[secret])
    answer = ask("import os; print(os.environ['API_KEY'])", policy)
    assert printed(answer) == "$API_KEY\n"
    assert answer.tools[0].container.network_policy.model_dump(exclude_none=True) == allowlist(
        site.at("api.example.test")
    )
    made = reaching.containers.create(name="net", network_policy=policy)
    headers = {"authorization": f"Bearer {networked.key}"}
    seen = [
        answer.model_dump_json(),
        reaching.responses.retrieve(answer.id).model_dump_json(),
        made.model_dump_json(),
        json.dumps([each.body for each in upstream.asked(answer.model)]),
        *(
            httpx2.get(f"{networked.url}{path}/{id.removeprefix('cntr_')}", headers=headers).text
            for id in (made.id, container_of(answer))
            for path in ("/v1/containers", "/api/v1/sandboxes", "/opensandbox/v1/sandboxes")
        ),
    ]
    assert all(SECRET not in each for each in seen)
    kept = [each for each in place.rglob("*") if each.is_file() and "templates" not in each.parts]
    assert any(answer.id.encode() in each.read_bytes() for each in kept)
    assert all(SECRET.encode() not in each.read_bytes() for each in (*kept, place.with_name("log")))
    assert "API_KEY for api.example.test" in description(answer)


# -- what cannot be

BAD = [
    (7, "", "invalid_type"),
    ({}, ".type", "missing_required_parameter"),
    ({"type": "open"}, ".type", "invalid_value"),
    ({"type": 7}, ".type", "invalid_value"),
    ({"type": "disabled", "allowed_domains": ["a.example.test"]}, ".allowed_domains", "invalid_value"),
    ({"type": "allowlist"}, ".allowed_domains", "missing_required_parameter"),
    (allowlist(), ".allowed_domains", "empty_array"),
    ({"type": "allowlist", "allowed_domains": "a.example.test"}, ".allowed_domains", "invalid_type"),
    (allowlist("a.example.test", 7), ".allowed_domains[1]", "invalid_type"),
    (allowlist("a.example.test", "https://b.test/x"), ".allowed_domains[1]", "invalid_value"),
    (allowlist("*"), ".allowed_domains[0]", "invalid_value"),
    (allowlist("127.0.0.1"), ".allowed_domains[0]", "invalid_value"),
    (allowlist("a.*.test"), ".allowed_domains[0]", "invalid_value"),
    (allowlist("münchen.test"), ".allowed_domains[0]", "invalid_value"),
    (allowlist(""), ".allowed_domains[0]", "invalid_value"),
    (allowlist(*(f"{n}.test" for n in range(1001))), ".allowed_domains", "array_above_max_length"),
    (allowlist(*(f"{n:0>60}.test" for n in range(500))), ".allowed_domains", "string_above_max_length"),
]
BAD_SECRETS = [
    (7, "", "invalid_type"),
    ([7], "[0]", "invalid_type"),
    ([{"name": "A", "value": "v"}], "[0].domain", "missing_required_parameter"),
    ([{"domain": "a.example.test", "value": "v"}], "[0].name", "missing_required_parameter"),
    ([{"domain": "a.example.test", "name": "A"}], "[0].value", "missing_required_parameter"),
    ([{"domain": "a.example.test", "name": "A", "value": 7}], "[0].value", "invalid_type"),
    ([{"domain": "a.example.test", "name": "A", "value": f"{SECRET}\r\nX: y"}], "[0].value", "invalid_value"),
    ([{"domain": "a.example.test", "name": "A", "value": SECRET * 1000}], "[0].value", "invalid_value"),
    ([{"domain": "a.example.test", "name": "not a name", "value": SECRET}], "[0].name", "invalid_value"),
    ([{"domain": "b.example.test", "name": "A", "value": SECRET}], "[0].domain", "invalid_value"),
    ([{"domain": "a.example.test", "name": "A", "value": SECRET}] * 2, "[1].name", "invalid_value"),
]


@pytest.mark.parametrize(
    ("policy", "param", "code"),
    [
        *BAD,
        *(
            (allowlist("a.example.test", domain_secrets=secrets), ".domain_secrets" + param, code)
            for secrets, param, code in BAD_SECRETS
        ),
    ],
)
def test_invalid_fields_are_named(reaching: openai.OpenAI, policy: Any, param: str, code: str):
    asks = [
        (lambda: reaching.containers.create(name="x", network_policy=policy), "network_policy"),
        (lambda: respond(reaching, tool(policy)), "tools[0].container.network_policy"),
        (lambda: chat(reaching, tool(policy)), "tools[0].container.network_policy"),
    ]
    for ask, place in asks:
        with pytest.raises(openai.BadRequestError) as refused:
            ask()
        assert (refused.value.param, refused.value.code) == (place + param, code)
        assert SECRET not in refused.value.message


def respond(client: openai.OpenAI, tool: Any) -> Any:
    return client.responses.create(model="cloche/echo", input="x", tools=[tool])


def chat(client: openai.OpenAI, tool: Any) -> Any:
    return client.chat.completions.create(
        model="cloche/echo", messages=[{"role": "user", "content": "x"}], tools=[tool]
    )


def test_hosts_outside_the_operators_rules_are_refused(reaching: openai.OpenAI):
    policy = allowlist("api.example.test", "foreign.test")
    for ask in (
        lambda: reaching.containers.create(name="x", network_policy=policy),
        lambda: respond(reaching, tool(policy)),
        lambda: chat(reaching, tool(policy)),
    ):
        with pytest.raises(openai.BadRequestError, match=r"foreign\.test") as refused:
            ask()
        assert (refused.value.param, refused.value.code) == ("network_policy", "invalid_value")
        assert "network.allow" in refused.value.message


def test_a_server_without_allowed_hosts_suggests_the_remedy(client: openai.OpenAI):
    policy = allowlist("pypi.org")
    for ask in (
        lambda: client.containers.create(name="x", network_policy=policy),
        lambda: respond(client, tool(policy)),
    ):
        with pytest.raises(openai.BadRequestError, match=r"network\.allow") as refused:
            ask()
        assert (refused.value.param, refused.value.code) == ("network_policy", "invalid_value")
    assert client.containers.create(name="x", network_policy={"type": "disabled"}).network_policy.type == "disabled"


# -- what is remembered, and what is told


def test_stored_policies_have_no_secret_and_invalid_ones_allow_nothing():
    secret = Secret(domain="a.test", name="KEY", value=SECRET)
    policy = NetworkPolicy(allow=("a.test", "*.b.test:8080"), secrets=(secret,))
    assert SECRET not in network_label(policy)
    for label, allowed in (
        (network_label(policy), policy.allow),
        ("", ()),
        ("https://no.test/,a.test", ()),
        ("a.test,,", ("a.test",)),
    ):
        info = SandboxInfo(
            id="i",
            template="python",
            owner="o",
            state="ended",
            created_at=0.0,
            deadline_at=None,
            metadata={NETWORK_LABEL: label},
            limits=Limits(),
        )
        assert network_from_label(info) == NetworkPolicy(allow=allowed)


@pytest.mark.parametrize(
    ("policy", "packages", "said"),
    [
        (NetworkPolicy(), False, "There is no internet access."),
        (NetworkPolicy(), True, "There is no internet access, but pip can install packages."),
        (NetworkPolicy(allow=("a.test",)), True, "a.test. pip can install packages."),
        (NetworkPolicy(allow=("*:*",)), False, "as far as the operator of this host allows."),
        (NetworkPolicy(allow=tuple(f"{n}.test" for n in range(40))), False, "29.test and 10 more."),
    ],
)
def test_the_model_is_told_the_truth_in_a_few_words(policy: NetworkPolicy, packages: bool, said: str):
    assert describe_network(policy, packages=packages).endswith(said)
    assert len(describe_network(policy, packages=packages)) < 500
