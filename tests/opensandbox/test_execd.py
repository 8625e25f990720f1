"""execd: code and contexts inside one sandbox."""

from __future__ import annotations

import threading

import httpx2
import pytest
from tests.opensandbox.conftest import Execd, Lifecycle, frames, said


def test_a_run_is_a_stream_of_events_in_order(execd: Execd):
    events = execd.run("print('hi')\n40 + 2")
    assert [event["type"] for event in events] == ["init", "execution_count", "stdout", "result", "execution_complete"]
    assert events[1]["execution_count"] == 1
    assert events[3]["results"]["text"] == "42"
    assert isinstance(events[-1]["execution_time"], int)


def test_an_exception_ends_the_stream_and_keeps_output(execd: Execd):
    events = execd.run("print('before')\n1/0")
    assert said(events, "stdout") == "before\n"
    assert events[-1]["type"] == "error"
    error = events[-1]["error"]
    assert (error["ename"], error["evalue"]) == ("ZeroDivisionError", "division by zero")
    assert error["traceback"][-1] == "ZeroDivisionError: division by zero"


def test_text_passes_as_it_is(execd: Execd):
    text = "é\u2028\x85 \U0001f600\r\nend"
    assert said(execd.run(f"print({text!r}, end='')"), "stdout") == text


def test_a_chart_is_a_picture_in_base_64(execd: Execd):
    events = execd.run("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()")
    pictures = [event["results"] for event in events if event["type"] == "result" and "image/png" in event["results"]]
    assert pictures[0]["image/png"].startswith("iVBOR")


def test_runs_without_an_id_share_a_context_per_language(execd: Execd):
    assert execd.http.get("/code/contexts").json() == []
    execd.run("x = 6")
    assert said(execd.run("print(x)"), "stdout") == "6\n"
    execd.run("x=7", language="bash")
    assert said(execd.run("echo $x", language="bash"), "stdout") == "7\n"
    listed = execd.http.get("/code/contexts").json()
    assert [each["language"] for each in listed] == ["python", "bash"]
    assert execd.run("print(x)")[0]["text"] == listed[0]["id"]


def test_a_command_that_fails_in_bash_is_an_error_with_its_status(execd: Execd):
    assert execd.run("exit_with() { return 3; }; exit_with", language="bash")[-1]["error"]["evalue"] == "3"


def test_contexts_are_made_found_listed_and_removed(execd: Execd):
    made = execd.http.post("/code/context", json={"language": "python"}).json()
    other = execd.http.post("/code/context", json={"language": "python", "cwd": "/tmp"}).json()
    execd.run("x = 1", **made)
    assert execd.run("x", **other)[-1]["error"]["ename"] == "NameError"
    assert said(execd.run("import os; print(os.getcwd())", id=other["id"]), "stdout") == "/tmp\n"
    assert execd.http.get(f"/code/contexts/{made['id']}").json() == made
    assert execd.http.get("/code/contexts", params={"language": "python"}).json() == [made, other]
    assert execd.http.get("/code/contexts", params={"language": "bash"}).json() == []
    assert execd.http.delete(f"/code/contexts/{made['id']}").status_code == 200
    gone = execd.http.get(f"/code/contexts/{made['id']}")
    assert (gone.status_code, gone.json()["code"]) == (404, "CONTEXT_NOT_FOUND")
    assert execd.http.delete("/code/contexts", params={"language": "python"}).status_code == 200
    assert execd.http.get("/code/contexts").json() == []


def test_an_interrupt_stops_the_execution_and_the_context_stays(execd: Execd):
    execd.run("x = 6")
    with execd.stream("print('on')\nwhile True: pass") as answer:
        coming = frames(answer)
        id = next(coming)["text"]
        assert [next(coming)["type"], next(coming)["type"]] == ["execution_count", "stdout"]
        assert execd.http.delete("/code", params={"id": id}).status_code == 200
        assert [event["error"]["ename"] for event in coming] == ["KeyboardInterrupt"]
    assert said(execd.run("print(x)"), "stdout") == "6\n"


def test_an_interrupt_right_after_the_first_event_counts_while_the_kernel_starts(execd: Execd):
    with execd.stream("while true; do :; done", language="bash") as answer:
        coming = frames(answer)
        execd.http.delete("/code", params={"id": next(coming)["text"]})
        assert list(coming)[-1]["type"] == "error"


