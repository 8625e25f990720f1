"""Secrets as values: what is refused, where they are not shown, how headers get them and answers are covered."""

from __future__ import annotations

import base64
import html
import json
import pprint
import random
import traceback
import urllib.parse

import msgspec
import pytest

from cloche import errors
from cloche.egress.masking import Mask, MaskedStream
from cloche.egress.placeholders import with_secrets
from cloche.network_policy import NetworkPolicy, Secret, useless_secret

TOKEN = 'sk-7Jd0/+v<&>"x?q9Zt4WmB2Yc'
BEARER = Secret(domain="api.test", header="Authorization", value=f"Bearer {TOKEN}")


# -- what a secret can be


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"header": "Authorization", "name": "TOKEN"}, "either"),
        ({}, "either"),
        ({"header": "Host"}, "header"),
        ({"header": "Accept-Encoding"}, "header"),
        ({"header": "X Key"}, "header"),
        ({"name": "1TOKEN"}, "name"),
        ({"header": "X-Key", "domain": "*"}, "one domain"),
        ({"header": "X-Key", "domain": "192.0.2.7"}, "one domain"),
        ({"header": "X-Key", "domain": "api.test:443"}, "one domain"),
        ({"header": "X-Key", "value": "a\r\nHost: b"}, "cannot be in a header"),
        ({"header": "X-Key", "value": ""}, "cannot be in a header"),
        ({"header": "X-Key", "value": "k" * 20_000}, "cannot be in a header"),
    ],
)
def test_what_cannot_be_a_secret_is_refused_with_a_reason(fields: dict[str, str], why: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=why):
        Secret(**{"domain": "api.test", "value": TOKEN, **fields})


def test_two_secrets_for_the_same_header_of_a_domain_are_refused() -> None:
    twice = Secret(domain="API.test", header="authorization", value="another")
    with pytest.raises(errors.InvalidRequest, match="two secrets"):
        NetworkPolicy(allow=("api.test",), secrets=(BEARER, twice))


@pytest.mark.parametrize(
    ("allow", "useless"),
    [
        (("api.test",), False),
        (("api.test:8443",), False),
        (("*.test",), False),
        (("*",), False),
        (("www.api.test", "192.0.2.0/24"), True),
        ((), True),
    ],
)
def test_a_secret_for_a_domain_that_is_not_allowed_is_found(allow: tuple[str, ...], useless: bool) -> None:
    found = useless_secret(NetworkPolicy(allow=allow, secrets=(BEARER,)))
    assert found == (BEARER if useless else None)


def test_a_value_is_shown_nowhere() -> None:
    policy = NetworkPolicy(allow=("api.test",), secrets=(BEARER,))
    shown = [repr(policy), str(policy), pprint.pformat(policy), f"{policy!r}", repr(list(BEARER.__rich_repr__()))]
    shown.append(msgspec.json.encode(policy.redacted()).decode())
    for broken in ({"header": TOKEN}, {"name": TOKEN}, {"header": 7}, {"header": "X", "value": f"{TOKEN}\n"}):
        fields = {"domain": "api.test", "value": TOKEN, **broken}
        try:
            msgspec.convert({"secrets": [fields]}, NetworkPolicy)
        except (errors.InvalidRequest, msgspec.ValidationError):
            shown.append(traceback.format_exc())
    assert len(shown) == 10
    assert not [text for text in shown if TOKEN in text]


# -- into a request


def test_a_header_replaces_what_the_program_sent_under_its_name() -> None:
    sent = (("authorization", "Bearer mine"), ("x-other", "1"), ("authorization", "Bearer again"))
    assert with_secrets(sent, [BEARER]) == [("x-other", "1"), ("authorization", BEARER.value)]


def test_the_secret_for_the_more_particular_domain_is_used() -> None:
    domains = ["*.test", "a.b.test", "*.b.test"]
    secrets = [Secret(domain=each, header="X-Key", value=f"for {each}") for each in domains]
    assert with_secrets((), secrets) == [("x-key", "for a.b.test")]


