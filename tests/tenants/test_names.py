"""Names are each owner's own: one that somebody else has is free, and nobody is told that it is taken."""

from __future__ import annotations

import pytest
from tests.conftest import wait_until
from tests.tenants.conftest import World
from tests.tenants.matrix import ghost
from tests.tenants.wire import Answer, form


@pytest.mark.parametrize(
    ("made", "shown", "kind", "id"),
    [
        ("/api/v1/volumes", "/api/v1/volumes", "volume_name", "id"),
        ("/e2b/volumes", "/e2b/volumes", "volume_name", "volumeID"),
        ("/e2b/v3/templates", "/e2b/templates", "template_name", "templateID"),
    ],
    ids=["volume", "volume of E2B", "template"],
)
def test_a_name_used_by_another_owner_is_free(world: World, made: str, shown: str, kind: str, id: str):
    name, attacker, victim = world.victim.ids[kind], world.attacker.wire, world.victim.wire
    before = victim.made("GET", f"{shown}/{name}")
    answers = [attacker.ask("POST", made, {"name": each}) for each in (name, ghost(name))]
    assert answers[0].status == answers[1].status
    assert answers[0].json().keys() == answers[1].json().keys()
    assert attacker.made("GET", f"{shown}/{name}")[id] != before[id]
    for each in (name, ghost(name)):
        attacker.made("DELETE", f"{shown}/{each}")
    assert victim.made("GET", f"{shown}/{name}") == before


def test_a_snapshot_takes_no_name_from_another_owner(world: World):
    name, attacker = world.victim.ids["snapshot_name"], world.attacker
    path = f"/api/v1/sandboxes/{attacker.ids['running']}/snapshots"
    before = world.victim.wire.made("GET", f"/api/v1/snapshots/{name}")
    own = attacker.wire.made("POST", path, {"name": name})
    assert world.victim.wire.made("GET", f"/api/v1/snapshots/{name}") == before != own
    assert attacker.wire.made("GET", f"/api/v1/snapshots/{name}")["id"] == own["id"]
    attacker.wire.made("DELETE", f"/api/v1/snapshots/{name}")
    assert attacker.wire.ask("GET", f"/api/v1/snapshots/{name}").status == 404
    assert world.victim.wire.made("GET", f"/api/v1/snapshots/{name}") == before


def test_a_template_is_not_built_from_foreign_files(world: World):
    said = set()
    for source in (world.victim.ids["snapshot"], ghost(world.victim.ids["snapshot"])):
        wire = world.attacker.wire
        asked = wire.made("POST", "/e2b/v3/templates", {"name": "mine"})
        one = f"templates/{asked['templateID']}/builds/{asked['buildID']}"
        wire.ask("POST", f"/e2b/v2/{one}", {"fromTemplate": source})
        wait_until(lambda: wire.made("GET", f"/e2b/{one}/status")["status"] == "error")
        reason = wire.made("GET", f"/e2b/{one}/status")["reason"]["message"]
        said.add(reason.replace(source, "ID"))
        wire.ask("DELETE", f"/e2b/templates/{asked['templateID']}")
    assert len(said) == 1


def test_an_agent_of_the_same_name_has_no_files_of_another_owners(world: World):
    agent = world.victim.ids["agent"]
    content, header = form({"kind": "agent", "id": agent}, "f.txt", b"of the attacker")
    made = world.attacker.wire.made("POST", "/librechat/v1/upload", content, header)
    path = f"/librechat/v1/files/{world.victim.ids['agents_session']}?kind=agent&id={agent}"
    assert world.attacker.wire.made("GET", path) == []
    path = f"/librechat/v1/files/{made['session_id']}?kind=agent&id={agent}"
    assert len(world.attacker.wire.made("GET", path)) == 1
    assert world.victim.wire.made("GET", path) == []


def test_a_request_id_of_another_owner_cancels_nothing(world: World):
    """Who may cancel is not told whether there was anything."""
    wire = world.attacker.wire
    answers: list[Answer] = [
        wire.ask("POST", "/librechat/v1/exec/programmatic/cancel", {"request_id": id}) for id in ("a-1", "b-2")
    ]
    assert answers[0] == answers[1]


def test_a_foreign_idempotency_key_creates_a_new_sandbox(world: World):
    again = {"idempotency-key": "the-same-for-both"}
    asked = {"templateID": "base", "timeout": 60}
    ids = [
        wire.made("POST", "/e2b/v2/sandboxes", asked, again)["sandboxID"]
        for wire in (world.victim.wire, world.victim.wire, world.attacker.wire)
    ]
    assert ids[0] == ids[1] != ids[2]
    for id, wire in zip(ids[1:], (world.victim.wire, world.attacker.wire), strict=True):
        wire.made("DELETE", f"/e2b/sandboxes/{id}")
