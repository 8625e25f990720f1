"""What one turn, and one owner, can take of the server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from tests.conftest import serving
from tests.openai.conftest import CODE_INTERPRETER, UPSTREAM_KEY, client_of
from tests.openai.upstream import Code, Hang, Raw, Reached, ScriptedUpstream, Text, WaitFor

from cloche.gateway.gateway import TooManyTurns, TurnLimiter

Play = Callable[..., str]
OUTPUTS = ["code_interpreter_call.outputs"]
ROOM = 100_000
LEAST = 16 * 1024  # that every execution has: what the model is shown
TURNS = 2
MUCH = "print('begin' + 'x' * 10_000_000 + 'end')"
NO_PICTURE = "from IPython.display import display\ndisplay({'image/png': 'bm8gcGljdHVyZQ=='}, raw=True)"


@pytest.fixture(scope="module")
def narrow(bare_dir: str, gateway_config: Path) -> Iterator[openai.OpenAI]:
    """A client of a server with little room."""
    env = {
        "CLOCHE_CONFIG": str(gateway_config),
        "TEST_UPSTREAM_KEY": UPSTREAM_KEY,
        "CLOCHE_GATEWAY_OUTPUTS_BYTES": str(ROOM),
        "CLOCHE_GATEWAY_TURNS_PER_OWNER": str(TURNS),
    }
    with serving(bare_dir, env=env) as server, client_of(server) as client:
        yield client


def test_a_turn_keeps_bounded_output(narrow: openai.OpenAI, play: Play, upstream: ScriptedUpstream):
    runs = 4
    model = play(*[[Code(MUCH)]] * runs, [Text("Much.")])
    response = narrow.responses.create(model=model, input="?", tools=[CODE_INTERPRETER], include=OUTPUTS)
    logs = ["".join(each.logs for each in item.outputs) for item in response.output[:runs]]
    assert sum(map(len, logs)) < ROOM + (runs - 1) * LEAST + runs * 200
    assert all(each.startswith("begin") and each.endswith("end\n") and "bytes dropped" in each for each in logs)
    seen = upstream.asked(model)[-1].outputs
    assert all(each.startswith("begin") and each.endswith("end\n") for each in seen)
    assert narrow.responses.retrieve(response.id, include=OUTPUTS).output == response.output


def test_streamed_output_is_bounded_too(narrow: openai.OpenAI, play: Play):
    model = play([Code(MUCH)], [Text("Much.")])
    said, unchecked = 0, narrow.copy(http_client=httpx2.Client())  # these events are our own
    with unchecked.responses.create(
        model=model, input="?", tools=[CODE_INTERPRETER], stream=True, stream_options={"include_outputs": True}
    ) as stream:
        for event in stream:
            said += len(event.delta) if "output.delta" in event.type else 0
    assert 0 < said <= ROOM


def test_a_picture_that_is_none_never_reaches_the_model(client: openai.OpenAI, play: Play, upstream: ScriptedUpstream):
    model = play([Code(NO_PICTURE)], [Text("None.")])
    response = client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER], include=OUTPUTS)
    assert [each.type for each in response.output[0].outputs] == ["image"]
    body = upstream.asked(model)[-1].body
    assert "image_url" not in json.dumps(body)
    assert "it is no image/png" in json.dumps(body)


# -- turns of one owner


def test_an_owner_has_so_many_turns_at_once(narrow: openai.OpenAI, play: Play):
    go_on, begun = threading.Event(), [threading.Event() for _ in range(TURNS)]
    streams = [
        narrow.responses.create(model=play([Text("a"), Reached(each), WaitFor(go_on)]), input="?", stream=True)
        for each in begun
    ]
    with pytest.raises(openai.RateLimitError, match="Too many requests at once") as refused:
        narrow.responses.create(model="cloche/echo", input="?")
    assert refused.value.code == "rate_limit_exceeded"
    for messages in ({"model": "cloche/echo"}, {"model": play([Text("b")])}):
        with pytest.raises(openai.RateLimitError):
            narrow.chat.completions.create(**messages, messages=[{"role": "user", "content": "?"}])
    go_on.set()
    for stream in streams:
        assert [event.type for event in stream][-1] == "response.completed"
        narrow.responses.create(model="cloche/echo", input="?")


def test_those_of_another_do_not_count():
    crowd = TurnLimiter(1)
    with crowd.enter("me"):
        with crowd.enter("you"):
            pass
        with pytest.raises(TooManyTurns), crowd.enter("me"):
            pass
    with crowd.enter("me"):
        pass
    assert not crowd._turns


# -- upstreams


FINISH = {
    "id": "chatcmpl-up_1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}


def test_an_upstream_that_does_not_hang_up_has_answered(client: openai.OpenAI, upstream: ScriptedUpstream):
    """Its patience is half a second: then it would have failed."""
    leg = [Text("Hi"), Raw(f"data: {json.dumps(FINISH)}\n\n"), Hang()]
    response = client.responses.create(model=upstream.play("impatient", leg), input="?")
    assert (response.output_text, response.usage.input_tokens) == ("Hi", 3)
    asked = {"model": upstream.play("impatient", leg), "messages": [{"role": "user", "content": "?"}]}
    chunks = client.chat.completions.create(**asked, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == "Hi"


def test_half_a_character_does_not_spoil_an_answer(client: openai.OpenAI, upstream: ScriptedUpstream):
    half = r'data: {"choices": [{"index": 0, "delta": {"content": "\ud83d"}}]}' + "\n\n"
    response = client.responses.create(model=upstream.play("chat", [Text("a"), Raw(half), Text("b")]), input="?")
    assert response.output_text == "a\ufffdb"
