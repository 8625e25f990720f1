"""Tools: the caller's functions that code in a sandbox may call, as in `run(code, tools={"get_weather":
get_weather})`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any

import msgspec

from cloche import errors
from cloche.events import AnyEvent, Ended, Run, RunFold, ToolsCalled
from cloche.model import MAX_TOOL_RESULT_BYTES, ToolCall, ToolResult
from cloche.model import ToolDefinition as Offered
from cloche.sdk import backend
from cloche.tasks import TaskSet

# The JSON schema of a function's arguments, read off its signature.

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def function_schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Annotations that JSON has no word for allow anything. Raises InvalidRequest for arguments without a name."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C do not say
        return {"type": "object"}
    hints, schema = _type_hints(function), ArgumentsSchema()
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            schema.allow_others()
        elif parameter.kind in _BY_NAME:
            schema.add(parameter, hints.get(parameter.name, Any))
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise errors.InvalidRequest(f"the tool {name!r} has an argument without a name: tools are called by names")
    return schema.made


class ArgumentsSchema:
    """The JSON schema of an object, built parameter by parameter."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}

    def allow_others(self) -> None:
        self.made["additionalProperties"] = True

    def add(self, parameter: inspect.Parameter, hint: Any) -> None:
        described = _hint_schema(hint)
        self.made.setdefault("$defs", {}).update(described.pop("$defs", {}))
        if not self.made["$defs"]:
            del self.made["$defs"]
        self.made["properties"][parameter.name] = described
        if parameter.default is inspect.Parameter.empty:
            self.made["required"].append(parameter.name)
        elif isinstance(parameter.default, str | int | float):
            described.setdefault("default", parameter.default)


def _type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError, SyntaxError):  # names that are not there when the program runs
        return {}


def _hint_schema(hint: Any) -> dict[str, Any]:
    if hint is Any:
        return {}
    try:
        return dict(msgspec.json.schema(hint))
    except (TypeError, RuntimeError, NameError):
        return {}


Function = Callable[..., Any]

TOOL_THREADS = 32  # calls of functions that are not coroutine functions, of one run at once


class Tool:
    """A function that code may call by `name`. Its parameters and description are read off it unless given
    here.

    `parameters` is a JSON schema of the object of its arguments.
    """

    def __init__(
        self,
        name: str,
        function: Function,
        *,
        description: str | None = None,
        parameters: Mapping[str, Any] | None = None,
    ):
        if not callable(function):
            raise errors.InvalidRequest(f"the tool {name!r} must be a function, not {type(function).__name__}")
        self.name = name
        self.function = function
        self.description = inspect.getdoc(function) or "" if description is None else description
        self.parameters: dict[str, Any] = function_schema(name, function) if parameters is None else dict(parameters)

    def __repr__(self) -> str:
        return f"<cloche.Tool {self.name}>"


ToolsLike = Mapping[str, Function] | Iterable[Tool | Function] | None


