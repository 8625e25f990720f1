"""The same requests to Open Terminal 0.14.5 and to Cloche: the answers are the same, but for what they cannot share.

It lives in an environment of its own, which `make test-all` makes; without it nothing of this runs.
"""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import subprocess
import zipfile
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from tests.conftest import REPOSITORY, RunningServer, free_port, wait_until
from tests.open_terminal.conftest import open_client
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

PLACE = REPOSITORY / ".venv-open-terminal"
KEY = "key-of-the-oracle"

pytestmark = [
    pytest.mark.skipif(not PLACE.exists(), reason="Open Terminal has its own environment: make open-terminal-env"),
    pytest.mark.timeout(300),
    pytest.mark.long,
]
OF_ONE_SERVER = {"modified", "log_path", "id", "pid", "created_at", "ts", "process"}
Asked = tuple[str, str] | tuple[str, str, Any]

NOTEBOOK = {
    "nbformat": 4,
    "nbformat_minor": 5,
    "metadata": {},
    "cells": [
        {"cell_type": "code", "id": "a", "metadata": {}, "source": source, "outputs": [], "execution_count": None}
        for source in ("x = 20", "print('a')\nx + 1")
    ],
}
SKILL = "---\nname: tidy\ndescription: |\n  Cleans\n  up.\n---\n# How\n\nSo.\n"
RTF = r"{\rtf1\ansi{\fonttbl\f0 Arial;}\f0 A {\b bold} word, \'e9\u8364?.\par Next line\tab end}"

