"""Secrets as values: what is refused, where they are not shown, how headers get them and answers are covered."""

from __future__ import annotations

import asyncio
import base64
import html
import json
import pprint
import random
import time
import traceback
import urllib.parse

import msgspec
import pytest

from cloche import errors
from cloche.egress.http1 import BadRequest
from cloche.egress.secrets import (
    MAX_FILLED_BYTES,
    MaskedStream,
    SecretMask,
    SecretMasks,
    add_secrets,
    basic_credentials,
    secret_forms,
)
from cloche.network_policy import NetworkPolicy, Secret, first_unused_secret

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
def test_invalid_secrets_are_refused_with_a_reason(fields: dict[str, str], why: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=why):
        Secret(**{"domain": "api.test", "value": TOKEN, **fields})


def test_two_secrets_for_the_same_header_of_a_domain_are_refused() -> None:
    twice = Secret(domain="API.test", header="authorization", value="another")
    with pytest.raises(errors.InvalidRequest, match="two secrets"):
        NetworkPolicy(allow=("api.test",), secrets=(BEARER, twice))


def test_the_values_of_a_policy_are_limited_in_all() -> None:
    def policy(count: int, value: str) -> NetworkPolicy:
        secrets = (Secret(domain="api.test", name=f"N{each}", value=value % each) for each in range(count))
        return NetworkPolicy(allow=("api.test",), secrets=tuple(secrets))

    policy(4, "%d" + "k" * 16_000)
    policy(100, "k" * 16_000 + "%.0s")  # the same value, for many
    with pytest.raises(errors.InvalidRequest, match="65536 bytes in all"):
        policy(5, "%d" + "k" * 16_000)


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
    found = first_unused_secret(NetworkPolicy(allow=allow, secrets=(BEARER,)))
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


def test_a_header_replaces_the_programs_own_of_that_name() -> None:
    sent = (("authorization", "Bearer mine"), ("x-other", "1"), ("authorization", "Bearer again"))
    assert add_secrets(sent, [BEARER]) == [("x-other", "1"), ("authorization", BEARER.value)]


def test_the_secret_for_the_more_particular_domain_is_used() -> None:
    domains = ["*.test", "a.b.test", "*.b.test"]
    secrets = [Secret(domain=each, header="X-Key", value=f"for {each}") for each in domains]
    assert add_secrets((), secrets) == [("x-key", "for a.b.test")]


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
    assert add_secrets([("authorization", sent)], secrets) == [("authorization", becomes)]


@pytest.mark.parametrize("sent", ["$A" * 30_000, "Basic " + base64.b64encode(b"me:" + b"${A}" * 10_000).decode()])
def test_placeholders_do_not_multiply_without_limit(sent: str) -> None:
    secret = Secret(domain="api.test", name="A", value="v" * 16_384)
    for headers in ([("authorization", sent)], [(f"x-{each}", "$A") for each in range(9)]):
        with pytest.raises(BadRequest, match="with its secrets"):
            add_secrets(headers, [secret])
    [(_, filled)] = add_secrets([("x-a", "$A" * 7)], [secret])
    assert filled == "v" * 16_384 * 7 and len(filled) < MAX_FILLED_BYTES


def test_headers_that_secrets_have_are_limited_as_well() -> None:
    secrets = [Secret(domain="api.test", header=f"X-{each}", value="v" * 16_384) for each in range(9)]
    with pytest.raises(BadRequest, match="with its secrets"):
        add_secrets((), secrets)


# -- out of an answer


def cover(mask: SecretMask, *parts: bytes) -> bytes:
    async def covered() -> bytes:
        stream = MaskedStream(mask)
        return b"".join([await stream.feed(part) for part in parts]) + stream.end()

    return asyncio.run(covered())


def text(mask: SecretMask, text: str) -> str:
    return cover(mask, text.encode()).decode()


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
        "hex": token.encode().hex(),
        "hex in capitals": token.encode().hex().upper(),
        "url-safe base64": base64.urlsafe_b64encode(b"??" + token.encode() + b"!!").decode(),
    }


@pytest.mark.parametrize("shape", shapes_of(TOKEN))
def test_a_value_is_covered_in_every_usual_shape_and_nothing_moves(shape: str) -> None:
    said = f"before {shapes_of(TOKEN)[shape]} after"
    covered = text(SecretMask.of(BEARER.value), said)
    assert len(covered) == len(said)
    assert covered.startswith("before ") and covered.endswith(" after")
    assert covered.count("*") >= len(TOKEN)


def test_headers_are_covered_each_by_itself() -> None:
    texts = ["", f"a {TOKEN}", TOKEN[:9], TOKEN[9:], ""]
    assert asyncio.run(SecretMask.of(TOKEN).texts(texts)) == ["", "a " + "*" * len(TOKEN), TOKEN[:9], TOKEN[9:], ""]


def test_the_password_of_a_basic_header_is_covered_by_itself() -> None:
    value = "Basic " + base64.b64encode(b"me:the password").decode()
    assert text(SecretMask.of(value), "hello me, the password is right") == f"hello me, {'*' * 12} is right"


def test_overlapping_occurrences_are_covered_as_a_whole() -> None:
    assert cover(SecretMask.of("ababab"), b"xababababx") == b"x********x"