class Toolbox:
    """The tools of one run. Plain functions are called in threads; coroutine functions on the loop of the
    caller.
    """

    def __init__(self, tools: list[Tool], loop: asyncio.AbstractEventLoop | None):
        self.offered = tuple(Offered(name=t.name, description=t.description, parameters=t.parameters) for t in tools)
        self._functions = {tool.name: tool.function for tool in tools}
        self._loop = loop
        self._context = contextvars.copy_context()
        self._threads: ThreadPoolExecutor | None = None

    async def result(self, call: ToolCall) -> ToolResult:
        """The result of a call. An exception of the function becomes the error that the program sees."""
        function = self._functions[call.name]
        try:
            if self._loop is not None and _is_async(function):
                return await asyncio.wrap_future(
                    asyncio.run_coroutine_threadsafe(_await_function(function, call), self._loop)
                )
            return await self._run_in_thread(partial(_call_function, function, call))
        except BaseException as error:  # the end of the caller's loop or task, or that loop has ended
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # this call was cancelled
                raise
            return _failure_result(call, error)

    def close(self) -> None:
        """Waits for no function that still runs."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _run_in_thread(self, work: Callable[[], ToolResult]) -> Awaitable[ToolResult]:
        if self._threads is None:
            # A separate pool: a function can use the sandbox, and its threads must not wait for these.
            self._threads = ThreadPoolExecutor(TOOL_THREADS, "cloche-tool")
        return asyncio.get_running_loop().run_in_executor(self._threads, self._context.copy().run, work)


def make_toolbox(tools: ToolsLike, loop: asyncio.AbstractEventLoop | None = None) -> Toolbox | None:
    """Raises InvalidRequest for values that cannot be a program's tools. `loop`: the caller's, if it has one."""
    if tools is None:
        return None
    if not isinstance(tools, Mapping | Iterable) or isinstance(tools, str | bytes):
        raise errors.InvalidRequest(f"tools must be functions by their names, not {type(tools).__name__}")
    named = [Tool(name, function) for name, function in tools.items()] if isinstance(tools, Mapping) else None
    listed = named if named is not None else [_as_tool(each) for each in tools]  # type: ignore[arg-type]
    for tool in listed:
        if loop is None and _is_async(tool.function):
            raise errors.InvalidRequest(f"the tool {tool.name!r} is a coroutine function: those need an AsyncSandbox")
    return Toolbox(listed, loop) if listed else None


def toolbox_from_loop(tools: ToolsLike) -> Toolbox | None:
    """The same where the caller has an event loop, on which their coroutine functions run."""
    return None if tools is None else make_toolbox(tools, asyncio.get_running_loop())


def offered_tools(toolbox: Toolbox | None) -> Sequence[Offered]:
    """The definitions of its tools."""
    return toolbox.offered if toolbox is not None else ()


class ToolAnsweringExecution:
    """An execution that answers its calls of tools as its events are taken."""

    def __init__(self, execution: backend.BackendExecution, toolbox: Toolbox):
        self._execution = execution
        self._toolbox = toolbox
        self._tasks = TaskSet()

    @property
    def ended(self) -> Ended | None:
        return self._execution.ended

    async def __aenter__(self) -> ToolAnsweringExecution:
        await self._execution.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> ToolAnsweringExecution:
        return self

    async def __anext__(self) -> AnyEvent:
        event = await self._execution.__anext__()
        self._answer_calls([event])
        return event

    async def next_events(self) -> list[AnyEvent]:
        events = await self._execution.next_events()
        self._answer_calls(events)
        return events

    async def result(self) -> Run:
        folding = RunFold()
        async with self:
            while events := await self.next_events():
                for event in events:
                    folding.feed(event)
        return folding.run()

    async def aclose(self) -> None:
        self._cancel_calls()
        await self._execution.aclose()

    def interrupt(self) -> None:
        self._execution.interrupt()

    def answer(self, text: str | None) -> None:
        self._execution.answer(text)

    def answer_tools(self, results: Iterable[ToolResult]) -> None:
        self._execution.answer_tools(results)

    def _answer_calls(self, events: list[AnyEvent]) -> None:
        for event in events:
            if isinstance(event, ToolsCalled):
                for call in event.calls:
                    self._tasks.start(self._answer_call(call))
            elif isinstance(event, Ended):
                self._cancel_calls()

    async def _answer_call(self, call: ToolCall) -> None:
        self._execution.answer_tools([await self._toolbox.result(call)])

    def _cancel_calls(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._toolbox.close()


async def answering_tools(
    starting: Awaitable[backend.BackendExecution], toolbox: Toolbox | None
) -> backend.BackendExecution:
    """The execution once it is there, with its calls of those tools answered."""
    execution = await starting
    return execution if toolbox is None else ToolAnsweringExecution(execution, toolbox)


def _as_tool(given: Tool | Function) -> Tool:
    if isinstance(given, Tool):
        return given
    name = getattr(given, "__name__", None)
    if not callable(given) or not isinstance(name, str):
        raise errors.InvalidRequest(f"{given!r} cannot be a tool: give functions by their names, or cloche.Tool")
    return Tool(name, given)


def _is_async(function: Function) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _call_function(function: Function, call: ToolCall) -> ToolResult:
    """Calls the function in a thread and catches everything: SystemExit would end our loop, futures take no
    StopIteration.
    """
    try:
        return _success_result(call, function(**call.input))
    except BaseException as error:  # noqa: BLE001 - the caller's own function: the program gets its error
        return _failure_result(call, error)


async def _await_function(function: Function, call: ToolCall) -> ToolResult:
    """On the caller's loop."""
    try:
        return _success_result(call, await function(**call.input))
    except Exception as error:  # noqa: BLE001 - as above
        return _failure_result(call, error)


def _success_result(call: ToolCall, value: object) -> ToolResult:
    return ToolResult(call_id=call.id, result=msgspec.Raw(_encode_result(value)))


def _failure_result(call: ToolCall, error: BaseException) -> ToolResult:
    message, kind = str(error), type(error).__name__
    if isinstance(error, KeyError) and message:  # which says no more than the key
        message = f"{kind}: {message}"
    return ToolResult(call_id=call.id, error=message or kind)


def _encode_result(value: object) -> bytes:
    """The value as JSON. Raises TypeError for a value that JSON cannot hold, ValueError for one that is too
    long.
    """
    content = msgspec.json.encode(value, enc_hook=_plain_value)
    if len(content) > MAX_TOOL_RESULT_BYTES:
        raise ValueError(f"the tool's result has {len(content)} bytes: {MAX_TOOL_RESULT_BYTES} are possible")
    return content


def _plain_value(value: Any) -> Any:
    """The plain form of values of numpy, pydantic and the like, by their own methods."""
    for name in ("model_dump", "tolist", "to_dict"):
        if callable(say := getattr(value, name, None)):
            return say()
    raise TypeError(f"the tool's result is no JSON value: it has a {type(value).__name__}")
