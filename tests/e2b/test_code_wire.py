"""The code server's bytes: what requests mean, and what events look like on the wire."""

from __future__ import annotations

import json

import pytest

from cloche import errors
from cloche.api.e2b import code
from cloche.api.e2b.code import E2bContextRequest, E2bExecuteRequest, ExecutionLineEncoder, UnprocessableRequest
from cloche.events import Cleared, Display, Ended, Output, Raised, Started, Truncated

WHEN = "2026-01-01T00:00:00+00:00"
SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"


def encoded(*events) -> bytes:
    return ExecutionLineEncoder().encode(events, WHEN)


def lines(*events) -> list[dict]:
    return [json.loads(line) for line in encoded(*events).decode("ascii").splitlines()]


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        # As Python 2.11.5 and JavaScript 2.8.0 send them.
        (
            b'{"code":"1+1","context_id":null,"language":null,"env_vars":{"A":"b"}}',
            E2bExecuteRequest(code="1+1", env_vars={"A": "b"}),
        ),
        (b'{"code":"1+1","env_vars":{"A":"b"}}', E2bExecuteRequest(code="1+1", env_vars={"A": "b"})),
        (b'{"code":"","env_vars":null}', E2bExecuteRequest(code="")),
        (b'{"code":"x","context_id":"c1"}', E2bExecuteRequest(code="x", context_id="c1")),
        (b'{"code":"x","language":" TS "}', E2bExecuteRequest(code="x", language="typescript")),
        (b'{"code":"x","language":"js","context_id":""}', E2bExecuteRequest(code="x", language="javascript")),
        (b'{"code":"x","unheard":"of"}', E2bExecuteRequest(code="x")),
        (b'{"code":"\\ud800"}', E2bExecuteRequest(code="\ud800")),
    ],
)
def test_requests_to_execute_are_understood(body, asked):
    assert code.decode_execute_request(body) == asked


@pytest.mark.parametrize(
    ("body", "kind", "where"),
    [
        (b"", "missing", ["body"]),
        (b"{", "json_invalid", ["body", 1]),
        (b'{"code":"\xff"}', "json_invalid", ["body"]),
        (b"[" * 100_000, "json_invalid", ["body"]),
        (b"[]", "model_attributes_type", ["body"]),
        (b"{}", "missing", ["body", "code"]),
        (b'{"code":null}', "string_type", ["body", "code"]),
        (b'{"code":1}', "string_type", ["body", "code"]),
        (b'{"code":"x","context_id":1}', "string_type", ["body", "context_id"]),
        (b'{"code":"x","language":["python"]}', "string_type", ["body", "language"]),
        (b'{"code":"x","env_vars":[]}', "dict_type", ["body", "env_vars"]),
        (b'{"code":"x","env_vars":{"A":1}}', "string_type", ["body", "env_vars", "A"]),
        (b'{"code":' + b"1" * 5000 + b"}", "json_invalid", ["body"]),
        (b'{"code":"x","other":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "json_invalid", ["body"]),
        (b'{"code":"x","context_id":"\\ud800"}', "string_unicode", ["body", "context_id"]),
        (b'{"code":"x","language":"\\ud800"}', "string_unicode", ["body", "language"]),
        (b'{"code":"x","env_vars":{"A":"\\ud800"}}', "string_unicode", ["body", "env_vars", "A"]),
        (b'{"code":"x","env_vars":{"\\ud800":1}}', "string_unicode", ["body", "env_vars"]),
    ],
)
def test_a_request_of_the_wrong_shape_is_told_where(body, kind, where):
    with pytest.raises(UnprocessableRequest) as raised:
        code.decode_execute_request(body)
    assert (raised.value.detail[0]["type"], raised.value.detail[0]["loc"]) == (kind, where)


@pytest.mark.parametrize("name", ["cwd", "language"])
def test_half_a_character_names_no_context(name):
    with pytest.raises(UnprocessableRequest) as raised:
        code.decode_context_request(b'{"%s":"\\ud800"}' % name.encode())
    assert raised.value.detail[0]["loc"] == ["body", name]


def test_a_context_and_a_language_at_once_are_refused():
    with pytest.raises(errors.InvalidRequest, match=r"^Only one of context_id or language can be provided$"):
        code.decode_execute_request(b'{"code":"x","context_id":"c1","language":"python"}')


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        (b"{}", E2bContextRequest(language="python", cwd=None)),
        (b'{"language":null,"cwd":null}', E2bContextRequest(language="python", cwd=None)),
        (b'{"language":"JS","cwd":"/root"}', E2bContextRequest(language="javascript", cwd="/root")),
        (b'{"language":"cobol"}', E2bContextRequest(language="cobol")),
    ],
)
def test_requests_for_a_context_are_understood(body, asked):
    assert code.decode_context_request(body) == asked


