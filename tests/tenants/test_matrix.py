"""Every route with every id of somebody else: the answer is that for an id which never existed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from tests.tenants.cases import LISTS
from tests.tenants.conftest import World
from tests.tenants.matrix import Pair, pairs, seen
from tests.tenants.routes import WEBSOCKET, Known
from tests.tenants.tries import NotTried, Try, behind_console, is_core, ports, signed, sockets, tries
from tests.tenants.wire import Answer, Wire, open_socket
from tests.tenants.witness import witnessed

Ask = Callable[..., Answer]


def test_every_route_is_tried(routes: list[Known]):
    missing = []
    for route in routes:
        try:
            list(tries(route))
        except NotTried as error:
            missing.append(str(error))
    assert not missing, "\n".join(missing)
    assert {each.name for each in routes} >= LISTS


@pytest.mark.parametrize("core", [True, pytest.param(False, marks=pytest.mark.long)], ids=["core", "whole"])
def test_a_foreign_id_is_answered_as_one_that_never_existed(world: World, routes: list[Known], core: bool):
    before = witnessed(world.victim)
    tried = [each for each in attempts(routes) if is_core(each) or not core]
    assert len(tried) > (700 if core else 5000)
    assert not list(told(world, tried, world.attacker.wire.ask))
    assert witnessed(world.victim) == before


@pytest.mark.parametrize("core", [True, pytest.param(False, marks=pytest.mark.long)], ids=["core", "whole"])
def test_neither_is_it_told_apart_behind_the_console(world: World, routes: list[Known], core: bool):
    """What its pages' scripts ask for, with a session and without any key."""
    before = witnessed(world.victim)
    tried = [behind_console(each) for each in attempts(routes) if is_core(each) or not core]
    asked = [each for each in tried if each is not None]
    assert len(asked) > 200
    assert not list(told(world, asked, Wire(world.server.url).ask))
    assert witnessed(world.victim) == before


@pytest.mark.parametrize("core", [True, pytest.param(False, marks=pytest.mark.long)], ids=["core", "whole"])
def test_a_websocket_to_a_foreign_sandbox_answers_like_an_unknown_one(world: World, routes: list[Known], core: bool):
    before = witnessed(world.victim)
    own = [each for route in routes if route.method == WEBSOCKET for each in tries(route)]
    behind = [each for each in map(behind_console, own) if each is not None]
    tried = [each for each in [*own, *behind, *sockets()] if is_core(each) or not core]
    assert not list(told(world, tried, open_socket(world.attacker.wire)))
    assert witnessed(world.victim) == before


def attempts(routes: list[Known]) -> list[Try]:
    """All but WebSockets, each once."""
    found = [each for route in routes if route.method != WEBSOCKET for each in tries(route)]
    by_what = {repr(each): each for each in [*found, *ports(), *signed()]}
    return list(by_what.values())


def told(world: World, tried: Iterable[Try], ask: Ask) -> Iterable[str]:
    """What the attacker learns."""
    for attempt in tried:
        for pair in pairs(attempt, world.victim, world.attacker):
            foreign, absent = _answers(pair, ask)
            if seen(foreign, pair.foreign) != seen(absent, pair.absent):
                yield _difference(pair, foreign, absent)
            if world.victim.mark in foreign.text:
                yield f"{attempt}\n  shows what only its owner should see: {foreign.text[:500]}"


def _answers(pair: Pair, ask: Ask) -> tuple[Answer, Answer]:
    """What a page says of the attacker's own things may change between the two: that is no difference that lasts."""
    for _ in range(4):
        foreign, absent = (ask(*each[:4]) for each in (pair.foreign, pair.absent))
        if pair.attempt.method != "GET" or seen(foreign, pair.foreign) == seen(absent, pair.absent):
            break
    return foreign, absent


def _difference(pair: Pair, foreign: Answer, absent: Answer) -> str:
    theirs, nobodys = seen(foreign, pair.foreign), seen(absent, pair.absent)
    return f"{pair.attempt}\n  of which {pair.own} are own ids\n  theirs:   {theirs}\n  nobody's: {nobodys}"
