"""Each run API over a socket, as its clients send it: keys, programs, limits, and the end of the sandbox."""

from __future__ import annotations

import base64
import json
import secrets
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from tests.conftest import RunningServer, wait_until

Json = dict[str, Any]
Post = Callable[[str, Json], Json]

ENDLESS = "while True: pass"
MAIN = "def main({}): return {}"


@pytest.fixture
def http(server: RunningServer) -> httpx2.Client:
    return httpx2.Client(base_url=server.url, headers={"x-api-key": server.key}, timeout=60)


@pytest.fixture
def post(http: httpx2.Client) -> Post:
    def post(path: str, body: Json) -> Json:
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    return post


def sandboxes(http: httpx2.Client) -> set[str]:
    return {each["id"] for each in http.get("/api/v1/sandboxes").json()}


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


# What each API says to a program in Python and in JavaScript, and where it says so.


def dify(post: Post, language: str, code: str) -> Json:
    names = {"py": "python3", "js": "nodejs"}
    body = {"language": names[language], "code": code, "preload": "", "enable_network": True}
    return dict(post("/dify/v1/sandbox/run", body)["data"])


def piston(post: Post, language: str, code: str, **more: Any) -> Json:
    body = {"language": language, "version": "*", "files": [{"name": "program", "content": code}], **more}
    return dict(post("/piston/api/v2/execute", body)["run"])


def fusion(post: Post, language: str, code: str, **more: Any) -> Json:
    return post("/sandboxfusion/run_code", {"language": language, "code": code, **more})


def test_dify_runs_python_and_javascript(post: Post):
    assert dify(post, "py", "import sys; print(1, file=sys.stderr); print(2)") == {
        "stdout": "2\n",
        "stderr": "1\n",
        "error": "",
        "exit_code": 0,
    }
    assert dify(post, "js", "console.log(JSON.stringify({a: 1}))")["stdout"] == '{"a":1}\n'
    assert "ZeroDivisionError" in dify(post, "py", "1/0")["error"]


def test_dify_lists_the_packages_of_the_template(http: httpx2.Client):
    found = http.get("/dify/v1/sandbox/dependencies", params={"language": "python3"}).json()["data"]["dependencies"]
    assert "numpy" in {each["name"] for each in found}


def test_piston_gives_arguments_stdin_and_files(post: Post):
    code = "import sys, other; print(sys.argv[1:], sys.stdin.read(), other.x, __file__)"
    files = [{"name": "a.py", "content": code}, {"name": "other.py", "content": "x = 5"}]
    body = {"language": "python3", "version": "3.x", "files": files, "args": ["1", "2"], "stdin": "in"}
    answer = post("/piston/api/v2/execute", body)
    assert answer["language"] == "python" and answer["version"].startswith("3.")
    assert answer["run"]["stdout"].startswith("['1', '2'] in 5 ") and answer["run"]["code"] == 0
    script = "const text = require('fs').readFileSync(0, 'utf8'); console.log(process.argv.slice(2), text)"
    assert piston(post, "js", script, args=["x"], stdin="y")["output"] == "[ 'x' ] y\n"
    assert piston(post, "bash", 'read line; echo "$1 $line"; exit 3', args=["x"], stdin="y\n")["code"] == 3


def test_piston_stops_a_program_at_its_time_limit(post: Post):
    stopped = piston(post, "python", ENDLESS, run_timeout=300)
    assert (stopped["status"], stopped["signal"], stopped["code"]) == ("TO", "SIGKILL", None)


def test_piston_lists_its_runtimes_and_refuses_others(http: httpx2.Client):
    runtimes = {each["language"]: each for each in http.get("/piston/api/v2/runtimes").json()}
    assert "py" in runtimes["python"]["aliases"] and runtimes["javascript"]["version"] != "0.0.0"
    body = {"language": "cobol", "version": "*", "files": [{"content": "x"}]}
    refused = http.post("/piston/api/v2/execute", json=body)
    assert refused.status_code == 400 and "cobol" in refused.json()["message"]


@pytest.mark.parametrize("name", ["../../etc/x", "/etc/passwd", "a/../../x", ""])
def test_a_file_cannot_leave_the_working_directory(http: httpx2.Client, name: str):
    files = {name: encoded("x")}
    body = {"language": "python", "code": "1", "files": files}
    assert http.post("/sandboxfusion/run_code", json=body).status_code == 422


