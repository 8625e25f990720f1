"""A network in E2B's words and in ours: what is asked for, what is refused in which words, and what is shown."""

from __future__ import annotations

import msgspec
import pytest

from cloche import errors
from cloche.api.dialect import NotSupported, decode_json_body
from cloche.api.e2b.network import policy_for_new_sandbox
from cloche.api.e2b.network_schema import (
    DOMAINS_NEED_DENIAL,
    E2bEgressRequest,
    E2bNetworkBody,
    allows_internet,
    decode_egress_request,
    encode_policy,
    policy_from_request,
)
from cloche.api.e2b.sandboxes_schema import decode_create_request
from cloche.config.sections import NetworkConfig as OperatorsNetwork
from cloche.config.sections import PackagesConfig
from cloche.egress.rules import PolicyDenied, PolicyRules, parse_destination
from cloche.engine.sandboxes.networks import Networks
from cloche.model import Template
from cloche.network_policy import NetworkPolicy, NetworkRule

NOTHING, EVERYTHING = NetworkPolicy(), NetworkPolicy(allow=("*:*",))
EVERYTHING_ALLOWED = NetworkPolicy(rules=(NetworkRule(action="allow", host="*:*"),))
ALL = "0.0.0.0/0"


def asked(internet: bool | None = None, **network: object) -> E2bEgressRequest:
    """As a client's JSON says it."""
    return decode_egress_request(decode_json_body(msgspec.json.encode(network), E2bNetworkBody), internet)


def reaches(policy: NetworkPolicy, host: str, port: int = 443) -> bool:
    try:
        PolicyRules(policy, "policy").check(parse_destination(host, port))
    except PolicyDenied:
        return False
    return True


# -- what may be reached


def test_the_internet_is_on_unless_it_is_declined():
    for internet in (None, True):
        assert reaches(policy_from_request(asked(internet), EVERYTHING), "example.com", 25)
    assert policy_from_request(asked(False), EVERYTHING) == NetworkPolicy()
    assert policy_from_request(asked(denyOut=[ALL]), EVERYTHING) == NetworkPolicy()


def test_the_internet_means_the_operators_allowed_hosts():
    assert policy_from_request(asked(), NOTHING) == NetworkPolicy()
    some = policy_from_request(asked(True), NetworkPolicy(allow=("pypi.org", "*.example.com:8000-8100")))
    assert reaches(some, "pypi.org") and reaches(some, "a.example.com", 8001)
    assert not reaches(some, "example.net")
    assert policy_from_request(asked(True, allowOut=[ALL]), NetworkPolicy(allow=("pypi.org",))) == policy_from_request(
        asked(), NetworkPolicy(allow=("pypi.org",))
    )


def test_allow_rules_come_before_deny_rules():
    policy = policy_from_request(
        asked(allowOut=["8.8.8.8", "2001:db8::1"], denyOut=["8.8.0.0/16", "2001:db8::/32"]), EVERYTHING
    )
    assert reaches(policy, "8.8.8.8", 53) and reaches(policy, "2001:db8::1")
    assert not reaches(policy, "8.8.4.4") and not reaches(policy, "2001:db8::2")
    assert reaches(policy, "1.1.1.1") and reaches(policy, "example.com")


def test_with_everything_denied_only_allowed_hosts_are_left():
    for policy in (
        policy_from_request(asked(denyOut=[ALL], allowOut=["1.1.1.0/24", "example.com", "*.example.org"]), EVERYTHING),
        policy_from_request(
            asked(False, denyOut=[ALL], allowOut=["1.1.1.0/24", "example.com", "*.example.org"]), EVERYTHING
        ),
    ):
        assert (
            reaches(policy, "1.1.1.7", 8080) and reaches(policy, "example.com", 22) and reaches(policy, "a.example.org")
        )
        assert not any(reaches(policy, host) for host in ("8.8.8.8", "www.example.com", "example.org", "2001:db8::1"))


def test_all_traffic_that_is_allowed_beats_every_denial():
    policy = policy_from_request(asked(allowOut=[ALL], denyOut=[ALL, "8.8.8.8"]), EVERYTHING)
    assert reaches(policy, "8.8.8.8") and reaches(policy, "example.com")


