"""Dynamic sessions over a socket, as AutoGen, LangChain and LlamaIndex send their requests."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from tests.conftest import RunningServer, wait_until

Json = dict[str, Any]
FIRST, LATER = "2024-02-02-preview", "2025-10-02-preview"


class Session:
    """The calls of a client, with an identifier of its own."""

    def __init__(self, server: RunningServer, base: str = "/aca"):
        self.query = {"api-version": FIRST, "identifier": f"s-{secrets.token_hex(6)}"}
        headers = {"authorization": f"Bearer {server.key}"}
        self.http = httpx2.Client(base_url=server.url + base, headers=headers, timeout=60)

    def ask(self, method: str, path: str, **sent: Any) -> httpx2.Response:
        return self.http.request(method, path, params=self.query, **sent)

    def execute(self, code: str, **more: Any) -> Json:
        inline = {"codeInputType": "inline", "executionType": "synchronous", "code": code, **more}
        answer = self.ask("POST", "/code/execute", json={"properties": inline})
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["properties"])


@pytest.fixture(params=["/aca", "/aca/python"])
def session(server: RunningServer, request: pytest.FixtureRequest) -> Session:
    return Session(server, request.param)


def test_variables_last_from_one_execution_to_the_next(session: Session):
    assert session.execute("a = 41; print('x')") | {"executionTimeInMilliseconds": 0} == {
        "status": "Success",
        "stdout": "x\n",
        "stderr": "",
        "result": "",
        "executionTimeInMilliseconds": 0,
    }
    assert session.execute("a + 1")["result"] == 42
    failed = session.execute("a / 0")
    assert failed["status"] == "Failure" and "ZeroDivisionError" in failed["stderr"]


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("'text'", "text"),
        ("1.5", 1.5),
        ("10**30", "1" + "0" * 30),
        ("float('inf')", "inf"),
        ("None", ""),
        ("['a' * 60, 'b' * 60]", f"['{'a' * 60}',\n '{'b' * 60}']"),
    ],
)
def test_a_value_is_itself_or_as_ipython_shows_it(server: RunningServer, code: str, result: Any):
    assert Session(server).execute(code)["result"] == result


def test_a_figure_is_the_result(server: RunningServer):
    got = Session(server).execute("import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()")["result"]
    assert (got["type"], got["format"]) == ("image", "png") and got["base64_data"].startswith("iVBOR")


def test_autogen_finds_the_installed_packages(server: RunningServer):
    code = "\nimport pkg_resources\n[d.project_name for d in pkg_resources.working_set]\n"
    listed = Session(server).execute(code)["result"].strip("[]").split(",\n")
    assert "numpy" in {each.strip(" '") for each in listed}


def test_files_of_a_form_are_bounded(session: Session):
    many = [("file", (f"{number}", b"x")) for number in range(101)]
    refused = session.ask("POST", "/files/upload", files=many)
    assert refused.status_code == 400 and "at most 100 files" in refused.text
    assert session.ask("POST", "/files/upload", files=many[:2]).status_code == 200


def test_files_are_uploaded_listed_and_downloaded(session: Session):
    made = session.ask("POST", "/files/upload", files={"file": ("a b.txt", b"content")})
    assert made.json()["value"][0]["properties"] | {"lastModifiedTime": ""} == {
        "filename": "a b.txt",
        "size": 7,
        "lastModifiedTime": "",
    }
    assert session.execute("open('/mnt/data/a b.txt').read()")["result"] == "content"
    assert [each["name"] for each in session.ask("GET", "/files").json()["value"]] == ["a b.txt"]
    assert session.ask("GET", "/files/content/a b.txt").content == b"content"
    assert session.ask("GET", "/files/a b.txt/content").content == b"content"
    assert session.ask("GET", "/files/content/missing").status_code == 404
    for name in ("../../etc/x", "/etc/x"):
        assert session.ask("POST", "/files/upload", files={"file": (name, b"x")}).status_code == 400


def test_later_api_versions_run_code_and_shell_commands(session: Session):
    session.query["api-version"] = LATER
    ran = session.ask("POST", "/executions", json={"codeInputType": "Inline", "code": "print(1); 2"}).json()
    assert (ran["status"], ran["result"]["stdout"], ran["result"]["executionResult"]) == ("Succeeded", "1\n", 2)
    shell = session.ask("POST", "/executions", json={"shellCommand": "pwd; exit 3"}).json()
    assert (shell["status"], shell["result"]["stdout"]) == ("3", "/mnt/data\n")


def test_a_time_limit_ends_the_code_and_keeps_the_session(session: Session):
    session.execute("a = 1")
    assert session.execute("while True: pass", timeoutInSeconds=0.3)["status"] == "Failure"
    assert session.execute("a")["result"] == 1


def test_a_session_ends_when_it_is_deleted(server: RunningServer, session: Session):
    session.execute("a = 1")
    assert session.ask("DELETE", "/session").status_code == 204
    wait_until(lambda: session.execute("'a' in globals()")["result"] is False)
    assert session.ask("DELETE", "/session").status_code == session.ask("DELETE", "/session").status_code == 204


def test_requests_at_once_share_one_sandbox(session: Session):
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda number: session.execute(f"v{number} = 1; id(In)")["result"], range(4)))
    assert len(set(made)) == 1 and session.execute("v0 + v1 + v2 + v3")["result"] == 4


def test_a_key_and_an_identifier_are_needed(server: RunningServer):
    nameless = Session(server)
    nameless.query["identifier"] = ""
    refused = nameless.ask("GET", "/files")
    assert refused.status_code == 400 and "identifier" in refused.json()["error"]["message"]
    assert httpx2.get(server.url + "/aca/files", params={"identifier": "x"}).status_code == 401
    assert Session(server, "/aca/no-such-template").ask("GET", "/files").status_code == 404
