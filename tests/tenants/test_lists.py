"""What shows many things at once shows nothing of others: lists, metrics, and what only admins may ask."""

from __future__ import annotations

import re

import pytest
from tests.tenants.cases import LISTS
from tests.tenants.conftest import World
from tests.tenants.routes import Known
from tests.tenants.tries import PREFIXES
from tests.tenants.wire import Wire


@pytest.mark.parametrize("name", sorted(LISTS))
def test_a_list_shows_nothing_of_another_owner(world: World, name: str):
    plane, _, path = name.split()
    answer = world.attacker.wire.ask("GET", PREFIXES.get(plane, "") + path)
    assert answer.status in (200, 403, 404), answer
    told = [kind for kind, id in world.victim.ids.items() if len(id) > 8 and id in answer.text]
    assert not told
    assert world.victim.owner not in answer.text


def test_no_page_of_the_console_shows_anything_of_another_owner(world: World, routes: list[Known]):
    asked = [each.path for each in routes if each.plane == "ui" and each.method == "GET" and "{" not in each.path]
    assert len(asked) > 10
    for path in asked:
        answer = world.attacker.wire.ask("GET", path, headers={"cookie": world.attacker.ids["console_session"]})
        assert answer.status in (200, 303, 400, 403, 404), (path, answer)
        shared = {world.victim.ids["origin"]}
        told = [kind for kind, id in world.victim.ids.items() if len(id) > 8 and id not in shared and id in answer.text]
        assert not told, path
        assert world.victim.owner not in answer.text, path


def test_list_filters_by_name_or_label_find_only_own_items(world: World):
    for path in (
        f"/e2b/v2/sandboxes?metadata=mark%3D{world.victim.mark}",
        f"/e2b/sandboxes?metadata=mark%3D{world.victim.mark}",
        f"/v1/containers?name={world.victim.mark}",
        f"/opensandbox/v1/sandboxes?metadata=mark%3D{world.victim.mark}",
        f"/opensandbox/v1/snapshots?name={world.victim.ids['snapshot_name']}",
    ):
        answer = world.attacker.wire.ask("GET", path)
        assert answer.status == 200
        assert not re.search(r'"(sandboxID|snapshotID|id)":', answer.text), path


def test_only_admins_are_told_of_the_server_and_others_are_told_so_in_the_same_words(world: World, routes: list[Known]):
    asked = [each for each in routes if each.plane == "admin"]
    assert asked
    for route in asked:
        answers = set()
        for id in (world.victim.ids["key"], world.victim.owner, "never-existed"):
            answer = world.attacker.wire.ask(route.method, re.sub(r"\{.*?\}", id, route.path), {})
            answers.add((answer.status, answer.text))
        assert {status for status, _ in answers} == {403}, route
        assert len(answers) == 1, route


def test_logs_and_everybodys_sandboxes_are_not_for_owners(world: World):
    for path in (
        "/api/v1/logs",
        f"/api/v1/logs?sandbox={world.victim.ids['running']}",
        "/api/v1/logs/follow",
        "/api/v1/sandboxes?all=true",
        "/api/v1/snapshots?all=true",
    ):
        answer = world.attacker.wire.ask("GET", path)
        assert answer.status == 403, path


def test_metrics_tell_of_no_owner_and_no_id(world: World):
    answer = Wire(world.server.url).ask("GET", "/metrics")
    assert answer.status == 200
    told = [kind for kind, id in world.victim.ids.items() if len(id) > 8 and id in answer.text]
    assert not told
    labels = set(re.findall(r'(\w+)="', answer.text))
    assert not labels & {"owner", "key", "key_id", "sandbox", "user", "tenant", "template", "id"}


def test_no_header_of_an_answer_reveals_another_owner(world: World):
    for path in ("/api/v1/sandboxes", "/v1/files", "/e2b/v2/sandboxes", "/opensandbox/v1/sandboxes"):
        assert world.victim.owner not in repr(world.attacker.wire.ask("GET", path).headers)
