"""Our own dialect, by a plain HTTP client and a plain WebSocket client."""

from __future__ import annotations

import base64
import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx2
import pytest
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from cloche.api.auth import Gatekeeper
from cloche.api.native import NativeApi
from cloche.config import Config
from cloche.model import Principal

PATIENCE_SECONDS = 60


@pytest.fixture(scope="module")
def api(server) -> Iterator[httpx2.Client]:
    with client(server.url, server.key) as made:
        yield made


def client(url: str, key: str) -> httpx2.Client:
    return httpx2.Client(base_url=f"{url}/api/v1", headers={"x-api-key": key}, timeout=PATIENCE_SECONDS)


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


def run(api: httpx2.Client, box: str, code: str, **how: object) -> dict:
    return api.post(f"{box}/run", json={"code": code, **how}).json()


def open_socket(api: httpx2.Client, path: str) -> ClientConnection:
    url = "ws" + str(api.base_url).rstrip("/").removeprefix("http") + path
    return connect(url, additional_headers={"x-api-key": api.headers["x-api-key"]})


def error_of(response: httpx2.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"code", "message", "request_id"} and len(error["message"]) > 10
    return error


# --- sandboxes


def test_a_sandbox_from_its_creation_to_its_end(api: httpx2.Client):
    asked = {"metadata": {"a": "b"}, "env": {"X": "1"}, "timeout_seconds": 100, "limits": {"output_bytes": 1000}}
    made = api.post("/sandboxes", json=asked)
    info = made.json()
    path = f"/sandboxes/{info['id']}"
    assert made.status_code == 201 and info["state"] == "running" and info["metadata"] == {"a": "b"}
    assert info["limits"]["output_bytes"] == 1000 and info["limits"]["memory_bytes"] > 1000
    assert run(api, path, "import os; os.environ['X']")["text"] == "'1'"
    assert info["id"] in [each["id"] for each in api.get("/sandboxes").json()]
    renewed = api.post(f"{path}/renew", json={"seconds": 1000}).json()
    assert renewed["deadline_at"] > info["deadline_at"]
    assert api.delete(path).status_code == 204
    gone = api.post(f"{path}/run", json={"code": "1"})
    assert gone.status_code == 410 and error_of(gone)["code"] == "sandbox_killed"
    assert "was killed at" in error_of(gone)["message"]
    assert api.get(path).json()["state"] == "ended"
    assert api.get(path, params={"running": "true"}).status_code == 410


def test_nothing_lives_for_ever_on_a_server(api: httpx2.Client, box: str):
    info = api.get(box).json()
    assert info["deadline_at"] - info["created_at"] == pytest.approx(api.get("/info").json()["max_lifetime_seconds"])


def test_a_foreign_sandbox_is_answered_for_as_one_that_never_existed(api, stranger, box: str):
    never = "/sandboxes/i00000000000000000000"
    for method, path, body in (
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "/run", {"code": "1"}),
        ("GET", "/files/list", None),
        ("GET", "/hold", None),
        ("POST", "/commands", {"command": "true"}),
    ):
        foreign = stranger.request(method, box + path, json=body)
        unknown = stranger.request(method, never + path, json=body)
        assert foreign.status_code == unknown.status_code == 404
        said = error_of(foreign)["message"], error_of(unknown)["message"]
        assert said[0].replace(box[11:], "X") == said[1].replace(never[11:], "X")
    with pytest.raises(InvalidStatus) as refused:
        open_socket(stranger, f"{box}/execute")
    assert refused.value.response.status_code == 404
    assert json.loads(refused.value.response.body)["error"]["code"] == "sandbox_not_found"
    assert box[11:] not in [each["id"] for each in stranger.get("/sandboxes").json()]
    assert stranger.get("/sandboxes", params={"all": "true"}).status_code == 403
    assert api.get("/sandboxes", params={"all": "true"}).status_code == 403  # for the control socket alone
    assert run(api, box, "1")["text"] == "1"


def test_no_key_and_a_wrong_key(server):
    for headers in ({}, {"x-api-key": "e2b_" + "f" * 40}):
        for path in ("/whoami", "/info", "/templates", "/sandboxes", "/sandboxes/i0", "/logs"):
            answer = httpx2.get(f"{server.url}/api/v1{path}", headers=headers)
            assert answer.status_code == 401 and error_of(answer)["code"] == "unauthenticated"
    with pytest.raises(InvalidStatus) as refused:
        connect(server.url.replace("http", "ws") + "/api/v1/sandboxes/i0/execute")
    assert refused.value.response.status_code == 401