def test_a_name_may_have_a_port_though_e2b_knows_none():
    policy = policy_from_request(asked(denyOut=[ALL], allowOut=["example.com:8443"]), EVERYTHING)
    assert reaches(policy, "example.com", 8443) and not reaches(policy, "example.com", 443)


# -- what a sandbox gets whose client says nothing


@pytest.mark.parametrize(
    ("template", "sealed", "settled"), [(None, True, False), (NetworkPolicy(), True, True), (None, False, True)]
)
def test_the_default_of_template_or_backend_stays_without_a_request(template, sealed, settled, tmp_path):
    place = dict.fromkeys(("python", "python_version", "python_prefix", "root"), "")
    made = Template(name="python", version="0" * 32, network=template, **place)
    networks = Networks(OperatorsNetwork(allow=("*:*",)), PackagesConfig(), tmp_path, sealed=sealed)
    assert policy_for_new_sandbox(asked(), made, networks) == (None if settled else EVERYTHING_ALLOWED)
    assert policy_for_new_sandbox(asked(False), made, networks) == NetworkPolicy()


# -- what is refused


@pytest.mark.parametrize(
    ("network", "says"),
    [
        ({"denyOut": ["example.com"]}, "invalid denied CIDR example.com"),
        ({"denyOut": ["0.0.0.0"]}, "invalid denied CIDR 0.0.0.0"),
        ({"denyOut": ["1.2.3.4/33"]}, "invalid denied CIDR 1.2.3.4/33"),
        ({"denyOut": ["1.2.3.4/255.255.255.0"]}, "invalid denied CIDR 1.2.3.4/255.255.255.0"),
        ({"allowOut": ["::"], "denyOut": [ALL]}, "invalid allowed address ::"),
        ({"allowOut": ["example.com"]}, DOMAINS_NEED_DENIAL),
        ({"allowOut": ["*"], "denyOut": ["8.8.8.8"]}, DOMAINS_NEED_DENIAL),
        ({"allowOut": ["https://example.com/"], "denyOut": [ALL]}, "is not a pattern of hosts"),
        ({"allowOut": [""], "denyOut": [ALL]}, "is not a pattern of hosts"),
        ({"denyOut": ["8.8.8.8"] * 1001}, "can have 1000 entries"),
        ({"rules": {f"{n}.example": [] for n in range(11)}}, "Network rules can have at most 10 domains."),
        (
            {"rules": {"a.example": [{"transform": {"headers": {f"A{n}": "b" for n in range(21)}}}]}},
            "at most 20 headers",
        ),
        ({"rules": {"": [{"transform": {"headers": {"A": "b"}}}]}}, "Rule domain must not be empty."),
        ({"rules": {"1.2.3.4": [{"transform": {"headers": {"A": "b"}}}]}}, "network.rules: "),
        ({"rules": {"*": [{"transform": {"headers": {"A": "b"}}}]}}, "network.rules: "),
        ({"rules": {"a.example": [{"transform": {"headers": {"A b": "c"}}}]}}, "network.rules: "),
        ({"rules": {"a.example": [{"transform": {"headers": {"Host": "c"}}}]}}, "network.rules: "),
        ({"rules": {"a.example": [{"transform": {"headers": {"A": "b\r\nC: d"}}}]}}, "network.rules: "),
        ({"rules": {"a.example": [{"transform": {"headers": {"A": "***"}}}]}}, "send the value itself"),
        ({"rules": {"a.example": {"transform": 1}}}, "rules[...]: Expected `array`"),
    ],
)
def test_invalid_networks_are_refused_in_e2bs_words(network, says):
    with pytest.raises(errors.InvalidRequest) as refused:
        asked(**network)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "network",
    [
        {"dnsServers": ["1.1.1.1"]},
        {"egressProxy": {"address": "proxy.example:1080"}},
        {"httpsPorts": [3000]},
        {"rules": {"a.example": [{"transform": {"headers": {"A": "${e2b.secrets.key}"}}}]}},
        {"rules": {"a.example": [{"transform": {"headers": {"A": "Bearer ${e2b.identity.tokens.aws}"}}}]}},
    ],
)
def test_unsupported_network_features_are_refused_by_name(network):
    with pytest.raises(NotSupported, match="|".join(("dnsServers", "egressProxy", "httpsPorts", "keeps no secrets"))):
        asked(**network)


