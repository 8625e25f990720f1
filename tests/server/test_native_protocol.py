"""What is said over `/api/v1`, as bytes."""

from __future__ import annotations

import pytest

from cloche import errors, events
from cloche.api.native.context import MAX_SLOW_PARSE_BYTES, decode_client_message
from cloche.api.native.files import parse_octal_mode
from cloche.api.native.runs import encode_server_event as encode_sse
from cloche.engine.executions.runs import RunEventLine
from cloche.events import Exited
from cloche.model import Usage
from cloche.protocol import requests, responses

STARTED = events.Started(execution="x1", count=3)
PICTURE = events.Display(data={"text/plain": "<Figure>", "image/png": b"\x89PNG", "image/gif": b"GIF\xff"}, main=True)
ENDED = events.Ended(outcome="ok", usage=Usage(wall_seconds=0.5))


def test_an_event_is_one_object_with_its_type():
    assert responses.encode_event(STARTED) == b'{"type":"started","execution":"x1","count":3}'
    assert responses.encode_event(events.Output(stream="stdout", text="a\n")) == (
        b'{"type":"output","stream":"stdout","text":"a\\n"}'
    )


def test_binary_values_are_marked_and_come_back_as_bytes():
    raw = responses.encode_event(PICTURE)
    assert raw == (
        b'{"type":"display","data":{"text/plain":"<Figure>","image/png":"iVBORw==","image/gif":"R0lG/w=="},'
        b'"main":true,"id":null,"update":false,"binary":["image/png","image/gif"]}'
    )
    assert responses.decode_event(raw) == PICTURE


@pytest.mark.parametrize(
    "event",
    [
        STARTED,
        PICTURE,
        ENDED,
        events.Output(stream="stderr", text="\u2028\x85"),
        events.Display(data={"text/plain": "lone \ud800", "application/json": {"n": 2**70}}),
        events.Cleared(wait=True),
        events.Raised(name="E", value="v", traceback="t"),
        events.Input(prompt="? ", secret=True),
        events.Truncated(stream="display", dropped_bytes=7),
        Exited(exit_code=3),
    ],
    ids=lambda event: type(event).__name__,
)
def test_every_event_survives_the_wire(event: events.Event):
    assert responses.decode_event(responses.encode_event(event)) == event


def test_a_run_survives_the_wire():
    run = events.fold([STARTED, PICTURE, events.Output(stream="stdout", text="a"), ENDED])
    assert responses.decode_run(responses.encode_run(run)) == run
    assert responses.decode_run(responses.encode_run(run)).results[0].extra == {"image/gif": b"GIF\xff"}


def test_server_sent_events_have_a_name_and_one_line_of_data():
    assert encode_sse(STARTED) == b'event: started\ndata: {"type":"started","execution":"x1","count":3}\n\n'
    assert responses.parse_event(encode_sse(events.Output(stream="stdout", text="a\n\nb")).removesuffix(b"\n\n")) == (
        events.Output(stream="stdout", text="a\n\nb")
    )
    assert responses.parse_event(b": still here") is None


def test_an_event_of_a_run_has_its_number_as_its_id():
    line = RunEventLine(7, responses.encode_event(STARTED))
    assert encode_sse(line) == b"id: 7\n" + encode_sse(STARTED)
    assert list(responses.EventStreamParser().feed_numbered(b": still here\n\n" + encode_sse(line))) == [(7, STARTED)]


@pytest.mark.parametrize("id", [b"", b"id: \n", b"id: -1\n", b"id: x\n", b"id: 1.5\n", b"id: " + b"9" * 5000 + b"\n"])
def test_an_event_of_a_run_without_its_number_is_not_ours(id: bytes):
    with pytest.raises(errors.Unavailable, match="is it Cloche"):
        list(responses.EventStreamParser().feed_numbered(id + encode_sse(STARTED)))


def all_errors() -> list[type[errors.ClocheError]]:
    return [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.ClocheError)]


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_an_error_comes_back_as_the_same_class_with_the_same_text(kind: type[errors.ClocheError]):
    error = responses.to_exception(responses.to_error_info(kind("what: to do")))
    assert (type(error), str(error), error.code) == (kind, "what: to do", kind.code)


