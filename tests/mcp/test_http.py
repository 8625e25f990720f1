"""`/mcp` as whoever has no official client sees it: keys, owners, pages, bounds, and its end."""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from tests.conftest import serving, wait_until, with_template
from tests.mcp.conftest import VERSION, House, Raw, over_http

from cloche.api.auth import Gatekeeper
from cloche.config import Config
from cloche.mcp.http import McpDialect
from cloche.model import Principal, Template

Making = Callable[..., Raw]
CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "run_code", "arguments": {"code": "1"}}}


@pytest.fixture(scope="module")
def strict(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A server whose sessions soon end, and are few."""
    place = with_template(tmp_path_factory.mktemp("strict") / "data", template)
    env = {"CLOCHE_MCP_IDLE_SECONDS": "4", "CLOCHE_MCP_SESSIONS_PER_OWNER": "2"}
    with serving(place, env=env) as running:
        yield House(running, place)


def test_without_a_key_there_is_nothing(raw: Making, house: House):
    unknown, none = raw("e2b_" + "0" * 40), raw()
    del none.headers["authorization"]
    for client in (unknown, none):
        answer = client.post(CALL)
        assert answer.status_code == 401 and answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.json()["error"]["data"]["code"] == "unauthenticated"
    none.headers["x-api-key"] = house.server.key
    assert none.initialize().status_code == 200


async def test_a_wrong_key_is_told_to_the_official_client(house: House):
    with pytest.raises(Exception) as caught:
        async with over_http(house, "e2b_" + "1" * 40)():
            pass
    assert "this key is not known here" in _leaf(caught.value)


def _leaf(error: BaseException) -> str:
    return _leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else str(error)


def test_a_foreign_session_is_answered_as_one_that_never_existed(raw: Making, house: House):
    victim, attacker = raw(), raw(house.new_owner("attacker"))
    victim.initialize()
    assert victim.call("run_code", code="secret = 1").status_code == 200
    attacker.headers["mcp-session-id"] = "mcp_" + "0" * 32
    absent = _tried(attacker)
    attacker.headers["mcp-session-id"] = victim.headers["mcp-session-id"]
    foreign = _tried(attacker)
    assert [each.status_code for each in foreign] == [404] * 3
    assert [_said(each) for each in foreign] == [_said(each) for each in absent]
    assert "1" in victim.call("run_code", id=2, code="secret").text
    del attacker.headers["mcp-session-id"]


def _tried(client: Raw) -> list[httpx2.Response]:
    return [client.call("run_code", code="secret"), client.end(), client.http.get("/mcp", headers=client.headers)]


def _said(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, json.dumps({**answer.json()["error"], "data": None})


def test_a_foreign_sandbox_cannot_be_used(raw: Making, house: House):
    victim, attacker = raw(), raw(house.new_owner("thief"))
    victim.initialize(), attacker.initialize()
    theirs = victim.call("sandbox_info").json()["result"]["structuredContent"]["sandbox"]
    answers = [attacker.call("use_sandbox", sandbox=each).json() for each in (theirs, "i" + "0" * 20)]
    assert all(each["result"]["isError"] for each in answers)
    told = [each["result"]["content"][0]["text"] for each in answers]
    assert told[0].replace(theirs, "") == told[1].replace("i" + "0" * 20, "")


async def test_without_the_extra_it_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    gatekeeper, config = Gatekeeper(None, Principal(owner="local")), Config(data_dir=str(tmp_path))
    app = McpDialect(None, gatekeeper, config)  # type: ignore[arg-type]  # it does not come so far
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1") as http:
        answer = await http.post("/mcp", json=CALL)
    assert answer.status_code == 503
    assert 'pip install "mcp>=2"' in answer.json()["error"]["message"]


def test_web_pages_of_other_sites_are_refused(raw: Making, house: House):
    client = raw()
    refused = client.initialize(origin="https://evil.example.com")
    assert refused.status_code == 403 and refused.json()["error"]["data"]["code"] == "forbidden"
    assert client.initialize(origin="null").status_code == 403
    assert client.initialize(origin=house.server.url).status_code == 200


@pytest.mark.parametrize("host", ["evil.test", "localhost.evil.test", "127.0.0.1.evil.test", "0.0.0.0", "", "a@[::1"])
async def test_without_keys_a_rebound_name_is_refused(tmp_path: Path, host: str):
    """A page whose name was rebound to this machine has the server's own Origin, or none."""
    gatekeeper, config = Gatekeeper(None, Principal(owner="local")), Config(data_dir=str(tmp_path))
    app = McpDialect(None, gatekeeper, config)  # type: ignore[arg-type]  # it does not come so far
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1") as http:
        for more in ({}, {"origin": f"http://{host}"}, {"origin": "null"}):
            answers = [await http.request(method, "/mcp", headers={"host": host, **more}) for method in ("POST", "GET")]
            assert [each.status_code for each in answers] == [403, 403]


def test_versions_without_sessions_are_sent_back_to_initialize(raw: Making):
    answer = raw().post({"jsonrpc": "2.0", "id": 1, "method": "server/discover"}, mcp_protocol_version="2026-07-28")
    assert answer.status_code == 400 and answer.json()["error"]["code"] == -32022
    assert "2025-11-25" in answer.json()["error"]["data"]["supported"]


def test_invalid_fields_are_named(raw: Making):
    client = raw()
    assert "needs a session" in client.post(CALL).json()["error"]["message"]
    client.initialize()
    for body, code, said in (
        (b"{", -32700, "no valid JSON"),
        (b"\xff", -32700, "no valid JSON"),
        (b"[]", -32600, "one message at a time"),
        ({"jsonrpc": "1.0", "id": 1, "method": "ping"}, -32600, '"jsonrpc": "2.0"'),
        ({"jsonrpc": "2.0", "id": {}, "method": "ping"}, -32600, "$.id"),
        (b" " * (33 << 20), -32600, "over the limit"),
    ):
        answer = client.post(body)
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.json()["error"]["code"] == code and said in answer.json()["error"]["message"], answer.text
    assert client.post({"jsonrpc": "2.0", "id": 1, "method": "none"}).json()["error"]["code"] == -32601
    no_name = client.post({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {}})
    assert no_name.json()["error"]["code"] == -32602
    assert client.post({"jsonrpc": "2.0", "id": 9, "result": {}}).status_code == 202
    assert client.http.put("/mcp", headers=client.headers).status_code == 400
    assert client.http.get("/mcp/none", headers=client.headers).status_code == 404


def test_an_address_can_configure_the_session(raw: Making, house: House):
    client = raw()
    headers = {**client.headers}
    params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "a", "version": "1"}}
    body = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
    begun = client.http.post("/mcp?tools=run_code,list_files", json=body, headers=headers)
    client.headers["mcp-session-id"] = begun.headers["mcp-session-id"]
    listed = client.post({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}).json()["result"]["tools"]
    assert [each["name"] for each in listed] == ["run_code", "list_files"]
    assert client.call("delete_file", path="a").json()["error"]["code"] == -32602
    for query in ("tools=none", "other=1", "template=%20"):
        assert client.http.post(f"/mcp?{query}", json=body, headers=headers).status_code in (400, 404)


