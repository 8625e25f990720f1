"""The fake model `cloche/echo`: runs the fenced code of the user's message and answers with its output.

Everything else is real (the call, the sandbox, the results, citations, streaming), so that a new user, a
health check or a test can try all of it offline.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator

from cloche.gateway.events import AnswerFinished, ItemClosed, ItemDelta, ItemOpened, TokenUsage, TurnEvent
from cloche.gateway.items import PYTHON_FUNCTION, Item, message_text, new_item_id, output_text_part
from cloche.gateway.upstream import ModelCall

ECHO_HINT = "This is cloche/echo. It runs the fenced code of your message: put Python between ```python and ```."
PIECE_CHARACTERS = 24  # characters of one delta

_FENCE = "```"
_LANGUAGES = frozenset({"", "python", "py", "python3"})  # info strings of fences with code that runs


class EchoUpstream:
    vision = False

    async def call_model(self, call: ModelCall) -> AsyncGenerator[TurnEvent, None]:
        asked, ran = _split_since_user(call.items)
        fences = list(find_fenced_code(asked))
        may_run = call.tool_choice != "none" and any(tool.get("name") == PYTHON_FUNCTION for tool in call.tools)
        if may_run and len(ran) < len(fences):
            turn_events = _code_call_events(fences[len(ran)])
        else:
            turn_events = _message_events(_compose_answer(asked, ran, has_code=bool(fences)))
        spent = 0
        for turn_event in turn_events:
            spent += isinstance(turn_event, ItemDelta)
            yield turn_event
        yield AnswerFinished(tokens=TokenUsage(input=len(asked) // 4 + 1, output=spent), model=call.model)

    async def models(self) -> Item:
        return {}

    async def aclose(self) -> None:
        pass


def find_fenced_code(text: str) -> Iterator[str]:
    """Yields the Python between fences. One pass over the lines, since a text can be all fences."""
    language: str | None = None  # of the block that is open
    lines: list[str] = []
    for line in text.split("\n"):
        info = line[len(_FENCE) :].strip() if line.startswith(_FENCE) else None
        if language is None:
            if info is not None and "`" not in info:
                language, lines = info, []
        elif info == "":
            if language in _LANGUAGES:
                yield "".join(f"{each}\n" for each in lines)
            language = None
        else:
            lines.append(line)


def _split_since_user(items: list[Item]) -> tuple[str, list[str]]:
    """Returns the user's last message, and the outputs of code that ran since."""
    asked = ""
    ran: list[str] = []
    for item in items:
        if item.get("type", "message") == "message" and item.get("role") == "user":
            asked, ran = message_text(item) or asked, []
        elif item.get("type") == "function_call_output":
            ran.append(_output_text(item.get("output")))
    return asked, ran


def _output_text(output: object) -> str:
    if isinstance(output, str):
        return output
    parts = output if isinstance(output, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _compose_answer(asked: str, ran: list[str], *, has_code: bool) -> str:
    if ran:
        return "\n".join(ran).strip() or "(no output)"
    if has_code:
        return "There is code in this message, and the request has no code_interpreter tool."
    return f"{asked}\n\n{ECHO_HINT}" if asked else ECHO_HINT


def _code_call_events(code: str) -> Iterator[TurnEvent]:
    arguments = json.dumps({"code": code})
    item: Item = {
        "id": new_item_id("function_call"),
        "type": "function_call",
        "name": PYTHON_FUNCTION,
        "call_id": new_item_id("call"),
        "arguments": "",
        "status": "in_progress",
    }
    yield ItemOpened(index=0, item=item)
    for piece in _split_pieces(arguments):
        yield ItemDelta(index=0, kind="arguments", text=piece)
    yield ItemClosed(index=0, item={**item, "arguments": arguments, "status": "completed"})


def _message_events(text: str) -> Iterator[TurnEvent]:
    item: Item = {
        "id": new_item_id("message"),
        "type": "message",
        "role": "assistant",
        "status": "in_progress",
        "content": [],
    }
    yield ItemOpened(index=0, item=item)
    for piece in _split_pieces(text):
        yield ItemDelta(index=0, kind="text", text=piece)
    yield ItemClosed(index=0, item={**item, "status": "completed", "content": [output_text_part(text)]})


def _split_pieces(text: str) -> Iterator[str]:
    return (text[at : at + PIECE_CHARACTERS] for at in range(0, len(text), PIECE_CHARACTERS))
