"""A transcript as the messages of Chat Completions. Pure.

    message                     a message of that role; `developer` is `system`, which every server knows
    function_call               in `tool_calls` of the assistant's message
    function_call_output        a message of the role `tool`, right behind the calls, wherever it was in the transcript;
                                its pictures follow in one of the user's, since a tool's can hold text only
    custom_tool_call, .._output the same: a custom tool is a function with one argument, `input`
    reasoning                   `reasoning_content` of a message with calls, in the turn that is not over: some models
                                (DeepSeek's) refuse to go on without. What is older, or sealed, is left out
    all others                  left out: Chat has no words for them

Servers differ in what they forgive, so nothing is sent that needs it: each call has an id of its own and exactly one
output, arguments are a JSON object, texts are strings and not lists of parts.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

from cloche.gateway.arguments import code_of
from cloche.gateway.call_ids import CallIds
from cloche.gateway.items import PYTHON, Item

Message = dict[str, Any]

NO_OUTPUT = "(no output)"
PDF = "data:application/pdf;"

_CALLS = frozenset({"function_call", "custom_tool_call"})
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
_ROLES = {"developer": "system", "system": "system", "assistant": "assistant"}


def messages(items: Iterable[Item], instructions: str | None = None, *, vision: bool = True) -> list[Message]:
    """The messages. `vision` is whether the model sees pictures; where not, a word stands for them."""
    listed = [{"type": "message", "role": "system", "content": instructions}] if instructions else []
    listed += items
    return _Conversation(listed, vision=vision).messages()


class _Conversation:
    def __init__(self, items: list[Item], *, vision: bool):
        self._items = items
        self._vision = vision
        self._messages: list[Message] = []
        self._said: list[str] = []  # by the assistant, in the message that is being put together
        self._thought: list[str] = []
        self._calls: list[Item] = []
        self._outputs = _outputs(items)
        self._ids = CallIds()
        self._last_user = max((at for at, item in enumerate(items) if _role(item) == "user"), default=-1)

    def messages(self) -> list[Message]:
        for at, item in enumerate(self._items):
            self._take(item, this_turn=at > self._last_user)
        self._end_assistant()
        self._add_orphans()
        return [_joined(message) for message in self._messages]

    def _take(self, item: Item, *, this_turn: bool) -> None:
        kind, role = item.get("type", "message"), _role(item)
        if kind in _CALLS:
            self._calls.append(item)
        elif kind == "reasoning" and this_turn:
            self._thought.append(_text_of_parts(item.get("content")))
        elif role == "assistant":
            self._said.append(_assistant_text(item.get("content")))
        elif kind in _OUTPUTS:
            self._end_assistant()
        elif role is not None:
            self._end_assistant()
            self._add(role, _content(item.get("content"), vision=self._vision))

    def _add(self, role: str, content: str | list[Item]) -> None:
        """Adds a message. Of those of the system, one after another, the texts are collected in one."""
        last = self._messages[-1] if self._messages else {}
        if not content:
            return
        if role != "system":
            self._messages.append({"role": role, "content": content})
        elif last.get("role") == "system":
            last["content"].append(_plain(content))
        else:
            self._messages.append({"role": role, "content": [_plain(content)]})

    def _end_assistant(self) -> None:
        """Adds the assistant's message and, if it calls tools, the outputs: they must follow at once."""
        said, thought, calls = self._said, self._thought, self._calls
        self._said, self._thought, self._calls = [], [], []
        text = "\n\n".join(each for each in said if each)
        if not text and not calls:
            return
        message: Message = {"role": "assistant", "content": text or None}
        if calls and any(thought):
            message["reasoning_content"] = "\n\n".join(each for each in thought if each)
        self._messages.append(message)
        if calls:
            self._add_calls(message, calls)

    def _add_calls(self, message: Message, calls: list[Item]) -> None:
        message["tool_calls"] = []
        pictures: list[Item] = []
        for call in calls:
            given = str(call.get("call_id") or "")
            id = self._ids.unique(given)
            message["tool_calls"].append({"id": id, "type": "function", "function": _function(call)})
            output = self._outputs[given].popleft() if self._outputs[given] else NO_OUTPUT
            self._messages.append({"role": "tool", "tool_call_id": id, "content": _output_text(output) or NO_OUTPUT})
            pictures += _pictures(output, vision=self._vision)
        if pictures:
            note = {"type": "text", "text": "The pictures that the tool has shown:"}
            self._messages.append({"role": "user", "content": [note, *pictures]})

    def _add_orphans(self) -> None:
        """Outputs of calls that are not in the transcript: nobody else could be told of them."""
        for waiting in self._outputs.values():
            for output in waiting:
                self._messages.append({"role": "user", "content": f"[Output of a tool]\n{_output_text(output)}"})


