"""How a request appears in the log and the metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route, Router

from cloche import errors
from cloche.api.http import DialectEndpoint, status_of
from cloche.api.requests import RequestTracker, route_template_of
from cloche.engine.principal import current_principal, set_current_principal
from cloche.model import Principal
from cloche.telemetry import FREQUENT_EVENTS, PRIVATE_FIELDS, EventLog, Histogram


@pytest.mark.parametrize(
    ("path", "params", "route"),
    [
        ("/sandboxes", {}, "/sandboxes"),
        ("/sandboxes/i123", {"id": "i123"}, "/sandboxes/{id}"),
        ("/sandboxes/s/logs", {"id": "s"}, "/sandboxes/{id}/logs"),
        ("/a/secret/b/c.txt", {"path": "secret/b/c.txt"}, "/a/{path}"),
        ("/contexts/7", {"number": 7}, "/contexts/{number}"),
    ],
)
def test_a_route_has_names_where_the_path_has_values(path: str, params: dict[str, Any], route: str):
    assert route_template_of({"path": path, "path_params": params, "endpoint": object()}) == route


def test_a_path_that_met_no_route_is_not_told():
    assert route_template_of({"path": "/whatever/somebody/typed"}) == "-"


async def answered(app: Any, **more: Any) -> tuple[RequestTracker, list[dict[str, Any]]]:
    traffic, sent = RequestTracker(), []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/x", "headers": [], "state": {}, **more}
    await traffic.follow("e2b", app, scope, None, send)  # type: ignore[arg-type]
    return traffic, sent


async def test_an_answer_has_the_request_id_exactly_once():
    async def endpoint(request: Any) -> PlainTextResponse:
        return PlainTextResponse("", headers={"X-Request-Id": "of-the-program"})

    traffic, sent = await answered(Router([Route("/x", endpoint)]), headers=[(b"x-request-id", b"of-the-client")])
    ids = [value for name, value in sent[0]["headers"] if name.lower() == b"x-request-id"]
    assert ids == [b"of-the-client"]
    assert traffic.requests == {("e2b", 200): 1}


async def test_an_unanswered_request_counts_as_disconnected():
    async def leave(*asgi: Any) -> None:
        return

    traffic, sent = await answered(leave)
    assert (traffic.requests, sent) == ({("e2b", 499): 1}, [])


async def test_a_request_in_the_task_of_another_has_no_principal_until_admitted():
    """As a pipelined one is, whose task is made in that of the one before it."""
    seen = []

    async def look(*asgi: Any) -> None:
        seen.append(current_principal())

    set_current_principal(Principal(owner="alice", key_id="k1"))
    await answered(look)
    assert seen == [None]


@pytest.mark.parametrize(
    ("state", "goes_on"),
    [
        ({"principal": Principal(owner="alice", key_id="k1")}, True),
        ({"principal": Principal(owner="alice", key_id="k2")}, False),
        ({"principal": Principal(owner="local")}, True),
        ({"principal": Principal(owner="chat", key_id="jwt:k2")}, True),
        ({"payer": ("alice", "k2")}, True),
        ({}, True),
    ],
    ids=["valid", "stopped", "control socket", "token", "sandbox", "stranger"],
)
async def test_answers_to_a_revoked_key_are_cut_off(state: dict[str, Any], goes_on: bool):
    traffic, over, ended = RequestTracker(), asyncio.Event(), []

    async def stream(*asgi: Any) -> None:
        await over.wait()
        ended.append("whole")

    scope = {"type": "http", "method": "GET", "path": "/x", "headers": [], "state": state}
    task = asyncio.create_task(traffic.follow("e2b", stream, scope, None, None))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    traffic.keep({"k1"})
    await asyncio.sleep(0)
    over.set()
    await task  # the server sees no exception of ours, and closes what is unfinished
    assert ended == (["whole"] if goes_on else [])


async def test_a_request_that_is_cut_off_before_its_answer_has_one_in_its_dialects_shape():
    traffic, sent = RequestTracker(), []

    async def forever(request: Any) -> PlainTextResponse:
        await asyncio.Event().wait()
        return PlainTextResponse("")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    class Shouting:
        def render_error(self, error: errors.ClocheError, request: Any) -> PlainTextResponse:
            return PlainTextResponse(error.code.upper(), status_of(error))

    state = {"principal": Principal(owner="alice")}
    scope = {"type": "http", "method": "GET", "path": "/x", "headers": [], "state": state}
    task = asyncio.create_task(traffic.follow("e2b", DialectEndpoint(Shouting(), forever), scope, None, send))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await traffic.cut_off("alice")
    await task
    assert (sent[0]["status"], sent[1]["body"]) == (401, b"UNAUTHENTICATED")


def test_a_histogram_counts_each_value_once_at_its_upper_bound():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.sum) == ([2, 1, 1], 12.0)


def test_events_are_kept_without_private_fields_and_requests_not_at_all(capsys):
    log = EventLog()
    log.info("sandbox.ended", sandbox="i1", reason="a\nb", **dict.fromkeys(PRIVATE_FIELDS, "secret"))
    for event in FREQUENT_EVENTS:
        log.info(event)
    log.debug("detail")
    assert [(entry.event, entry.fields) for entry in log.recent] == [
        ("sandbox.ended", {"sandbox": "i1", "reason": "a\nb"})
    ]
    assert capsys.readouterr().err == ""  # a library is silent below warnings
    log.level = "info"
    log.info("sandbox.ended", sandbox="i1", reason="a\nb")
    assert capsys.readouterr().err.endswith(" [info] sandbox.ended sandbox=i1 reason='a\\nb'\n")
