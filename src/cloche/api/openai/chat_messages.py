"""A chat's messages, from JSON to items. Pure: `message_items` inserts the turns that the store remembers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cloche.api.openai.context import BadParameter
from cloche.api.openai.responses_request import missing_parameter
from cloche.gateway import history
from cloche.gateway.items import Item
from cloche.model import Struct
from cloche.store.gateway import StoredChatTurn

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ChatMessage(Struct):
    """One message as items. `calls` are the ids of its tool calls."""

    items: list[Item]
    calls: tuple[str, ...] = ()


def decode_messages(value: Any) -> list[ChatMessage]:
    """Raises InvalidRequest in OpenAI's words."""
    if value is None:
        raise missing_parameter("messages")
    if not isinstance(value, list):
        raise _wrong_type("messages", "an array of objects")
    if not value:
        raise BadParameter(
            "Invalid 'messages': empty array. Expected an array with minimum length 1, but got an empty array instead.",
            "messages",
            "empty_array",
        )
    reading = _ChatMessageReader()
    messages = [reading.read(each, f"messages[{at}]") for at, each in enumerate(value)]
    reading.check_answered(len(value))
    return messages


def message_items(messages: Iterable[ChatMessage], turns: Mapping[str, StoredChatTurn], python: str) -> list[Item]:
    """All items in order. A message with remembered calls becomes the whole turn that made them.

    `python` is the current name of the function for code.
    """
    items: list[Item] = []
    renamed: dict[str, str] = {}
    for message in messages:
        turn = remembered_turn(message, turns)
        if turn is None:
            items += [_rename_call(item, renamed) for item in message.items]
        else:
            renamed |= turn.calls
            items += history.from_stored_transcript(_remaining_items(turn, message.calls), python)
    return items


def remembered_turn(message: ChatMessage, turns: Mapping[str, StoredChatTurn]) -> StoredChatTurn | None:
    """The turn that ended with this message, if it is remembered."""
    return next((turns[call] for call in message.calls if call in turns), None)


def _remaining_items(turn: StoredChatTurn, calls: tuple[str, ...]) -> list[Item]:
    """The turn's items without calls that the client removed from its message: they get no results."""
    dropped = {theirs for ours, theirs in turn.calls.items() if ours not in calls}
    return [item for item in turn.items if item.get("call_id") not in dropped]


def _rename_call(item: Item, renamed: Mapping[str, str]) -> Item:
    call = str(item.get("call_id"))
    return {**item, "call_id": renamed[call]} if call in renamed else item