def test_whoami_info_and_templates(api, stranger):
    assert api.get("/whoami").json()["role"] == "admin"
    assert stranger.get("/whoami").json()["owner"] == "stranger"
    assert "python" in api.get("/info").json()["languages"]
    (template, *_) = [each for each in api.get("/templates").json() if each["name"] == "python"]
    assert template["packages"] and "root" not in template


def test_logs_tell_why_a_sandbox_ended_and_are_for_admins(api, stranger):
    id = api.post("/sandboxes", json={}).json()["id"]
    api.delete(f"/sandboxes/{id}")
    (entry,) = [each for each in api.get("/logs", params={"sandbox": id}).json() if each["event"] == "sandbox.ended"]
    assert entry["fields"]["reason"] == "killed by its owner"
    assert stranger.get("/logs").status_code == 403


def test_a_held_sandbox_ends_with_the_connection(api: httpx2.Client):
    path = f"/sandboxes/{api.post('/sandboxes', json={}).json()['id']}"
    with api.stream("GET", f"{path}/hold") as held:
        chunks = held.iter_raw()
        assert b"event: watching" in next(chunks)
        assert api.get(path).json()["state"] == "running"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while api.get(path).json()["state"] == "running":
        assert time.monotonic() < deadline
    assert "held" in api.get(path).json()["end_reason"]


# --- bad input


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "said"),
    [
        ("/sandboxes", {"template": "no-such"}, 404, "template_not_found", "python"),
        ("/sandboxes", {"template": "../x"}, 404, "template_not_found", "not a template name"),
        ("/sandboxes", {"timeout_seconds": -1}, 400, "invalid_request", "positive"),
        ("/sandboxes", {"timeout_seconds": 0}, 400, "invalid_request", "positive"),
        ("/sandboxes", {"timeout_seconds": 1e9}, 400, "invalid_request", "on this host"),
        ("/sandboxes", {"limits": {"memory_bytes": 1}}, 400, "invalid_request", "at least"),
        ("/sandboxes", {"limits": {"memory_bytes": 1 << 60}}, 400, "invalid_request", "maximum"),
        ("/sandboxes", {"env": {"a=b": "c"}}, 400, "invalid_request", "environment"),
        ("/sandboxes", {"enw": {}}, 400, "invalid_request", "did you mean 'env'"),
        ("BOX/run", {"code": "1", "context": "nope"}, 404, "context_not_found", "nope"),
        ("BOX/run", {"code": "1", "cwd": ""}, 400, "invalid_path", "empty"),
        ("BOX/run", {"code": "1", "input": True}, 400, "invalid_request", "WebSocket"),
        ("BOX/stream", {"code": "1", "timeout_seconds": -1}, 400, "invalid_request", "positive"),
        ("BOX/contexts", {"language": "cobol"}, 400, "invalid_request", "cobol"),
        ("BOX/contexts/nope/restart", {}, 404, "context_not_found", "nope"),
        ("BOX/renew", {}, 400, "invalid_request", "seconds"),
        ("BOX/commands", {"command": "true", "user": "nobody"}, 400, "invalid_request", "nobody"),
        ("BOX/commands", {"command": "a\0b"}, 400, "invalid_request", "NUL"),
        ("BOX/processes", {"command": "x", "terminal": {"rows": 0, "columns": 1}}, 400, "invalid_request", "rows"),
        ("BOX/processes/nope/signal", {"signal": 9}, 404, "process_not_found", "nope"),
        ("BOX/files/remove", {"path": "nothing"}, 404, "file_not_found", "nothing"),
        ("BOX/files/make_dir", {"path": "a\0"}, 400, "invalid_path", "NUL"),
        ("/nowhere", {}, 404, "not_found", "openapi.json"),
    ],
)
def test_bad_input_gets_an_error_that_names_the_field(api, box, path, body, status, code, said):
    answer = api.post(path.replace("BOX", box), json=body, headers={"x-request-id": "mine"})
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)
    assert said in error_of(answer)["message"] and error_of(answer)["request_id"] == "mine"
    assert run(api, box, "1")["text"] == "1"


