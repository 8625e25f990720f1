"""Functions that call tools, which live with the client: see "THE TOOLS' DOOR" in `cloche.guest.wire`.

Calls that begin in the same moment of a loop (a `gather`, a few tasks) are sent together: the client gets
them as one round. The program waits meanwhile, and nothing of it is run twice.
"""

from __future__ import annotations

import asyncio
import json
import keyword
import sys
import unicodedata
from typing import Any

from cloche.guest.kernel import display

MAX_INPUT_BYTES = 5 << 20
_MAX_ANSWER_BYTES = 64 << 20
_QUIET_TICKS = 5  # of the loop, without another call: what tasks that begin now begin in turn comes along
_TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "array": "list", "object": "dict"}


class ToolExecutionError(Exception):
    """A tool has failed, or could not be called; the message says why."""


ToolExecutionError.__module__ = "__main__"  # where programs have it


def functions(offer: dict) -> dict:
    """The names of an offer for a program: a coroutine function for each tool, and the error class.

    `offer`: {"port", "token", "functions": [{"identifier", "name", "description", "parameters": a JSON schema},
    ..]}
    """
    line = _ToolClient(offer["port"], offer["token"])
    made = {each["identifier"]: _tool_function(line, each) for each in offer["functions"]}
    return {"asyncio": asyncio, **made, ToolExecutionError.__name__: ToolExecutionError}


def lend_functions(names: dict, offer: dict) -> Any:
    """Adds those to a namespace. Returns a function that removes the tools again.

    Names that the program has rebound stay.
    """
    added = functions(offer)
    lent = {each["identifier"]: added[each["identifier"]] for each in offer["functions"]}
    before = {name: names[name] for name in lent if name in names}
    names.update({name: value for name, value in added.items() if name in lent or name not in names})

    def take_back() -> None:
        for name in [name for name, value in lent.items() if names.get(name) is value]:
            del names[name]
            names.update({name: before[name]} if name in before else {})

    return take_back


# --- what a program calls


def _tool_function(line: _ToolClient, tool: dict) -> Any:
    """A function with the schema's own signature, so that Python itself refuses wrong arguments.

    Its source is made of identifiers alone: names that are none have an identifier in their stead.
    """
    schema = tool.get("parameters") or {}
    fields = _schema_parameters(schema)
    signature = [_parameter_source(name, kind, needed) for name, (_, kind, needed) in fields.items()]
    rest = _unused_name("others", fields)
    if _takes_others(schema):
        signature.append(f"**{rest}")
    pairs = ", ".join(f"({index}, {name})" for index, name in enumerate(fields))
    body = f"return await __call__([{pairs}], {rest if _takes_others(schema) else '{}'})"
    source = f"async def {tool['identifier']}({', '.join(signature)}):\n    {body}\n"
    names = [name for name, _, _ in fields.values()]

    def call(values: list, others: dict) -> Any:
        given = {names[index]: value for index, value in values if value is not None}
        return line.call(tool["name"], {**given, **{k: v for k, v in others.items() if v is not None}})

    scope: dict = {"__call__": call, "__name__": "__main__"}
    exec(compile(source, f"<tool {tool['identifier']}>", "exec", dont_inherit=True), scope)
    function = scope[tool["identifier"]]
    function.__doc__ = tool.get("description") or None
    return function


