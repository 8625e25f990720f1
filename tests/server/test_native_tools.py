"""Tools of our own dialect: a program's calls go out over its WebSocket, and their results come in."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx2
import pytest
from tests.server.test_native_api import PATIENCE_SECONDS, client, error_of, open_socket, run


@pytest.fixture(scope="module")
def api(server) -> Iterator[httpx2.Client]:
    with client(server.url, server.key) as made:
        yield made


@pytest.fixture
def box(api: httpx2.Client) -> Iterator[str]:
    """The path of a sandbox."""
    path = f"/sandboxes/{api.post('/sandboxes', json={}).json()['id']}"
    yield path
    api.delete(path)


def begin_with_tools(talk, code: str) -> dict:
    """As far as its first round of calls."""
    talk.send(json.dumps({"code": code, "tools": [{"name": "look-up", "parameters": {"type": "object"}}]}))
    assert json.loads(talk.recv())["type"] == "accepted"
    talk.send('{"type": "start"}')
    while (event := json.loads(talk.recv()))["type"] != "tools_called":
        pass
    return event


def test_a_socket_carries_calls_of_tools_and_their_results(api: httpx2.Client, box: str):
    code = "print(await asyncio.gather(look_up(n=1), look_up(n=2), return_exceptions=True))"
    with open_socket(api, f"{box}/execute") as talk:
        called = begin_with_tools(talk, code)
        assert called["calls"] == [{"id": f"call_00{n}", "name": "look-up", "input": {"n": n}} for n in (1, 2)]
        talk.send(json.dumps({"type": "tool_result", "call_id": "call_002", "error": "not found"}))
        talk.send(json.dumps({"type": "tool_result", "call_id": "call_001", "result": {"ü": [1]}}))
        events = [json.loads(message) for message in talk]
    assert events[0]["text"] == "[{'ü': [1]}, ToolExecutionError('not found')]\n"
    assert events[-1]["outcome"] == "ok"


def test_a_client_that_leaves_ends_a_program_that_waits_for_it(api: httpx2.Client, box: str):
    run(api, box, "x = 1")
    with open_socket(api, f"{box}/execute") as talk:
        begin_with_tools(talk, "await look_up()")
    assert run(api, box, "x", timeout_seconds=PATIENCE_SECONDS)["text"] == "1"


@pytest.mark.parametrize("wrong", [{"call_id": "call_009"}, {"call_id": 1}, {}, {"call_id": "call_001", "more": 1}])
def test_a_result_that_makes_no_sense_is_refused(api: httpx2.Client, box: str, wrong: dict):
    with open_socket(api, f"{box}/execute") as talk:
        begin_with_tools(talk, "await look_up()")
        talk.send(json.dumps({"type": "tool_result", **wrong}))
        told = json.loads(talk.recv())
        assert told["type"] == "error" and told["error"]["code"] == "invalid_request"
    assert run(api, box, "1", timeout_seconds=PATIENCE_SECONDS)["text"] == "1"


def test_tools_need_a_socket_and_names(api: httpx2.Client, box: str):
    for path in ("run", "stream"):
        refused = api.post(f"{box}/{path}", json={"code": "1", "tools": [{"name": "x"}]})
        assert refused.status_code == 400 and "WebSocket" in error_of(refused)["message"]
    with open_socket(api, f"{box}/execute") as talk:
        talk.send(json.dumps({"code": "1", "tools": [{"name": "a-b"}, {"name": "a b"}]}))
        told = json.loads(talk.recv())
        assert told["type"] == "error" and "'a-b' and 'a b'" in told["error"]["message"]