@pytest.mark.parametrize("error", [errors.Busy("full", retry_after_seconds=7.5), errors.QuotaExceeded("much")])
def test_when_to_ask_again_comes_back_where_it_is_known(error: errors.ClocheError):
    assert responses.to_exception(responses.to_error_info(error)).retry_after_seconds == error.retry_after_seconds


def test_an_error_of_a_newer_server_is_still_one_of_ours():
    error = responses.to_exception(responses.ErrorInfo(code="brand_new", message="hm"))
    assert type(error) is errors.ClocheError and str(error) == "hm"


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'{"type":"nope"}', b'{"type":"display","data":{"a":1},"binary":["a"]}']
)
def test_an_answer_that_is_not_ours_says_so(raw: bytes):
    with pytest.raises(errors.Unavailable, match="is it Cloche"):
        responses.decode_event(raw)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"cod": "1"}', "did you mean 'code'"),
        (b'{"code": "1", "zzz": 1}', "there are code, context"),
        (b'{"code": 7}', "Expected `str`"),
        (b"{}", "missing required field `code`"),
        (b"{", "no valid JSON"),
        (b'{"code": "\xff"}', "no valid JSON"),
        (b'{"code": ' + b"[" * 100_000, "invalid request"),
        (b"[]", "invalid request"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_with_a_reason(raw: bytes, said: str):
    with pytest.raises(errors.InvalidRequest, match=said):
        decode_client_message(raw, requests.ExecuteRequest)


def test_names_inside_a_message_are_hinted_at_too():
    with pytest.raises(errors.InvalidRequest, match="did you mean 'memory_bytes'"):
        decode_client_message(b'{"limits": {"memory_byte": 1}}', requests.CreateSandbox)


def test_code_may_have_lone_surrogates():
    assert decode_client_message(b'{"code": "\'\\ud800\'"}', requests.ExecuteRequest).code == "'\ud800'"


@pytest.mark.parametrize("as_text", [False, True])
def test_a_message_has_a_limit_of_values(as_text: bool):
    raw = b'{"code": "\\ud800", "argv": [' + b"{}," * 300_000 + b"{}]}"
    with pytest.raises(errors.InvalidRequest, match="more than 200000 values"):
        decode_client_message(raw.decode() if as_text else raw, requests.ExecuteRequest)
    assert (
        len(decode_client_message(b'{"code": "[,{' + b"," * 300_000 + b'"}', requests.ExecuteRequest).code) == 300_003
    )


def test_input_for_the_slow_parser_has_a_limit_of_bytes():
    raw = b'{"code": "' + b"x" * MAX_SLOW_PARSE_BYTES + b'%s"}'
    assert len(decode_client_message(raw.replace(b"%s", b""), requests.ExecuteRequest).code) == MAX_SLOW_PARSE_BYTES
    with pytest.raises(errors.InvalidRequest, match="a lone surrogate"):
        decode_client_message(raw.replace(b"%s", b"\\ud800"), requests.ExecuteRequest)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_json_has_no_constants_but_its_own(constant: str):
    with pytest.raises(errors.InvalidRequest, match=f"there is no {constant} in JSON"):
        decode_client_message(f'{{"code": "1", "timeout_seconds": {constant}}}', requests.ExecuteRequest)


def test_nan_is_null_beside_a_lone_surrogate_too():
    assert responses.encode_json([float("nan"), "a"]) == b'[null,"a"]'
    assert responses.encode_json([float("nan"), "\ud800"]) == b'[null,"\\ud800"]'


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_server_sent_events_are_found_however_they_are_cut(size: int):
    raw = encode_sse(STARTED) + b": still here\n\n" + encode_sse(PICTURE) + encode_sse(ENDED)
    stream = responses.EventStreamParser()
    found = [event for at in range(0, len(raw), size) for event in stream.feed(raw[at : at + size])]
    assert found == [STARTED, PICTURE, ENDED]


def test_modes_are_octal():
    assert (parse_octal_mode("644"), parse_octal_mode(None)) == (0o644, None)
    with pytest.raises(errors.InvalidRequest, match="octal"):
        parse_octal_mode("rw")