def test_bad_json_bad_queries_and_bad_methods(api: httpx2.Client, box: str):
    for answer, status in (
        (api.post(f"{box}/run", content=b'{"code": "1'), 400),
        (api.post(f"{box}/run", content=b"\xff\xfe"), 400),
        (api.post(f"{box}/run", content=b"[]"), 400),
        (api.get(f"{box}/files/list", params={"depth": "x"}), 400),
        (api.get(f"{box}/files/list", params={"depht": "1"}), 400),
        (api.get(f"{box}/files/content"), 400),
        (api.get(f"{box}/files/content", params={"path": ""}), 400),
        (api.put(f"{box}/files/content", params={"path": "a", "mode": "999"}, content=b""), 400),
        (api.get(f"{box}/run"), 400),
        (api.patch(box), 400),
    ):
        assert answer.status_code == status and error_of(answer)["code"].startswith("invalid_")
    assert run(api, box, "1")["text"] == "1"


# --- running


def test_a_run_is_one_answer_with_everything(api: httpx2.Client, box: str):
    plot = "import matplotlib.pyplot as plt; plt.plot([1]); print('out'); 6 * 7"
    answer = run(api, box, plot)
    assert (answer["text"], answer["stdout"], answer["outcome"], answer["error"]) == ("42", "out\n", "ok", None)
    (picture,) = [each for each in answer["results"] if "png" in each]
    assert "png" in picture["binary"] and base64.b64decode(picture["png"]).startswith(b"\x89PNG")
    assert run(api, box, "input() + input()", input=["a", "b"])["text"] == "'ab'"
    assert run(api, box, "1/0")["error"]["name"] == "ZeroDivisionError"
    assert run(api, box, "import sys; sys.argv", argv=["p", "q"])["text"] == "['p', 'q']"


def test_a_stream_is_server_sent_events(api: httpx2.Client, box: str):
    with api.stream("POST", f"{box}/stream", json={"code": "print(1)\n2"}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        blocks = [block.split("\n") for block in answer.read().decode().split("\n\n") if block]
    assert [name for name, _ in blocks] == ["event: started", "event: output", "event: display", "event: ended"]
    assert [json.loads(data[6:])["type"] for _, data in blocks] == ["started", "output", "display", "ended"]


@pytest.mark.parametrize("how", ["run", "stream"])
def test_a_client_that_leaves_interrupts_the_program(api: httpx2.Client, box: str, how: str):
    run(api, box, "x = 1")
    code = "open('begun', 'w').close()\nimport time\ntime.sleep(600)"
    body = json.dumps({"code": code}).encode()
    with _raw(api) as plug:
        plug.sendall(_head(api, "POST", f"{box}/{how}", len(body)) + body)
        _until(lambda: api.get(f"{box}/files/exists", params={"path": "begun"}).json()["exists"])
    assert run(api, box, "x", timeout_seconds=PATIENCE_SECONDS)["text"] == "1"


def test_a_command_of_a_client_that_leaves_is_killed(api: httpx2.Client, box: str):
    body = json.dumps({"command": "touch begun; sleep 600"}).encode()
    with _raw(api) as plug:
        plug.sendall(_head(api, "POST", f"{box}/commands", len(body)) + body)
        _until(lambda: api.get(f"{box}/files/exists", params={"path": "begun"}).json()["exists"])
    _until(lambda: api.get(f"{box}/processes").json() == [])


def test_copies_of_a_context_that_their_client_does_not_wait_for_are_not_made(api: httpx2.Client, box: str):
    context = f"{box}/contexts/default"
    run(api, box, "x = 1")
    code = "import os, time\nopen('begun', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)"
    with _raw(api) as running:
        body = json.dumps({"code": code}).encode()
        running.sendall(_head(api, "POST", f"{box}/run", len(body)) + body)
        _until(lambda: api.get(f"{box}/files/exists", params={"path": "begun"}).json()["exists"])
        for path in ("checkpoints", "fork"):
            with _raw(api) as left:
                left.sendall(_head(api, "POST", f"{context}/{path}", 2) + b"{}")
                api.get(box)  # whose answer comes after that has been heard, and before it was closed
        api.put(f"{box}/files/content", params={"path": "go"}, content=b"")
        assert run(api, box, "x", timeout_seconds=PATIENCE_SECONDS)["text"] == "1"  # it waited behind them
    assert api.get(f"{context}/checkpoints").json() == []
    assert [each["id"] for each in api.get(f"{box}/contexts").json()] == ["default"]


def _raw(api: httpx2.Client) -> socket.socket:
    parts = urlsplit(str(api.base_url))
    return socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_SECONDS)


