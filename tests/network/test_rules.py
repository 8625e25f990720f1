"""What policies say: the first rule that matches decides, both policies must agree, and some addresses are nobody's."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.egress import rules
from cloche.egress.packages import upstream
from cloche.egress.packages.replies import ForbiddenIndexHost
from cloche.egress.rules import FORBIDDEN_NETWORKS, PolicyDenied, SandboxRules, is_own_address, parse_destination
from cloche.network_policy import NetworkPolicy, NetworkRule

EVERYTHING = NetworkPolicy(allow=("*:*",))


def rulebooks(bound: NetworkPolicy = EVERYTHING, internal: tuple[str, ...] = (), **own) -> SandboxRules:
    return SandboxRules(NetworkPolicy(**own), bound, [ipaddress.ip_network(each) for each in internal])


def allows(books: SandboxRules, host: str, port: int = 443) -> bool:
    try:
        books.check(parse_destination(host, port))
    except PolicyDenied:
        return False
    return True


def leads(books: SandboxRules, host: str, *addresses: str) -> list[str]:
    found = [ipaddress.ip_address(each) for each in addresses]
    return [str(each) for each in books.allowed_addresses(parse_destination(host, 443), found)]


def test_nothing_is_allowed_that_no_rule_allows() -> None:
    assert not allows(rulebooks(), "example.com")
    assert not allows(rulebooks(allow=("example.com",)), "example.org")


@pytest.mark.parametrize(
    ("pattern", "host", "matches"),
    [
        ("example.com", "example.com", True),
        ("example.com", "EXAMPLE.com.", True),
        ("example.com", "a.example.com", False),
        ("example.com", "notexample.com", False),
        ("*.example.com", "a.example.com", True),
        ("*.example.com", "a.b.example.com", True),
        ("*.example.com", "example.com", False),
        ("*.example.com", "notexample.com", False),
        ("*.example.com", "example.com.evil.org", False),
        ("*", "anything.at.all", True),
        ("*", "192.0.2.1", True),
        ("192.0.2.0/24", "192.0.2.77", True),
        ("192.0.2.0/24", "3221226061", True),  # 192.0.2.77
        ("192.0.2.0/24", "192.0.3.1", False),
        ("192.0.2.0/24", "::ffff:192.0.2.77", True),
        ("192.0.2.0/24", "example.com", False),  # a name is not looked up for that
        ("2001:db8::/32", "2001:db8::1", True),
        ("2001:db8::/32", "192.0.2.1", False),
    ],
)
def test_a_pattern_matches_its_hosts(pattern: str, host: str, matches: bool) -> None:
    assert allows(rulebooks(allow=(pattern,)), host) is matches


@pytest.mark.parametrize(
    ("pattern", "port", "matches"),
    [
        ("example.com", 443, True),
        ("example.com", 80, True),
        ("example.com", 22, False),
        ("example.com:22", 22, True),
        ("example.com:22", 443, False),
        ("example.com:8000-8100", 8100, True),
        ("example.com:8000-8100", 8101, False),
        ("example.com:*", 1, True),
    ],
)
def test_which_ports_a_rule_is_for(pattern: str, port: int, matches: bool) -> None:
    assert allows(rulebooks(allow=(pattern,)), "example.com", port) is matches


def test_a_denial_without_ports_is_for_all_of_them() -> None:
    assert not allows(rulebooks(allow=("*:*",), deny=("example.com",)), "example.com", 22)


def test_deny_comes_before_allow() -> None:
    books = rulebooks(allow=("*.example.com",), deny=("secret.example.com",))
    assert allows(books, "a.example.com")
    assert not allows(books, "secret.example.com")


def test_the_first_rule_that_matches_decides() -> None:
    open_first = (
        NetworkRule(action="allow", host="a.example.com"),
        NetworkRule(action="deny", host="*.example.com"),
        NetworkRule(action="allow", host="*"),
    )
    assert allows(rulebooks(rules=open_first), "a.example.com")
    assert not allows(rulebooks(rules=open_first), "b.example.com")
    assert allows(rulebooks(rules=open_first), "example.org")
    assert not allows(rulebooks(rules=open_first[::-1], deny=("example.org",)), "x.y", 22)


def test_the_operator_bounds_the_policy_of_a_sandbox() -> None:
    bound = NetworkPolicy(allow=("*.example.com",), deny=("internal.example.com",))
    books = rulebooks(bound, allow=("*",))
    assert allows(books, "a.example.com")
    assert not allows(books, "internal.example.com")
    assert not allows(books, "example.org")
    with pytest.raises(PolicyDenied, match="operator's"):
        books.check(parse_destination("example.org", 443))


def test_a_policy_can_be_replaced() -> None:
    books = rulebooks(allow=("example.com",))
    books.replace(NetworkPolicy(allow=("example.org",)))
    assert allows(books, "example.org")
    assert not allows(books, "example.com")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.255.255.254",
        "0.0.0.0",
        "10.0.0.1",
        "100.64.0.1",
        "168.63.129.16",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "::7f00:1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::1",
        "2001:0:7f00:1::",
        "fd00:ec2::254",
        "fe80::1",
        "fec0::1",
        "ff02::1",
    ],
)
def test_addresses_near_the_host_are_never_allowed(address: str) -> None:
    books = rulebooks(allow=("*:*",))
    assert not allows(books, address)
    with pytest.raises(PolicyDenied, match="no public address"):
        leads(books, "rebound.example.com", address)


def test_an_allowed_private_network_is_still_refused_unless_the_operator_says_so() -> None:
    assert not allows(rulebooks(allow=("10.0.0.0/8",)), "10.1.2.3")
    assert allows(rulebooks(allow=("10.0.0.0/8",), internal=("10.1.0.0/16",)), "10.1.2.3")
    assert not allows(rulebooks(allow=("10.0.0.0/8",), internal=("10.1.0.0/16",)), "10.2.2.3")


ONES_OWN = ["127.0.0.1", "127.9.8.7", *(["::1"] if socket.has_dualstack_ipv6() else [])]


@pytest.mark.parametrize("own", ONES_OWN)
def test_a_public_address_of_the_host_itself_is_never_allowed(own: str, monkeypatch) -> None:
    """Loopback stands for it here: it is the host's own everywhere."""
    monkeypatch.setattr(rules, "FORBIDDEN_NETWORKS", [])
    books = rulebooks(allow=("*:*",))
    with pytest.raises(PolicyDenied, match="is an address of this host itself"):
        books.check(parse_destination(own, 443))
    with pytest.raises(PolicyDenied, match="leads to an address of this host itself"):
        leads(books, "example.com", own)
    assert allows(rulebooks(allow=("*:*",), internal=(own,)), own)
    assert allows(books, "203.0.113.5") and allows(books, "2001:db8::5")


