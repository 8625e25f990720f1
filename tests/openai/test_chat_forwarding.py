"""Chats that are passed on: odd chunks of an upstream reach the client as they are, and its own fields the upstream."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from tests.conftest import RunningServer
from tests.openai.upstream import Raw, ScriptedUpstream, Text

ODD: list[dict[str, Any]] = [
    {"choices": 5},
    {"choices": "text"},
    {"choices": {"finish_reason": "stop"}},
    {"choices": [5, None, [], "x"]},
    {"choices": [{"finish_reason": {}, "delta": 7, "message": 7}]},
    {"choices": None, "usage": 5},
    {"usage": {"prompt_tokens": "many", "completion_tokens": 10**30}},
    {"error": None},
    {},
]


def told(server: RunningServer, model: str) -> list[str]:
    """What the server sends, line by line."""
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "?"}]}
    headers = {"authorization": f"Bearer {server.key}"}
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]


@pytest.mark.parametrize("chunk", ODD)
def test_an_odd_chunk_and_its_successors_are_forwarded(
    gateway_server: RunningServer, upstream: ScriptedUpstream, chunk: dict[str, Any]
):
    model = upstream.play("chat", [Raw(f"data: {json.dumps(chunk)}\n\n"), Text("All the same.")])
    *chunks, last = told(gateway_server, model)
    assert last == "[DONE]"
    assert sorted(chunk) in [sorted(json.loads(each)) for each in chunks]
    deltas = [choice for each in map(json.loads, chunks) if each.get("id") for choice in each["choices"]]
    assert "".join(each["delta"].get("content") or "" for each in deltas) == "All the same."


def test_the_clients_store_flag_reaches_the_upstream_unchanged(
    gateway_server: RunningServer, upstream: ScriptedUpstream
):
    model = upstream.play("chat", [Text("Yes.")], [Text("Yes.")])
    headers = {"authorization": f"Bearer {gateway_server.key}"}
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "?"}]}
    for given in ({"store": True, "metadata": {"a": "b"}}, {}):
        httpx2.post(f"{gateway_server.url}/v1/chat/completions", json={**body, **given}, headers=headers)
    said, unsaid = (asked.body for asked in upstream.asked(model))
    assert said["store"] is True and said["metadata"] == {"a": "b"}
    assert "store" not in unsaid and "metadata" not in unsaid
