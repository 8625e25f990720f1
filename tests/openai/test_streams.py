"""How answers come, and end: word by word, as errors that SDKs know, and when their client has left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from tests.conftest import serving, wait_until
from tests.openai.conftest import CODE_INTERPRETER, client_of
from tests.openai.test_store import OUTPUTS, echo, fenced, logs
from tests.openai.upstream import BreakOff, Code, Hang, HttpError, ScriptedUpstream, Text, WaitFor

Play = Callable[..., str]
ENDLESS = "x = 7\nwhile True: pass"


def test_the_first_word_does_not_wait_for_the_second(client: openai.OpenAI, play: Play):
    second = threading.Event()
    model = play([Text("first", chunks=1), WaitFor(second), Text("second", chunks=1)])
    with client.responses.create(model=model, input="?", stream=True) as stream:
        delta = next(event for event in stream if event.type == "response.output_text.delta")
        assert delta.delta == "first"
        second.set()
        assert list(stream)[-1].type == "response.completed"


def test_code_is_streamed_before_it_is_whole(client: openai.OpenAI, play: Play):
    rest = threading.Event()
    model = play([Code("print(6 * 7)", chunks=['{"code": "pri', "nt(6 * 7)", '"}'])], [WaitFor(rest), Text("42")])
    with client.responses.create(model=model, input="?", stream=True, tools=[CODE_INTERPRETER]) as stream:
        kinds = []
        for event in stream:
            kinds.append(event.type)
            if event.type == "response.code_interpreter_call.completed":
                rest.set()
    assert kinds.count("response.code_interpreter_call_code.delta") >= 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "error"),
    [(400, openai.BadRequestError), (404, openai.NotFoundError), (429, openai.RateLimitError)],
)
def test_a_refusal_of_the_upstream_is_the_exception_that_sdks_have_for_it(
    client: openai.OpenAI, play: Play, status: int, error: type[openai.APIStatusError], stream: bool
):
    body = {"error": {"message": "not so", "type": "t", "code": "c", "param": "input"}}
    model = play([HttpError(status, body, {"retry-after": "7"})])
    with pytest.raises(error, match="not so") as refused:
        client.responses.create(model=model, input="?", stream=stream)
    assert "x-should-retry" not in refused.value.response.headers


@pytest.mark.parametrize("stream", [False, True])
def test_an_upstream_that_is_down_is_a_server_error(client: openai.OpenAI, stream: bool):
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="gone-model", input="?", stream=stream)


def test_no_retry_is_suggested_after_code_has_run(client: openai.OpenAI, play: Play):
    model = play([Code("print(1)")], [HttpError(429, {"error": {"message": "later"}})])
    with pytest.raises(openai.RateLimitError) as refused:
        client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER])
    assert refused.value.response.headers["x-should-retry"] == "false"


def test_a_failure_in_the_middle_is_told_in_the_stream_and_kept(client: openai.OpenAI, play: Play):
    model = play([Text("half", chunks=1), BreakOff()])
    with client.responses.with_streaming_response.create(model=model, input="?", stream=True) as answer:
        told = answer.read().decode()
    kinds = [line.removeprefix("event: ") for line in told.splitlines() if line.startswith("event: ")]
    assert kinds[0] == "response.created" and kinds[-2:] == ["error", "response.failed"]
    assert "response.output_item.done" in kinds


def test_answers_say_how_long_they_took(client: openai.OpenAI):
    headers = client.responses.with_raw_response.create(model="cloche/echo", input="hello").headers
    assert int(headers["openai-processing-ms"]) >= 0
    assert headers["openai-version"] == "2020-10-01" and headers["x-request-id"]


def test_code_is_interrupted_when_the_reader_of_a_stream_leaves(client: openai.OpenAI):
    id = container = ""
    before = echo(client, "x = 7")
    with client.responses.create(
        model="cloche/echo",
        input=fenced("while True: pass"),
        stream=True,
        tools=[CODE_INTERPRETER],
        previous_response_id=before.id,
    ) as stream:
        for event in stream:
            if event.type == "response.created":
                id = event.response.id
            if event.type == "response.output_item.added":
                container = event.item.container_id
            if event.type == "response.code_interpreter_call.interpreting":
                break
    tool = {"type": "code_interpreter", "container": container}
    assert logs(echo(client, "1 + 1", tools=[tool])) == ["2\n"]  # it would wait for the endless one
    assert client.responses.retrieve(id).status == "cancelled"
    assert logs(echo(client, "x", previous_response_id=id)) == ["7\n"]


def test_code_is_interrupted_when_a_client_stops_waiting(client: openai.OpenAI):
    container = echo(client, "1").output[0].container_id
    tool = {"type": "code_interpreter", "container": container}
    with pytest.raises(openai.APITimeoutError):
        echo(client.with_options(timeout=1), ENDLESS, tools=[tool])
    assert logs(echo(client, "1 + 1", tools=[tool])) == ["2\n"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_is_left_too(client: openai.OpenAI, upstream: ScriptedUpstream, play: Play, stream: bool):
    model = play([Hang()])
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1).responses.create(model=model, input="?", stream=stream)
    wait_until(upstream.asked(model)[0].abandoned.is_set)


def test_a_server_that_stops_ends_its_streams_properly_and_soon(
    own_data_dir: Path, gateway_config: Path, upstream: ScriptedUpstream
):
    waiting = upstream.play("chat", [Text("half", chunks=1), Hang()])
    running = {"model": "cloche/echo", "input": fenced(ENDLESS), "tools": [CODE_INTERPRETER]}
    with serving(own_data_dir, env={"CLOCHE_CONFIG": str(gateway_config), "TEST_UPSTREAM_KEY": "k"}) as server:
        client = client_of(server).responses.with_streaming_response
        with client.create(model=waiting, input="?", stream=True) as one, client.create(**running, stream=True) as two:
            streams = [_after("delta", one.iter_lines()), _after("interpreting", two.iter_lines())]
            server.process.send_signal(signal.SIGTERM)
            ends = [list(stream) for stream in streams]
        assert server.process.wait(25) == 0
    assert all("event: response.failed" in lines for lines in ends)


def _after(word: str, lines: Iterator[str]) -> Iterator[str]:
    assert any(word in line for line in lines)
    return lines


def test_outputs_are_in_a_stream_if_they_are_asked_for(client: openai.OpenAI):
    for include, expected in (([OUTPUTS], ["2\n"]), ([], [])):
        with client.responses.stream(
            model="cloche/echo", input=fenced("1 + 1"), tools=[CODE_INTERPRETER], include=include
        ) as stream:
            assert logs(stream.get_final_response()) == expected
