"""Tokens and signed addresses open what they were made for, and nothing else, and nothing afterwards."""

from __future__ import annotations

import time

import pytest
from tests.tenants.conftest import World
from tests.tenants.matrix import ghost
from tests.tenants.wire import Wire

from cloche.api.e2b.registry import sign_file_url

ENVD, CODE, PROGRAM = "49983", "49999", "8000"


@pytest.fixture(scope="module")
def bare(world: World):
    """Who has no key."""
    wire = Wire(world.server.url)
    yield wire
    wire.close()


def at(sandbox: str, port: str, **tokens: str) -> dict[str, str]:
    named = {"e2b-sandbox-id": sandbox, "e2b-sandbox-port": port}
    return {**named, **{name.replace("_", "-"): value for name, value in tokens.items()}}


def test_a_token_opens_its_own_sandbox_and_no_other_of_the_same_owner(world: World, bare: Wire):
    ids = world.victim.ids
    for port, path in ((ENVD, "/e2b/metrics"), (CODE, "/e2b/contexts")):
        assert bare.ask("GET", path, headers=at(ids["private"], port, x_access_token=ids["access_token"])).status == 200
        for other in ("running", "cell", "paused", "killed"):
            answers = {
                bare.ask("GET", path, headers=at(id, port, x_access_token=ids["access_token"])).text.replace(id, "ID")
                for id in (ids[other], ghost(ids[other]))
            }
            assert len(answers) == 1


def test_a_traffic_token_does_not_open_envd(world: World, bare: Wire):
    ids = world.victim.ids
    sent = at(ids["private"], ENVD, e2b_traffic_access_token=ids["traffic_token"], x_access_token=ids["traffic_token"])
    assert bare.ask("GET", "/e2b/metrics", headers=sent).status == 401


def test_a_token_of_a_killed_sandbox_opens_nothing_and_says_why_to_its_holder_only(world: World, bare: Wire):
    asked = {"templateID": "base", "timeout": 60, "secure": True, "network": {"allowPublicTraffic": False}}
    made = world.victim.wire.made("POST", "/e2b/v2/sandboxes", asked)
    id, token = made["sandboxID"], made["envdAccessToken"]
    url = f"/files?path=/etc/hostname&signature={sign_file_url('/etc/hostname', 'read', '', token).replace('+', '%2B')}"
    assert bare.ask("GET", url).status == 200
    world.victim.wire.made("DELETE", f"/e2b/sandboxes/{id}")
    assert bare.ask("GET", url).status == 401
    held = bare.ask("GET", "/e2b/metrics", headers=at(id, ENVD, x_access_token=token))
    assert (held.status, "was killed" in held.text) == (502, True)
    for port in (ENVD, CODE, PROGRAM):
        answers = [bare.ask("GET", "/e2b/metrics", headers=at(each, port)) for each in (id, ghost(id))]
        assert answers[0].text.replace(id, "ID") == answers[1].text.replace(ghost(id), "ID")
        assert answers[0].status in (401, 403)


@pytest.mark.parametrize("change", ["path", "signature", "username", "expiration", "method"])
def test_an_altered_file_url_opens_nothing(world: World, bare: Wire, change: str):
    ids = world.victim.ids
    fields = {"path": "/home/user/g.txt", "signature": ids["signature"].replace("+", "%2B")}
    assert bare.ask("GET", "/files?" + "&".join(f"{k}={v}" for k, v in fields.items())).text == world.victim.mark
    if change == "path":
        fields["path"] = "/home/user/../user/g.txt"
    elif change == "signature":
        fields["signature"] = ghost(ids["signature"]).replace("+", "%2B")
    elif change == "username":
        fields["username"] = "root"
    elif change == "expiration":
        fields["signature_expiration"] = str(int(time.time()) + 60)
    asked = "&".join(f"{name}={value}" for name, value in fields.items())
    answer = bare.ask("POST" if change == "method" else "GET", f"/files?{asked}", b"" if change == "method" else None)
    assert (answer.status, answer.json()["message"]) == (401, "invalid signature")


def test_ports_of_sandboxes_that_e2bs_clients_did_not_make_are_closed_to_strangers(world: World, bare: Wire):
    """Their ids are no secrets: an OpenAI container's is in every answer that cites a file of it."""
    for id in (world.victim.ids["running"], world.victim.ids["cell"], world.victim.ids["container"][5:]):
        answers = [bare.ask("GET", "/", headers=at(each, PROGRAM)) for each in (id, ghost(id))]
        assert {each.status for each in answers} == {403}
        assert answers[0].text.replace(id, "ID") == answers[1].text.replace(ghost(id), "ID")


def test_an_address_for_an_upload_is_good_for_one_template_and_one_file(world: World, bare: Wire):
    ids, own = world.victim.ids, world.attacker.ids
    for template, digest in ((ids["template"], own["hash"]), (own["template"], ids["hash"])):
        path = f"/e2b/template-files/{template}/{digest}?{ids['upload_query']}"
        assert bare.ask("PUT", path, b"attack").status == 401


def test_a_librechat_user_sees_neither_other_users_nor_other_tenants(world: World, bare: Wire):
    ids, owner = world.victim.ids, world.victim.owner
    path = f"/librechat/v1/download/{ids['users_session']}/{ids['users_object']}"
    absent = f"/librechat/v1/download/{ids['users_session']}/{ghost(ids['users_object'])}"
    assert bare.ask("GET", path, headers=world.victim.user(f"ann-{owner}", f"tenant-{owner}")).text == world.victim.mark
    for user in (
        world.victim.user("bob", f"tenant-{owner}"),
        world.victim.user(f"ann-{owner}", "tenant-of-others"),
        {"x-api-key": world.attacker.key},
        {"x-api-key": world.victim.key},  # a key is one LibreChat, a token is one of another's users
    ):
        assert bare.ask("GET", path, headers=user)[::2] == bare.ask("GET", absent, headers=user)[::2]
        assert bare.ask("GET", path, headers=user).status == 404
