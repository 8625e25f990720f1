"""Calls in a call: what models ask for by a function that nobody offered them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI
from tests.openai.conftest import CODE_INTERPRETER
from tests.openai.upstream import Function, ScriptedUpstream, Text

from cloche.gateway.events import AnswerFinished, ItemClosed, ItemDelta, ItemOpened, TurnEvent
from cloche.gateway.turn import ParallelCallSplitter

PYTHON = {"type": "function", "name": "python"}


def wrapped(*uses: tuple[str, Any]) -> dict[str, Any]:
    return {"tool_uses": [{"recipient_name": name, "parameters": given} for name, given in uses]}


def said_of(name: str, arguments: str, tools: list[dict[str, Any]]) -> list[TurnEvent]:
    item = {"type": "function_call", "name": name, "call_id": "c", "arguments": arguments, "status": "completed"}
    message = {"type": "message", "content": []}
    happenings: list[TurnEvent] = [
        ItemOpened(index=0, item={**item, "arguments": ""}),
        ItemOpened(index=1, item=message),
        ItemDelta(index=0, kind="arguments", text=arguments),
        ItemDelta(index=1, kind="text", text="x"),
        ItemClosed(index=0, item=item),
        ItemClosed(index=1, item=message),
        AnswerFinished(),
    ]
    unwrapped = ParallelCallSplitter(tools)
    return [each for happening in happenings for each in unwrapped.of(happening)]


def calls(happenings: list[TurnEvent]) -> list[str]:
    return [each.item["name"] for each in happenings if isinstance(each, ItemClosed) and "name" in each.item]


@pytest.mark.parametrize("name", ["parallel", "multi_tool_use.parallel"])
def test_calls_in_a_call_are_taken_apart(name: str):
    arguments = json.dumps(wrapped(("functions.python", {"code": "1"}), ("python", {"code": "2"})))
    happenings = said_of(name, arguments, [PYTHON])
    assert calls(happenings) == ["python", "python"]
    indices = [each.index for each in happenings if isinstance(each, ItemOpened)]
    assert len(set(indices)) == 3  # the message has its own too
    text = next(each for each in happenings if isinstance(each, ItemDelta) and each.kind == "text")
    assert text.index == next(
        each.index for each in happenings if isinstance(each, ItemOpened)
    )  # it was announced first


@pytest.mark.parametrize(
    "arguments", ["", "[]", "{}", '{"tool_uses": 5}', '{"tool_uses": [{}]}', json.dumps(wrapped(("rm", {})))]
)
def test_a_call_that_cannot_be_taken_apart_is_left_as_it_is(arguments: str):
    assert calls(said_of("parallel", arguments, [PYTHON])) == ["parallel"]


def test_a_function_of_that_name_is_the_clients():
    arguments = json.dumps(wrapped(("python", {})))
    assert calls(said_of("parallel", arguments, [PYTHON, {"type": "function", "name": "parallel"}])) == ["parallel"]


def test_code_asked_for_so_runs_and_nothing_of_it_leaks(client: OpenAI, upstream: ScriptedUpstream, play, style: str):
    uses = wrapped(("functions.python", {"code": "print(1)"}), ("functions.python", {"code": "print(2)"}))
    model = play([Text("So:"), Function("parallel", uses)], [Text("done")])
    events = list(client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER], stream=True))
    assert "tool_uses" not in "".join(event.to_json() for event in events)
    response = events[-1].response
    kinds = ["message", "code_interpreter_call", "code_interpreter_call", "message"]
    assert [item.type for item in response.output] == kinds
    assert upstream.asked(model)[1].outputs == ["1\n", "2\n"]
