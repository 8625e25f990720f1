"""Whatever a model says, in whichever protocol: the official SDKs accept the stream, and it means what was said."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests import javascript
from tests.conftest import RunningServer
from tests.openai.conftest import client_of
from tests.openai.schemas import Checked, Frames
from tests.openai.scripts import OUTPUTS, TOOLS, Script, kind_of, same, scripts
from tests.openai.upstream import Code, Function, Reasoning, Refusal, ScriptedUpstream, Text

EXAMPLES = int(os.environ.get("ANY_SCRIPT_EXAMPLES", "12"))
IN_ONE_PROCESS = 12  # scripts that one run of Node.js is given
TERMINAL = ("response.completed", "response.incomplete", "response.failed")

bounded = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # a failing script is short enough
)


class Recorded(httpx2.BaseTransport):
    """Keeps every byte that a client saw."""

    def __init__(self) -> None:
        self._inner = httpx2.HTTPTransport()
        self.seen = b""

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = self._inner.handle_request(request)
        assert isinstance(response.stream, httpx2.SyncByteStream)
        self.seen = b""
        response.stream = _Tee(response.stream, self)
        return response

    def events(self) -> list[dict[str, Any]]:
        return [data for _, data in Frames().feed(self.seen)]


class _Tee(httpx2.SyncByteStream):
    def __init__(self, inner: httpx2.SyncByteStream, recorded: Recorded):
        self._inner = inner
        self._chunks = iter(inner)
        self._recorded = recorded

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            self._recorded.seen += chunk
            yield chunk

    def close(self) -> None:
        # The SDK stops at an error, and what follows may be large and still on its way.
        self._recorded.seen += b"".join(self._chunks)
        self._inner.close()


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture(scope="module")
def recording_client(gateway_server: RunningServer, recorded: Recorded) -> Iterator[openai.OpenAI]:
    http_client = httpx2.Client(transport=Checked(recorded))
    with client_of(gateway_server, http_client=http_client) as made:
        yield made


@pytest.mark.parametrize("style", ["chat", "resp"])
@given(script=scripts)
@settings(bounded, max_examples=EXAMPLES)
def test_the_python_sdk_accepts_every_stream(
    style: str,
    script: Script,
    gateway_server: RunningServer,
    recording_client: openai.OpenAI,
    recorded: Recorded,
    upstream: ScriptedUpstream,
):
    streamed = upstream.play(style, *script.legs)
    accepted = accepts(recording_client, streamed)
    assert accepted == (script.status != "failed")
    seen = recorded.seen
    leaks_nothing(seen)
    if not recorded.events():
        assert script.status == "failed" and json.loads(seen)["error"]["message"]  # before the first word
        return
    is_well_formed(recorded.events())
    response = recorded.events()[-1]["response"]
    try:
        says_what_was_said(response, script, style)
        kept = recording_client.responses.with_raw_response.retrieve(response["id"], include=OUTPUTS)
        assert json.loads(kept.text) == response
        if script.status != "failed":
            whole = whole_answer(recording_client, upstream.play(style, *script.legs))
            leaks_nothing(recorded.seen)
            end_containers(gateway_server, whole["output"])
            assert same(whole["output"]) == same(response["output"])
    finally:
        end_containers(gateway_server, response["output"])


@pytest.fixture(scope="module")
def node_modules() -> None:
    javascript.install()


@pytest.mark.parametrize("style", ["chat", "resp"])
@given(many=st.lists(scripts, min_size=IN_ONE_PROCESS, max_size=IN_ONE_PROCESS))
@settings(bounded, max_examples=max(EXAMPLES // IN_ONE_PROCESS, 1))
def test_the_node_sdk_accepts_every_stream(
    style: str, many: list[Script], gateway_server: RunningServer, upstream: ScriptedUpstream, node_modules: None
):
    requests = [{"model": upstream.play(style, *script.legs), **asking()} for script in many]
    said = javascript.run(["node", "openai/streams.mjs"], input=json.dumps(requests), **environment(gateway_server))
    outcomes = [json.loads(line) for line in said.splitlines()]
    for script, outcome in zip(many, outcomes, strict=True):
        assert "APIError" in outcome["error"] if script.status == "failed" else outcome["error"] is None, outcome
        if script.status != "failed":
            says_what_was_said(outcome["response"], script, style)
            end_containers(gateway_server, outcome["response"]["output"])


def asking() -> dict[str, Any]:
    return {"input": "Go", "tools": TOOLS, "include": OUTPUTS}


def environment(server: RunningServer) -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": server.key}


def accepts(client: openai.OpenAI, model: str) -> bool:
    """Whether the SDK read the stream to its end. It raises what the stream says of a failure."""
    try:
        with client.responses.stream(model=model, **asking()) as stream:
            for event in stream:
                if event.type == "response.completed":
                    assert stream.get_final_response().id == event.response.id
    except openai.APIError as error:
        assert error.message
        return False
    return True


def whole_answer(client: openai.OpenAI, model: str) -> dict[str, Any]:
    return json.loads(client.responses.with_raw_response.create(model=model, **asking()).text)


def is_well_formed(events: list[dict[str, Any]]) -> None:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] in TERMINAL
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    items = defaultdict(list)
    for event in events:
        if "output_index" in event:
            items[event["output_index"]].append(event)
    assert sorted(items) == list(range(len(items)))
    for index in items:
        item_is_well_formed(items[index])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done, "the last object is not what was streamed"


def item_is_well_formed(events: list[dict[str, Any]]) -> None:
    assert events[0]["type"] == "response.output_item.added"
    assert events[-1]["type"] == "response.output_item.done"
    added, done = events[0]["item"], events[-1]["item"]
    assert (added["id"], added["type"]) == (done["id"], done["type"])
    assert {event["item_id"] for event in events[1:-1]} <= {added["id"]}
    assert [event["type"] for event in events].count("response.output_item.done") == 1
    texts: dict[Any, str] = defaultdict(str)
    for event in events:
        what, _, when = event["type"].rpartition(".")
        place = what, event.get("content_index"), event.get("summary_index")
        if when == "delta":
            texts[place] += event["delta"]
        elif when == "done" and what != "response.output_item" and "part" not in event:
            whole = next(event[name] for name in ("text", "refusal", "code", "arguments", "input") if name in event)
            assert texts[place] == whole, event["type"]


def says_what_was_said(response: dict[str, Any], script: Script, style: str) -> None:
    assert response["status"] == script.status
    if script.status == "failed":
        assert response["error"]["message"]
        return
    output = response["output"]
    calls = [item["type"] for item in output if item["type"] in ("code_interpreter_call", "function_call")]
    assert calls == script.calls
    for kind, field in ((Text, "text"), (Refusal, "refusal")):  # a chat's message has one of each
        said = "".join(part.text for part in script.parts if isinstance(part, kind))
        assert "".join(texts_of(output, field)) == said
    if style == "resp":
        assert [item["type"] for item in output] == [kind_of(part) for part in script.parts]
    thought = "".join(
        part["text"] for item in output for part in item.get("content") or [] if part["type"] == "reasoning_text"
    )
    assert thought == "".join(part.text for part in script.parts if isinstance(part, Reasoning))
    functions = [part for part in script.parts if isinstance(part, Function)]
    answered = [item for item in output if item["type"] == "function_call"]
    assert [(item["call_id"], item["arguments"]) for item in answered] == [
        (part.call_id, part.arguments) for part in functions
    ]
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == script.tokens
    for item, part in zip(code_calls(output), (part for part in script.parts if isinstance(part, Code)), strict=True):
        assert item["code"] == (part.raw_arguments or part.code)
    for item in output:
        links_are_right(item)


def code_calls(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item for item in output if item["type"] == "code_interpreter_call"]


def texts_of(output: list[dict[str, Any]], field: str) -> Iterator[str]:
    for item in output:
        if item["type"] == "message":
            yield from (part[field] for part in item["content"] if field in part)


def links_are_right(item: dict[str, Any]) -> None:
    for part in item.get("content") or []:
        for each in part.get("annotations", []):
            assert each["type"] == "container_file_citation"
            linked = part["text"][each["start_index"] : each["end_index"]]
            assert linked in ("", "sandbox:/mnt/data/out.csv")


def leaks_nothing(seen: bytes) -> None:
    """Of the upstream's ids and of the function that stands for the code interpreter."""
    text = seen.decode()
    assert not re.findall(r"up_\d+", text)  # `\w*` before it takes the square of a long output's time
    assert '"python"' not in text


def end_containers(server: RunningServer, output: list[dict[str, Any]]) -> None:
    for container in {item["container_id"] for item in code_calls(output)}:
        url = f"{server.url}/api/v1/sandboxes/{container.removeprefix('cntr_')}"
        httpx2.delete(url, headers={"x-api-key": server.key})
