"""A token of LibreChat's is believed if every part of it is as LibreChat makes it, and else not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from tests.librechat.minting import (
    KEY_ID,
    b64,
    claims,
    jwk,
    mint,
    new_ed25519,
    new_rsa,
    pem,
    private_pem,
    signed,
    signer,
)

from cloche import errors
from cloche.api.librechat.jwt import KEY_CHECK_SECONDS, InvalidToken, JwtKeys, JwtVerifier
from cloche.config.librechat import JwtConfig

ED, RSA, SECRET = new_ed25519(), new_rsa(), b"a secret that both sides have, and nobody else"
STRANGER = new_ed25519()
BOTH = JwtConfig(jwks=json.dumps({"keys": [jwk(ED), jwk(RSA, "rsa-1")]}))
MADE_AT = time.time()  # when the tokens of the tables below were made: they are tried much later, in a long run


def verifier(settings: JwtConfig = BOTH, clock: Any = time.time) -> JwtVerifier:
    return JwtVerifier(settings, JwtKeys(settings), clock)


# --- tokens that are believed


@pytest.mark.parametrize(
    "token",
    [
        mint(ED),
        mint(RSA, kid="rsa-1"),
        mint(ED, typ=...),
        mint(ED, claims(aud=["somebody else", "codeapi"])),
        mint(ED, claims(principal_source="openid_reuse", plan_id="p", org_id="o")),
        mint(ED, claims(iat=time.time() - 10.5, nbf=time.time() - 10.5, exp=time.time() + 200.5)),
        mint(ED, claims(iat=int(time.time()) - 320, exp=int(time.time()) - 20)),  # within what clocks may differ
        mint(ED, jku="https://evil.example/keys.json", jwk=jwk(STRANGER)),  # which nobody looks at
    ],
    ids=["EdDSA", "RS256", "no typ", "a list of aud", "of OpenID", "fractions", "a slow clock", "other keys in it"],
)
def test_a_token_signed_by_librechat_identifies_its_user(token: str):
    holder = verifier(clock=lambda: MADE_AT).verify(token)
    assert (holder.user, holder.tenant) == ("6630f2a1c0ffee0123456789", "legacy")


def test_a_shared_secret_is_used_where_it_is_allowed():
    settings = JwtConfig(hs256_secret=SECRET.decode(), algorithms=("HS256",))
    assert verifier(settings).verify(mint(SECRET, kid="hs256-dev")).key_id == "hs256-dev"
    with pytest.raises(InvalidToken, match="signature"):
        verifier(settings).verify(mint(b"another secret, which is wrong, however long", kid="hs256-dev"))


def test_a_token_can_be_used_again_while_it_lasts():
    """LibreChat mints one for half a minute, and uses it for all that a user does meanwhile."""
    token, asked = mint(ED), verifier()
    assert asked.verify(token) == asked.verify(token)


def test_a_user_without_a_tenant_is_in_the_one_for_these_unless_tenants_are_strict():
    token = mint(ED, claims(tenant_id=...))
    assert verifier(JwtConfig(jwks=BOTH.jwks, tenant="ours")).verify(token).tenant == "ours"
    assert verifier().verify(mint(ED, claims(tenant_id="acme"))).tenant == "acme"
    with pytest.raises(InvalidToken, match="tenant_id"):
        verifier(JwtConfig(jwks=BOTH.jwks, strict_tenants=True)).verify(token)


# --- tokens that are not


def of_none(said: dict[str, Any]) -> str:
    return f"{b64(json.dumps({'alg': 'none', 'typ': 'JWT', 'kid': KEY_ID}).encode())}.{b64(json.dumps(said).encode())}."


def twice(member: str) -> str:
    """Claims in which a member is there twice: the good one, and another before it."""
    return '{"' + member + '": "somebody", ' + json.dumps(claims())[1:]


NOW = int(time.time())
GOOD = mint(ED)
FORGED: dict[str, tuple[str, str]] = {
    "alg none": (of_none(claims()), "base64url|alg"),
    "alg none, in capitals": (mint(ED, alg="NONE"), "alg"),
    "alg none with a signature": (mint(ED, alg="none"), "alg"),
    "no alg": (mint(ED, alg=...), "alg"),
    "alg of a wrong type": (mint(ED, alg=["EdDSA"]), "alg"),
    "HS256 with the public key as its secret": (mint(pem(RSA).encode(), kid="rsa-1"), "alg"),
    "HS256 with the text of a JWK": (mint(json.dumps(jwk(ED)).encode()), "alg"),
    "an RSA key for EdDSA": (mint(ED, kid="rsa-1"), "not that of the key"),
    "an Ed25519 key for RS256": (mint(RSA), "not that of the key"),
    "another's key": (mint(STRANGER), "signature"),
    "an unknown kid": (mint(ED, kid="other"), "kid"),
    "no kid": (mint(ED, kid=...), "kid"),
    "kid of a wrong type": (mint(ED, kid=1), "kid"),
    "kid that is a path": (mint(ED, kid="../../etc/passwd"), "kid"),
    "crit": (mint(ED, crit=["exp"]), "crit"),
    "another typ": (mint(ED, typ="at+jwt"), "typ"),
    "expired": (mint(ED, claims(iat=NOW - 400, nbf=NOW - 400, exp=NOW - 100)), "expired"),
    "not yet valid": (mint(ED, claims(nbf=NOW + 200)), "not valid yet"),
    "from the future": (mint(ED, claims(iat=NOW + 200, exp=NOW + 300)), "not valid yet"),
    "long-lived": (mint(ED, claims(exp=NOW + 301)), "iat"),
    "that lives for ever": (mint(ED, claims(exp=1e11)), "iat"),
    "that ends before it begins": (mint(ED, claims(iat=NOW + 20, nbf=NOW, exp=NOW + 10)), "iat"),
    "exp that is infinite": (mint(ED, json.dumps(claims()).replace(str(NOW + 300), "1e999")), "exp|JSON"),
    "exp that is NaN": (mint(ED, claims(exp=float("nan"))), "exp"),
    "exp of many digits": (mint(ED, claims(exp=10**4000)), "exp"),
    "exp that is a text": (mint(ED, claims(exp=str(NOW + 300))), "exp"),
    "exp that is true": (mint(ED, claims(exp=True)), "exp"),
    "another issuer": (mint(ED, claims(iss="evil")), "iss"),
    "another audience": (mint(ED, claims(aud="other")), "aud"),
    "an empty list of audiences": (mint(ED, claims(aud=[])), "aud"),
    "audiences of wrong types": (mint(ED, claims(aud=["codeapi", 1])), "aud"),
    "an audience in an object": (mint(ED, claims(aud={"codeapi": 1})), "aud"),
    "another source": (mint(ED, claims(principal_source="none")), "principal_source"),
    "an empty user": (mint(ED, claims("")), "sub"),
    "a user of spaces": (mint(ED, claims("  ")), "sub"),
    "a user with a line in it": (mint(ED, claims("a\nb")), "sub"),
    "a user with NUL": (mint(ED, claims("a\0b")), "sub"),
    "a user with half a surrogate": (mint(ED, json.dumps(claims(sub="@")).replace("@", "\\ud800")), "sub"),
    "a long user": (mint(ED, claims("u" * 257)), "sub"),
    "a user that is a number": (mint(ED, claims(sub=7)), "sub"),
    "an empty tenant": (mint(ED, claims(tenant_id="")), "tenant_id"),
    "no tenant, but null": (mint(ED, claims(tenant_id=None)), "tenant_id"),
    "a long jti": (mint(ED, claims(jti="j" * 257)), "jti"),
    "a plan that is none": (mint(ED, claims(plan_id=3)), "plan_id"),
    "a user twice": (mint(ED, twice("sub")), "each member once"),
    "alg twice": (signed(ED.sign, '{"alg":"none","alg":"EdDSA","kid":"' + KEY_ID + '"}', json.dumps(claims())), "once"),
    "claims that are a list": (mint(ED, "[]"), "object"),
    "claims that are no JSON": (mint(ED, "{"), "JSON"),
    "claims nested deeply": (mint(ED, "[" * 5000), "JSON"),
    "padding": (GOOD + "=", "base64url"),
    "spaces in it": (GOOD.replace(".", " .", 1), "base64url"),
    "base64, not base64url": ("+/+/" + GOOD, "base64url"),
    "unused bits of its last letter": (GOOD[:-1] + chr(ord(GOOD[-1]) + 1), "base64url"),
    "a letter that is none": ("ä" + GOOD, "base64url"),
    "nothing signed": (GOOD.rpartition(".")[0] + ".", "base64url"),
    "half a signature": (GOOD[:-20], "signature|base64url"),
    "changed claims": (
        ".".join((GOOD.split(".")[0], b64(json.dumps(claims("root")).encode()), GOOD.split(".")[2])),
        "signature",
    ),
    "two parts": (GOOD.rpartition(".")[0], "three parts"),
    "five parts": (GOOD + ".a.b", "three parts"),
    "huge": (mint(ED, claims(extra="x" * 20_000)), "too long"),
    "dots": ("..", "base64url"),
    "nothing": ("", "three parts"),
    **{
        f"no {name}": (mint(ED, claims(**{name: ...})), name)
        for name in ("iss", "aud", "sub", "jti", "iat", "nbf", "exp", "principal_source", "auth_context_hash")
    },
}


@pytest.mark.parametrize("name", FORGED)
def test_a_token_that_is_wrong_anywhere_is_refused_with_the_reason(name: str):
    token, reason = FORGED[name]
    with pytest.raises(InvalidToken, match=reason) as refused:
        verifier(clock=lambda: MADE_AT).verify(token)
    assert not token or token not in str(refused.value)


def test_a_public_key_is_no_secret_even_where_secrets_are_allowed():
    settings = JwtConfig(
        jwks=BOTH.jwks, hs256_secret=SECRET.decode(), hs256_key_id="hs", algorithms=("EdDSA", "RS256", "HS256")
    )
    for secret, kid in ((pem(RSA).encode(), "rsa-1"), (pem(ED).encode(), KEY_ID), (SECRET, KEY_ID), (SECRET, "rsa-1")):
        with pytest.raises(InvalidToken, match="not that of the key"):
            verifier(settings).verify(mint(secret, kid=kid))
    with pytest.raises(InvalidToken, match="not that of the key"):
        verifier(settings).verify(mint(ED, kid="hs"))


def test_the_borders_of_time_are_those_of_the_contract():
    """Half a minute either way; exactly then, a token has ended, and one that begins then has begun."""
    at = 1_780_000_000
    said = claims(iat=at, nbf=at, exp=at + 300)
    for now, believed in ((at - 30, True), (at - 31, False), (at + 329, True), (at + 330, False)):
        asked = verifier(clock=lambda now=now: float(now))
        if believed:
            assert asked.verify(mint(ED, said)).user
        else:
            with pytest.raises(InvalidToken, match="clocks"):
                asked.verify(mint(ED, said))


# --- keys


def test_a_key_is_taken_as_pem_jwk_der_or_the_path_of_one(tmp_path: Path):
    path = tmp_path / "key.pem"
    path.write_text(pem(ED))
    der = "".join(pem(ED).splitlines()[1:-1])
    for written in (pem(ED), pem(ED).replace("\n", "\\n"), json.dumps(jwk(ED)), der, str(path)):
        assert verifier(JwtConfig(public_key=written, key_id=KEY_ID)).verify(mint(ED)).key_id == KEY_ID
    assert verifier(JwtConfig(public_key=pem(RSA), key_id="r")).verify(mint(RSA, kid="r"))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (JwtConfig(jwks="{"), "jwks: it is not JSON"),
        (JwtConfig(jwks='{"x": 1}'), "set of keys"),
        (JwtConfig(jwks='{"keys": []}'), "no key"),
        (JwtConfig(jwks=json.dumps({"keys": [{"kty": "EC", "kid": "e"}]})), "no key"),
        (JwtConfig(jwks=json.dumps({"keys": [jwk(ED), jwk(RSA)]})), "two keys with the id"),
        (JwtConfig(jwks=json.dumps({"keys": [{**jwk(ED), "d": "AAAA"}]})), "private key"),
        (JwtConfig(jwks=json.dumps({"keys": [{**jwk(ED), "alg": "RS256"}]})), "alg"),
        (JwtConfig(jwks=json.dumps({"keys": [{**jwk(ED), "x": "AAAA"}]})), "no key"),
        (JwtConfig(jwks=json.dumps({"keys": [{**jwk(RSA), "n": 7}]})), "`n`"),
        (JwtConfig(jwks=json.dumps({"keys": [jwk(new_rsa(1024))]})), "2048"),
        (JwtConfig(jwks="/nowhere/jwks.json"), "jwks.*cannot be read"),
        (JwtConfig(keys_dir="/nowhere"), "keys_dir.*cannot be read"),
        (JwtConfig(public_key=private_pem(ED), key_id="k"), "public_key.*private key"),
        (JwtConfig(public_key="-----BEGIN PUBLIC KEY-----", key_id="k"), "no public key"),
        (JwtConfig(public_key="a\0b", key_id="k"), "public_key"),
        (JwtConfig(public_key=pem(ec.generate_private_key(ec.SECP256R1())), key_id="k"), "kind"),  # type: ignore[arg-type]
        (JwtConfig(public_key=pem(ED), key_id="two words"), "id of a key"),
        (JwtConfig(hs256_secret=pem(ED), algorithms=("HS256",)), "hs256_secret.*another kind"),
        (JwtConfig(hs256_secret=json.dumps(jwk(RSA)), algorithms=("HS256",)), "hs256_secret.*another kind"),
        (JwtConfig(jwks=json.dumps({"keys": [{**jwk(ED), "x": "!" + jwk(ED)["x"]}]})), "`x`"),
        (JwtConfig(public_key=pem(ED), key_id="k", algorithms=("RS256",)), "the keys are for EdDSA"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_a_key_that_cannot_be_used_is_said_at_the_start(settings: JwtConfig, reason: str):
    with pytest.raises(errors.InvalidConfig, match=reason) as refused:
        JwtKeys(settings)
    assert "librechat.jwt" in str(refused.value)
    assert "MC4C" not in str(refused.value)  # how a private key begins


class Hours:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_keys_in_a_directory_come_and_go_without_a_restart(tmp_path: Path):
    hours = Hours()
    (tmp_path / f"{KEY_ID}.pem").write_text(pem(ED))
    (tmp_path / ".hidden").write_text("not a key")
    keys = JwtKeys(JwtConfig(keys_dir=str(tmp_path)), hours)
    asked = JwtVerifier(BOTH, keys)
    assert asked.verify(mint(ED))

    (tmp_path / "rsa-1.json").write_text(json.dumps(jwk(RSA)))
    (tmp_path / "broken.pem").write_text("half a fi")
    hours.now += KEY_CHECK_SECONDS
    assert asked.verify(mint(RSA, kid="rsa-1"))
    assert asked.verify(mint(ED))

    os.replace(tmp_path / "rsa-1.json", tmp_path / "gone")  # a rotation: the old one is no longer good
    (tmp_path / f"{KEY_ID}.pem").write_text(pem(STRANGER))
    hours.now += KEY_CHECK_SECONDS
    with pytest.raises(InvalidToken, match="kid"):
        asked.verify(mint(RSA, kid="rsa-1"))
    with pytest.raises(InvalidToken, match="signature"):
        asked.verify(mint(ED))
    assert asked.verify(mint(STRANGER))


def test_a_file_of_keys_is_looked_at_now_and_then_and_not_for_each_token(tmp_path: Path):
    hours, path = Hours(), tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [jwk(ED)]}))
    keys = JwtKeys(JwtConfig(jwks=str(path)), hours)
    path.write_text("{")
    hours.now += KEY_CHECK_SECONDS / 2
    assert keys.find(KEY_ID)
    hours.now += KEY_CHECK_SECONDS
    assert keys.find(KEY_ID) is None  # what cannot be read proves nothing
    path.write_text(json.dumps({"keys": [jwk(ED), jwk(RSA, "rsa-1")]}))
    hours.now += KEY_CHECK_SECONDS
    assert keys.find("rsa-1")
    assert keys.ids == [KEY_ID, "rsa-1"]


def test_signing_and_verification_agree():
    """The tests' own signatures are real: else every refusal above would prove nothing."""
    for key, kid in ((ED, KEY_ID), (RSA, "rsa-1")):
        found = JwtKeys(BOTH).find(kid)
        assert found and found.algorithm == signer(key)[0]
        assert found.accepts(signer(key)[1](b"x"), b"x") and not found.accepts(signer(key)[1](b"x"), b"y")


def test_pyjwt_is_not_imported_before_a_key_is_read():
    code = "import sys, cloche.api.librechat.context; sys.exit('jwt' in sys.modules or 'cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