def _head(api: httpx2.Client, method: str, path: str, size: int) -> bytes:
    lines = (f"{method} /api/v1{path} HTTP/1.1", "host: x", f"x-api-key: {api.headers['x-api-key']}")
    return "\r\n".join([*lines, f"content-length: {size}", "", ""]).encode()


def _until(true) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline


def test_a_socket_carries_answers_and_interrupts(api: httpx2.Client, box: str):
    with open_socket(api, f"{box}/execute") as talk:
        talk.send(json.dumps({"code": "print(input('? '), flush=True)\nwhile True: pass", "input": True}))
        assert json.loads(talk.recv())["type"] == "accepted"
        talk.send('{"type": "start"}')
        seen = []
        for message in talk:
            event = json.loads(message)
            seen.append(event["type"])
            if event["type"] == "input":
                talk.send('{"type": "answer", "text": "me"}')
            if event["type"] == "output" and "me" in event["text"]:
                talk.send('{"type": "interrupt"}')
        assert seen[0] == "started" and seen[-1] == "ended" and "input" in seen
        assert event["outcome"] == "interrupted"


def test_a_socket_that_leaves_interrupts_the_program(api: httpx2.Client, box: str):
    run(api, box, "x = 1")
    with open_socket(api, f"{box}/execute") as talk:
        talk.send(json.dumps({"code": "import time\ntime.sleep(600)"}))
        talk.recv()
        talk.send('{"type": "start"}')
        assert json.loads(talk.recv())["type"] == "started"
    assert run(api, box, "x", timeout_seconds=PATIENCE_SECONDS)["text"] == "1"


@pytest.mark.parametrize(
    "message",
    ["", "{", "[]", '{"code": 1}', '{"cod": ""}', '{"code": "", "context": "nope"}', b"bytes"],
)
def test_an_invalid_socket_message_is_the_last(api: httpx2.Client, box: str, message):
    with open_socket(api, f"{box}/execute") as talk:
        talk.send(message)
        told = json.loads(talk.recv())
        assert told["type"] == "error" and told["error"]["code"] in ("invalid_request", "context_not_found")
        with pytest.raises(ConnectionClosedError):
            talk.recv()
    assert run(api, box, "1")["text"] == "1"


# --- files


def test_files_by_hand(api: httpx2.Client, box: str):
    content = bytes(range(256)) * 20_000
    written = api.put(f"{box}/files/content", params={"path": "d/a b.bin", "mode": "600"}, content=content).json()
    assert (written["path"], written["size_bytes"], written["mode"] & 0o777) == (
        "/mnt/data/d/a b.bin",
        len(content),
        0o600,
    )
    for whole in ("false", "true"):
        read = api.get(f"{box}/files/content", params={"path": "d/a b.bin", "whole": whole})
        assert read.content == content
        assert read.headers["x-content-type-options"] == "nosniff"
        assert read.headers["cross-origin-resource-policy"] == "same-origin"
        assert read.headers["cache-control"] == "private, no-store"
    assert api.get(f"{box}/files/stat", params={"path": "d"}).json()["kind"] == "directory"
    assert api.post(f"{box}/files/make_dir", json={"path": "e"}).json() == {"created": True}
    api.post(f"{box}/files/move", json={"path": "d/a b.bin", "to": "e"})
    assert [each["name"] for each in api.get(f"{box}/files/list", params={"path": "e"}).json()] == ["a b.bin"]
    assert api.post(f"{box}/files/remove", json={"path": "e"}).status_code == 204
    assert api.get(f"{box}/files/exists", params={"path": "e"}).json() == {"exists": False}
    missing = api.get(f"{box}/files/content", params={"path": "none"})
    assert missing.status_code == 404 and error_of(missing)["code"] == "file_not_found"


def test_an_upload_over_the_limit_and_one_that_breaks_off_leave_nothing(api: httpx2.Client, box: str):
    limit = api.get("/info").json()["max_upload_bytes"]
    params = {"path": "big"}
    with _raw(api) as plug:
        plug.sendall(_head(api, "PUT", f"{box}/files/content?path=big", limit + 1) + b"x" * 1000)
        assert b" 413 " in plug.recv(4096)
    with _raw(api) as plug:
        plug.sendall(_head(api, "PUT", f"{box}/files/content?path=big", 10_000_000) + b"x" * 1_000_000)
    time.sleep(0.2)  # until the server has noticed: nothing shows that from outside
    assert api.get(f"{box}/files/exists", params=params).json() == {"exists": False}
    assert run(api, box, "1")["text"] == "1"