def plainly_covered(mask: SecretMask, content: bytes) -> bytes:
    """What comes out, found in the plainest way."""
    copy = bytearray(content)
    for form in mask.forms:
        for at in range(len(content)):
            if content.startswith(form.content, at):
                copy[at : at + len(form.content)] = b"*" * len(form.content)
    return bytes(copy)


def cut(content: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(content):
        parts.append(content[at : at + random.choice([1, 2, 5, 40, 300])])
        at += len(parts[-1])
    return parts


def test_a_body_is_covered_however_it_is_cut() -> None:
    random.seed(5)
    pieces = [TOKEN.encode(), TOKEN.encode()[:9], b"a", b"b", b"data", b"\n"]
    mask = SecretMask.of(TOKEN, "aab")
    content = b"".join(random.choices(pieces, k=500))
    whole = plainly_covered(mask, content)
    assert TOKEN.encode() not in whole and b"aab" not in whole
    for _ in range(50):
        assert cover(mask, *cut(content)) == whole


def test_values_that_repeat_themselves_are_covered_as_well() -> None:
    random.seed(6)
    for _ in range(200):
        units = [(random.choice(["a", "ab", "aab"]) * 20)[: random.randint(1, 40)] for _ in range(2)]
        values = [*units, "".join(random.choices("ab", k=random.randint(1, 30)))]
        mask = SecretMask.of(*values)
        content = "".join(random.choices([*values, "a", "b", "ab" * 9, "a" * 13], k=20)).encode()
        assert cover(mask, *cut(content)) == plainly_covered(mask, content)


# -- when it goes on


def sizes(mask: SecretMask, *parts: bytes) -> list[int]:
    async def fed() -> list[int]:
        stream = MaskedStream(mask)
        return [len(await stream.feed(part)) for part in parts]

    return asyncio.run(fed())


def test_withheld_bytes_do_not_reveal_the_beginning_of_a_value() -> None:
    """Else a program would learn one letter after the other, from a server that says what it is asked to say."""
    mask = SecretMask.of(TOKEN)
    for known in range(len(TOKEN)):
        right, wrong = TOKEN[: known + 1], TOKEN[:known] + "~"
        for before in (b"", b"data: ", b"line\n", b"." * 4096):
            guesses = [before + guess.encode() for guess in (right, wrong)]
            assert sizes(mask, guesses[0], b"!", b"!\n") == sizes(mask, guesses[1], b"!", b"!\n")


def test_whole_lines_do_not_wait() -> None:
    event, held = b"data: {}\n\n", SecretMask.of(TOKEN).held_bytes
    assert sizes(SecretMask.of(TOKEN), event, event + b"da", b"ta\r", b"x" * held, b"xx") == [10, 10, 5, 0, 2]


# -- what it costs


def many(count: int, value: str) -> list[str]:
    return [value % each for each in range(count)]


@pytest.mark.parametrize(
    ("values", "body"),
    [
        (["a" * 16_384], "a"),
        (many(4, "a" * 8000 + "b%d" + "c" * 8000), "a"),
        (many(100, "a" * 300 + "<b/%d" + "a" * 300), "a"),
        (many(100, "<b/%d" + "a" * 90), "a"),
        ([one + other for one in "abcdefghij" for other in "abcdefghij"], "abcdefghij"),
    ],
)
@pytest.mark.parametrize("size", [2_000, 20_000, 65_536])
def test_no_values_and_no_body_keep_others_waiting(values: list[str], body: str, size: int) -> None:
    """The longest step; of the best of three runs, as others use this machine too."""

    async def longest_step() -> float:
        mask, content = SecretMask.of(*values), "".join(random.choices(body, k=size)).encode()
        longest, since = 0.0, time.thread_time()
        for _ in mask.cover_steps(content, bytearray(content), 0):
            now = time.thread_time()
            longest, since = max(longest, now - since), now
        return longest

    assert min(asyncio.run(longest_step()) for _ in range(3)) < 0.05


async def _others_turns(values: list[str], content: bytes) -> int:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(others())
    await MaskedStream(SecretMask.of(*values)).feed(content)
    task.cancel()
    return turns


def test_others_have_their_turn_while_much_is_looked_for() -> None:
    assert asyncio.run(_others_turns(many(100, "<b/%d" + "a" * 90), b"a" * 65_536)) > 5


def test_a_mask_is_made_once_for_a_policy() -> None:
    async def made() -> None:
        secrets = tuple(Secret(domain="api.test", header=f"X-{each}", value=f"value {each}") for each in "ab")
        policy = NetworkPolicy(allow=("api.test",), secrets=secrets)
        masks = SecretMasks(asyncio.Lock())
        both, one = await masks.of(policy, secrets), await masks.of(policy, secrets[:1])
        assert await masks.of(policy, secrets[::-1]) is both and await masks.of(policy, secrets[:1]) is one
        assert set(one.forms) == secret_forms("value a") < set(both.forms)
        other = NetworkPolicy(allow=("api.test",), secrets=secrets)
        assert await masks.of(other, secrets) is not both

    asyncio.run(made())


@pytest.mark.parametrize("value", ["Basic \xe9", "Basic !", "Basic /w==", "Bearer YTpi"])
def test_other_authentication_is_not_basic(value: str):
    assert basic_credentials(value) is None