def test_empty_fields_request_nothing():
    nothing = asked(allowOut=[], denyOut=[], rules={}, dnsServers=[], httpsPorts=[], egressProxy=None)
    assert nothing == E2bEgressRequest() == asked(rules={"a.example": [{"transform": {}}, {}]})


# -- headers that are added


def test_a_rule_is_a_secret_for_allowed_hosts_and_allows_none():
    rules = {"API.example.com": [{"transform": {"headers": {"X-Key": "one", "B": "2"}}}], "*.example.org": []}
    for network in ({}, {"denyOut": [ALL], "allowOut": ["*.example.com"]}):
        policy = policy_from_request(asked(rules=rules, **network), EVERYTHING)
        assert [(each.domain, each.header, each.value) for each in policy.secrets] == [
            ("api.example.com", "X-Key", "one"),
            ("api.example.com", "B", "2"),
        ]
    assert policy_from_request(asked(rules=rules, denyOut=[ALL]), EVERYTHING) == NetworkPolicy()


def test_of_a_domains_rules_the_last_one_that_names_a_header_counts():
    rules = [{"transform": {"headers": {"X-Key": "old", "B": "2"}}}, {"transform": {"headers": {"x-key": "new"}}}]
    assert {(each.header, each.value) for each in asked(rules={"a.example": rules}).secrets} == {
        ("x-key", "new"),
        ("B", "2"),
    }


# -- what is shown


@pytest.mark.parametrize(
    ("network", "bound", "told", "internet"),
    [
        ({}, EVERYTHING, {}, True),
        ({}, NOTHING, {"denyOut": [ALL]}, False),
        ({}, NetworkPolicy(allow=("pypi.org",)), {"allowOut": ["pypi.org"], "denyOut": [ALL]}, False),
        ({"denyOut": ["8.8.8.8"]}, EVERYTHING, {"denyOut": ["8.8.8.8"]}, True),
        (
            {"denyOut": [ALL], "allowOut": ["a.example"]},
            EVERYTHING,
            {"allowOut": ["a.example"], "denyOut": [ALL]},
            False,
        ),
        ({"allowOut": ["2001:db8::/32"]}, EVERYTHING, {"allowOut": ["2001:db8::/32"]}, True),
    ],
)
def test_it_is_shown_as_it_is(network, bound, told, internet):
    policy = policy_from_request(asked(**network), bound)
    assert (encode_policy(policy), allows_internet(policy)) == (told, internet)


def test_no_value_of_a_header_is_shown():
    policy = policy_from_request(
        asked(rules={"a.example": [{"transform": {"headers": {"X-Key": "hush"}}}]}), EVERYTHING
    )
    assert encode_policy(policy) == {"rules": {"a.example": [{"transform": {"headers": {"X-Key": "***"}}}]}}
    assert "hush" not in repr(policy)


def test_a_policy_of_another_dialect_is_shown_too():
    policy = NetworkPolicy(allow=("*.example.com", "pypi.org:443"), deny=("bad.example.com",))
    assert encode_policy(policy) == {"allowOut": ["*.example.com", "pypi.org:443"], "denyOut": ["bad.example.com", ALL]}


# -- the Host that programs are told


def mask_of(given: str) -> str | None:
    return decode_create_request(
        msgspec.json.encode({"templateID": "base", "network": {"maskRequestHost": given}}), version=2
    ).host_mask


@pytest.mark.parametrize("mask", ["custom.example:${PORT}", "${PORT}-app.example", "localhost", "[::1]:${PORT}"])
def test_a_mask_for_the_host_may_hold_the_port(mask):
    assert mask_of(mask) == mask


@pytest.mark.parametrize("mask", ["a b", "a\r\nX: y", "host:port", "a/b", "${HOME}", "grüße.example"])
def test_a_mask_that_is_no_host_is_refused(mask):
    with pytest.raises(errors.InvalidRequest, match="mask request host"):
        mask_of(mask)
