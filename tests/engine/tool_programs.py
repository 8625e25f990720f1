"""Programs that call tools, and a client that answers them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from cloche.engine.commands.program import PythonScript
from cloche.engine.executions.tools import ToolOffer
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import ProcessResult, Run, ToolsCalled, fold
from cloche.model import ToolCall, ToolDefinition, ToolResult

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}, "required": ["city"]}
WEATHER = ToolDefinition(name="get-weather", description="The weather of a city.", parameters=CITY)
ECHO = ToolDefinition(name="echo_it", parameters={"type": "object"})

Answer = Callable[[ToolCall], Any]


class Client:
    """Answers rounds, as a client of ours would, and remembers them."""

    def __init__(self, answer: Answer | None = None, delay_seconds: float = 0.0):
        self.rounds: list[list[dict[str, Any]]] = []
        self._answer = answer or (lambda call: call.input)
        self._delay_seconds = delay_seconds

    def result(self, call: ToolCall) -> ToolResult:
        try:
            return ToolResult(call_id=call.id, result=self._answer(call))
        except LookupError as error:
            return ToolResult(call_id=call.id, error=str(error.args[0]))

    async def serve(self, offer: ToolOffer) -> None:
        while calls := await offer.next_round():
            self.rounds.append([call.input for call in calls])
            await asyncio.sleep(self._delay_seconds)  # the time of the client, as the test asks
            offer.answer(map(self.result, calls))

    @property
    def sizes(self) -> list[int]:
        return [len(each) for each in self.rounds]


async def script(
    box: Sandbox, source: str, client: Client, tools: Sequence[ToolDefinition] = (WEATHER, ECHO), **how: Any
) -> ProcessResult:
    async with box.tools.make_offer(tools, max_calls=how.pop("max_calls", 200)) as offer:
        program = PythonScript(source=source, awaits=True, tools=offer.header)
        return await _run(offer, client, await box.commands.start(script=program, **how))


async def shell(
    box: Sandbox, source: str, client: Client, tools: Sequence[ToolDefinition] = (WEATHER, ECHO), **how: Any
) -> ProcessResult:
    async with box.tools.make_offer(tools, language="bash") as offer:
        return await _run(offer, client, await box.commands.start(source, env=offer.env, **how))


async def _run(offer: ToolOffer, client: Client, process: Any) -> ProcessResult:
    offer.runs(process)
    serving = asyncio.create_task(client.serve(offer))
    try:
        async with process:
            return await process.result()
    finally:
        offer.close()
        await serving


async def execute(box: Sandbox, code: str, client: Client, *, language: str = "python", **how: Any) -> Run:
    """In a context, where rounds are events."""
    seen = []
    context = box.default_context(language)
    async with context.execute(code, tools=[WEATHER, ECHO], **how) as execution:
        async for event in execution:
            seen.append(event)
            if isinstance(event, ToolsCalled):
                client.rounds.append([call.input for call in event.calls])
                execution.answer_tools(map(client.result, event.calls))

    return fold(seen)