@pytest.mark.parametrize("own", ONES_OWN)
async def test_nor_do_packages_come_from_there(own: str, monkeypatch) -> None:
    monkeypatch.setattr(upstream, "FORBIDDEN_NETWORKS", [])

    async def resolve(name: str):
        return [ipaddress.ip_address(own)]

    with pytest.raises(ForbiddenIndexHost):
        await upstream.IndexReach(resolve, ()).allowed_addresses("files.example.com", 443)
    assert await upstream.IndexReach(resolve, (), [ipaddress.ip_network(own)]).allowed_addresses(
        "files.example.com", 443
    )


def test_addresses_are_classified() -> None:
    assert is_own_address(ipaddress.ip_address("127.0.0.1"))
    assert not is_own_address(ipaddress.ip_address("203.0.113.5"))
    assert not is_own_address(ipaddress.ip_address("255.255.255.255"))
    assert not is_own_address(ipaddress.ip_address("2001:db8::5"))


def own_ones(*addresses: str, before: str = "", within: tuple[str, ...] = ()) -> list[str]:
    """Those that are its own to a process that has done something `before`, or runs `within` another program."""
    program = f"""
import sys
sys.path.insert(0, {str(Path(rules.__file__).parents[2])!r})
import ipaddress, resource
from cloche.egress.rules import is_own_address as is_own
{before}
print(*(each for each in sys.argv[1:] if is_own(ipaddress.ip_address(each))))
"""
    asked = [*within, sys.executable, "-c", program, *addresses]
    return subprocess.run(asked, check=True, timeout=60, stdout=subprocess.PIPE, text=True).stdout.split()


