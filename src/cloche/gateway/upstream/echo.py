"""`cloche/echo`: a model that is none. It runs the fenced code of the user's message and answers with its output.

Everything else is real (the call, the sandbox, the results, citations, streaming), so that a new user, a health check
or a test can try all of it offline.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator

from cloche.gateway.events import Closed, Delta, Finished, Happening, Opened, Tokens
from cloche.gateway.items import PYTHON, Item, new_item_id, output_text, text_of
from cloche.gateway.upstream import Call

HINT = "This is cloche/echo. It runs the fenced code of your message: put Python between ```python and ```."
PIECE = 24  # characters of one delta

_FENCE = "```"
_LANGUAGES = frozenset({"", "python", "py", "python3"})  # what may stand behind the fence of code that runs


class Echo:
    vision = False

    async def leg(self, call: Call) -> AsyncGenerator[Happening, None]:
        asked, ran = _since_user(call.items)
        fences = list(fenced(asked))
        may_run = call.tool_choice != "none" and any(tool.get("name") == PYTHON for tool in call.tools)
        if may_run and len(ran) < len(fences):
            happenings = _code(fences[len(ran)])
        else:
            happenings = _text(_answer(asked, ran, has_code=bool(fences)))
        spent = 0
        for happening in happenings:
            spent += isinstance(happening, Delta)
            yield happening
        yield Finished(tokens=Tokens(input=len(asked) // 4 + 1, output=spent), model=call.model)

    async def models(self) -> Item:
        return {}

    async def aclose(self) -> None:
        pass


def fenced(text: str) -> Iterator[str]:
    """The Python between fences. One pass over the lines, since a text can be all fences."""
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


def _since_user(items: list[Item]) -> tuple[str, list[str]]:
    """The user's last message, and the outputs of what ran since."""
    asked = ""
    ran: list[str] = []
    for item in items:
        if item.get("type", "message") == "message" and item.get("role") == "user":
            asked, ran = text_of(item) or asked, []
        elif item.get("type") == "function_call_output":
            ran.append(_output_text(item.get("output")))
    return asked, ran


def _output_text(output: object) -> str:
    if isinstance(output, str):
        return output
    parts = output if isinstance(output, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _answer(asked: str, ran: list[str], *, has_code: bool) -> str:
    if ran:
        return "\n".join(ran).strip() or "(no output)"
    if has_code:
        return "There is code in this message, and the request has no code_interpreter tool."
    return f"{asked}\n\n{HINT}" if asked else HINT


def _code(code: str) -> Iterator[Happening]:
    arguments = json.dumps({"code": code})
    item: Item = {
        "id": new_item_id("function_call"),
        "type": "function_call",
        "name": PYTHON,
        "call_id": new_item_id("call"),
        "arguments": "",
        "status": "in_progress",
    }
    yield Opened(index=0, item=item)
    for piece in _pieces(arguments):
        yield Delta(index=0, kind="arguments", text=piece)
    yield Closed(index=0, item={**item, "arguments": arguments, "status": "completed"})


def _text(text: str) -> Iterator[Happening]:
    item: Item = {
        "id": new_item_id("message"),
        "type": "message",
        "role": "assistant",
        "status": "in_progress",
        "content": [],
    }
    yield Opened(index=0, item=item)
    for piece in _pieces(text):
        yield Delta(index=0, kind="text", text=piece)
    yield Closed(index=0, item={**item, "status": "completed", "content": [output_text(text)]})


def _pieces(text: str) -> Iterator[str]:
    return (text[at : at + PIECE] for at in range(0, len(text), PIECE))
