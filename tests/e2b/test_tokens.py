"""Access tokens, traffic tokens and signatures: who gets in where, and what the others are told."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import httpx
import pytest
from e2b_code_interpreter import Sandbox

from cloche import errors
from cloche.api.e2b.registry import (
    MAX_SIGNER_SEARCHES,
    SIGNER_CHECKS_PER_TURN,
    E2bSandboxes,
    E2bTokens,
    decode_signature_digest,
    secrets_match,
    sign_file_url,
)

UNAUTHORIZED = "unauthorized access, please provide a valid access token or method signing if supported"
SECURED = "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is"


def test_a_signature_is_the_one_that_clients_make():
    made = sign_file_url("/a b.txt", "read", "", "envd-token-abc")
    assert made == "v1_F7932srRvsE0j7Noz3Dv5qzabnjEYRkmIRBZw7G310Q"


def test_tokens_differ_by_sandbox_purpose_and_server():
    tokens, others = E2bTokens(b"one"), E2bTokens(b"two")
    made = {tokens.access("a"), tokens.access("b"), tokens.traffic("a"), others.access("a")}
    assert len(made) == 4
    assert tokens.access("a") == E2bTokens(b"one").access("a")


def test_nothing_is_the_same_as_no_token():
    assert not secrets_match(None, "a")
    assert not secrets_match("", "a")
    assert not secrets_match("é\udcff", "a")
    assert secrets_match("a", "a")


@pytest.fixture(scope="module")
def box(server):
    made = Sandbox.create(**server.e2b)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def private(server):
    """Its ports are not for everybody."""
    made = Sandbox.create(network={"allow_public_traffic": False}, **server.e2b)
    yield made
    made.kill()


def ask(server, box: Sandbox, method: str, path: str, port: int, **headers: str) -> httpx.Response:
    named = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": str(port)}
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.request(method, f"{server.url}/e2b{path}", headers={**named, **sent}, json={})


# -- envd


def test_envd_needs_the_access_token(server, box):
    for headers in ({}, {"X_Access_Token": "wrong"}, {"E2B_Traffic_Access_Token": box.traffic_access_token}):
        answer = ask(server, box, "POST", "/filesystem.Filesystem/ListDir", 49983, **headers)
        assert answer.status_code == 401
        assert answer.json() == {"code": 401, "message": UNAUTHORIZED}


def test_envd_takes_no_other_sandboxs_token(server, box, private):
    answer = ask(server, box, "POST", "/process.Process/List", 49983, X_Access_Token=private._envd_access_token)
    assert answer.status_code == 401


def test_envds_health_needs_a_token(server, box):
    """Who has none could else find out which sandboxes there are; E2B's clients send theirs."""
    assert ask(server, box, "GET", "/health", 49983).status_code == 401
    assert ask(server, box, "GET", "/health", 49983, X_Access_Token=box._envd_access_token).status_code == 204


# -- the code server and other ports


def test_the_code_server_needs_one_of_the_two_tokens(server, box):
    missing = ask(server, box, "GET", "/contexts", 49999)
    assert missing.status_code == 403
    assert missing.json() == {"sandboxId": box.sandbox_id, "message": f"{SECURED} missing", "code": 403}
    wrong = ask(server, box, "GET", "/contexts", 49999, E2B_Traffic_Access_Token="wrong")
    assert wrong.json()["message"] == f"{SECURED} invalid"
    for token in ({"E2B_Traffic_Access_Token": box.traffic_access_token}, {"X_Access_Token": box._envd_access_token}):
        assert ask(server, box, "GET", "/contexts", 49999, **token).status_code == 200


def test_ports_are_public_unless_asked_otherwise(server, box, private):
    assert ask(server, box, "GET", "/", 8123).status_code == 502  # nobody listens, which it may know
    assert ask(server, private, "GET", "/", 8123).status_code == 403
    token = {"E2B_Traffic_Access_Token": private.traffic_access_token}
    assert ask(server, private, "GET", "/", 8123, **token).status_code == 502


def test_the_sdk_uses_a_sandbox_whose_ports_are_private(private):
    assert private.run_code("6 * 7").text == "42"
    assert private.list_code_contexts()


def test_a_sandbox_of_an_old_client_that_asked_for_no_security_needs_no_token(server):
    key = {"X-API-Key": server.key}
    made = httpx.post(f"{server.url}/e2b/sandboxes", headers=key, json={"templateID": "base", "timeout": 60}).json()
    assert made["envdAccessToken"] is None
    named = {"E2b-Sandbox-Id": made["sandboxID"], "E2b-Sandbox-Port": "49983"}
    listed = httpx.post(f"{server.url}/e2b/filesystem.Filesystem/ListDir", headers=named, json={"path": "/home"})
    assert listed.status_code == 200
    named["E2b-Sandbox-Port"] = "49999"
    assert '"text": "2"' in httpx.post(f"{server.url}/e2b/execute", headers=named, json={"code": "1+1"}).text
    httpx.delete(f"{server.url}/e2b/sandboxes/{made['sandboxID']}", headers=key)