def test_a_watch_tells_of_changes(api: httpx2.Client, box: str):
    with api.stream("GET", f"{box}/files/watch", params={"path": "/mnt/data"}) as watch:
        chunks = watch.iter_raw()
        assert b"event: watching" in next(chunks)
        api.put(f"{box}/files/content", params={"path": "new"}, content=b"x")
        assert b'"path":"/mnt/data/new"' in next(chunks)


# --- commands


def test_a_command_and_its_stdin(api: httpx2.Client, box: str):
    done = api.post(f"{box}/commands", json={"command": "sort; exit 3", "stdin": "b\na\n"}).json()
    assert (done["stdout"], done["exit_code"]) == ("a\nb\n", 3)
    raw = base64.b64encode(b"\xff\x00").decode()
    assert api.post(f"{box}/commands", json={"command": "wc -c", "stdin_base64": raw}).json()["stdout"] == "2\n"


def test_a_process_by_requests_and_by_a_socket(api: httpx2.Client, box: str):
    started = api.post(f"{box}/processes", json={"command": "cat", "stdin": True})
    one = f"{box}/processes/{started.json()['id']}"
    assert started.status_code == 201 and len(api.get(f"{box}/processes").json()) == 1
    with open_socket(api, f"{one}/attach") as talk:
        assert json.loads(talk.recv())["pid"] == started.json()["pid"]
        assert api.put(f"{one}/stdin", content=b"one ").status_code == 204
        talk.send(b"two")
        talk.send('{"type": "close_stdin"}')
        events = [json.loads(message) for message in talk]
    assert "".join(each["text"] for each in events[:-1]) == "one two"
    assert (events[-1]["type"], events[-1]["exit_code"]) == ("exited", 0)
    assert api.put(f"{one}/stdin", content=b"x").status_code == 404


def test_signals(api: httpx2.Client, box: str):
    with open_socket(api, f"{box}/process") as talk:
        talk.send(json.dumps({"command": "trap 'echo term; exit 5' TERM; echo up; sleep 600 & wait"}))
        one = f"{box}/processes/{json.loads(talk.recv())['id']}"
        assert json.loads(talk.recv())["text"] == "up\n"
        assert api.post(f"{one}/signal", json={"signal": 99}).status_code == 400
        assert api.post(f"{one}/signal", json={"signal": 15}).status_code == 204
        assert json.loads(list(talk)[-1])["exit_code"] == 5


def test_a_terminal_speaks_bytes_and_follows_its_size(api: httpx2.Client, box: str):
    with open_socket(api, f"{box}/process?raw=true") as talk:
        talk.send(json.dumps({"command": ["bash", "-i"], "terminal": {"rows": 24, "columns": 80}, "attached": True}))
        process = json.loads(talk.recv())["id"]
        talk.send('{"type": "resize", "rows": 33, "columns": 77}')
        talk.send(b"stty size; printf '\\377'; echo don''e\n")
        seen = b""
        while b"done\r\n" not in seen:
            message = talk.recv(PATIENCE_SECONDS)
            assert isinstance(message, bytes)
            seen += message
        assert b"33 77" in seen and b"\xff" in seen
        assert process in [each["id"] for each in api.get(f"{box}/processes").json()]
    _until(lambda: api.get(f"{box}/processes").json() == [])


# --- the document


def test_the_document_has_every_route_and_only_those(api: httpx2.Client):
    document = api.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    told = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    app = NativeApi(None, Gatekeeper(None, Principal(owner="x")), Config(data_dir="/nowhere"))  # type: ignore[arg-type]
    served = set()
    for route in app.routes:
        for method in getattr(route, "methods", None) or ({"GET"} if "socket" in type(route).__name__.lower() else ()):
            served.add((route.path_format, method))  # type: ignore[attr-defined]  # {ref:path} is {ref} there
    assert told == {each for each in served if each[1] != "HEAD"}


def test_every_reference_in_the_document_leads_somewhere(api: httpx2.Client):
    raw = api.get("/openapi.json").text
    document = json.loads(raw)
    named = {part.split('"')[0] for part in raw.split("#/components/schemas/")[1:]}
    assert named and named <= set(document["components"]["schemas"])
    ids = [each["operationId"] for methods in document["paths"].values() for each in methods.values()]
    assert len(ids) == len(set(ids))
