"""How a request appears in the log and the metrics."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route, Router

from cloche.api.traffic import Traffic, route_of
from cloche.telemetry import FREQUENT, PRIVATE, Histogram, Log


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
    assert route_of({"path": path, "path_params": params, "endpoint": object()}) == route


def test_a_path_that_met_no_route_is_not_told():
    assert route_of({"path": "/whatever/somebody/typed"}) == "-"


async def answered(app: Any, **more: Any) -> tuple[Traffic, list[dict[str, Any]]]:
    traffic, sent = Traffic(), []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/x", "headers": [], "state": {}, **more}
    await traffic.follow("e2b", app, scope, None, send)  # type: ignore[arg-type]
    return traffic, sent


async def test_an_answer_has_the_requests_id_once_whoever_wrote_it():
    async def endpoint(request: Any) -> PlainTextResponse:
        return PlainTextResponse("", headers={"X-Request-Id": "of-the-program"})

    traffic, sent = await answered(Router([Route("/x", endpoint)]), headers=[(b"x-request-id", b"of-the-client")])
    ids = [value for name, value in sent[0]["headers"] if name.lower() == b"x-request-id"]
    assert ids == [b"of-the-client"]
    assert traffic.requests == {("e2b", 200): 1}


async def test_a_request_that_nobody_answered_counts_as_left():
    async def leave(*asgi: Any) -> None:
        return

    traffic, sent = await answered(leave)
    assert (traffic.requests, sent) == ({("e2b", 499): 1}, [])


def test_a_histogram_counts_each_value_once_at_its_upper_bound():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.sum) == ([2, 1, 1], 12.0)


def test_events_are_kept_without_what_is_private_and_requests_are_not_kept(capsys):
    log = Log()
    log.info("sandbox.ended", sandbox="i1", reason="a\nb", **dict.fromkeys(PRIVATE, "secret"))
    for event in FREQUENT:
        log.info(event)
    log.debug("detail")
    assert [(entry.event, entry.fields) for entry in log.recent] == [
        ("sandbox.ended", {"sandbox": "i1", "reason": "a\nb"})
    ]
    assert capsys.readouterr().err == ""  # a library is silent below warnings
    log.level = "info"
    log.info("sandbox.ended", sandbox="i1", reason="a\nb")
    assert capsys.readouterr().err.endswith(" [info] sandbox.ended sandbox=i1 reason='a\\nb'\n")