def test_sandbox_fusion_runs_compiles_and_fetches(post: Post):
    code = "print(open('in/a').read()); open('out', 'w').write('made')"
    ran = fusion(post, "python", code, files={"in/a": encoded("given")}, fetch_files=["out", "missing"])
    assert (ran["status"], ran["run_result"]["stdout"]) == ("Success", "given\n")
    assert ran["files"] == {"out": encoded("made")} and ran["compile_result"] is None
    assert fusion(post, "python", "1/0")["run_result"]["return_code"] == 1
    slow = fusion(post, "python", ENDLESS, run_timeout=0.3)
    assert (slow["status"], slow["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
    assert fusion(post, "verilog", "x")["status"] == "SandboxError"


def test_sandbox_fusion_runs_cells_of_one_kernel(post: Post):
    cells = ["a = 'x'", "a", "import sys; print('o'); print('e', file=sys.stderr)", "assert False", "print(a)"]
    got = post("/sandboxfusion/run_jupyter", {"cells": cells})
    assert got["status"] == "Success" and got["cells"][1]["display"] == [{"text/plain": "'x'"}]
    assert (got["cells"][2]["stdout"], got["cells"][2]["stderr"]) == ("o\n", "e\n")
    assert got["cells"][3]["error"][0]["ename"] == "AssertionError" and got["cells"][4]["stdout"] == "x\n"
    stopped = post("/sandboxfusion/run_jupyter", {"cells": [ENDLESS], "total_timeout": 0.3})
    assert (stopped["status"], stopped["driver"]["status"]) == ("Failed", "TimeLimitExceeded")


def test_ragflow_calls_main_and_returns_its_value_and_artifacts(post: Post):
    code = "import os\ndef main(a, b):\n    open('artifacts/t.csv', 'w').write('1'); print('x'); return {'sum': a + b}"
    got = post("/ragflow/run", {"code_b64": encoded(code), "language": "python", "arguments": {"a": 1, "b": 2}})
    assert (got["status"], got["stdout"]) == ("success", "x\n")
    assert got["result"] == {"present": True, "value": {"sum": 3}, "type": "json"}
    assert [(each["name"], each["content_b64"]) for each in got["artifacts"]] == [("t.csv", encoded("1"))]
    script = "async function main({a}) { console.log('y'); return a.map(x => x * 2); }"
    got = post("/ragflow/run", {"code_b64": encoded(script), "language": "nodejs", "arguments": {"a": [1, 2]}})
    assert (got["result"]["value"], got["stdout"]) == ([2, 4], "y\n")
    failed = post("/ragflow/run", {"code_b64": encoded(MAIN.format("", "1/0")), "arguments": {}})
    assert failed["status"] == "program_error" and "ZeroDivisionError" in failed["stderr"]


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "def main(a, b=2):\n    print('log', a)\n    return {'sum': a + b}"),
        ("js", "async function main({a, b = 2}) { console.log('log', a); return {sum: a + b}; }"),
    ],
)
def test_fastgpt_calls_main_with_the_variables(post: Post, language: str, code: str):
    got = post(f"/fastgpt/sandbox/{language}", {"code": code, "variables": {"a": 1}})
    assert got == {"success": True, "data": {"codeReturn": {"sum": 3}, "log": "log 1"}}


def test_fastgpt_reports_the_message_of_an_error(post: Post):
    python = {"code": "def main(): raise ValueError('no way')", "variables": {}}
    assert post("/fastgpt/sandbox/python", python) == {"success": False, "message": "no way"}
    script = {"code": "function main() { throw new Error('no way') }"}
    assert post("/fastgpt/sandbox/js", script) == {"success": False, "message": "no way"}
    assert not post("/fastgpt/sandbox/python", {"code": ENDLESS, "limits": {"timeoutMs": 300}})["success"]
    help = (
        "main = () => ({b: strToBase64('a', 'p:'), n: countToken('12345'), s: typeof createHmac('sha256', 'k').sign})"
    )
    assert post("/fastgpt/sandbox/js", {"code": "const " + help})["data"]["codeReturn"] == {
        "b": "p:YQ==",
        "n": 2,
        "s": "string",
    }


REQUESTS = {
    "/dify/v1/sandbox/run": {"language": "python3", "code": "print(1)"},
    "/piston/api/v2/execute": {"language": "py", "version": "*", "files": [{"content": "print(1)"}]},
    "/sandboxfusion/run_code": {"language": "python", "code": "print(1)"},
    "/ragflow/run": {"code_b64": encoded(MAIN.format("", "1"))},
    "/fastgpt/sandbox/python": {"code": MAIN.format("", "1")},
}


@pytest.mark.parametrize("path", REQUESTS)
def test_a_key_is_needed_and_may_be_in_the_url(server: RunningServer, path: str):
    assert httpx2.post(server.url + path, json=REQUESTS[path]).status_code == 401
    with_key = server.url.replace("://", f"://cloche:{server.key}@")
    assert httpx2.post(with_key + path, json=REQUESTS[path], timeout=60).status_code == 200


@pytest.mark.parametrize("path", REQUESTS)
def test_nothing_is_left_of_a_run(http: httpx2.Client, post: Post, path: str):
    before = sandboxes(http)
    post(path, REQUESTS[path])
    wait_until(lambda: sandboxes(http) <= before)


def test_a_program_ends_when_its_client_disconnects(server: RunningServer, http: httpx2.Client):
    before, place, mark = sandboxes(http), urlsplit(server.url), secrets.token_hex(4)
    body = json.dumps({"language": "python", "code": f"# {mark}\n{ENDLESS}", "run_timeout": 60}).encode()
    head = f"POST /sandboxfusion/run_code HTTP/1.1\r\nhost: {place.netloc}\r\nx-api-key: {server.key}\r\n"
    with socket.create_connection((str(place.hostname), place.port or 0)) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: not sandboxes(http) <= before)
    wait_until(lambda: sandboxes(http) <= before)


def test_code_with_lone_surrogates_and_nuls_is_the_programs_affair(post: Post):
    assert dify(post, "py", "print(len('\\ud83d'))")["stdout"] == "1\n"
    assert fusion(post, "bash", "echo a\0b")["run_result"]["stdout"] == "ab\n"
