"""`network=`, `secrets=` and `box.network` of the library: in this process, and against a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tests.conftest import serving
from tests.network.neighbour import Neighbour, living_next_door

import cloche
from cloche import errors
from cloche.config import Config
from cloche.network_policy import NetworkEntry, NetworkPolicy, NetworkRule, Secret
from cloche.sdk import embedded
from cloche.sdk.backend import NetworkLog

SECRET = {"domain": "api.test", "header": "Authorization", "value": "Bearer hush-hush"}


@pytest.fixture(scope="module")
def there() -> Iterator[Neighbour]:
    with living_next_door() as neighbour:
        yield neighbour


@pytest.fixture(scope="module", autouse=True, params=["embedded", "remote"])
def _library(request, there: Neighbour, bare_dir: str) -> Iterator[None]:
    if request.param == "embedded":
        own = embedded.EmbeddedEngine(Config(data_dir=bare_dir, network=there.settings("*:*")))
        own.open()
        with embedded.use_engine(own):
            yield
        own.close()
        return
    with serving(bare_dir, env=there.variables("*:*")) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLOCHE_URL", server.url)
        patch.setenv("CLOCHE_API_KEY", server.key)
        yield


def test_only_allowed_hosts_are_reached(there: Neighbour):
    with cloche.Sandbox(network={"allow": [there.at("api.test")]}) as box:
        assert box.run(there.fetch("api.test")).stdout == "hello"
        assert box.run(there.fetch("other.test")).stdout == "refused"


def test_without_a_policy_and_with_an_empty_one_nothing_is_reached(there: Neighbour):
    for network in (None, {}, False, NetworkPolicy()):
        with cloche.Sandbox(network=network) as box:
            assert box.run(there.fetch("api.test")).stdout == "refused"
            assert box.network.policy == NetworkPolicy()
            assert box.network.log() == []


def test_rules_come_before_deny_and_that_before_allow(there: Neighbour):
    rules = [{"action": "allow", "host": there.at("www.api.test")}]
    network = {"allow": ["*:*"], "deny": ["*.api.test"], "rules": rules}
    with cloche.Sandbox(network=network) as box:
        assert box.run(there.fetch("www.api.test")).stdout == "hello"
        assert box.run(there.fetch("other.test")).stdout == "hello"
        assert box.network.policy.rules == (NetworkRule(action="allow", host=there.at("www.api.test")),)


def test_the_log_has_attempts_and_their_outcomes(there: Neighbour):
    with cloche.Sandbox(network={"allow": [there.at("api.test")]}) as box:
        box.run(there.fetch("api.test") + there.fetch("other.test"))
        allowed, denied = box.network.log()
    assert isinstance(allowed, NetworkEntry)
    assert (allowed.verdict, allowed.host, allowed.port, allowed.protocol) == (
        "allowed",
        "api.test",
        there.port,
        "http",
    )
    assert allowed.received_bytes > 0 and allowed.sent_bytes > 0
    assert (denied.verdict, denied.host, denied.port) == ("denied", "other.test", there.port)
    assert denied.reason


def test_a_log_shows_itself_and_a_hostile_name_steers_no_notebook():
    entry = NetworkEntry(at=0.0, protocol="connect", host="<b>x</b>", port=443, verdict="denied", reason="no rule")
    log = NetworkLog([entry], dropped=7)
    assert "7 older" in repr(log) and "denied" in repr(log) and "no rule" in repr(log)
    assert "<td>443</td>" in log._repr_html_() and "<b>" not in log._repr_html_()
    steering = NetworkEntry(at=0.0, protocol="connect", host="\x1b[31mx\n", port=0, verdict="denied")
    assert "\x1b" not in str(steering) and "\n" not in str(steering)
    assert repr(entry).startswith("<NetworkEntry ") and repr(NetworkLog()) == "nothing was tried"


def test_a_policy_is_replaced_while_the_sandbox_runs(there: Neighbour):
    with cloche.Sandbox(network={"allow": [there.at("api.test")]}) as box:
        assert box.network.set({"allow": [there.at("other.test")]}).allow == (there.at("other.test"),)
        assert box.network.policy.allow == (there.at("other.test"),)
        assert box.run(there.fetch("other.test")).stdout == "hello"
        assert box.run(there.fetch("api.test")).stdout == "refused"
        box.network.set(False)
        assert box.run(there.fetch("other.test")).stdout == "refused"


def test_a_sandbox_without_a_network_can_be_given_one(there: Neighbour):
    with cloche.Sandbox() as box:
        box.run("x = 1")
        box.network.set({"allow": [there.at("api.test")]})
        assert box.run(there.fetch("api.test") + "print(x)").stdout == "hello1\n"
        assert box.commands.run(["python3", "-c", there.fetch("api.test")]).stdout == "hello"


@pytest.mark.parametrize("used", [False, True])
def test_kernels_of_every_language_that_were_there_before_find_a_network_that_comes_later(there: Neighbour, used: bool):
    url = there.url("api.test")
    fetches = {
        "bash": f"curl -sS {url}",
        "javascript": f"process.stdout.write(await (await fetch('{url}')).text())",
        "python": there.fetch("api.test"),
    }
    with cloche.Sandbox(env={"OWN": "stays"}) as box:
        contexts = {language: box.contexts.create(language=language) for language in fetches}
        for language in fetches if used else ():
            contexts[language].run({"bash": "kept='a b'", "javascript": "kept = 1", "python": "kept = 1"}[language])
        box.network.set({"allow": [there.at("api.test")]})
        said = {language: contexts[language].run(code) for language, code in fetches.items()}
        assert {language: each.stdout for language, each in said.items()} == dict.fromkeys(fetches, "hello"), said
        told = contexts["bash"].run('echo "$OWN,$kept,$HTTPS_PROXY,$(alias)"').stdout
        assert told == f"stays,{'a b' if used else ''},http://127.0.0.1:49980,\n"


def test_a_variable_of_a_secret_is_data_to_a_shell_that_runs(there: Neighbour):
    with cloche.Sandbox() as box:
        bash = box.contexts.create(language="bash")
        bash.run("builtin() { echo caught; }; export() { echo caught; }; set -u")
        secrets = [{"domain": "api.test", "name": "API_KEY", "value": "hush"}]
        box.network.set({"allow": ["api.test"]}, secrets=secrets)
        assert bash.run("printenv API_KEY").stdout == "$API_KEY\n"


def test_values_of_secrets_are_never_shown(there: Neighbour):
    with cloche.Sandbox(network={"allow": ["api.test"]}, secrets=[SECRET]) as box:
        policy = box.network.policy
        (secret,) = policy.secrets
        assert (secret.domain, secret.header) == ("api.test", "Authorization")
        assert "hush" not in repr(policy) and "hush" not in secret.value and "hush" not in repr(box.info())


def test_a_shown_policy_can_be_set_again_and_secrets_stay_until_they_are_replaced(there: Neighbour):
    with cloche.Sandbox(network={"allow": ["api.test"]}, secrets=[SECRET]) as box:
        shown = box.network.policy
        assert box.network.set(shown) == shown
        assert box.network.set({"allow": ["api.test", "other.test"]}).secrets == shown.secrets
        assert box.network.set({"allow": ["api.test"]}, secrets=[]).secrets == ()
        assert box.network.set({"allow": ["api.test"]}, secrets=[SECRET]).secrets == shown.secrets
        assert box.network.set({"allow": ["other.test"]}).secrets == ()
        with pytest.raises(errors.InvalidRequest, match="not shown"):
            cloche.Sandbox(network=shown)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"network": True}, "False or None"),
        ({"network": ["pypi.org"]}, "mapping"),
        ({"network": {"alow": []}}, "'alow'"),
        ({"network": {"allow": ["https://pypi.org/simple"]}}, "no scheme"),
        ({"network": {"allow": "pypi.org"}}, "allow"),
        ({"network": {"allow": ["x:0"]}}, "ports"),
        ({"network": {"rules": [{"action": "maybe", "host": "x"}]}}, "maybe"),
        ({"network": {"secrets": [SECRET]}}, "beside it"),
        ({"secrets": [SECRET]}, "need a network"),
        ({"network": {"allow": ["api.test"]}, "secrets": [{**SECRET, "headers": "x"}]}, "'headers'"),
        ({"network": {"allow": ["api.test"]}, "secrets": [{**SECRET, "header": "Host"}]}, "header"),
        ({"network": {"allow": ["other.test"]}, "secrets": [SECRET]}, "of no use"),
        ({"network": {"allow": ["api.test"]}, "secrets": [{**SECRET, "value": "hush\nX: y"}]}, "line breaks"),
        ({"network": {"allow": ["api.test"]}, "secrets": [{**SECRET, "name": "BOTH"}]}, "either"),
        ({"network": {"allow": ["api.test"]}, "secrets": SECRET}, "list"),
        ({"network": {"allow": "api.test"}}, r"list of patterns: write allow=\['api.test'\]"),
        ({"network": {"allow": ["api.test"], "deny": "x.test"}}, r"write deny=\['x.test'\]"),
        ({"network": {"allow": ["api.test"]}, "secrets": ["hush"]}, "mapping"),
    ],
)
def test_bad_policies_and_secrets_are_refused_without_their_values(given, said):
    with pytest.raises(errors.InvalidRequest, match=said) as refused:
        cloche.Sandbox(**given)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["PATH", "HOME", "LD_PRELOAD", "PYTHONPATH", "https_proxy", "SSL_CERT_FILE", "NODE_OPTIONS", "BASH_ENV"]
)
def test_a_secret_cannot_have_the_name_of_a_control_variable(name: str):
    with pytest.raises(errors.InvalidRequest, match="use another"):
        Secret(domain="api.test", value="hush", name=name)
    assert Secret(domain="api.test", value="hush", name=f"MY_{name}_TOKEN").name


def test_a_policy_of_a_string_is_refused():
    with pytest.raises(errors.InvalidRequest, match="list of patterns"):
        NetworkPolicy(allow="pypi.org")  # type: ignore[arg-type]


def test_a_bad_change_changes_nothing(there: Neighbour):
    with cloche.Sandbox(network={"allow": [there.at("api.test")]}) as box:
        with pytest.raises(errors.InvalidRequest):
            box.network.set({"allow": ["not a host"]})
        with pytest.raises(errors.InvalidRequest, match="False"):
            box.network.set(None)
        assert box.run(there.fetch("api.test")).stdout == "hello"


def test_the_network_of_a_sandbox_that_has_ended_says_so():
    box = cloche.Sandbox(network={"allow": ["api.test"]})
    box.close()
    for use in (box.network.log, lambda: box.network.policy, lambda: box.network.set({})):
        with pytest.raises(errors.SandboxKilled):
            use()


def test_the_same_with_await(there: Neighbour):
    async def use() -> None:
        network = {"allow": [there.at("api.test"), "api.test"]}
        async with cloche.AsyncSandbox(network=network, secrets=[SECRET]) as box:
            assert (await box.run(there.fetch("api.test"))).stdout == "hello"
            assert [each.verdict for each in await box.network.log()] == ["allowed"]
            assert (await box.network.policy).secrets[0].domain == "api.test"
            assert (await box.network.set(False)) == await box.network.policy
            assert (await box.run(there.fetch("api.test"))).stdout == "refused"

    asyncio.run(use())


def test_proxies_are_where_programs_look_for_them_and_neighbours_of_another_sandbox_are_not(there: Neighbour):
    with cloche.Sandbox(network={"allow": [there.at("api.test")]}) as box, cloche.Sandbox() as other:
        variables = "import os; print({k for k in os.environ if k.lower().endswith('_proxy')} != set())"
        assert (box.run(variables).stdout, other.run(variables).stdout) == ("True\n", "False\n")