# -- signed file URLs, which name no sandbox


def test_a_signed_url_reads_and_writes_one_file_without_a_key(server, box, private):
    box.files.write("/home/user/a b.txt", "hello")
    url = box.download_url("/home/user/a b.txt")
    assert url.startswith(f"{server.url}/files?")  # the prefix is lost
    assert httpx.get(url).text == "hello"
    assert httpx.get(url.replace("/files?", "/e2b/files?")).text == "hello"
    upload = box.upload_url("/home/user/b.txt", use_signature_expiration=60)
    assert httpx.post(upload, files={"file": ("b.txt", b"there")}).status_code == 200
    assert box.files.read("/home/user/b.txt") == "there"
    assert not private.files.exists("/home/user/b.txt")


def test_a_signature_is_good_for_one_file_and_one_direction(box):
    url = box.download_url("a.txt")
    for changed in (url.replace("a.txt", "b.txt"), url.replace("v1_", "v1_x"), url + "&username=root"):
        answer = httpx.get(changed)
        assert (answer.status_code, answer.json()) == (401, {"code": 401, "message": "invalid signature"})
    assert httpx.post(url, files={"file": ("a.txt", b"x")}).status_code == 401


def test_an_expired_signature_says_exactly_that(server, box):
    expired = int(time.time()) - 1
    signed = sign_file_url("a.txt", "read", "", box._envd_access_token, expired)
    query = {"path": "a.txt", "signature": signed, "signature_expiration": str(expired)}
    named = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49983"}
    for headers in ({}, named):
        answer = httpx.get(f"{server.url}/files", params=query, headers=headers)
        assert answer.status_code == 401
        assert answer.json() == {"code": 401, "message": "signature is already expired"}


def test_a_token_in_the_header_wins_over_a_signature(server, box):
    box.files.write("c.txt", "c")
    good = {"signature": sign_file_url("c.txt", "read", "", box._envd_access_token), "path": "c.txt"}
    bad = {**good, "signature": "v1_x"}
    named = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49983"}

    def get(query: dict[str, str], **token: str) -> httpx.Response:
        return httpx.get(f"{server.url}/e2b/files", params=query, headers={**named, **token})

    mismatch = get(good, **{"X-Access-Token": "wrong"})
    assert mismatch.json() == {"code": 401, "message": "access token present in header but does not match"}
    assert get(bad, **{"X-Access-Token": box._envd_access_token}).text == "c"
    assert get({"path": "c.txt"}).json() == {"code": 401, "message": "missing signature query parameter"}


def test_malformed_tokens_are_refused_before_any_lookup(server):
    expired = {"path": "a", "signature": "v1_" + "a" * 43, "signature_expiration": "1"}
    assert httpx.get(f"{server.url}/files", params=expired).json()["message"] == "signature is already expired"
    assert decode_signature_digest("v1_" + "a" * 43) is not None
    for given in ("", "v1_x", "v1_" + "a" * 44, "v2_" + "a" * 43, "v1_" + "-" * 43, "v1_" + "a" * 42 + "="):
        assert decode_signature_digest(given) is None


class Host:
    """Of an engine no more than whom it has."""

    def __init__(self, count: int):
        self.searches = 0
        self.sandboxes = [SimpleNamespace(id=f"i{number}", spec=SimpleNamespace(notes={})) for number in range(count)]

    def known(self, owner: None) -> list[SimpleNamespace]:
        self.searches += 1
        return self.sandboxes


async def test_signature_checks_among_many_sandboxes_block_no_other_and_are_limited():
    host, turns = Host(SIGNER_CHECKS_PER_TURN * 20), 0
    residents = E2bSandboxes(host, E2bTokens(b"x" * 32))

    async def look() -> None:
        with pytest.raises(errors.Unauthenticated, match="invalid signature"):
            await residents.by_signature("v1_" + "a" * 43, "a", "read", "", None)

    looking = [asyncio.create_task(look()) for _ in range(10)]
    while host.searches < 10:
        await asyncio.sleep(0)
        turns += 1
        assert host.searches - sum(task.done() for task in looking) <= MAX_SIGNER_SEARCHES
    await asyncio.gather(*looking)
    assert turns >= 20 * (10 // MAX_SIGNER_SEARCHES - 1)


def test_an_expiration_that_is_no_time_is_a_bad_request(server):
    answer = httpx.get(f"{server.url}/files?path=a&signature=v1_x&signature_expiration=soon")
    assert (answer.status_code, answer.json()["code"]) == (400, 400)
