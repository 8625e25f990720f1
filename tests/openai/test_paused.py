"""Containers whose sandboxes somebody has paused by another dialect. OpenAI's API has no such thing."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI
from tests.conftest import RunningServer

import cloche


def sandbox_of(server: RunningServer, container: str) -> cloche.Sandbox:
    id = container.removeprefix("cntr_")
    return cloche.Sandbox.connect(id, url=server.url, api_key=server.key)


def ran(client: OpenAI, code: str, container: Any = None, **more: Any) -> tuple[str, str]:
    """What code printed, and in which container."""
    tools = [{"type": "code_interpreter", "container": container or {"type": "auto"}}]
    answer = client.responses.create(model="cloche/echo", input=f"```python\n{code}\n```", tools=tools, **more)  # type: ignore[call-overload]
    (call,) = [each for each in answer.output if each.type == "code_interpreter_call"]
    return answer.output_text, call.container_id


@pytest.mark.parametrize("memory", [True, False])
def test_a_paused_container_says_so_and_stays_so_until_it_is_used(
    client: OpenAI, gateway_server: RunningServer, memory: bool
):
    made = client.containers.create(name="paused")
    ran(client, "open('/mnt/data/f', 'w').write('kept')", made.id)
    box = sandbox_of(gateway_server, made.id)
    box.pause(memory=memory)
    for _ in range(2):
        assert client.containers.retrieve(made.id).status == "paused"
        assert {each.id: each.status for each in client.containers.list(name="paused")}[made.id] == "paused"
    assert box.info().state == "paused"
    text, _ = ran(client, "print(open('/mnt/data/f').read())", made.id)
    assert "kept" in text and box.info().state == "running"
    box.pause(memory=memory)
    assert "/mnt/data/f" in [each.path for each in client.containers.files.list(made.id)]
    box.pause(memory=memory)
    client.containers.delete(made.id)
    assert box.info().state == "ended"
    with pytest.raises(openai.NotFoundError):
        client.containers.retrieve(made.id)


def test_a_conversation_goes_on_in_its_paused_container(client: OpenAI, gateway_server: RunningServer):
    first = client.responses.create(
        model="cloche/echo",
        input="```python\nx = 42\n```",
        tools=[{"type": "code_interpreter", "container": {"type": "auto"}}],
    )
    (call,) = [each for each in first.output if each.type == "code_interpreter_call"]
    sandbox_of(gateway_server, call.container_id).pause()
    text, container = ran(client, "print(x)", previous_response_id=first.id)
    assert container == call.container_id and "42" in text
    client.containers.delete(container)