def _schema_parameters(schema: dict) -> dict:
    """By parameter, required ones first: (name of the property, its type, whether it is required)."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    fields: dict = {}
    for name in sorted(properties, key=lambda name: name not in required):
        fields[_unused_name(_parameter_name(name), fields)] = (
            name,
            _annotation_type(properties[name]),
            name in required,
        )
    return fields


def _parameter_name(name: str) -> str:
    name = unicodedata.normalize("NFKC", name)  # as Python itself reads names
    if name.isidentifier() and not keyword.iskeyword(name):
        return name
    made = "".join(char if char.isascii() and char.isalnum() else "_" for char in name)
    made = made if made and not made[0].isdigit() else f"_{made}"
    return f"{made}_" if keyword.iskeyword(made) else made


def _unused_name(name: str, used: dict) -> str:
    while name in used or name in ("__call__", "__debug__"):
        name += "_"
    return name


def _annotation_type(schema: Any) -> str:
    kind = schema.get("type") if isinstance(schema, dict) else None
    kinds = [each for each in (kind if isinstance(kind, list) else [kind]) if each != "null"]
    known = _TYPES.get(kinds[0]) if len(kinds) == 1 and isinstance(kinds[0], str) else None
    return known or "object"


def _parameter_source(name: str, kind: str, needed: bool) -> str:
    return f"{name}: {kind}" if needed else f"{name}: {kind} = None"


def _takes_others(schema: dict) -> bool:
    """A schema that names no properties at all says nothing of them; one that does means those, unless it says so."""
    others = schema.get("additionalProperties")
    return "properties" not in schema if others is None else others is not False


# --- how calls reach the host


class _ToolClient:
    """Sends the calls of one program to the host. Each loop has a batch of its own."""

    def __init__(self, port: int, token: str):
        self._port = port
        self._token = token
        self._batches: dict = {}

    def call(self, name: str, input: dict) -> Any:
        """A future of the result, or of a ToolExecutionError.

        Raises TypeError or ValueError for input that is no JSON.
        """
        content = _encode_input(name, input)
        loop = asyncio.get_running_loop()
        batch = self._batches.get(loop)
        if batch is None:
            batch = self._batches[loop] = _CallBatch(self, loop)
        return batch.add(name, content)

    def leave(self, batch: _CallBatch) -> None:
        """Removes a batch that is being sent: a call that begins now is of the next."""
        self._batches.pop(batch.loop, None)

    async def send(self, calls: list) -> None:
        """Sends calls, and resolves each with its result."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError as error:
            raise ToolExecutionError(f"the tools cannot be reached: {error}") from None
        try:
            for part in self._encode_request(calls):
                writer.write(part)
            await writer.drain()
            while not all(future.done() for _, _, future in calls):
                _resolve_calls(calls, *await _read_answer(reader))
        except (OSError, EOFError):
            raise ToolExecutionError("the tools are gone: the caller does not answer any more") from None
        finally:
            writer.close()

    def _encode_request(self, calls: list) -> list:
        parts = [f"{self._token}\0{len(calls)}\0".encode()]
        for name, content, _ in calls:
            parts += [name.encode("utf-8", "surrogatepass"), b"\0", content, b"\0"]
        return parts


class _CallBatch:
    """The calls that begin in one moment of a loop."""

    def __init__(self, line: _ToolClient, loop: Any):
        self.loop = loop
        self._line = line
        self._calls: list = []
        self._sending: Any = None
        self._seen = self._quiet = 0
        loop.call_soon(self._await_quiet)

    def add(self, name: str, content: bytes) -> Any:
        """A future of the call's result."""
        future = self.loop.create_future()
        self._calls.append((name, content, future))
        return future

    def _await_quiet(self) -> None:
        """Once in each turn of the loop, until no more calls come."""
        self._quiet = self._quiet + 1 if len(self._calls) == self._seen else 0
        self._seen = len(self._calls)
        if self._quiet < _QUIET_TICKS:
            self.loop.call_soon(self._await_quiet)
            return
        self._line.leave(self)
        calls = [call for call in self._calls if not call[2].done()]
        if calls:
            _flush_streams()  # what was printed before a call is read before it
            self._sending = self.loop.create_task(self._send_calls(calls))
            for _, _, future in calls:
                future.add_done_callback(lambda _: self._cancel_if_unawaited(calls))

    async def _send_calls(self, calls: list) -> None:
        failure: BaseException = ToolExecutionError("the call was given up")
        try:
            await self._line.send(calls)
        except ToolExecutionError as error:
            failure = error
        finally:
            for _, _, future in calls:
                if not future.done():
                    future.set_exception(failure)

    def _cancel_if_unawaited(self, calls: list) -> None:
        if all(future.done() for _, _, future in calls) and any(future.cancelled() for _, _, future in calls):
            self._sending.cancel()  # the host hears of it by the end of the connection


def _encode_input(name: str, input: dict) -> bytes:
    try:
        content = json.dumps(input, default=display.to_jsonable, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"the arguments of {name} cannot be sent as JSON: {error}") from None
    if len(content) > MAX_INPUT_BYTES:
        raise ValueError(f"the arguments of {name} have {len(content)} bytes: a tool takes {MAX_INPUT_BYTES} at most")
    return content


async def _read_answer(reader: Any) -> tuple:
    """The next answer: which call (-1: all), whether it succeeded, its content. Raises EOFError, ToolExecutionError."""
    head = (await reader.readline()).split()
    if not head:
        raise EOFError
    index, verdict, size = head
    if int(size) > _MAX_ANSWER_BYTES:
        raise ToolExecutionError("the answer is too large")
    return int(index), verdict == b"ok", await reader.readexactly(int(size))


def _resolve_calls(calls: list, index: int, success: bool, content: bytes) -> None:
    for _, _, future in calls if index < 0 else calls[index : index + 1]:
        if future.done():
            continue
        if success:
            future.set_result(json.loads(content))
        else:
            future.set_exception(ToolExecutionError(content.decode("utf-8", "replace").rstrip("\n")))


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # the program has put something else there, or closed it
            pass