def test_a_client_that_leaves_in_the_middle_interrupts_its_program(raw: Making, house: House):
    client = raw()
    client.initialize()
    client.call("run_code", code="kept = 1")
    host, port = house.server.url.removeprefix("http://").split(":")
    message = {
        **CALL,
        "params": {"name": "run_code", "arguments": {"code": "open('on', 'w'); import time; time.sleep(100)"}},
    }
    body = json.dumps(message).encode()
    head = "".join(f"{name}: {value}\r\n" for name, value in client.headers.items())
    with socket.create_connection((host, int(port))) as connection:
        request = f"POST /mcp HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-length: {len(body)}\r\n{head}\r\n"
        connection.sendall(request.encode() + body)
        wait_until(lambda: "/mnt/data/on" in client.call("list_files", id=2).text)
    assert '"text":"1"' in client.call("run_code", id=3, code="kept").text  # its turn has come


def test_sessions_per_owner_are_limited(strict: House):
    with httpx2.Client(base_url=strict.server.url, timeout=60) as http:
        headers = {"authorization": f"Bearer {strict.server.key}", "accept": "application/json, text/event-stream"}
        clients = [Raw(http, {**headers}) for _ in range(3)]
        assert [each.initialize().status_code for each in clients] == [200, 200, 429]
        assert "sessions are open" in clients[2].initialize().json()["error"]["message"]
        clients[0].end()
        assert clients[2].initialize().status_code == 200
        for each in clients[1:]:
            assert each.end().status_code == 204
        assert clients[1].call("run_code", code="1").status_code == 404


def test_a_client_that_vanishes_leaves_no_sandbox(strict: House):
    with httpx2.Client(base_url=strict.server.url, timeout=60) as http:
        client = Raw(http, {"authorization": f"Bearer {strict.server.key}", "accept": "text/event-stream"})
        client.initialize()
        client.call("run_code", code="1")
        client.call("fork_sandbox", id=2)
        assert len(strict.sandboxes()) == 2
        wait_until(lambda: not strict.sandboxes())
        assert client.call("run_code", id=3, code="1").status_code == 404


async def test_ending_a_session_ends_its_sandboxes(house: House):
    key = house.new_owner("orderly")
    async with over_http(house, key)() as client:
        await client.call_tool("run_code", {"code": "1"})
        await client.call_tool("fork_sandbox", {})
        assert len(house.sandboxes(key)) == 2
    wait_until(lambda: not house.sandboxes(key))


def test_a_server_that_stops_ends_its_sessions(strict: House):
    """The last one here: there is no such server any more."""
    running = strict.server
    with httpx2.Client(base_url=running.url, timeout=60) as http:
        client = Raw(http, {"authorization": f"Bearer {running.key}", "accept": "application/json, text/event-stream"})
        client.initialize()
        answers: list[object] = []

        def listen() -> None:
            with http.stream("GET", "/mcp", headers=client.headers) as stream:
                answers.extend(stream.iter_lines())
                answers.append("ended")

        listening = threading.Thread(target=listen)
        listening.start()
        client.call("run_code", code="1")
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(30) == 0
        listening.join(10)
        assert answers[-1] == "ended"


def test_client_descriptions_are_bounded(raw: Making):
    """A session keeps it for as long as it lasts."""
    client = {"name": "x" * 100_000, "version": "1"}
    params = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": client}
    hello = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
    stranger, known = raw(), raw()
    assert known.initialize().status_code == 200
    for client_of in (stranger, known):
        refused = client_of.post(hello)
        assert refused.status_code == 413
        assert "mcp-session-id" not in refused.headers


def test_an_erased_owner_has_no_session(raw: Making, house: House):
    client = raw(house.new_owner("erased"))
    client.initialize()
    assert client.call("run_code", code="1").status_code == 200
    house.ask("DELETE", "/admin/owners/erased")
    again = raw(house.new_owner("erased"))
    again.headers["mcp-session-id"] = client.headers.pop("mcp-session-id")
    assert again.call("run_code", code="1").status_code == 404
    del again.headers["mcp-session-id"]