class _ChatMessageReader:
    """Reads one message after the other: tool results must follow the calls that they answer."""

    def __init__(self) -> None:
        self._unanswered: dict[str, str] = {}  # calls of the last assistant message -> the type of their answers
        self._answered: dict[str, str] = {}
        self._legacy: dict[str, str] = {}  # functions of the old kind -> the id that we gave to the call
        self._readers: dict[str, Callable[[Item, str], ChatMessage]] = {
            "system": _plain_message,
            "developer": _plain_message,
            "user": _plain_message,
            "assistant": self._read_assistant,
            "tool": self._read_tool,
            "function": self._read_function,
        }

    def read(self, message: Any, param: str) -> ChatMessage:
        if not isinstance(message, dict):
            raise _wrong_type(param, "an object")
        role = message.get("role")
        if role is None:
            raise missing_parameter(f"{param}.role")
        if role not in ROLES:
            raise BadParameter(
                f"Invalid value: {str(role)[:100]!r}. Supported values are: {_quote_names(ROLES)}.", f"{param}.role"
            )
        if role not in ("tool", "function"):
            self.check_answered(param)
        return self._readers[role](message, param)

    def check_answered(self, before: object) -> None:
        """Raises InvalidRequest if the last calls have no results yet."""
        if self._unanswered:
            names = ", ".join(each[:100] for each in self._unanswered)
            where = before if isinstance(before, str) else f"messages[{before}]"
            raise BadParameter(
                "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
                f"'tool_call_id'. The following tool_call_ids did not have response messages: {names}",
                f"{where}.role",
            )

    def _read_assistant(self, message: Item, param: str) -> ChatMessage:
        items = list(_code_calls(message.get("code_interpreter_calls")))
        content = _assistant_content(message, param)
        if content:
            items.append({"type": "message", "role": "assistant", "content": content})
        calls = self._read_calls(message.get("tool_calls"), f"{param}.tool_calls")
        items += calls
        if message.get("function_call"):
            items.append(self._read_legacy_call(message["function_call"], f"{param}.function_call"))
        self._answered = {}
        return ChatMessage(items=items, calls=tuple(call["call_id"] for call in calls))

    def _read_calls(self, value: Any, param: str) -> list[Item]:
        if value is None:
            return []
        if not isinstance(value, list):
            raise _wrong_type(param, "an array of tool calls")
        calls = [_decode_call(each, f"{param}[{at}]") for at, each in enumerate(value)]
        self._unanswered = {call["call_id"]: f"{call['type']}_output" for call in calls}
        return calls

    def _read_tool(self, message: Item, param: str) -> ChatMessage:
        call = _text_field(message, "tool_call_id", param)
        kind = self._unanswered.pop(call, None) or self._answered.get(call)
        if kind is None:
            raise BadParameter(
                "Invalid parameter: messages with role 'tool' must be a response to a preceding message with "
                "'tool_calls'.",
                f"{param}.tool_call_id",
            )
        self._answered[call] = kind
        return ChatMessage(
            items=[{"type": kind, "call_id": call, "output": _tool_output(message.get("content"), param)}]
        )

    def _read_legacy_call(self, call: Any, param: str) -> Item:
        if not isinstance(call, dict):
            raise _wrong_type(param, "an object")
        name = _text_field(call, "name", param)
        id = self._legacy[name] = f"call_{len(self._legacy)}_{name}"
        return {
            "type": "function_call",
            "call_id": id,
            "name": name,
            "arguments": _text_field(call, "arguments", param),
        }

    def _read_function(self, message: Item, param: str) -> ChatMessage:
        name = _text_field(message, "name", param)
        if name not in self._legacy:
            raise BadParameter(
                "Invalid parameter: messages with role 'function' must be a response to a preceding message with "
                "'function_call'.",
                f"{param}.name",
            )
        output = _tool_output(message.get("content"), param)
        return ChatMessage(items=[{"type": "function_call_output", "call_id": self._legacy[name], "output": output}])


# -- roles


def _plain_message(message: Item, param: str) -> ChatMessage:
    content = message.get("content")
    if content is None:
        raise missing_parameter(f"{param}.content")
    parts = _decode_parts(content, f"{param}.content")
    return ChatMessage(items=[{"type": "message", "role": message["role"], "content": parts}])


def _assistant_content(message: Item, param: str) -> list[Item]:
    content, refusal = message.get("content"), message.get("refusal")
    parts: list[Item] = []
    if isinstance(content, str):
        parts = [{"type": "output_text", "text": content}] if content else []
    elif content is not None:
        parts = [_assistant_part(each, f"{param}.content[{at}]") for at, each in _enumerate_parts(content, param)]
    if isinstance(refusal, str) and refusal:
        parts.append({"type": "refusal", "refusal": refusal})
    return parts


def _assistant_part(part: Any, param: str) -> Item:
    if isinstance(part, dict) and part.get("type") == "text":
        return {"type": "output_text", "text": _text_field(part, "text", param)}
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"type": "refusal", "refusal": _text_field(part, "refusal", param)}
    raise _unknown_part(part, param, ("text", "refusal"))


def _code_calls(value: Any) -> Iterable[Item]:
    """Reads this server's extra key of a message that the client sent back: the model sees its code's results."""
    for call in value if isinstance(value, list) else ():
        if isinstance(call, dict) and isinstance(call.get("code"), str):
            outputs = call.get("outputs")
            yield {
                "type": "code_interpreter_call",
                "id": str(call.get("id")),
                "status": "completed",
                "code": call["code"],
                "container_id": str(call.get("container_id")),
                "outputs": outputs if isinstance(outputs, list) else [],
            }


# -- what they say


