"""Who is let in: by a key in any of the places where clients put one, and nobody else."""

from __future__ import annotations

import base64

import httpx2
import pytest
from starlette.requests import Request
from tests.conftest import serving

from cloche import errors
from cloche.api.auth import Gatekeeper, is_local, is_loopback, key_from_headers
from cloche.model import Principal

KEY = "e2b_" + "7" * 40
SOMEBODY = Principal(owner="somebody", role="user", key_id="k1")


class OneKey:
    def find(self, key: str) -> Principal | None:
        return SOMEBODY if key == KEY else None


def asking(**headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "GET", "path": "/", "headers": raw})


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": KEY},
        {"api-key": KEY},
        {"open-sandbox-api-key": KEY},
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer   {KEY} "},
        {"authorization": "Basic " + base64.b64encode(f"anybody:{KEY}".encode()).decode()},
    ],
    ids=lambda headers: " ".join(headers),
)
def test_a_key_is_found_wherever_clients_put_one(headers):
    assert key_from_headers(headers) == KEY


@pytest.mark.parametrize("value", ["", "Basic", "Basic !", "Basic /w==", "Basic \xff", "Digest x", "Bearer"])
def test_nonsense_in_authorization_is_no_key(value):
    assert key_from_headers({"authorization": value}) == ""


def test_a_known_key_identifies_its_owner_and_an_unknown_one_is_refused():
    gatekeeper = Gatekeeper(OneKey(), SOMEBODY)
    assert gatekeeper.admit(asking(x_api_key=KEY)) == SOMEBODY
    for headers in ({}, {"x_api_key": KEY[:-1]}, {"x_api_key": ""}):
        with pytest.raises(errors.Unauthenticated):
            gatekeeper.admit(asking(**headers))


def test_admin_actions_are_forbidden_to_users():
    with pytest.raises(errors.Forbidden, match="admin"):
        Gatekeeper(OneKey(), SOMEBODY).admit_admin(asking(x_api_key=KEY))


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]:8000", "127.9.9.9"])
def test_without_keys_programs_on_this_machine_are_served(host):
    assert Gatekeeper(None, SOMEBODY).admit(asking(host=host)) == SOMEBODY


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example:8000"},  # a name that was rebound to 127.0.0.1
        {"host": "127.0.0.1.evil.example"},
        {"host": "192.168.0.7:8000"},
        {"host": ""},
        {"host": "[]"},
        {"host": "127.0.0.1:8000", "origin": "https://evil.example"},
        {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:9000"},
        {"host": "127.0.0.1:8000", "origin": "null"},
        {"host": "127.0.0.1:8000", "origin": "http://["},
        {"host": "127.0.0.1:8000", "x-forwarded-for": "192.168.0.7"},  # a proxy here that serves a network
        {"host": "127.0.0.1:8000", "via": "1.1 proxy"},
    ],
    ids=str,
)
def test_without_keys_no_web_page_is_served(headers):
    with pytest.raises(errors.Forbidden):
        Gatekeeper(None, SOMEBODY).admit(asking(**headers))


def test_loopback_is_told_from_networks():
    assert all(map(is_loopback, ["127.0.0.1", "127.1.2.3", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "example.org", ""]))
    assert is_local(asking(host="localhost:1"))
    assert not is_local(asking(host="localhost:1", x_forwarded_for="1.2.3.4"))


def test_answers_to_a_missing_and_a_wrong_key_are_401_in_the_shape_of_the_dialect(server):
    for headers in ({}, {"x-api-key": "e2b_" + "0" * 40}):
        ours = httpx2.get(f"{server.url}/admin/keys", headers=headers)
        assert (ours.status_code, ours.json()["error"]["code"]) == (401, "unauthenticated")
        theirs = httpx2.get(f"{server.url}/e2b/v2/sandboxes", headers=headers)
        assert (theirs.status_code, theirs.json()["code"]) == (401, 401)


def test_a_server_without_keys_serves_this_machine_and_no_web_page(own_data_dir):
    with serving(own_data_dir, "--insecure-no-auth") as server:
        assert server.said.startswith("data directory ") and server.said.count("\n") == 1  # no key was made
        assert httpx2.get(f"{server.url}/admin/keys").json() == []
        foreign = (
            {"host": "evil.example"},
            {"origin": "https://evil.example"},
            {"origin": "http://["},
            {"via": "a proxy"},
        )
        for headers in foreign:
            refused = httpx2.get(f"{server.url}/admin/keys", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
            refused = httpx2.get(f"{server.url}/e2b/v2/sandboxes", headers=headers)
            assert (refused.status_code, refused.json()["code"]) == (403, 403)