def test_a_run_as_it_is_on_the_wire():
    run = (
        Started(execution="x1", count=1),
        Output(stream="stdout", text="hi\n"),
        Display(data={"text/plain": "2"}, main=True),
        Ended(outcome="ok"),
    )
    assert encoded(*run) == (
        b'{"type": "number_of_executions", "execution_count": 1}\n'
        b'{"type": "stdout", "text": "hi\\n", "timestamp": "2026-01-01T00:00:00+00:00"}\n'
        b'{"type": "result", "text": "2", "extra": {}, "is_main_result": true}\n'
        b'{"type": "end_of_execution"}\n'
    )


def test_lines_are_ascii_and_nothing_in_them_splits_them():
    text = f"naïve {SEPARATORS} 漢字 \U0001f600 \ud800"
    raw = encoded(Output(stream="stderr", text=text), Display(data={"text/plain": text, "x/y": text}))
    assert raw.isascii() and len(raw.decode().splitlines()) == 2
    assert [json.loads(line)["text"] for line in raw.decode().splitlines()] == [text, text]


def test_a_result_has_every_field_that_it_has_a_value_for():
    data = {
        "text/plain": "t",
        "text/html": "h",
        "text/markdown": "m",
        "image/svg+xml": "<svg/>",
        "image/png": b"\x89PNG",
        "image/jpeg": b"\xff\xd8",
        "application/pdf": b"%PDF",
        "text/latex": "$x$",
        "application/json": [1, {"a": None}],
        "application/javascript": "1",
        "application/vnd.cloche.data+json": {"a": [1]},
        "application/vnd.cloche.chart+json": {"type": "line"},
        "image/gif": b"GIF",
        "application/vnd.x+json": {"y": 1},
    }
    assert lines(Display(data=data))[0] == {
        "type": "result",
        "text": "t",
        "html": "h",
        "markdown": "m",
        "svg": "<svg/>",
        "png": "iVBORw==",
        "jpeg": "/9g=",
        "pdf": "JVBERg==",
        "latex": "$x$",
        "json": [1, {"a": None}],
        "javascript": "1",
        "data": {"a": [1]},
        "chart": {"type": "line"},
        "extra": {"image/gif": "R0lG", "application/vnd.x+json": {"y": 1}},
        "is_main_result": False,
    }


@pytest.mark.parametrize(
    ("text", "sent"),
    [("'abc'", "abc"), ('"a\'b"', "a'b"), ("'a\"", "'a\""), ("'", "'"), ("''", ""), ("", ""), ("[1]", "[1]")],
)
def test_outer_quotes_that_match_are_stripped(text, sent):
    assert lines(Display(data={"text/plain": text}))[0]["text"] == sent


def test_numbers_that_are_no_json_become_null():
    raw = encoded(Display(data={"application/json": {"a": [float("nan"), float("inf"), 1.5]}}))
    assert b"NaN" not in raw and json.loads(raw)["json"] == {"a": [None, None, 1.5]}


def test_mime_types_unknown_to_e2b_are_left_out():
    assert lines(Cleared(), Truncated(stream="stdout", dropped_bytes=1), Display(data={}, id="d", update=True)) == []


def test_an_exception_is_one_error_before_the_end():
    raised = Raised(name="NameError", value="name 'x' is not defined", traceback="Traceback ..")
    late = Output(stream="stderr", text="late")
    kinds = [line["type"] for line in lines(raised, raised, late, Ended(outcome="raised"))]
    assert kinds == ["stderr", "error", "end_of_execution"]
    assert lines(raised, Ended(outcome="raised"))[0] == {
        "type": "error",
        "name": "NameError",
        "value": "name 'x' is not defined",
        "traceback": "Traceback ..",
    }


@pytest.mark.parametrize(
    ("outcome", "name"),
    [
        ("died", "ContextRestarting"),
        ("out_of_memory", "OutOfMemory"),
        ("timed_out", "ExecutionTimedOut"),
        ("interrupted", "KeyboardInterrupt"),
    ],
)
def test_an_end_that_no_exception_explains_is_an_error_with_its_reason(outcome, name):
    said = lines(Ended(outcome=outcome, reason="because of this"))
    assert [line["type"] for line in said] == ["error", "end_of_execution"]
    assert said[0]["name"] == name and "because of this" in said[0]["value"]


def test_a_limit_is_named_rather_than_the_interrupt_that_enforced_it():
    raised = Raised(name="KeyboardInterrupt", value="", traceback="where it was")
    said = lines(raised, Ended(outcome="timed_out", reason="the time limit of 3 s was reached"))
    assert (said[0]["name"], said[0]["traceback"]) == ("ExecutionTimedOut", "where it was")
    assert lines(raised, Ended(outcome="interrupted"))[0]["name"] == "KeyboardInterrupt"