def _decode_call(call: Any, param: str) -> Item:
    if not isinstance(call, dict):
        raise _wrong_type(param, "an object")
    id, kind = _text_field(call, "id", param), call.get("type", "function")
    if kind not in ("function", "custom"):
        raise BadParameter(
            f"Invalid value: {str(kind)[:100]!r}. Supported values are: {_quote_names(('function', 'custom'))}.",
            f"{param}.type",
        )
    about, where = call.get(kind), f"{param}.{kind}"
    if not isinstance(about, dict):
        raise missing_parameter(where)
    named = {"call_id": id, "name": _text_field(about, "name", where)}
    if kind == "custom":
        return {"type": "custom_tool_call", **named, "input": _text_field(about, "input", where)}
    return {"type": "function_call", **named, "arguments": _text_field(about, "arguments", where)}


def _tool_output(content: Any, param: str) -> str | list[Item]:
    if content is None:
        raise missing_parameter(f"{param}.content")
    return content if isinstance(content, str) else _decode_parts(content, f"{param}.content")


def _decode_parts(content: Any, param: str) -> list[Item]:
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    return [_decode_part(each, f"{param}[{at}]") for at, each in _enumerate_parts(content, param)]


def _decode_part(part: Any, param: str) -> Item:
    kind = part.get("type") if isinstance(part, dict) else None
    reader = _PART_DECODERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise _unknown_part(part, param, tuple(_PART_DECODERS))
    return reader(part, param)


def _text_part(part: Item, param: str) -> Item:
    return {"type": "input_text", "text": _text_field(part, "text", param)}


def _image_part(part: Item, param: str) -> Item:
    image = part.get("image_url")
    image = {"url": image} if isinstance(image, str) else image
    if not isinstance(image, dict):
        raise missing_parameter(f"{param}.image_url")
    url = _text_field(image, "url", f"{param}.image_url")
    return {"type": "input_image", "image_url": url, "detail": image.get("detail") or "auto"}


def _file_part(part: Item, param: str) -> Item:
    file = part.get("file")
    if not isinstance(file, dict):
        raise missing_parameter(f"{param}.file")
    if not any(file.get(name) for name in ("file_id", "file_data")):
        raise missing_parameter(f"{param}.file.file_id")
    known = ("file_id", "file_data", "filename")
    return {
        "type": "input_file",
        **{name: _text_field(file, name, f"{param}.file") for name in known if file.get(name)},
    }


def _audio_part(part: Item, param: str) -> Item:
    audio = part.get("input_audio")
    if not isinstance(audio, dict):
        raise missing_parameter(f"{param}.input_audio")
    where = f"{param}.input_audio"
    said = {"data": _text_field(audio, "data", where), "format": _text_field(audio, "format", where)}
    return {"type": "input_audio", "input_audio": said}


_PART_DECODERS: dict[str, Callable[[Item, str], Item]] = {
    "text": _text_part,
    "image_url": _image_part,
    "file": _file_part,
    "input_audio": _audio_part,
}


# -- what may be wrong


def _text_field(fields: Item, name: str, param: str) -> str:
    """Raises InvalidRequest unless it is there and a string."""
    value = fields.get(name)
    if value is None:
        raise missing_parameter(f"{param}.{name}")
    if not isinstance(value, str):
        raise _wrong_type(f"{param}.{name}", "a string")
    return value


def _enumerate_parts(content: Any, param: str) -> Iterable[tuple[int, Any]]:
    if not isinstance(content, list):
        raise _wrong_type(param, "a string or an array of parts")
    return enumerate(content)


def _unknown_part(part: Any, param: str, kinds: tuple[str, ...]) -> BadParameter:
    if not isinstance(part, dict):
        return _wrong_type(param, "an object")
    kind = str(part.get("type"))[:100]
    return BadParameter(f"Invalid value: {kind!r}. Supported values are: {_quote_names(kinds)}.", f"{param}.type")


def _wrong_type(param: str, expected: str) -> BadParameter:
    return BadParameter(f"Invalid type for '{param}': expected {expected}.", param, "invalid_type")


def _quote_names(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