FILES: list[Asked] = [
    ("GET", "/health"),
    ("GET", "/api/config"),
    ("GET", "/info"),
    ("GET", "/files/cwd"),
    ("POST", "/files/write", {"path": "a/b/one.txt", "content": "first\nsecond Word\r\nthird\n"}),
    ("POST", "/files/write", {"path": "a/two.py", "content": "import os\nword = 'ü€😀 word'\n"}),
    ("POST", "/files/write", {"path": "a/.hidden", "content": "word"}),
    ("POST", "/files/write", {"path": "a", "content": "over a directory"}),
    ("POST", "/files/write", {"path": "a/x"}),
    ("POST", "/files/write", {"content": 1, "path": "x"}),
    ("POST", "/files/write", {"path": "empty.txt", "content": ""}),
    ("GET", "/files/list?directory=a"),
    ("GET", "/files/list?directory=none"),
    ("GET", "/files/read?path=a/b/one.txt"),
    ("GET", "/files/read?path=a/b/one.txt&start_line=2"),
    ("GET", "/files/read?path=a/b/one.txt&start_line=2&end_line=2"),
    ("GET", "/files/read?path=a/b/one.txt&start_line=null&end_line=1"),
    ("GET", "/files/read?path=a/b/one.txt&start_line=9"),
    ("GET", "/files/read?path=a/b/one.txt&start_line=0"),
    ("GET", "/files/read?path=empty.txt"),
    ("GET", "/files/read?path=a"),
    ("GET", "/files/read"),
    ("GET", "/files/display?path=a/b/one.txt"),
    ("GET", "/files/display?path=none"),
    ("GET", "/files/grep?query=wor.&path=a"),
    ("GET", "/files/grep?query=WOR.&path=a&case_insensitive=true&include=*.py"),
    ("GET", "/files/grep?query=wor.&path=a&regex=false"),
    ("GET", "/files/grep?query=word&path=a&match_per_line=false"),
    ("GET", "/files/grep?query=d&path=a&max_results=1"),
    ("GET", "/files/grep?query=(&path=a"),
    ("GET", "/files/grep?query=first&path=a/b/one.txt"),
    ("GET", "/files/grep?query=x&path=none"),
    ("GET", "/files/grep?query=x&max_results=501"),
    ("GET", "/files/matches?query=word&path=a"),
    ("GET", "/files/matches?query=one&path=a"),
    ("GET", "/files/matches?query=o&path=a&limit=1"),
    ("GET", "/files/matches?query=o&path=a&limit=1&offset=1&show_hidden=true"),
    ("GET", "/files/matches?query=%20&path=a"),
    ("GET", "/files/search?query=o&path=a"),
    ("GET", "/files/search?query=B&path=a&type=directory"),
    ("GET", "/files/search?path=a&show_hidden=true"),
    ("GET", "/files/search?path=a&type=other"),
    ("GET", "/files/search?path=none"),
    ("GET", "/files/glob?pattern=*.txt&path=a"),
    ("GET", "/files/glob?pattern=b/*&path=a"),
    ("GET", "/files/glob?pattern=*&path=a&exclude=*.txt&exclude=b"),
    ("GET", "/files/glob?pattern=*&path=a&type=file&max_results=1"),
    ("POST", "/files/replace", {"path": "a/two.py", "replacements": [{"target": "word", "replacement": "term"}]}),
    (
        "POST",
        "/files/replace",
        {"path": "a/two.py", "replacements": [{"target": "word", "replacement": "t", "allow_multiple": True}]},
    ),
    ("POST", "/files/replace", {"path": "a/two.py", "replacements": [{"target": "none", "replacement": ""}]}),
    (
        "POST",
        "/files/replace",
        {"path": "a/two.py", "replacements": [{"target": "t", "replacement": "T", "start_line": 2, "end_line": 2}]},
    ),
    ("POST", "/files/replace", {"path": "none", "replacements": []}),
    ("GET", "/files/read?path=a/two.py"),
    ("POST", "/files/mkdir", {"path": "made/deep"}),
    ("POST", "/files/mkdir", {"path": "made/deep"}),
    ("POST", "/files/mkdir", {"path": "empty.txt"}),
    ("POST", "/files/move", {"source": "empty.txt", "destination": "made/moved.txt"}),
    ("POST", "/files/move", {"source": "empty.txt", "destination": "made/other.txt"}),
    ("POST", "/files/move", {"source": "made/moved.txt", "destination": "none/other.txt"}),
    ("POST", "/files/move", {"source": "a/two.py", "destination": "made/moved.txt"}),
    ("DELETE", "/files/delete?path=made/moved.txt"),
    ("DELETE", "/files/delete?path=made"),
    ("DELETE", "/files/delete?path=made"),
    ("POST", "/files/write", {"path": "left.txt", "content": "same\nold line here\nend\n"}),
    ("POST", "/files/write", {"path": "right.txt", "content": "same\nnew line here\nadded\nend\n"}),
    ("POST", "/files/compare", {"original": "left.txt", "revised": "right.txt"}),
    ("POST", "/files/compare", {"original": "left.txt", "revised": "left.txt"}),
    ("POST", "/files/compare", {"original": "left.txt", "revised": "none"}),
    ("POST", "/files/compare", {"original": "", "revised": "none"}),
    ("POST", "/files/write", {"path": "text.rtf", "content": RTF}),
    ("GET", "/files/read?path=text.rtf"),
    ("GET", "/skills"),
    ("POST", "/files/write", {"path": ".agents/skills/tidy/SKILL.md", "content": SKILL}),
    ("POST", "/files/write", {"path": ".agents/skills/tidy/sub/run.py", "content": ""}),
    ("GET", "/skills"),
    ("GET", "/skills/read?name=tidy"),
    ("GET", "/skills/read?name=none"),
    ("POST", "/files/cwd", {"path": "none"}),
    ("POST", "/files/cwd", {"path": "a/b"}),
    ("GET", "/files/cwd"),
    ("GET", "/files/list"),
    ("GET", "/files/read?path=one.txt"),
    ("POST", "/execute?wait=20", {"command": "pwd"}),
    ("POST", "/execute?wait=20", {"command": "pwd", "cwd": ".."}),
    ("GET", "/files/serve/none"),
    ("GET", "/proxy/99999/"),
    ("GET", "/api/terminals"),
    ("GET", "/api/terminals/none"),
    ("DELETE", "/api/terminals/none"),
    ("GET", "/api/terminals/user/output"),
    ("POST", "/api/terminals/user/input", {"input": "x"}),
    ("GET", "/execute/none/status"),
    ("POST", "/execute/none/input", {"input": "x"}),
    ("DELETE", "/execute/none"),
    ("GET", "/notebooks/none"),
    ("POST", "/notebooks", {"path": "none.ipynb"}),
    ("GET", "/nothing"),
    ("PUT", "/execute"),
]
SAME_STATUS: list[Asked] = [
    ("GET", "/proxy/1/"),
    ("GET", "/proxy/word/"),
    ("POST", "/notebooks", {"path": "left.txt"}),
]
COMMANDS: list[Asked] = [
    ("POST", "/execute?wait=20", {"command": "echo out; echo err >&2; exit 3"}),
    ("POST", "/execute?wait=20", {"command": "echo $A$B", "env": {"A": "1", "B": "two words"}}),
    ("POST", "/execute?wait=20", {"command": "test -t 1 && stty size && echo $TERM"}),
    ("POST", "/execute?wait=20", {"command": "printf 'no newline'"}),
    ("POST", "/execute?wait=20", {"command": "kill -9 $$"}),
    ("POST", "/execute?wait=20", {"command": "no-such-program"}),
    ("POST", "/execute?wait=20&tail=1", {"command": "printf word"}),
    ("POST", "/execute?wait=301", {"command": "true"}),
    ("POST", "/execute?tail=0", {"command": "true"}),
    ("POST", "/execute", {"cwd": "/"}),
]


