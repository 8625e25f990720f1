"""`run_code` of E2B's Python SDK: results, output, errors, and executions that somebody leaves or ends."""

from __future__ import annotations

import json
import threading
from datetime import datetime

import httpx
import pytest
from e2b import NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import AsyncSandbox, Sandbox


def code_server(server, box: Sandbox, **headers: str) -> httpx.Client:
    """The code server without the SDK."""
    names = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49999"}
    names["E2B-Traffic-Access-Token"] = box.traffic_access_token or ""
    return httpx.Client(base_url=f"{server.url}/e2b", headers={**names, **headers}, timeout=60)


def test_the_last_expression_is_the_text_and_state_lives_on(box):
    assert box.run_code("x = 1; x").text == "1"
    assert box.run_code("x + 1").text == "2"
    assert box.run_code("'a string'").text == "a string"
    assert box.run_code("x;").results == []


def test_output_comes_as_it_is_printed_with_its_time(box):
    seen = []
    run = box.run_code("import sys\nprint(1)\nprint(2, file=sys.stderr)", on_stdout=seen.append, on_stderr=seen.append)
    assert [(message.line, message.error) for message in seen] == [("1\n", False), ("2\n", True)]
    assert all(datetime.fromisoformat(message.timestamp).tzinfo for message in seen)
    assert (run.logs.stdout, run.logs.stderr) == (["1\n"], ["2\n"])


def test_text_that_would_break_lines_arrives_whole(box):
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg漢字😀"
    assert "".join(box.run_code(f"print({text!r}, end='')").logs.stdout) == text


def test_executions_are_counted_also_those_that_do_not_parse(box):
    counts = [box.run_code(code).execution_count for code in ("1", "x = = 1", "print(1)")]
    assert counts == [1, 2, 3]


def test_an_exception_has_its_name_value_and_traceback(box):
    error = box.run_code("def f():\n    return missing\nf()").error
    assert (error.name, error.value) == ("NameError", "name 'missing' is not defined")
    assert "line 2, in f" in error.traceback and "\x1b" not in error.traceback


def test_input_is_refused_as_in_jupyter(box):
    assert box.run_code("input('name? ')").error.name == "StdinNotImplementedError"


def test_lists_and_dicts_are_json_too(box):
    code = (
        "import numpy as np, datetime\n"
        "{1: np.float64(1.5), 'a': np.arange(3), 'n': float('nan'), 'd': [datetime.date(2024, 1, 2)]}"
    )
    result = box.run_code(code).results[0]
    assert result.json == {"1": 1.5, "a": [0, 1, 2], "n": None, "d": ["2024-01-02"]}
    assert result.text.startswith("{1: ")
    assert box.run_code("[1, {'a': None}]").results[0].json == [1, {"a": None}]
    assert box.run_code("from collections import Counter\nCounter('aab')").results[0].json == {"a": 2, "b": 1}
    assert box.run_code("[object, {1, 2}]").results[0].formats() == ["text"]
    assert box.run_code("a = []; a.append(a); a").results[0].formats() == ["text"]


def test_the_text_of_a_long_list_is_whole(box):
    result = box.run_code("list(range(5000))").results[0]
    assert json.loads(result.text) == result.json == list(range(5000))


def test_a_data_frame_has_its_data(box):
    result = box.run_code(
        "import pandas as pd\npd.DataFrame({'a': [1, 2, 3], 't': pd.date_range('2024-01-01', periods=3)})"
    ).results[0]
    assert result.data == {"a": [1, 2, 3], "t": [f"2024-01-0{day}T00:00:00" for day in (1, 2, 3)]}
    assert "<table" in result.html and "text" in result.formats()


def test_the_data_of_a_data_frame_is_whole_or_told_to_be_missing(box):
    run = box.run_code("import pandas as pd\npd.DataFrame({'a': range(20_000)})")
    assert run.results[0].data == {"a": list(range(20_000))}
    run = box.run_code("pd.DataFrame({'a': range(2_000_000)})")
    assert run.results[0].data is None and "2000000 values was left out" in run.logs.stderr[0]
    run = box.run_code("['x' * 100] * 100_000")
    assert run.results[0].json is None and "application/json of 10300001 bytes was left out" in run.logs.stderr[0]


def test_displays_of_chosen_types_have_only_these(box):
    run = box.run_code("display({'text/latex': '$x$', 'x/y': 'z'}, raw=True)\n1")
    assert [result.formats() for result in run.results] == [["latex", "x/y"], ["text"]]
    assert [result.is_main_result for result in run.results] == [False, True]
    assert run.results[0].extra == {"x/y": "z"}


def test_updates_of_a_display_and_cleared_output_are_no_results(box):
    run = box.run_code(
        "from IPython.display import clear_output\nh = display('a', display_id=True)\nh.update('b')\nclear_output()"
    )
    assert [result.text for result in run.results] == ["a"]


def test_environment_variables_hold_for_one_call(box):
    code = "import os; os.environ.get('A')"
    assert box.run_code(code, envs={"A": 'it\'s "quoted"\n'}).text == 'it\\\'s "quoted"\\n'
    assert box.run_code(code).text is None