@pytest.mark.long
def test_a_long_silence_is_filled_with_pings(execd: Execd):
    with execd.stream("import time; time.sleep(30)") as answer:
        coming = frames(answer)
        assert next(event for event in coming if event["type"] == "ping") == {"type": "ping", "text": "pong"}
    assert execd.run("print(1)")[-1]["type"] == "execution_complete"


def test_runs_in_one_context_wait_for_each_other(execd: Execd):
    with execd.stream("print('on')\ninput_here = 1\nimport time; time.sleep(1)\ny = 2") as answer:
        coming = frames(answer)
        assert [next(coming)["type"] for _ in range(3)][-1] == "stdout"
        second: list[str] = []
        other = threading.Thread(target=lambda: second.append(said(execd.run("print(y)"), "stdout")))
        other.start()
        list(coming)
    other.join()
    assert second == ["2\n"]


def test_a_sandboxes_end_is_reported_to_running_code(execd: Execd, lifecycle: Lifecycle, sandbox: str):
    with execd.stream("print('on')\nimport time; time.sleep(60)") as answer:
        coming = frames(answer)
        assert [next(coming)["type"] for _ in range(3)][-1] == "stdout"
        lifecycle.http.delete(f"/sandboxes/{sandbox}")
        assert list(coming)[-1]["error"]["evalue"] == "sandbox killed"
    assert execd.http.get("/ping").status_code == 404


def test_only_the_token_of_that_sandbox_opens_its_execd(execd: Execd, lifecycle: Lifecycle, server):
    other = lifecycle.create().json()["id"]
    token = lifecycle.execd(other).http.headers["x-execd-access-token"]
    for headers in ({}, {"OPEN-SANDBOX-API-KEY": server.key}, {"X-EXECD-ACCESS-TOKEN": token}):
        answer = httpx2.get(f"http://{execd.endpoint}/ping", headers=headers)
        assert (answer.status_code, answer.json()["error"][:12]) == (401, "Unauthorized")
    assert execd.http.get("/ping").status_code == 200
    lifecycle.http.delete(f"/sandboxes/{other}")


def test_the_endpoint_is_a_path_of_this_server_without_a_scheme(execd: Execd, sandbox: str, server):
    place = server.url.removeprefix("http://")
    assert execd.endpoint == f"{place}/opensandbox/v1/sandboxes/{sandbox}/proxy/44772"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON"),
        (b"[]", "JSON object"),
        (b'{"context": {"language": "python"}}', "code"),
        (b'{"code": 1, "context": {"language": "python"}}', "code"),
        (b'{"code": "1"}', "context"),
        (b'{"code": "1", "context": "python"}', "context"),
        (b'{"code": "1", "context": {"language": 1}}', "language"),
        (b'{"code": "1", "context": {"language": "cobol"}}', "cobol"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(execd: Execd, body: bytes, says: str):
    answer = execd.http.post("/code", content=body)
    assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_REQUEST_BODY")
    assert says in answer.json()["message"]


def test_an_unknown_context_is_refused(execd: Execd):
    body = {"code": "1", "context": {"id": "none", "language": "python"}}
    assert execd.http.post("/code", json=body).json()["code"] == "CONTEXT_NOT_FOUND"
    assert execd.http.delete("/code").json()["code"] == "MISSING_QUERY"
    assert execd.http.delete("/code", params={"id": "none"}).status_code == 404
    assert execd.http.delete("/code/contexts").json()["code"] == "MISSING_QUERY"
    assert execd.http.post("/code/context", json={"language": "cobol"}).status_code == 400


def test_use_prolongs_a_life_where_that_was_asked_for(lifecycle: Lifecycle):
    made = lifecycle.create(timeout=60, extensions={"access.renew.extend.seconds": "300"}).json()
    assert made["extensions"] == {"access.renew.extend.seconds": "300"}
    lifecycle.execd(made["id"]).run("1")
    assert lifecycle.http.get(f"/sandboxes/{made['id']}").json()["expiresAt"] > made["expiresAt"]
    lifecycle.http.delete(f"/sandboxes/{made['id']}")