def test_without_descriptors_left_every_address_counts_as_the_hosts_own() -> None:
    """Nothing can be found out then, and programs can bring it about."""
    addresses = ["203.0.113.5", "2001:db8::5"]
    assert own_ones(*addresses, before="resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))") == addresses


def test_an_address_of_unknown_owner_counts_as_the_hosts_own() -> None:
    """For one that routes forbid it has no other answer than that. Where no way leads to, the host is not."""
    apart = ("env", "unshare", "--map-root-user", "--net", "sh", "-c")
    routes = "ip route add prohibit 203.0.113.0/24 && ip route add unreachable 198.51.100.0/24"
    if subprocess.run([*apart, f"ip link set lo up && {routes}"], capture_output=True).returncode:
        pytest.skip("a network with routes of its own takes unshare, ip, and the right to use them")
    within = (*apart, f'ip link set lo up && {routes} && exec "$@"', "sh")
    assert own_ones("203.0.113.5", "198.51.100.5", "192.0.2.5", within=within) == ["203.0.113.5"]


@pytest.mark.parametrize("pattern", ["::ffff:192.0.2.7", "[::ffff:192.0.2.7]:443", "::ffff:192.0.2.0/120"])
def test_ipv4_in_disguise_is_ipv4_in_a_pattern_too(pattern: str) -> None:
    books = rulebooks(deny=(pattern,), allow=("*",))
    assert not allows(books, "192.0.2.7") and allows(books, "192.0.3.7")
    with pytest.raises(PolicyDenied):
        leads(books, "example.com", "192.0.2.7")
    assert allows(rulebooks(allow=(pattern,)), "192.0.2.7")


def test_an_internal_address_is_not_thereby_allowed() -> None:
    assert not allows(rulebooks(allow=("example.com",), internal=("10.0.0.0/8",)), "10.1.2.3")


def test_of_several_addresses_the_public_ones_are_used() -> None:
    books = rulebooks(allow=("example.com",))
    assert leads(books, "example.com", "10.0.0.1", "192.0.2.1", "::1", "2001:db8::1") == ["192.0.2.1", "2001:db8::1"]
    with pytest.raises(PolicyDenied):
        leads(books, "example.com", "10.0.0.1", "127.0.0.1")
    with pytest.raises(PolicyDenied, match="has no address"):
        leads(books, "example.com")


def test_a_name_may_not_lead_into_a_network_that_is_denied() -> None:
    books = rulebooks(allow=("example.com",), deny=("192.0.2.0/24",))
    assert leads(books, "example.com", "192.0.2.1", "198.51.100.1") == ["198.51.100.1"]
    assert leads(rulebooks(NetworkPolicy(allow=("*",), deny=("192.0.2.0/24",)), allow=("*",)), "a.b", "198.51.100.1")
    with pytest.raises(PolicyDenied, match="operator's"):
        leads(rulebooks(NetworkPolicy(allow=("*",), deny=("192.0.2.0/24",)), allow=("*",)), "a.b", "192.0.2.1")


def test_a_name_that_is_allowed_first_may_lead_into_a_network_that_is_denied_after() -> None:
    rules = (
        NetworkRule(action="allow", host="example.com"),
        NetworkRule(action="deny", host="192.0.2.0/24"),
        NetworkRule(action="allow", host="*"),
    )
    assert leads(rulebooks(rules=rules), "example.com", "192.0.2.1") == ["192.0.2.1"]
    with pytest.raises(PolicyDenied):
        leads(rulebooks(rules=rules), "example.org", "192.0.2.1")


@given(st.ip_addresses())
def test_no_address_is_public_that_python_knows_to_be_private(address) -> None:
    """Ours is a list with reasons; the standard library's is another's. Neither may know one that the other forgot."""
    documentation = ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "198.18.0.0/15", "2001:db8::/32")
    known = [ipaddress.ip_network(each) for each in documentation]
    if any(address.version == each.version and address in each for each in known):
        return
    forbidden = any(address.version == each.version and address in each for each, _ in FORBIDDEN_NETWORKS)
    private = address.is_private or address.is_loopback or address.is_link_local or address.is_multicast
    assert forbidden or not (private or address.is_unspecified or address.is_reserved)
