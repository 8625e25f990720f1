"""A host in any spelling is one thing: what a rule is asked about is what is connected to."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.egress.rules import Destination, InvalidDestination, parse_authority, parse_destination


@pytest.mark.parametrize(
    ("spelling", "host"),
    [
        ("example.com", "example.com"),
        ("EXAMPLE.Com", "example.com"),
        ("example.com.", "example.com"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("_dmarc.example.com", "_dmarc.example.com"),
        ("1and1.example", "1and1.example"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1.", "127.0.0.1"),
        ("127.1", "127.0.0.1"),
        ("127.0.1", "127.0.0.1"),
        ("2130706433", "127.0.0.1"),
        ("0x7f000001", "127.0.0.1"),
        ("0X7F000001", "127.0.0.1"),
        ("0x7f.0.0.1", "127.0.0.1"),
        ("0177.0.0.1", "127.0.0.1"),
        ("017700000001", "127.0.0.1"),
        ("0", "0.0.0.0"),
        ("::1", "::1"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("::FFFF:127.0.0.1", "127.0.0.1"),
        ("::ffff:7f00:1", "127.0.0.1"),
        ("2001:DB8::1", "2001:db8::1"),
    ],
)
def test_every_spelling_of_a_host_is_that_host(spelling: str, host: str) -> None:
    found = parse_destination(spelling, 443)
    assert found.host == host
    assert (found.address is None) == host.endswith(("example", "com"))


@pytest.mark.parametrize(
    "spelling",
    [
        "",
        ".",
        "..",
        "example..com",
        ".example.com",
        "example.com..",
        "-example.com",
        "example-.com",
        "exam ple.com",
        "example.com\x00.other.com",
        "example.com\r\nHost: other",
        "example.com/",
        "user@example.com",
        "example.com%00",
        "%31%32%37.0.0.1",
        "例え.jp",
        "１２７.0.0.1",  # digits of another alphabet
        "127。0。0。1",  # dots of another
        "o\u212a.test",  # KELVIN SIGN, whose lower case is k
        "256.0.0.1",
        "1.2.3.4.5",
        "127.0.0.08",
        "example.123",
        "127.0.0.1 x.1",
        "fe80::1%eth0",
        "fe80::1%25eth0",
        "::1%1",
        "1::2::3",
        "[::1]",
        "a" * 64 + ".com",
        "a." * 127 + "com",
        "*",
        "*.example.com",
    ],
)
def test_malformed_hosts_are_refused(spelling: str) -> None:
    with pytest.raises(InvalidDestination):
        parse_destination(spelling, 443)


@pytest.mark.parametrize("port", [0, -1, 65536, 99999])
def test_a_port_exists(port: int) -> None:
    with pytest.raises(InvalidDestination):
        parse_destination("example.com", port)


@pytest.mark.parametrize(
    ("authority", "host", "port"),
    [
        ("example.com:443", "example.com", 443),
        ("example.com", "example.com", 80),
        ("[::1]:8080", "::1", 8080),
        ("[::1]", "::1", 80),
        ("[::ffff:10.0.0.1]:80", "10.0.0.1", 80),
        ("127.1:80", "127.0.0.1", 80),
        ("example.com:080", "example.com", 80),
    ],
)
def test_an_authority_is_a_host_and_a_port(authority: str, host: str, port: int) -> None:
    assert parse_authority(authority, 80)[:2] == (host, port)


@pytest.mark.parametrize(
    "authority",
    [
        "",
        ":80",
        "example.com:",
        "example.com:x",
        "example.com:+80",
        "example.com:8 0",
        "example.com:٨٠",
        "example.com:443:80",
        "example.com:100000",
        "::1:80",
        "[::1",
        "::1]:80",
        "[::1]x:80",
        "[example.com]:80",
        "[127.0.0.1]:80",
        "[::1%lo]:80",
        "user@example.com:80",
        "user:pass@example.com:80",
        "example.com:80/",
        "example.com\\@other.com:80",
    ],
)
def test_malformed_authorities_are_refused(authority: str) -> None:
    with pytest.raises(InvalidDestination):
        parse_authority(authority, 80)


def test_connect_names_its_port() -> None:
    with pytest.raises(InvalidDestination, match="names no port"):
        parse_authority("example.com", None)


@given(st.integers(0, 2**32 - 1), st.sampled_from(["{}", "{:#x}", "0{:o}", "0X{:X}"]))
def test_a_number_is_an_address_in_every_base(number: int, form: str) -> None:
    if form == "0{:o}" and number == 0:
        return
    assert parse_destination(form.format(number), 80).address == ipaddress.IPv4Address(number)


@given(st.text(alphabet="0123456789abcdefxABCDEFX.:-_%[]@/ \t", max_size=40))
def test_addresses_of_the_c_library_are_recognised(text: str) -> None:
    """A name that is let through is looked up: then it must not be an address that no address rule was asked about."""
    try:
        found = parse_destination(text, 80)
    except InvalidDestination:
        return
    if found.address is None:
        with pytest.raises(OSError):
            socket.inet_aton(found.host)
        with pytest.raises(ValueError):
            ipaddress.ip_address(found.host)


@given(st.text(max_size=60))
def test_a_parsed_host_parses_the_same_again(text: str) -> None:
    try:
        found = parse_authority(text, 80)
    except InvalidDestination:
        return
    assert parse_authority(str(found), None) == found
    assert Destination(*found) == found
