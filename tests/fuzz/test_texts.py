"""Texts that mean something: tokens, ranges, amounts, patterns of hosts, configuration, recipes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from tests.fuzz.mutations import EXAMPLES, Claim, bodies, holds, only_our_errors, texts
from tests.librechat.minting import claims, jwk, mint, new_ed25519

from cloche import config, errors, network_policy
from cloche.api import encoding, multipart
from cloche.api.e2b import sandboxes_schema
from cloche.api.librechat.jwt import JwtKeys, JwtVerifier
from cloche.api.opensandbox import lifecycle_schema
from cloche.config.librechat import JwtConfig
from cloche.egress import rules
from cloche.egress.streams import EgressRefusal
from cloche.templates import recipe

KEY = new_ed25519()
JWT = JwtConfig(jwks=json.dumps({"keys": [jwk(KEY)]}))
VERIFIER = JwtVerifier(JWT, JwtKeys(JWT))
RECIPE = """
name = "mine"
python = ">=3.11"
packages = ["pandas>=2", "x[y]==1"]
imports = ["pandas"]
[env]
A = "b"
[limits]
memory_bytes = 1000000000
[network]
allow = ["pypi.org"]
"""
CONFIG = """
data_dir = "/tmp/x"
[pool]
ready = 3
[limits.default]
memory_bytes = "512MiB"
cpus = 1.5
[network]
allow = ["*.example.com:443"]
[[upstream]]
models = ["m"]
base_url = "http://127.0.0.1:1/v1"
[aliases]
"x:*" = "python"
"""


def token(body: bytes) -> None:
    """Signed by the one who is trusted, with any claims; and with any signature."""
    middle = base64.urlsafe_b64encode(body).rstrip(b"=").decode()
    head, _, signature = mint(KEY, claims("ann")).split(".")
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        given = None
    signed = mint(KEY, given) if isinstance(given, dict) and _can_be_said(given) else ""
    for each in (f"{head}.{middle}.{signature}", f"{middle}.{middle}.{middle}", signed):
        only_our_errors(VERIFIER.verify, each)


def _can_be_said(value: Any) -> bool:
    try:
        json.dumps(value).encode()
    except (ValueError, RecursionError):
        return False
    return True


def authority(text: str) -> None:
    for port in (None, 80):
        try:
            found = rules.parse_authority(text, port)
        except EgressRefusal:
            continue
        assert rules.parse_authority(str(found), None) == found, "what was understood is said the same again"


def pattern(text: str) -> None:
    found = network_policy.parse_pattern(text)
    assert network_policy.parse_pattern(text.strip().lower()) == found


def span(text: str) -> None:
    for size in (0, 1, 1000):
        try:
            found = encoding.parse_range_header(text, size)
        except encoding.RangeNotSatisfiable:
            continue
        assert found is None or 0 <= found.start < found.end <= found.size == size


def amount(text: str) -> None:
    for read in (lifecycle_schema.parse_cpus, lifecycle_schema.parse_size_bytes):
        try:
            assert 0 <= read(text) < 1e30
        except errors.InvalidRequest:
            continue
    size = config.parse_bytes(text)
    assert size is None or size >= 0


def form_type(text: str) -> None:
    """A header's value, which is Latin-1 when it comes to us."""
    assert multipart.parse_form_boundary(text.encode().decode("latin-1"))


def page_token(text: str) -> None:
    sandboxes_schema.decode_page_token(text)


def listing(text: str) -> None:
    sandboxes_schema.decode_sandbox_query({"metadata": text, "limit": text[:3], "state": text[:9], "nextToken": text})


CLAIMS = [
    Claim("a token's claims", token, bodies({"sub": "ann", "iat": 1, "nbf": 1, "exp": 9e9, "aud": ["codeapi"]})),
    Claim("a token", VERIFIER.verify, texts("aaaa.bbbb.cccc", "e30.e30.e30", "eyJraWQiOiJ4In0.e30.AA")),
    Claim("a range", span, texts("bytes=0-5", "bytes=-500", "bytes=5-", "bytes=0-1,4-5")),
    Claim("an amount", amount, texts("500m", "0.5", "512Mi", "2G", "1048576", "999999999999999Ti", "9" * 5000)),
    Claim("a pattern of hosts", pattern, texts("pypi.org", "*.a.test:443", "192.0.2.0/24", "[2001:db8::]/32:1-5", "*")),
    Claim("an authority", authority, texts("a.test:443", "[::1]:80", "127.1:80", "0x7f.1", "[::ffff:1.2.3.4]:1")),
    Claim("a recipe", recipe.parse_recipe, texts(RECIPE)),
    Claim("a form's type", form_type, texts('multipart/form-data; boundary="x"', "multipart/form-data;b=c")),
    Claim("a page's token", page_token, texts(sandboxes_schema.encode_page_token(1, "i" + "a" * 20))),
    Claim("a list's query", listing, texts("a=b&c=%20", "running", "10")),
]


@EXAMPLES
@pytest.mark.parametrize("claim", CLAIMS, ids=[claim.name for claim in CLAIMS])
def test_a_text_is_understood_or_refused(claim: Claim, examples: int) -> None:
    holds(lambda text: only_our_errors(claim.decode, text), claim.inputs, examples)


@EXAMPLES
def test_a_configuration_is_understood_or_refused(examples: int, tmp_path: Path) -> None:
    file = tmp_path / "cloche.toml"

    def check(text: str) -> None:
        file.write_text(text, "utf-8")
        only_our_errors(lambda path: config.load_config(path, {"HOME": str(tmp_path)}), file)

    holds(check, texts(CONFIG), examples)


@EXAMPLES
def test_a_variable_is_understood_or_refused(examples: int, tmp_path: Path) -> None:
    names = [f"CLOCHE_{key.upper().replace('.', '_')}" for key in config.CONFIG_KEYS]
    values = texts("1", "0.5", "512MiB", "true", "a,b", '["x"]', "9" * 5000) | st.sampled_from(
        ["", "-1", "nan", "1e400"]
    )

    def check(given: tuple[str, str]) -> None:
        if "\0" not in given[1]:
            environ = {"HOME": str(tmp_path), given[0]: given[1]}
            only_our_errors(lambda variables: config.load_config(None, variables), environ)

    holds(check, st.tuples(st.sampled_from(names), values), examples)


@EXAMPLES
def test_a_place_in_a_list_is_found_again(examples: int) -> None:
    def check(place: tuple[int, str]) -> None:
        found = sandboxes_schema.decode_page_token(sandboxes_schema.encode_page_token(*place))
        assert tuple(found)[-1] == place[1]

    ids = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=20, max_size=20).map(lambda text: "i" + text)
    holds(check, st.tuples(st.integers(0, 2**50), ids), examples)
