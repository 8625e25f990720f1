"""Bodies that are cheap to send and dear to read, to every route that takes one: others are served meanwhile."""

from __future__ import annotations

import json
import re
import secrets
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from tests.tenants.belongings import Belongings
from tests.tenants.bombs import BOMBS, JSON, Bomb, send, watching
from tests.tenants.conftest import World
from tests.tenants.matrix import for_owner
from tests.tenants.routes import ANY, WEBSOCKET, Known
from tests.tenants.tries import Try, own_try
from tests.tenants.wire import Answer, Wire

MIB = 1 << 20
MOST_MEMORY = 64 * MIB
LONG = {"a wide string", "lone surrogates"}  # their strings are copied, where long ones are possible: several times
LONGEST_WAIT = 1.0  # a coarse bound, for busy machines: it was 12.7 s, and is some milliseconds
LEFT_OUT = frozenset(
    {
        "api PUT /api/v1/sandboxes/{id}/processes/{process}/stdin",  # waits for the program, by design
        "ui POST /ui/logout",  # all other bombs at the console need the session
    }
)
NO_BODY = frozenset({"GET", WEBSOCKET, ANY})
ENDS = re.compile(r"/(pause|resume|signal|interrupt|restart|cancel|revoke|erase|kill|stop|logout)\b|Signal")


@pytest.fixture(scope="module")
def owner(world: World) -> Iterator[Belongings]:
    """One whose things may end."""
    admin, name = Wire(world.server.url, {"x-api-key": world.server.key}), f"bomber-{secrets.token_hex(4)}"
    made = admin.made("POST", "/admin/keys", {"owner": name, "name": name})
    gathered = Belongings(world.server.url, made["key"], name, world.victim.signing_key).gather()
    gathered.ids["key"] = made["id"]
    gathered.ids["request"] = admin.made("GET", f"/admin/requests?owner={name}")["requests"][0]["record"]
    yield gathered
    gathered.close()
    admin.close()


def aimed(routes: list[Known]) -> list[tuple[Known, Try]]:
    """What takes a body; what ends something comes last."""
    found = [(route, own_try(route)) for route in routes if route.method not in NO_BODY]
    kept = [
        (route, attempt)
        for route, attempt in found
        if (route.method != "DELETE" or attempt.body is not None) and route.name not in LEFT_OUT
    ]
    return sorted(kept, key=lambda each: bool(ENDS.search(each[0].path)))


@pytest.mark.parametrize(
    ("bombs", "size"),
    [
        (BOMBS[:1], 3 * MIB),
        pytest.param(BOMBS, 3 * MIB, marks=pytest.mark.long),
        pytest.param(BOMBS, 24 * MIB, marks=pytest.mark.long),
    ],
)
def test_no_body_stops_the_server_or_takes_its_memory(
    world: World, owner: Belongings, routes: list[Known], bombs: list[Bomb], size: int
):
    tried = aimed(routes)
    too_complex = 0
    for bomb in bombs:
        body = bomb.make(size)
        with watching(world.server.url, world.server.process.pid) as watched:
            for route, attempt in tried:
                answer = blow(world, owner, route, attempt, bomb, body)
                assert answer.status != 500, (bomb.name, route.name, answer.text[:300])
                too_complex += "more than 200000 values" in answer.text
            seen = watched()
        print(f"{bomb.name}: p99 {seen.waited(0.99) * 1000:.0f} ms, {seen.memory_bytes / MIB:.0f} MiB")
        # One wide letter makes four bytes of each; the body is there twice, whole and in pieces; and the server's own.
        most = max(MOST_MEMORY, 6 * size + MOST_MEMORY // 4) if bomb.name in LONG else MOST_MEMORY
        assert seen.waited(0.99) < LONGEST_WAIT and seen.memory_bytes < most, (bomb.name, seen.memory_bytes)
    assert too_complex > 80 or bombs[0].name != "lists", too_complex
    made = owner.wire.made("POST", "/api/v1/sandboxes", {})  # and the next request works
    assert owner.wire.made("POST", f"/api/v1/sandboxes/{made['id']}/run", {"code": "1+1"})["outcome"] == "ok"


def blow(world: World, owner: Belongings, route: Known, attempt: Try, bomb: Bomb, body: bytes) -> Answer:
    """Sends it as the first body of a route is sent: in an envelope, where there are envelopes."""
    sent = for_owner(attempt, owner)
    headers = {"x-api-key": world.server.key if route.plane == "admin" else owner.key, **bomb.headers}
    headers |= {name: value for name, value in sent.headers.items() if name != "content-type"}
    if route.plane == "mcp":
        headers |= {"accept": "application/json, text/event-stream"}
    place = world.server.url.removeprefix("http://")
    answer = send(place, sent.method, sent.path, body, headers)
    if answer.status == 415 and "connect+json" in str(answer):
        headers |= {"content-type": "application/connect+json"}
        answer = send(place, sent.method, sent.path, struct.pack(">BI", 0, len(body)) + body, headers)
    return answer


def test_a_bomb_is_refused_in_the_shape_of_other_errors(world: World, owner: Belongings, routes: list[Known]):
    """A list of too many values, a text that is nested too deeply, and one that is no JSON."""
    kinds = [Bomb("", lambda size: content * size) for content in (b"[],", b"[", b"{")]
    for route, attempt in aimed(routes):
        if ENDS.search(route.path):
            continue
        answers = [blow(world, owner, route, attempt, bomb, b"[" + bomb.make(90_000)) for bomb in kinds]
        shapes = [_shape(answer) for answer in answers]
        assert shapes[0] == shapes[1] == shapes[2], (route.name, answers)


def _shape(answer: Answer) -> tuple[str, Any]:
    content_type = answer.header("content-type") or answer.header("Content-Type")
    if answer.status < 400 or "json" not in content_type:
        return content_type, None
    return content_type, _keys(json.loads(answer.body))


def _keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _keys(each) for name, each in value.items()}
    return type(value).__name__


def test_the_bombs_are_what_they_are_called():
    assert len({bomb.name for bomb in BOMBS}) == len(BOMBS)
    assert all(len(bomb.make(MIB)) > MIB / 2 or bomb.headers != JSON for bomb in BOMBS)