class Peer:
    """One of the two servers, with a chat of a user."""

    def __init__(self, client: httpx2.Client, home: str, key: str):
        self.client, self.home, self.key = client, home, key

    def ask(self, asked: Asked) -> tuple[int, Any]:
        method, path, *body = asked
        answer = self.client.request(method, path, json=body[0]) if body else self.client.request(method, path)
        try:
            return answer.status_code, self.comparable(answer.status_code, answer.json())
        except ValueError:
            return answer.status_code, answer.content

    def comparable(self, status: int, value: Any) -> Any:
        if status == 422 and isinstance(value.get("detail"), list):
            return [each["loc"] for each in value["detail"]]
        return self._stripped(value)

    def _stripped(self, value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(self.home, "~")
        if isinstance(value, list):
            if value and all(isinstance(each, dict) and each.get("type") == "output" for each in value):
                return self._stripped("".join(each["data"] for each in value))  # in chunks as they came
            return [self._stripped(each) for each in value]
        if not isinstance(value, dict):
            return value
        dropped = OF_ONE_SERVER | ({"size"} if value.get("type") == "directory" else set())
        dropped |= {"next_offset"} if "output" in value else set()
        return {name: self._stripped(each) for name, each in value.items() if name not in dropped}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    home, port = tmp_path_factory.mktemp("home"), free_port()
    variables = {
        "HOME": str(home),
        "PATH": f"{PLACE / 'bin'}:{os.environ['PATH']}",
        "OPEN_TERMINAL_API_KEY": KEY,
        "OPEN_TERMINAL_LOG_DIR": str(tmp_path_factory.mktemp("logs")),
        "TERM": "xterm-256color",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
    }
    words = [str(PLACE / "bin/uvicorn"), "open_terminal.main:app", "--port", str(port), "--log-level", "error"]
    process = subprocess.Popen(words, cwd=home, env=variables)
    try:
        with open_client(f"http://127.0.0.1:{port}", KEY, "ann", "chat") as client:
            wait_until(lambda: process.poll() is not None or _is_up(client))
            yield Peer(client, str(home), KEY)
    finally:
        process.terminate()
        process.wait(20)


def _is_up(client: httpx2.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx2.TransportError:
        return False


@pytest.fixture(scope="module")
def ours(server: RunningServer) -> Iterator[Peer]:
    with open_client(server.url + "/open-terminal", server.key, f"ann-{secrets.token_hex(4)}", "chat") as client:
        yield Peer(client, "/home/user", server.key)


def test_answers_about_files_are_the_same(oracle: Peer, ours: Peer):
    assert not list(differences(oracle, ours, FILES))
    assert [ours.ask(each)[0] for each in SAME_STATUS] == [oracle.ask(each)[0] for each in SAME_STATUS]


def test_answers_about_commands_are_the_same(oracle: Peer, ours: Peer):
    assert not list(differences(oracle, ours, COMMANDS))


def differences(oracle: Peer, ours: Peer, asked: list[Asked]) -> Iterator[str]:
    for each in asked:
        wanted, got = oracle.ask(each), ours.ask(each)
        if got != wanted:
            yield f"{each}\n  Open Terminal: {wanted}\n  Cloche:        {got}"


def test_the_document_has_the_same_operations_and_parameters(oracle: Peer, ours: Peer):
    assert described(ours) == described(oracle)


def described(peer: Peer) -> dict[str, Any]:
    document = peer.client.get("/openapi.json").json()
    return {
        f"{method} {path}": (operation["operationId"], parameters(operation), body_fields(document, operation))
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def parameters(operation: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: (each["in"], each["required"]) for each in operation.get("parameters", [])}


def body_fields(document: dict[str, Any], operation: dict[str, Any]) -> Any:
    if "requestBody" not in operation:
        return None
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    schema = document["components"]["schemas"][name]
    return sorted(schema["properties"]), sorted(schema.get("required", []))


def test_a_running_command_is_the_same(oracle: Peer, ours: Peer):
    seen = [follow_command(each) for each in (oracle, ours)]
    assert seen[1] == seen[0]


def follow_command(peer: Peer) -> list[Any]:
    """What it is answered from its start to its end."""
    client = peer.client
    made = client.post("/execute", json={"command": "cat"}).json()
    status = f"/execute/{made['id']}/status"
    seen: list[Any] = [made["status"], made["exit_code"], sorted(made)]
    seen.append(peer.ask(("POST", f"/execute/{made['id']}/input", {"input": "line\\n\n"})))
    wait_until(lambda: str(client.get(status).json()["output"]).count("line") == 2)
    now = client.get(status).json()
    seen += [sorted(now), client.get(f"{status}?offset={now['next_offset']}").json()["output"]]
    seen.append(len(client.get(f"{status}?tail=1").json()["output"]))
    seen += [peer.ask(("DELETE", f"/execute/{made['id']}")), peer.ask(("GET", status + "?wait=5"))]
    seen.append(peer.ask(("POST", f"/execute/{made['id']}/input", {"input": "x"})))
    listed = client.get("/execute").json()
    return [*seen, sorted(listed[-1]), listed[-1]["status"], listed[-1]["exit_code"]]


def test_uploads_views_and_archives_are_the_same(oracle: Peer, ours: Peer):
    seen = [send_and_fetch(each) for each in (oracle, ours)]
    assert seen[1] == seen[0]


def send_and_fetch(peer: Peer) -> list[Any]:
    client, pixel = peer.client, b"\x89PNG\r\n\x1a\n\xff"
    sent = client.post("/files/upload?directory=up", files={"file": ("../p.png", pixel)})
    missing = client.post("/files/upload?directory=up", files={"other": ("p.png", pixel)})
    client.post("/files/upload?directory=up", files={"file": ("b.bin", b"\xff\xfe\0")})
    found = [peer.comparable(200, sent.json()), missing.status_code]
    for path in ("view?path=up/p.png", "read?path=up/p.png", f"serve{peer.home}/up/p.png", "view?path=up/b.bin"):
        answer = client.get(f"/files/{path}")
        found += [answer.status_code, answer.headers["content-type"], answer.content]
    found.append(peer.ask(("GET", "/files/read?path=up/b.bin")))
    for paths in (["up"], ["up/p.png"], ["up", "left.txt"]):
        packed = client.post("/files/archive", json={"paths": paths})
        names = zipfile.ZipFile(io.BytesIO(packed.content)).namelist()
        found += [packed.headers["content-type"], packed.headers["content-disposition"], sorted(names)]
    return [*found, *(peer.ask(("POST", "/files/archive", {"paths": each})) for each in ([], ["none"]))]


def test_a_terminal_is_the_same(oracle: Peer, ours: Peer):
    seen = [use_terminal(each) for each in (oracle, ours)]
    assert seen[1] == seen[0]


def use_terminal(peer: Peer) -> list[Any]:
    client = peer.client
    made = client.post("/api/terminals").json()
    path = f"/api/terminals/{made['id']}"
    url, headers = (
        re.sub("^http", "ws", str(client.base_url)).rstrip("/") + path,
        {"X-User-Id": client.headers["x-user-id"]},
    )
    seen: list[Any] = [
        sorted(made),
        sorted(client.get(path).json()),
        client.get("/api/terminals/user/output").status_code,
    ]
    for first in ('{"type": "auth", "token": "wrong"}', "no json", '{"type": "auth"}'):
        with connect(url, additional_headers=headers) as socket:
            socket.send(first)
            seen.append(close_code(socket))
    with connect(url, additional_headers=headers) as socket:
        socket.send(json.dumps({"type": "auth", "token": peer.key, "chat_id": "chat"}))
        socket.send(json.dumps({"type": "resize", "rows": 33, "cols": 99}))
        socket.send(b"stty size\n")
        text = ""
        while "33 99" not in text:
            text += bytes(socket.recv(20)).decode()
        seen.append(sorted(client.get("/api/terminals/user/output").json()))
        seen.append(peer.ask(("POST", "/api/terminals/user/input", {"input": "echo $((6*7))\n"})))
        while "42" not in text:
            text += bytes(socket.recv(20)).decode()
        with connect(url, additional_headers=headers) as second:
            second.send(json.dumps({"type": "auth", "token": peer.key, "chat_id": "chat"}))
            seen.append(close_code(second))
    wait_until(lambda: client.get(path).status_code == 404)
    return [*seen, client.get(path).json(), client.get("/api/terminals").json()]


def close_code(socket: Any) -> int | None:
    with pytest.raises(ConnectionClosed):
        socket.recv(20)
    found: int | None = socket.close_code
    return found


def test_a_notebook_is_the_same(oracle: Peer, ours: Peer):
    seen = [run_notebook(each) for each in (oracle, ours)]
    assert seen[1] == seen[0]


def run_notebook(peer: Peer) -> list[Any]:
    client = peer.client
    path = f"{peer.home}/n.ipynb"
    client.post("/files/write", json={"path": path, "content": json.dumps(NOTEBOOK)})
    made = client.post("/notebooks", json={"path": path}).json()
    place = f"/notebooks/{made['id']}"
    seen: list[Any] = [sorted(made), made["kernel"], made["status"], peer.ask(("GET", place))]
    for cell in ({"cell_index": 0}, {"cell_index": 1}, {"cell_index": 1, "source": "x * 2"}, {"cell_index": 7}, {}):
        seen.append(peer.ask(("POST", place + "/execute", cell)))
    failed = client.post(place + "/execute", json={"cell_index": 0, "source": "1/0"}).json()
    seen += [failed["status"], [each["output_type"] for each in failed["outputs"]]]
    saved = json.loads(client.get("/files/read", params={"path": path}).json()["content"])
    seen += [[each["execution_count"], each["source"]] for each in saved["cells"]][1:]
    return [*seen, peer.ask(("DELETE", place)), peer.ask(("GET", place))]
