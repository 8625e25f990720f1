"""Many at once: each stream has its own code, its own container and its own answer."""

from __future__ import annotations

import asyncio

import httpx2
import openai
import pytest
from tests.conftest import RunningServer
from tests.openai.conftest import CODE_INTERPRETER
from tests.openai.upstream import Code, ScriptedUpstream, Text

STREAMS = 100

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("style", ["chat", "resp"])
async def test_a_hundred_streams_with_code_end_well(
    gateway_server: RunningServer, upstream: ScriptedUpstream, style: str
):
    models = [
        upstream.play(style, [Code(f"x = {number}\nprint(x * 2)")], [Text(f"It was {number}.")])
        for number in range(STREAMS)
    ]
    limits = httpx2.Limits(max_connections=STREAMS)
    async with openai.AsyncOpenAI(
        api_key=gateway_server.key,
        base_url=f"{gateway_server.url}/v1",
        max_retries=0,
        http_client=httpx2.AsyncClient(limits=limits, timeout=240),
    ) as client:
        answers = await asyncio.gather(*(_streamed(client, model) for model in models))
        containers = {call.container_id for call, _ in answers}
        await asyncio.gather(*(client.containers.delete(container) for container in containers))
    assert [call.outputs[0].logs for call, _ in answers] == [f"{number * 2}\n" for number in range(STREAMS)]
    assert [message.content[0].text for _, message in answers] == [f"It was {number}." for number in range(STREAMS)]
    assert len(containers) == STREAMS


async def _streamed(client: openai.AsyncOpenAI, model: str):
    async with client.responses.stream(
        model=model, input="Go", tools=[CODE_INTERPRETER], include=["code_interpreter_call.outputs"]
    ) as stream:
        async for _ in stream:
            pass
        response = await stream.get_final_response()
    return response.output