def test_a_kernel_that_dies_says_so_and_the_next_run_works(box):
    error = box.run_code("x = 1\nimport os; os._exit(3)").error
    assert error.name == "ContextRestarting"
    assert "exited with code 3" in error.value and "state is lost" in error.value
    assert box.run_code("1+1").text == "2"
    assert box.run_code("x").error.name == "NameError"


@pytest.mark.long
def test_running_out_of_memory_names_the_limit(box, memory_is_enforced):
    error = box.run_code("a = b'x' * (8 << 30)").error
    if memory_is_enforced:
        assert error.name == "OutOfMemory" and "2048 MiB" in error.value
    assert error.name in ("OutOfMemory", "MemoryError")
    assert box.run_code("1+1").text == "2"


def test_output_over_the_limit_is_told(box):
    run = box.run_code("print('x' * (40 << 20))\n1")
    assert "the output limit of 33554432 bytes was reached" in run.logs.stderr[-1]
    assert sum(map(len, run.logs.stdout)) <= 32 << 20


def test_a_client_that_disconnects_interrupts_its_execution(box):
    box.run_code("x = 7")
    with pytest.raises(TimeoutException):
        box.run_code("import time; time.sleep(300)", timeout=1)
    assert box.run_code("x", timeout=30).text == "7"


@pytest.mark.long
def test_a_program_that_does_not_stop_for_a_client_that_left_is_killed_and_the_next_run_told(box):
    with pytest.raises(TimeoutException):
        box.run_code("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", timeout=1)
    run = box.run_code("1+1")
    assert run.text == "2" and "the context's state was lost" in run.logs.stderr[0]


def test_a_client_that_leaves_while_it_waits_for_its_turn_runs_nothing(box):
    started, code = threading.Event(), "import time; print('go'); time.sleep(3)"
    first = threading.Thread(target=box.run_code, args=(code,), kwargs={"on_stdout": lambda _: started.set()})
    first.start()
    assert started.wait(30)
    with pytest.raises(TimeoutException):
        box.run_code("ran = True", timeout=0.5)
    first.join()
    assert box.run_code("'ran' in globals()").text == "False"


def test_a_sandbox_that_is_killed_ends_its_executions(box):
    def kill(_message) -> None:
        threading.Thread(target=box.kill).start()

    with pytest.raises(TimeoutException, match="sandbox was killed while the request was in progress"):
        box.run_code("print('running', flush=True)\nimport time; time.sleep(300)", on_stdout=kill)


def test_a_sandbox_that_expires_ends_its_executions(server):
    box = Sandbox.create(timeout=2, **server.e2b)
    with pytest.raises(TimeoutException):
        box.run_code("import time; time.sleep(300)")


@pytest.mark.long
def test_a_quiet_program_is_kept_alive_until_its_end(server, box):
    quiet = {"code": "import time; time.sleep(6); 1"}
    with code_server(server, box) as http, http.stream("POST", "/execute", json=quiet) as response:
        assert response.status_code == 200 and "content-type" not in response.headers
        kinds = [json.loads(line)["type"] for line in response.iter_lines()]
    assert kinds == ["number_of_executions", "keepalive", "result", "end_of_execution"]


@pytest.mark.parametrize(
    ("request_body", "status", "said"),
    [
        ({"code": "1", "context_id": "c", "language": "python"}, 400, "Only one of context_id or language can be"),
        ({"code": "1", "context_id": "nowhere"}, 404, "Context nowhere not found"),
        ({"code": "1", "language": "cobol"}, 500, "Failed to create context: there is no language 'cobol'"),
        ({"code": "1", "env_vars": {"A=B": "c"}}, 400, "environment variable 'A=B'"),
        ({"code": 1}, 422, '"loc":["body","code"]'),
        ({}, 422, '"msg":"Field required"'),
    ],
)
def test_bad_requests_are_answered_in_the_protocols_way(server, box, request_body, status, said):
    with code_server(server, box) as http:
        answer = http.post("/execute", json=request_body)
        assert answer.status_code == status and said in answer.text
        assert http.post("/execute", content=b'{"code": "1"').status_code == 422
    assert box.run_code("1").text == "1"


def test_the_sdk_reports_the_error(box):
    with pytest.raises(SandboxException, match="there is no language 'cobol': a context can be python"):
        box.run_code("1", language="cobol")
    context = box.create_code_context()
    box.remove_code_context(context)
    with pytest.raises(NotFoundException, match=f"Context {context.id} not found"):
        box.run_code("1", context=context)


def test_the_code_server_is_healthy_and_not_for_strangers(server, box):
    with code_server(server, box) as http:
        assert http.get("/health").json() == "OK"
    with code_server(server, box, **{"E2B-Traffic-Access-Token": "wrong"}) as stranger:
        assert stranger.get("/contexts").status_code in (401, 403)
        assert stranger.post("/execute", json={"code": "1"}).status_code in (401, 403)


async def test_the_same_by_await(async_box: AsyncSandbox):
    seen = []
    run = await async_box.run_code("print('hi')\n[1]", on_stdout=seen.append, on_result=seen.append)
    assert (run.text, run.results[0].json, run.logs.stdout) == ("[1]", [1], ["hi\n"])
    assert [str(one) for one in seen] == ["hi\n", "Result([1])"]
    with pytest.raises(TimeoutException):
        await async_box.run_code("import time; time.sleep(300)", timeout=1)
    assert (await async_box.run_code("1/0")).error.name == "ZeroDivisionError"
