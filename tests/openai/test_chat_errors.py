"""Chat completions when something goes wrong: upstreams, clients, requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest
from tests.conftest import RunningServer
from tests.openai.conftest import UPSTREAM_KEY, client_of
from tests.openai.test_chat import ASKED, CALL, TOOLS, WEATHER
from tests.openai.upstream import (
    BreakOff,
    Code,
    Function,
    Garbage,
    Hang,
    HttpError,
    NoFinish,
    ScriptedUpstream,
    StreamError,
    Text,
)

Play = Callable[..., str]


def test_an_upstream_refusal_is_an_error_before_any_event(client: openai.OpenAI, play: Play):
    error = HttpError(429, {"error": {"message": "slow down", "type": "rate_limit"}}, {"retry-after": "7"})
    for stream in (False, True):
        for tools in (TOOLS, []):
            with pytest.raises(openai.RateLimitError, match="slow down") as caught:
                client.chat.completions.create(model=play([error]), messages=ASKED, tools=tools, stream=stream)
            assert caught.value.response.headers["retry-after"] == "7"


@pytest.mark.parametrize("trouble", [BreakOff(), Garbage(), NoFinish(), StreamError("it broke")])
def test_trouble_in_a_stream_is_an_error_that_ends_it(client: openai.OpenAI, play: Play, trouble: Any):
    for tools in (TOOLS, []):
        model = play([Text("I was about to"), trouble])
        with client.chat.completions.create(model=model, messages=ASKED, tools=tools, stream=True) as stream:
            said = ""
            with pytest.raises(openai.APIError) as caught:
                for chunk in stream:
                    said += chunk.choices[0].delta.content or ""
        assert said == "I was about to" and not isinstance(caught.value, openai.APIConnectionError)
        assert UPSTREAM_KEY not in str(caught.value)


def test_a_failure_after_code_is_not_to_be_tried_again(client: openai.OpenAI, play: Play):
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=play([Code("1")], [HttpError(503)]), messages=ASKED, tools=TOOLS)
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_code_of_a_client_that_leaves_is_interrupted_and_its_container_lives(client: openai.OpenAI, play: Play):
    container = client.containers.create(name="left").id
    tools: Any = [{"type": "code_interpreter", "container": container}]
    model = play([Text("Wait."), Code("x = 1\nimport time\ntime.sleep(60)")])
    with client.chat.completions.create(model=model, messages=ASKED, tools=tools, stream=True) as stream:
        next(stream)
    made: Any = client.chat.completions.create(
        model=play([Code("print(1)")], [Text("Done.")]), messages=ASKED, tools=tools, timeout=30
    )
    assert made.choices[0].message.code_interpreter_calls[0]["outputs"][0]["logs"] == "1\n"


def test_an_upstream_hears_that_the_client_has_left(client: openai.OpenAI, upstream: ScriptedUpstream, play: Play):
    for tools in (TOOLS, []):
        model = play([Text("Wait."), Hang()])
        with client.chat.completions.create(model=model, messages=ASKED, tools=tools, stream=True) as stream:
            next(stream)
        assert upstream.asked(model)[0].abandoned.wait(20)


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"model": "nobody"}, 404, "model", "model_not_found"),
        ({"model": None}, 400, "model", "missing_required_parameter"),
        ({"messages": None}, 400, "messages", "missing_required_parameter"),
        ({"messages": []}, 400, "messages", "empty_array"),
        ({"tools": TOOLS, "n": 2}, 400, "n", "invalid_value"),
        ({"tools": TOOLS, "messages": [{"role": "x"}]}, 400, "messages[0].role", "invalid_value"),
        ({"tools": [{"type": "code_interpreter", "container": 7}]}, 400, "tools[0].container", "invalid_value"),
    ],
)
def test_bad_requests_are_refused_in_openais_shape(
    client: openai.OpenAI, fields: Any, status: int, param: str, code: str
):
    body = {"model": "cloche/echo", "messages": ASKED, **fields}
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as caught:
            client.post("/chat/completions", body={**body, "stream": stream}, cast_to=object)
        assert (caught.value.status_code, caught.value.param, caught.value.code) == (status, param, code)


def test_completions_are_not_stored(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.chat.completions.retrieve("chatcmpl-1")
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.chat.completions.list()


def test_no_foreign_turn_is_spliced_in(gateway_server: RunningServer, upstream: ScriptedUpstream, play: Play):
    """A foreign call id is as unknown as one that never existed."""
    headers = {"authorization": f"Bearer {gateway_server.key}"}
    with client_of(gateway_server) as client:
        model = play([Code("secret = 7"), Function("weather", {"city": "Oslo"})])
        call: Any = client.chat.completions.create(model=model, messages=ASKED, tools=[*TOOLS, WEATHER]).choices[0]
    made = httpx2.post(f"{gateway_server.url}/admin/keys", headers=headers, json={"name": "o", "owner": "other"})
    made.raise_for_status()
    bare = {"role": "assistant", "tool_calls": [call.message.tool_calls[0].model_dump(include=CALL)]}
    result = {"role": "tool", "tool_call_id": bare["tool_calls"][0]["id"], "content": "1"}
    with client_of(gateway_server, api_key=made.json()["key"]) as other:
        model = play([Text("Fine.")])
        other.chat.completions.create(model=model, messages=[*ASKED, bare, result], tools=TOOLS)
    assert "secret" not in json.dumps(upstream.asked(model)[0].body)