@pytest.mark.parametrize(
    ("sent", "becomes"),
    [
        ("Bearer $TOKEN", "Bearer one"),
        ("Bearer ${TOKEN}", "Bearer one"),
        ("$TOKEN_2 and $TOKEN", "$two and one"),  # a value is not read again
        ("$TOKENS", "oneS"),
        ("$token $ ${TOKEN $OTHER", "$token $ ${TOKEN $OTHER"),
        ("Basic " + base64.b64encode(b"me:$TOKEN").decode(), "Basic " + base64.b64encode(b"me:one").decode()),
        ("Basic " + base64.b64encode(b"me:mine").decode(), "Basic " + base64.b64encode(b"me:mine").decode()),
        ("Basic $TOKEN", "Basic one"),
    ],
)
def test_placeholders_in_headers_become_values(sent: str, becomes: str) -> None:
    secrets = [
        Secret(domain="api.test", name="TOKEN", value="one"),
        Secret(domain="api.test", name="TOKEN_2", value="$two"),
    ]
    assert with_secrets([("authorization", sent)], secrets) == [("authorization", becomes)]


# -- out of an answer


def shapes_of(token: str) -> dict[str, str]:
    return {
        "plain": token,
        "json": json.dumps(token),
        "html": html.escape(token),
        "quoted": urllib.parse.quote(token, safe=""),
        "in a path": urllib.parse.quote(token),
        "in a form": urllib.parse.urlencode({"a": f"1 {token} 2"}),
        **{f"base64 after {n}": base64.b64encode(b"u" * n + token.encode() + b":x").decode() for n in range(4)},
        **{f"at the end of base64 after {n}": base64.b64encode(b"u" * n + token.encode()).decode() for n in range(4)},
        "url-safe base64": base64.urlsafe_b64encode(b"??" + token.encode() + b"!!").decode(),
    }


@pytest.mark.parametrize("shape", shapes_of(TOKEN))
def test_a_value_is_covered_in_every_usual_shape_and_nothing_moves(shape: str) -> None:
    text = f"before {shapes_of(TOKEN)[shape]} after"
    covered = Mask([BEARER.value]).text(text)
    assert len(covered) == len(text)
    assert covered.startswith("before ") and covered.endswith(" after")
    assert covered.count("*") >= len(TOKEN)


def test_the_password_of_a_basic_header_is_covered_by_itself() -> None:
    value = "Basic " + base64.b64encode(b"me:the password").decode()
    assert Mask([value]).text("hello me, the password is right") == f"hello me, {'*' * 12} is right"


def test_overlapping_occurrences_are_covered_as_a_whole() -> None:
    assert Mask(["ababab"]).cover(b"xababababx") == b"x********x"


def test_a_body_is_covered_however_it_is_cut() -> None:
    random.seed(5)
    mask = Mask([TOKEN, "aab"])
    content = b"".join(random.choice([TOKEN.encode(), TOKEN.encode()[:9], b"a", b"b", b"data"]) for _ in range(500))
    whole = mask.cover(content)
    assert TOKEN.encode() not in whole and b"aab" not in whole
    for _ in range(50):
        stream, out, at = MaskedStream(mask), b"", 0
        while at < len(content):
            size = random.choice([1, 2, 5, 40, 300])
            out += stream.feed(content[at : at + size])
            at += size
        assert out + stream.end() == whole


def test_what_cannot_be_the_beginning_of_a_value_does_not_wait() -> None:
    stream = MaskedStream(Mask([TOKEN]))
    assert stream.feed(b"data: {}\n\n") == b"data: {}\n\n"
    assert stream.feed(b"data: " + TOKEN[:5].encode()) == b"data: "
    assert stream.feed(b"!\n") == TOKEN[:5].encode() + b"!\n"
    assert stream.end() == b""
