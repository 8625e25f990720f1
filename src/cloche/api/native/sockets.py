"""WebSockets: executions that are answered and interrupted, processes and terminals that are typed into.

Before a socket is accepted an error is an HTTP answer, afterwards the last message.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from cloche import errors
from cloche.api.http import Internal, request_id, status_of
from cloche.api.native.commands import Stdin, check_signal, feeding, started
from cloche.api.native.context import Door, query_of, read, reply
from cloche.api.native.runs import execution_of
from cloche.engine.commands.jobs import Job
from cloche.engine.commands.process import Exited, Process
from cloche.engine.commands.program import Program
from cloche.engine.executions.execution import Execution
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Event, Output
from cloche.model import ToolResult
from cloche.protocol import requests, responses
from cloche.telemetry import log

Talk = Callable[[WebSocket, Sandbox], Awaitable[None]]

_decoder = codecs.getincrementaldecoder("utf-8")
FIRST_WORD_SECONDS = 20.0
STUCK_SECONDS = 60.0  # while it waits, a socket hears neither signals nor that its client has left

_CLOSED_NORMALLY = 1000
_CLOSED_BY_ERROR = 1011


class SocketEdge:
    """The ASGI endpoint of one kind of WebSocket: what `Edge` is for requests."""

    def __init__(self, door: Door, talk: Talk):
        self._door = door
        self._talk = talk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket = WebSocket(scope, receive, send)
        try:
            sandbox = await self._door.sandbox(socket)
            await self._talk(socket, sandbox)
            await socket.close(_CLOSED_NORMALLY)
        except WebSocketDisconnect:
            pass
        except errors.ClocheError as error:
            await _fail(socket, error)
        except Exception as error:  # noqa: BLE001 - the dialect's edge
            log.error("socket.failed", request=_request_id(socket), error=type(error).__name__)
            await _fail(socket, Internal("a fault of Cloche's: the server's log has this request"))


async def _fail(socket: WebSocket, error: errors.ClocheError) -> None:
    fault = responses.fault_of(error, _request_id(socket))
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # they have left meanwhile
        if socket.application_state == WebSocketState.CONNECTING:
            await socket.send_denial_response(reply(responses.Failure(error=fault), status_of(error)))
        else:
            await _say(socket, responses.Failed(error=fault))
            await socket.close(_CLOSED_BY_ERROR)


def _request_id(socket: HTTPConnection) -> str:
    return request_id(socket)  # type: ignore[arg-type]  # it looks at scope and headers only


async def _say(socket: WebSocket, event: Event) -> None:
    await socket.send_text(responses.encode_event(event).decode())


async def _hear(socket: WebSocket, kind: Any) -> Any:
    """The next message. Bytes are what they are. Raises InvalidRequest, WebSocketDisconnect."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1006))
    binary = message.get("bytes")
    return binary if binary is not None else read(message.get("text") or "", kind)


async def _first_word(socket: WebSocket, kind: Any, what: str) -> Any:
    """The next message, which must come soon: a connection that says nothing keeps what it has said before."""
    try:
        async with asyncio.timeout(FIRST_WORD_SECONDS):
            message = await _hear(socket, kind)
    except TimeoutError:
        raise errors.InvalidRequest(f"{what} did not come within {FIRST_WORD_SECONDS:g} s: connect again") from None
    if isinstance(message, bytes):
        raise errors.InvalidRequest(f"{what} must come first, as text")
    return message


async def _both_ways(*halves: Awaitable[None]) -> None:
    """Does all of it until one half is over; what that raised is raised."""
    tasks = [asyncio.ensure_future(half) for half in halves]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


# --- executions


async def execute(socket: WebSocket, sandbox: Sandbox) -> None:
    """First the request, then `accepted`; from `start` on events go out while answers and interrupts come in."""
    await socket.accept()
    asked = await _first_word(socket, requests.Execute, "the request")
    execution = execution_of(sandbox, asked)
    await _say(socket, responses.Accepted(execution=execution.id))
    if not isinstance(await _first_word(socket, requests.Start | requests.Leave, "`start`"), requests.Start):
        return
    async with contextlib.aclosing(execution):
        await _both_ways(_tell_execution(socket, execution), _steer(socket, execution))


async def _tell_execution(socket: WebSocket, execution: Execution) -> None:
    while events := await execution.next_events():
        for event in events:
            await _say(socket, event)


async def _steer(socket: WebSocket, execution: Execution) -> None:
    while True:
        match await _hear(socket, requests.Answer | requests.ToolAnswer | requests.Interrupt | requests.Leave):
            case requests.Leave():
                return
            case requests.Answer(text=None, problem=problem):
                execution.refuse_answer(problem)
            case requests.Answer(text=text):
                execution.answer(text)
            case requests.ToolAnswer(call_id=call, result=result, error=error):
                execution.answer_tools([ToolResult(call_id=call, result=result, error=error)])
            case requests.Interrupt():
                execution.interrupt()
            case _:
                raise errors.InvalidRequest("an execution takes text messages only")


# --- processes


async def process(socket: WebSocket, sandbox: Sandbox) -> None:
    """Starts one as the first message says, and attaches to it. It lives on when the client leaves."""
    query = query_of(socket, requests.AttachQuery)
    await socket.accept()
    asked = await _first_word(socket, requests.StartProcess, "the request")
    program = await started(sandbox.commands, asked)
    try:
        with _reading(program):
            await _attend(socket, program, query.raw)
    finally:
        if asked.attached:
            program.kill()


async def attach(socket: WebSocket, sandbox: Sandbox) -> None:
    """Attaches to a process that runs."""
    query = query_of(socket, requests.AttachQuery)
    found = sandbox.commands.get(socket.path_params["process"])
    with _reading(found):
        await socket.accept()
        await _attend(socket, found, query.raw)


def _reading(program: Program) -> contextlib.AbstractContextManager[None]:
    """A terminal has as many readers as come, anything else one. Raises InvalidRequest."""
    return program.reading() if isinstance(program, Process) else contextlib.nullcontext()


async def _attend(socket: WebSocket, program: Program, raw: bool) -> None:
    await _say(socket, responses.Attached(id=program.id, pid=program.pid))
    telling = _tell_process(socket, program) if isinstance(program, Process) else _tell_job(socket, program, raw)
    async with feeding(program) as stdin:
        await _both_ways(telling, _feed(socket, program, stdin))


async def _tell_process(socket: WebSocket, program: Process) -> None:
    while events := await program.next_events():
        for event in events:
            await _say(socket, event)


async def _feed(socket: WebSocket, program: Program, stdin: Stdin) -> None:
    """Waits only for a program that lets more input wait than there is room for."""
    while True:
        message = await _hear(socket, requests.CloseStdin | requests.Kill | requests.Resize)
        match message:
            case bytes():
                await stdin.put(message, STUCK_SECONDS)
            case requests.CloseStdin():
                stdin.end()
            case requests.Kill(signal=number):
                check_signal(number)
                program.kill(number)
            case requests.Resize(rows=rows, columns=columns):
                program.resize(rows, columns)


async def _tell_job(socket: WebSocket, program: Program, raw: bool) -> None:
    assert isinstance(program, Job)
    decoders = {"stdout": _decoder("replace"), "stderr": _decoder("replace")}
    async with program.listen() as listener:
        while events := await listener.next_events():
            for event in events:
                if isinstance(event, Exited):
                    await _say(socket, event)
                elif raw:
                    await socket.send_bytes(event.data)
                elif text := decoders[event.stream].decode(event.data):
                    await _say(socket, Output(stream=event.stream, text=text))
