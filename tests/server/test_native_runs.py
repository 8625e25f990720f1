"""Detached runs over our own dialect: connections come and go, the run and what it said stay."""

from __future__ import annotations

import contextlib
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from tests.conftest import serving, wait_until

from cloche.events import Output, fold
from cloche.protocol import responses
from cloche.protocol.responses import EventStreamParser

PATIENCE_SECONDS = 60
KEY = "e2b_" + "7" * 40
COUNT = "import time\nfor i in range({count}):\n    print(i, flush=True); time.sleep({pause})\n"


def client(url: str, key: str) -> httpx2.Client:
    return httpx2.Client(base_url=f"{url}/api/v1", headers={"x-api-key": key}, timeout=PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def api(server) -> Iterator[httpx2.Client]:
    with client(server.url, server.key) as made:
        yield made


@pytest.fixture(scope="module")
def stranger(server) -> Iterator[httpx2.Client]:
    """Somebody else with a key of their own."""
    asked = {"owner": "stranger", "role": "user", "name": "test"}
    made = httpx2.post(f"{server.url}/admin/keys", headers={"x-api-key": server.key}, json=asked).json()
    with client(server.url, made["key"]) as other:
        yield other


@pytest.fixture
def box(api: httpx2.Client) -> Iterator[str]:
    """The path of a sandbox."""
    path = f"/sandboxes/{api.post('/sandboxes', json={}).json()['id']}"
    yield path
    api.delete(path)


def start(api: httpx2.Client, box: str, code: str, **how: object) -> str:
    """The path of the run."""
    begun = api.post(f"{box}/runs", json={"code": code, **how})
    assert begun.status_code == 201, begun.text
    assert begun.json()["state"] == "running"
    return f"/runs/{begun.json()['id']}"


def events(api: httpx2.Client, run: str, after: object = 0, headers: dict[str, str] | None = None) -> list:
    answer = api.get(f"{run}/events", params={"after": after}, headers=headers)
    assert answer.status_code in (200, 204), answer.text
    return list(EventStreamParser().feed_numbered(answer.content))


def error_of(response: httpx2.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"code", "message", "request_id"} and len(error["message"]) > 10
    return error


def cut_after(api: httpx2.Client, run: str, after: int, most_bytes: int) -> list:
    """What comes over a connection that breaks in the middle of something."""
    place = urlsplit(str(api.base_url))
    with socket.create_connection((place.hostname, place.port), timeout=PATIENCE_SECONDS) as raw:
        key = api.headers["x-api-key"]
        raw.sendall(f"GET /api/v1{run}/events?after={after} HTTP/1.0\r\nX-API-Key: {key}\r\n\r\n".encode())
        got = b""
        while len(got) < most_bytes and (chunk := raw.recv(most_bytes - len(got))):
            got += chunk
    return list(EventStreamParser().feed_numbered(got.partition(b"\r\n\r\n")[2]))


def test_connections_that_break_lose_nothing_and_repeat_nothing(api, box: str):
    run, seen = start(api, box, COUNT.format(count=40, pause=0.01)), []
    for most_bytes in (200, 400, 600, 777, 900, 1000):
        seen += cut_after(api, run, seen[-1].number if seen else 0, most_bytes)
    seen += events(api, run, seen[-1].number)
    assert [each.number for each in seen] == list(range(1, len(seen) + 1))
    done = fold(each.event for each in seen)
    assert done.stdout == "".join(f"{i}\n" for i in range(40)) and done.outcome == "ok"
    assert responses.decode_run(api.get(f"{run}/result").content) == done


def test_a_browser_that_comes_again_goes_on_where_it_was(api, box: str):
    run = start(api, box, COUNT.format(count=3, pause=0))
    whole = events(api, run)
    raw = api.get(f"{run}/events").text
    assert raw.startswith("id: 1\nevent: started\ndata: {")
    assert events(api, run, 0, {"Last-Event-ID": "2"}) == whole[2:]
    over = api.get(f"{run}/events", headers={"Last-Event-ID": str(len(whole))})
    assert (over.status_code, over.content) == (204, b"")
    for nonsense in ("-1", "x", "1.5", "9" * 30, "²"):
        answer = api.get(f"{run}/events", headers={"Last-Event-ID": nonsense.encode()})
        assert answer.status_code == 400 and error_of(answer)["code"] == "invalid_request"


def test_its_life_as_it_is_told(api, box: str):
    run = start(api, box, "import time\nprint('on', flush=True)\ntime.sleep(60)")
    wait_until(lambda: api.get(run).json()["events"] == 2)
    info = api.get(run).json()
    assert (info["state"], info["outcome"], f"/sandboxes/{info['sandbox']}") == ("running", None, box)
    assert [each["id"] for each in api.get(f"{box}/runs").json()] == [info["id"]]
    assert info["id"] in [each["id"] for each in api.get("/runs").json()]
    assert api.post(f"{run}/interrupt").json() == {"interrupted": True}
    result = api.get(f"{run}/result").json()
    assert (result["outcome"], result["stdout"], result["id"]) == ("interrupted", "on\n", info["id"])
    assert api.post(f"{run}/interrupt").json() == {"interrupted": False}
    api.delete(box)
    assert api.get(f"{run}/result").json() == result  # also when its sandbox has ended
    assert [each["outcome"] for each in api.get(f"{box}/runs").json()] == ["interrupted"]
    assert api.delete(run).status_code == 204
    assert api.get(run).status_code == api.delete(run).status_code == 404


def test_a_sandbox_that_is_killed_ends_its_runs(api, box: str):
    run = start(api, box, "import time\nprint('on', flush=True)\ntime.sleep(60)")
    wait_until(lambda: api.get(run).json()["events"] == 2)
    seen = cut_after(api, run, 0, 300)
    api.delete(box)
    rest = events(api, run, seen[-1].number if seen else 0)
    done = fold(each.event for each in seen + rest)
    assert (done.outcome, done.reason, done.stdout) == ("died", "sandbox killed", "on\n")


def test_a_foreign_run_is_answered_for_as_one_that_never_existed(api, stranger, box: str):
    run = start(api, box, "1")
    never = "/runs/x" + "0" * 20
    calls = [("GET", ""), ("GET", "/result"), ("GET", "/events"), ("POST", "/interrupt"), ("DELETE", "")]
    for method, path in calls:
        foreign, unknown = stranger.request(method, run + path), stranger.request(method, never + path)
        assert foreign.status_code == unknown.status_code == 404
        said = [error_of(foreign), error_of(unknown)]
        assert said[0]["code"] == said[1]["code"] == "run_not_found"
        assert said[0]["message"].replace(run[6:], "") == said[1]["message"].replace(never[6:], "")
    assert stranger.get("/runs").json() == []
    assert (
        stranger.get(f"{box}/runs").status_code == stranger.post(f"{box}/runs", json={"code": "1"}).status_code == 404
    )
    assert api.get(f"{run}/result").json()["text"] == "1"


@pytest.mark.parametrize(
    "id", ["x", "..", "%00", "x%27%20OR%201", "%ED%A0%80", "x" + "A" * 20, "x" * 5000, "%F0%9F%90%8D"]
)
def test_an_unknown_run_is_not_found(api, id: str):
    for path in ("", "/result", "/events", "/interrupt"):
        answer = api.request("POST" if path == "/interrupt" else "GET", f"/runs/{id}{path}")
        assert answer.status_code in (400, 404), answer.text
        assert len(error_of(answer)["message"]) < 300


@pytest.mark.parametrize("after", ["-1", "x", "1.5", "", "99", "9" * 30, "true"])
def test_a_place_that_does_not_exist_is_refused(api, box: str, after: str):
    run = start(api, box, "1")
    api.get(f"{run}/result")
    answer = api.get(f"{run}/events", params={"after": after})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"input": True}, "no client to answer"),
        ({"tools": [{"name": "f"}]}, "no client to answer"),
        ({"timeout_seconds": -1}, "timeout"),
        ({"detach": True}, "no field 'detach'"),
        ({"cwd": ""}, "path"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused(api, box: str, asked: dict, said: str):
    answer = api.post(f"{box}/runs", json={"code": "1", **asked})
    assert answer.status_code == 400 and said in error_of(answer)["message"]
    assert api.get(f"{box}/runs").json() == []
    assert api.post(f"{box}/runs", json={"code": "1", "context": "none"}).status_code == 404


def test_leaving_while_waiting_for_a_result_changes_nothing(api, box: str):
    run = start(api, box, "import time; time.sleep(0.6); 'here'")
    with contextlib.suppress(httpx2.ReadTimeout):
        api.get(f"{run}/result", timeout=0.2)
    assert api.get(f"{run}/result").json()["text"] == "'here'"


def test_it_is_in_the_document(api):
    paths = api.get("/openapi.json").json()["paths"]
    assert {"get", "post"} <= paths["/api/v1/sandboxes/{id}/runs"].keys()
    for path in ("", "/result", "/events", "/interrupt"):
        assert "/api/v1/runs/{run}" + path in paths
    (after,) = (each for each in paths["/api/v1/runs/{run}/events"]["get"]["parameters"] if each["in"] == "query")
    assert after["name"] == "after" and not after["required"]


def test_a_killed_server_reports_its_runs_after_the_next_start(own_data_dir: Path):
    with serving(own_data_dir, env={"CLOCHE_API_KEY": KEY}) as server, client(server.url, KEY) as api:
        box = f"/sandboxes/{api.post('/sandboxes', json={}).json()['id']}"
        whole = start(api, box, "print('whole'); 6 * 7")
        result = api.get(f"{whole}/result").json()
        going = start(api, box, COUNT.format(count=100_000, pause=0.01))
        seen = cut_after(api, going, 0, 1500)
        server.process.kill()
        server.process.wait(60)
    with serving(own_data_dir, env={"CLOCHE_API_KEY": KEY}) as server, client(server.url, KEY) as api:
        assert api.get(f"{whole}/result").json() == result
        _check_died(api, going, seen)
        box = f"/sandboxes/{api.post('/sandboxes', json={}).json()['id']}"
        last = start(api, box, "print('on', flush=True)\nimport time; time.sleep(60)")
        wait_until(lambda: api.get(last).json()["events"] == 2)
    db = sqlite3.connect(own_data_dir / "store.sqlite3")  # which was stopped properly this time
    asked = "SELECT instance, outcome, reason, events FROM runs WHERE id = ?"
    assert db.execute(asked, (last.rpartition("/")[2],)).fetchone() == (None, "died", "shutdown", 3)


def _check_died(api: httpx2.Client, run: str, seen: list) -> None:
    """What a reader saw stays as it was."""
    info = api.get(run).json()
    assert (info["state"], info["outcome"], info["reason"]) == ("ended", "died", "its host process died")
    whole = events(api, run)
    assert whole[: len(seen)] == seen and [each.number for each in whole] == list(range(1, len(whole) + 1))
    done = fold(each.event for each in whole)
    numbers = [int(line) for line in done.stdout.split()]
    assert numbers == list(range(len(numbers))) and len(numbers) >= sum(isinstance(e.event, Output) for e in seen)
    assert responses.decode_run(api.get(f"{run}/result").content) == done