def _joined(message: Message) -> Message:
    return {**message, "content": "\n\n".join(message["content"])} if message["role"] == "system" else message


def _outputs(items: Iterable[Item]) -> defaultdict[str, deque[Any]]:
    """By the call's id, in their order: of calls with the same id, the first has the first output."""
    found: defaultdict[str, deque[Any]] = defaultdict(deque)
    for item in items:
        if item.get("type") in _OUTPUTS:
            found[str(item.get("call_id") or "")].append(item.get("output"))
    return found


def _role(item: Item) -> str | None:
    """The role of a message; None of what is none."""
    if item.get("type", "message") != "message":
        return None
    return _ROLES.get(str(item.get("role")), "user")


def _function(call: Item) -> Item:
    name = str(call.get("name") or "unknown")
    if call["type"] == "custom_tool_call":
        return {"name": name, "arguments": json.dumps({"input": str(call.get("input") or "")})}
    return {"name": name, "arguments": _object(name, str(call.get("arguments") or ""))}


def _object(name: str, arguments: str) -> str:
    """The arguments, made a JSON object where a model had sent none: templates of many servers parse them."""
    try:
        if isinstance(json.loads(arguments or "{}"), dict):
            return arguments or "{}"
    except (ValueError, RecursionError):
        pass
    if name.startswith(PYTHON):
        return json.dumps({"code": code_of(arguments)})
    return json.dumps({"arguments": arguments})


# -- content


def _content(content: Any, *, vision: bool) -> str | list[Item]:
    """A string where there is text only."""
    if isinstance(content, str):
        return content
    parts = [_part(part, vision=vision) for part in content or () if isinstance(part, dict)]
    return _plain(parts) if all(part["type"] == "text" for part in parts) else parts


def _part(part: Item, *, vision: bool) -> Item:
    match part.get("type"):
        case "input_image":
            return _image(part) if vision and part.get("image_url") else _note("image", part)
        case "input_file" if vision and str(part.get("file_data")).startswith(PDF):
            return {"type": "file", "file": {"filename": _name(part), "file_data": part["file_data"]}}
        case "input_file":
            return _note("file", part)
        case "input_audio" if isinstance(part.get("input_audio"), dict):
            return {"type": "input_audio", "input_audio": part["input_audio"]}
        case _:
            return {"type": "text", "text": str(part.get("text") or part.get("refusal") or "")}


def _image(part: Item) -> Item:
    shown = {"url": part["image_url"]}
    if part.get("detail") in ("low", "high"):
        shown["detail"] = part["detail"]
    return {"type": "image_url", "image_url": shown}


def _note(what: str, part: Item) -> Item:
    named = part.get("filename") or part.get("file_id") or part.get("file_url") or ""
    return {"type": "text", "text": f"[{what} {named}]" if named else f"[{what}]"}


def _name(part: Item) -> str:
    return str(part.get("filename") or "file.pdf")


def _plain(content: str | list[Item]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", f"[{part['type']}]")) for part in content)


def _assistant_text(content: Any) -> str:
    return _plain(_content(content, vision=False))


def _text_of_parts(content: Any) -> str:
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _output_text(output: Any) -> str:
    if isinstance(output, list):
        return _plain([_part(part, vision=False) for part in output if isinstance(part, dict)])
    return output if isinstance(output, str) else json.dumps(output)


def _pictures(output: Any, *, vision: bool) -> list[Item]:
    if not (vision and isinstance(output, list)):
        return []
    parts = [part for part in output if isinstance(part, dict) and part.get("type") == "input_image"]
    return [_image(part) for part in parts if part.get("image_url")]
