"""Bodies that are held whole: all of them together have a bound, and small ones pass whatever is held."""

from __future__ import annotations

import asyncio
import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from cloche import errors
from cloche.api.body_memory import BODY_MEMORY_STATE, BodyMemory, end_body, hold_body
from cloche.model import KIB, MIB, Principal


def state_of(memory: BodyMemory, owner: str) -> dict[str, Any]:
    return {BODY_MEMORY_STATE: memory, "principal": Principal(owner=owner, role="owner")}


@pytest.mark.asyncio
async def test_one_owner_has_half_and_small_bodies_pass():
    memory = BodyMemory(10 * MIB, wait_seconds=0.01)
    own, more, others = (state_of(memory, owner) for owner in ("a", "a", "b"))
    await hold_body(own, 4 * MIB)
    await hold_body(own, 5 * MIB)
    with pytest.raises(errors.Busy) as refused:
        await hold_body(more, 1 * MIB)
    assert refused.value.retry_after_seconds
    await hold_body(more, 64 * KIB)
    await hold_body(others, 5 * MIB)
    assert memory.held_bytes == 10 * MIB
    for state in (own, more, others):
        end_body(state)
    assert memory.held_bytes == 0


@pytest.mark.asyncio
async def test_a_body_waits_for_room():
    memory = BodyMemory(4 * MIB)
    first, second = state_of(memory, "a"), state_of(memory, "a")
    await hold_body(first, 2 * MIB)
    waiting = asyncio.ensure_future(hold_body(second, 1 * MIB))
    await asyncio.sleep(0)
    assert not waiting.done()
    end_body(first)
    await waiting
    assert memory.held_bytes == 1 * MIB


def test_many_large_bodies_at_a_time_are_refused_beyond_the_bound_and_others_are_served(server):
    """Three bodies of 60 MiB, each unfinished, from one owner: the third waits and is refused."""
    place = urlsplit(server.url)
    headers = {"x-api-key": server.key, "content-type": "application/json", "content-length": str(60 * MIB)}
    held = []
    for _ in range(3):
        held.append(http.client.HTTPConnection(str(place.hostname), place.port, timeout=60))
        held[-1].putrequest("POST", "/v1/responses")
        for name, value in headers.items():
            held[-1].putheader(name, value)
        held[-1].endheaders()
    try:
        for each in held:
            each.send(b'{"input": "')
            try:
                for _ in range(59):
                    each.send(b"x" * MIB)
            except OSError:
                break
        refused = held[-1].getresponse()
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        assert "memory" in json.loads(refused.read())["error"]["message"]
        small = http.client.HTTPConnection(str(place.hostname), place.port, timeout=60)
        small.request("GET", "/api/v1/sandboxes", headers={"x-api-key": server.key})
        assert small.getresponse().status == 200
    finally:
        for each in held:
            each.close()
