"""Whatever a model says: OpenAI's client puts the stream of a chat together, and it is what the whole answer is."""

from __future__ import annotations

import json
import os
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from openai.lib.streaming.chat import ChatCompletionStreamState
from tests.openai.scripts import Script, scripts
from tests.openai.test_chat import ASKED, TOOLS, WEATHER
from tests.openai.upstream import Code, Function, ScriptedUpstream, Text

EXAMPLES = int(os.environ.get("ANY_SCRIPT_EXAMPLES", "24"))


@pytest.mark.parametrize("style", ["chat", "resp"])
@given(script=scripts)
@settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
    max_examples=EXAMPLES,
)
def test_every_chat_is_the_same_streamed_and_whole(
    style: str, script: Script, client: openai.OpenAI, upstream: ScriptedUpstream
):
    if script.status == "failed":
        for stream in (False, True):
            with pytest.raises(openai.APIError):
                ask(client, upstream.play(style, *script.legs), stream=stream)
        return
    whole, streamed = (ask(client, upstream.play(style, *script.legs), stream=stream) for stream in (False, True))
    assert means(whole) == means(streamed)
    choice = whole["choices"][0]
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == script.tokens
    calls = [part for part in script.parts if isinstance(part, Function)]
    ended = "length" if script.status == "incomplete" else "tool_calls" if calls else "stop"
    assert choice["finish_reason"] == ended
    assert len(choice["message"].get("tool_calls") or []) == len(calls)
    assert len(choice["message"].get("code_interpreter_calls") or []) == sum(
        isinstance(part, Code) for part in script.parts
    )
    said = joined(choice["message"]["content"] or "")
    assert all(joined(part.text) in said for part in script.parts if isinstance(part, Text))
    assert "call_up_" not in json.dumps(whole) and "chatcmpl-up_" not in json.dumps(whole)


def joined(text: str) -> str:
    """Without the lines between messages: a thought in the middle of a text makes two of it."""
    return text.replace("\n", "")


def ask(client: openai.OpenAI, model: str, *, stream: bool) -> dict[str, Any]:
    fields: Any = {"model": model, "messages": ASKED, "tools": [*TOOLS, WEATHER]}
    if not stream:
        return client.chat.completions.create(**fields).to_dict()
    state: Any = ChatCompletionStreamState()
    with client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **fields) as chunks:
        for chunk in chunks:
            list(state.handle_chunk(chunk))
    made: dict[str, Any] = state.current_completion_snapshot.to_dict()
    return made


def means(completion: dict[str, Any]) -> dict[str, Any]:
    """A completion without what differs between two runs: ids, and how a client writes that there is nothing."""
    choice = completion["choices"][0]
    message = choice["message"]
    codes = [{**each, "id": "", "container_id": ""} for each in message.get("code_interpreter_calls") or []]
    cited = [
        {**each, "file_id": "", "container_id": "", "filename": ""}
        for each in message.get("container_file_citations") or []
    ]
    calls = [each["function"] for each in message.get("tool_calls") or []]
    said = {key: message.get(key) or "" for key in ("content", "refusal", "reasoning_content")}
    return {
        **said,
        "codes": codes,
        "cited": cited,
        "calls": [(each["name"], each["arguments"]) for each in calls],
        "finish_reason": choice["finish_reason"],
        "usage": completion["usage"],
    }
