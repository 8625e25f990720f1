"""Who is let in by LibreChat's code API, as whom, and what the others are told."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.requests import Request
from tests.conftest import RunningServer
from tests.librechat.conftest import SIGNING_KEY, no_engine
from tests.librechat.minting import KEY_ID, claims, jwk, mint, new_ed25519, pem

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.librechat import LibreChatApi
from cloche.api.librechat.identity import LibreChatAuth, LibreChatCaller
from cloche.api.librechat.limits import ProgramRateLimit
from cloche.api.librechat.replies import LibreChatRefusal
from cloche.config import Config
from cloche.config.librechat import JwtConfig
from cloche.config.librechat import LibreChatConfig as Settings
from cloche.model import Principal
from cloche.store.gateway import GatewayStore
from cloche.telemetry import log

KEY, OTHER_KEY = "e2b_" + "7" * 40, "a.key.with-two-dots-in-it"
SIGNS = new_ed25519()
JWT = JwtConfig(jwks=json.dumps({"keys": [jwk(SIGNS)]}), owner="chat")
OWNER = Principal(owner="ada", key_id="k1")


class TwoKeys:
    def find(self, key: str) -> Principal | None:
        return OWNER if key in (KEY, OTHER_KEY) else None


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


def asking(*headers: tuple[str, str], state: dict[str, Any] | None = None) -> Request:
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    return Request({"type": "http", "method": "POST", "path": "/exec", "headers": raw, "state": state or {}})


def caller(*headers: tuple[str, str], jwt: JwtConfig = JWT) -> LibreChatCaller:
    return LibreChatAuth(Gatekeeper(TwoKeys(), OWNER), jwt).caller(asking(*headers))


def refused(*headers: tuple[str, str], jwt: JwtConfig = JWT) -> LibreChatRefusal:
    with pytest.raises(LibreChatRefusal) as refusal:
        caller(*headers, jwt=jwt)
    return refusal.value


@pytest.mark.parametrize(
    "headers",
    [
        [("X-API-Key", KEY)],
        [("Authorization", f"Bearer {KEY}")],
        [("Authorization", f"Bearer {OTHER_KEY}")],
        [("Authorization", basic(f"user:{KEY}"))],
        [("Authorization", basic(f"{KEY}:"))],  # of http://KEY@host
        [("X-API-Key", KEY), ("Authorization", f"Bearer {KEY}")],
        [("X-API-Key", KEY), ("User-Id", "somebody else")],
        [("X-API-Key", KEY), ("X-CodeAPI-Expected-Profile", "default")],
        [("X-API-Key", KEY), ("X-CodeAPI-Expected-Profile", "stateful")],
    ],
    ids=lambda headers: " ".join(name for name, _ in headers),
)
def test_a_key_is_one_librechat_wherever_it_puts_it(headers: list[tuple[str, str]]):
    assert caller(*headers) == LibreChatCaller(owner="ada", tenant="", user="", source="key")


def test_a_token_is_one_user_of_the_owner_that_is_configured():
    assert caller(("Authorization", f"Bearer {mint(SIGNS)}")) == LibreChatCaller(
        owner="chat", tenant="legacy", user="6630f2a1c0ffee0123456789", source="jwt"
    )


def test_a_request_is_asked_once_and_its_principal_is_known_to_all():
    request = asking(("Authorization", f"Bearer {mint(SIGNS)}"))
    door = LibreChatAuth(Gatekeeper(TwoKeys(), OWNER), JWT)
    assert door.caller(request) is door.caller(request)
    assert request.scope["state"]["principal"] == Principal(owner="chat", role="user", key_id=f"jwt:{KEY_ID}")


def test_a_control_socket_caller_is_identified_by_the_socket_not_headers():
    request = asking(("X-API-Key", "wrong"), state={"principal": Principal(owner="local", role="admin")})
    assert LibreChatAuth(Gatekeeper(TwoKeys(), OWNER), JWT).caller(request) == LibreChatCaller(
        owner="local", source="local"
    )


@pytest.mark.parametrize(
    "headers",
    [
        [("X-API-Key", KEY), ("Authorization", f"Bearer {OTHER_KEY}")],
        [("X-API-Key", KEY), ("X-API-Key", OTHER_KEY)],
        [("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {OTHER_KEY}")],
        [("X-API-Key", KEY), ("Authorization", f"Bearer {mint(SIGNS)}")],
        [("X-API-Key", KEY), ("Api-Key", "x")],
    ],
)
def test_two_different_credentials_are_refused_even_if_each_is_good(headers: list[tuple[str, str]]):
    refusal = refused(*headers)
    assert (refusal.status, refusal.body["error"]) == (400, "Ambiguous authentication headers")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "")],
        [("Authorization", "Bearer ")],
        [("Authorization", "Digest x")],
        [("X-API-Key", " ")],
    ],
)
def test_without_a_credential_one_is_told_where_to_put_it(headers: list[tuple[str, str]]):
    refusal = refused(*headers)
    assert (refusal.status, refusal.body["error"]) == (401, "Bearer token is required")
    assert "X-API-Key" in refusal.body["message"] and "[librechat.jwt]" in refusal.body["message"]


@pytest.mark.parametrize(
    "credential",
    ["wrong", "a.b.c", "..", mint(new_ed25519()), mint(SIGNS, claims(exp=1)), "\xff"],
    ids=["a key", "no token", "dots", "another's", "expired", "no ASCII"],
)
def test_a_wrong_credential_is_refused_and_not_repeated(credential: str):
    refusal = refused(("Authorization", f"Bearer {credential}"))
    assert (refusal.status, refusal.body["error"]) == (401, "Invalid bearer token")
    assert refusal.body["message"] and credential not in json.dumps(refusal.body["message"])


def test_where_no_key_for_tokens_is_set_a_token_is_answered_with_how_to_set_one():
    refusal = refused(("Authorization", f"Bearer {mint(SIGNS)}"), jwt=JwtConfig())
    assert refusal.status == 401 and "CODEAPI_JWT_JWKS_JSON" in refusal.body["message"]


def test_without_keys_programs_on_this_machine_are_served_and_web_pages_are_not():
    door = LibreChatAuth(Gatekeeper(None, Principal(owner="local")), JWT)
    here = ("Host", "127.0.0.1:8000")
    assert door.caller(asking(here)) == LibreChatCaller(owner="local", source="local")
    assert door.caller(asking(here, ("X-API-Key", "any"))).owner == "local"
    assert door.caller(asking(here, ("Authorization", f"Bearer {mint(SIGNS)}"))).source == "jwt"  # still a user each
    for headers in ([here, ("Origin", "https://evil.example")], [("Host", "evil.example")]):
        with pytest.raises(errors.Forbidden):
            door.caller(asking(*headers))


def test_an_unknown_profile_is_refused_in_the_clients_words():
    refusal = refused(("X-API-Key", KEY), ("X-CodeAPI-Expected-Profile", "microvm"))
    assert (refusal.status, refusal.body["code"]) == (400, "execution_profile_mismatch")


def test_a_key_that_cannot_be_used_is_an_error_of_the_configuration():
    with pytest.raises(errors.InvalidConfig, match="jwks"):
        LibreChatAuth(Gatekeeper(TwoKeys(), OWNER), JwtConfig(jwks="{}"))


# --- how fast


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_rate_limited_user_waits_as_told_and_others_do_not():
    clock, ada, bob = Clock(), LibreChatCaller(owner="o", user="ada"), LibreChatCaller(owner="o", user="bob")
    pace = ProgramRateLimit(20, clock)
    for _ in range(20):
        pace.take(ada)
    with pytest.raises(LibreChatRefusal) as refusal:
        pace.take(ada)
    pace.take(bob)
    assert refusal.value.status == 429
    assert refusal.value.body == {
        "error": "rate_limited",
        "message": "Too many CodeAPI execution requests. Please retry in 3 seconds.",
        "retry_after_seconds": 3,
    }
    assert refusal.value.headers == {
        "retry-after": "3",
        "ratelimit-limit": "20",
        "ratelimit-remaining": "0",
        "ratelimit-reset": "3",
    }
    clock.now += 3
    pace.take(ada)


def test_users_are_counted_only_with_a_limit_and_idle_ones_dropped(monkeypatch):
    pace = ProgramRateLimit(0)
    for _ in range(1000):
        pace.take(LibreChatCaller(owner="o"))
    monkeypatch.setattr("cloche.api.librechat.limits.SWEEP_ENTRIES", 10)
    clock = Clock()
    pace = ProgramRateLimit(60, clock)
    for number in range(100):
        clock.now += 1
        pace.take(LibreChatCaller(owner="o", user=str(number)))
    assert len(pace._left) <= 11


def test_one_too_many_is_answered_with_when_to_try_again_for_that_user_alone(app: LibreChatApi):
    """What is counted is whoever asks, before anything of what they ask for is looked at."""
    answers = [ask(app, bearer("hasty")) for _ in range(4)]
    assert [each.status_code for each in answers] == [400, 400, 400, 429]
    last = answers[-1]
    wait = last.json()["retry_after_seconds"]
    assert last.json()["error"] == "rate_limited" and 1 <= wait <= 20
    assert last.headers["retry-after"] == str(wait) and last.headers["ratelimit-limit"] == "3"
    assert ask(app, bearer("patient")).status_code == 400


def test_a_refused_token_is_in_the_log_by_its_reason_only(app: LibreChatApi, capsys, monkeypatch):
    monkeypatch.setattr(log, "level", "info")
    headers = bearer("u3", exp=1)
    assert ask(app, headers, apiKey=KEY).status_code == 401
    said = capsys.readouterr().err
    assert "librechat.token_refused" in said and "expired" in said
    assert KEY not in said and headers["authorization"][7:] not in said


@pytest.fixture
def app(tmp_path: Path) -> LibreChatApi:
    """The API without what runs code. Each user has three programs a minute."""
    config = Config(data_dir=str(tmp_path), librechat=Settings(exec_per_minute=3, jwt=JWT))
    return LibreChatApi(no_engine(config), GatewayStore(tmp_path, 1.0), Gatekeeper(TwoKeys(), OWNER), config, b"secret")


def ask(app: LibreChatApi, headers: dict[str, str], **body: str) -> httpx2.Response:
    async def post() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://host") as client:
            return await client.post("/librechat/v1/exec", json=body, headers=headers)

    return asyncio.run(post())


def bearer(user: str, key: Any = SIGNS, **changed: Any) -> dict[str, str]:
    return {"authorization": f"Bearer {mint(key, claims(user, **changed))}"}


# --- over a socket


def run(server: RunningServer, headers: dict[str, str], **body: str) -> httpx2.Response:
    asked = {"lang": "bash", "code": "echo hello", **body}
    return httpx2.post(f"{server.url}/librechat/v1/exec", json=asked, headers=headers, timeout=60)


def test_a_user_with_a_token_runs_code_and_so_does_a_key_in_a_url(librechat_server: RunningServer):
    assert run(librechat_server, bearer("u1", SIGNING_KEY)).json()["stdout"] == "hello\n"
    with_key = librechat_server._replace(url=librechat_server.url.replace("://", f"://anybody:{librechat_server.key}@"))
    assert run(with_key, {}).json()["stdout"] == "hello\n"


@pytest.mark.parametrize(
    ("headers", "status", "error"),  # headers as they are made now: a token is valid for minutes
    [
        (dict, 401, "Bearer token is required"),
        (lambda: {"x-api-key": "wrong"}, 401, "Invalid bearer token"),
        (lambda: bearer("u2", SIGNING_KEY, exp=1), 401, "Invalid bearer token"),
        (lambda: bearer("u2", pem(SIGNING_KEY).encode()), 401, "Invalid bearer token"),
        (lambda: {"authorization": f"Bearer {'x' * 20_000}.{'y' * 20_000}.z"}, 401, "Invalid bearer token"),
        (lambda: {**bearer("u2", SIGNING_KEY), "x-api-key": "another"}, 400, "Ambiguous authentication headers"),
        (lambda: {**bearer("u2", SIGNING_KEY), "x-codeapi-expected-profile": "x"}, 400, "execution_profile_mismatch"),
    ],
    ids=["nothing", "a wrong key", "expired", "forged", "huge", "two", "another profile"],
)
def test_other_callers_cannot_run_programs_with_any_key_in_the_body(librechat_server, headers, status, error):
    answer = run(librechat_server, headers(), LIBRECHAT_CODE_API_KEY=librechat_server.key, apiKey=librechat_server.key)
    assert (answer.status_code, answer.json()["error"]) == (status, error)
    assert answer.json()["message"]


def test_a_token_opens_no_other_dialect(librechat_server: RunningServer):
    with httpx2.Client(base_url=librechat_server.url, headers=bearer("u4", SIGNING_KEY)) as client:
        for path in ("/api/v1/sandboxes", "/e2b/sandboxes", "/v1/models", "/admin/keys"):
            assert client.get(path).status_code == 401
        assert client.get("/librechat/v1/health").text == "OK"
