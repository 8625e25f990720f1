"""WebSockets: executions that take answers and interrupts, processes and terminals that take input.

Before a socket is accepted an error is an HTTP response, afterwards the last message.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from cloche import errors
from cloche.api.dialect import json_reply
from cloche.api.http import decode_apart, internal_error, request_id_of, status_of
from cloche.api.native.commands import StdinQueue, check_signal_number, open_stdin_queue, start_requested_process
from cloche.api.native.context import NativeContext, decode_client_message, decode_request_query
from cloche.api.native.runs import prepare_execution
from cloche.engine.commands.jobs import CommandJob
from cloche.engine.commands.process import SandboxProcess
from cloche.engine.commands.program import SandboxProgram
from cloche.engine.executions.execution import Execution
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Event, Exited, Output
from cloche.model import ToolResult
from cloche.protocol import requests, responses
from cloche.tasks import run_until_first_ends
from cloche.telemetry import log

SocketHandler = Callable[[WebSocket, Sandbox], Awaitable[None]]

_decoder = codecs.getincrementaldecoder("utf-8")
FIRST_MESSAGE_SECONDS = 20.0
STUCK_INPUT_SECONDS = 60.0  # while it waits, a socket hears neither signals nor that its client has left

_CLOSED_NORMALLY = 1000
_CLOSED_BY_ERROR = 1011


class SocketEndpoint:
    """The ASGI endpoint of one kind of WebSocket: the counterpart of `DialectEndpoint`."""

    def __init__(self, api: NativeContext, talk: SocketHandler):
        self._api = api
        self._talk = talk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket = WebSocket(scope, receive, send)
        try:
            sandbox = await self._api.sandbox(socket)
            await self._talk(socket, sandbox)
            await socket.close(_CLOSED_NORMALLY)
        except WebSocketDisconnect:
            pass
        except errors.ClocheError as error:
            await _send_socket_error(socket, error)
        except Exception as error:  # noqa: BLE001 - the dialect's edge
            log.error("socket.failed", request=request_id_of(socket.scope), error=type(error).__name__)
            await _send_socket_error(socket, internal_error(request_id_of(socket.scope)))


async def _send_socket_error(socket: WebSocket, error: errors.ClocheError) -> None:
    fault = responses.to_error_info(error, request_id_of(socket.scope))
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # they have left meanwhile
        if socket.application_state == WebSocketState.CONNECTING:
            await socket.send_denial_response(json_reply(responses.ErrorResponse(error=fault), status_of(error)))
        else:
            await _send_event(socket, responses.ErrorMessage(error=fault))
            await socket.close(_CLOSED_BY_ERROR)


async def _send_event(socket: WebSocket, event: Event) -> None:
    await socket.send_text(responses.encode_event(event).decode())


async def _receive_message(socket: WebSocket, kind: Any) -> Any:
    """The next message: decoded text, or plain bytes. Raises InvalidRequest, WebSocketDisconnect."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1006))
    binary = message.get("bytes")
    if binary is not None:
        return binary
    return await decode_apart(lambda text: decode_client_message(text, kind), message.get("text") or "")


async def _receive_first_message(socket: WebSocket, kind: Any, what: str) -> Any:
    """The next message, with a timeout: a silent connection would keep its earlier request in memory."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
            message = await _receive_message(socket, kind)
    except TimeoutError:
        raise errors.InvalidRequest(f"{what} did not come within {FIRST_MESSAGE_SECONDS:g} s: connect again") from None
    if isinstance(message, bytes):
        raise errors.InvalidRequest(f"{what} must come first, as text")
    return message


# --- executions


async def execute(socket: WebSocket, sandbox: Sandbox) -> None:
    """Receives the request, sends `accepted`; from `start` on sends events and takes answers and interrupts."""
    await socket.accept()
    message = await _receive_first_message(socket, requests.ExecuteRequest, "the request")
    execution = prepare_execution(sandbox, message)
    await _send_event(socket, responses.AcceptedMessage(execution=execution.id))
    if not isinstance(
        await _receive_first_message(socket, requests.StartExecutionRequest | requests.LeaveRequest, "`start`"),
        requests.StartExecutionRequest,
    ):
        return
    async with contextlib.aclosing(execution):
        await run_until_first_ends(
            _send_execution_events(socket, execution), _handle_execution_messages(socket, execution)
        )


async def _send_execution_events(socket: WebSocket, execution: Execution) -> None:
    while events := await execution.next_events():
        for event in events:
            await _send_event(socket, event)


async def _handle_execution_messages(socket: WebSocket, execution: Execution) -> None:
    while True:
        match await _receive_message(
            socket,
            requests.InputAnswerRequest
            | requests.ToolAnswerRequest
            | requests.InterruptRequest
            | requests.LeaveRequest,
        ):
            case requests.LeaveRequest():
                return
            case requests.InputAnswerRequest(text=None, problem=problem):
                execution.refuse_answer(problem)
            case requests.InputAnswerRequest(text=text):
                execution.answer(text)
            case requests.ToolAnswerRequest(call_id=call, result=result, error=error):
                execution.answer_tools([ToolResult(call_id=call, result=result, error=error)])
            case requests.InterruptRequest():
                execution.interrupt()
            case _:
                raise errors.InvalidRequest("an execution takes text messages only")


# --- processes


async def process(socket: WebSocket, sandbox: Sandbox) -> None:
    """Starts the process of the first message and attaches to it. It continues after a disconnect."""
    query = decode_request_query(socket, requests.AttachQuery)
    await socket.accept()
    message = await _receive_first_message(socket, requests.StartProcessRequest, "the request")
    program = await start_requested_process(sandbox.commands, message)
    try:
        with _claim_reader(program):
            await _attach_socket_to_program(socket, program, query.raw)
    finally:
        if message.attached:
            program.kill()


async def attach(socket: WebSocket, sandbox: Sandbox) -> None:
    """Attaches to a running process."""
    query = decode_request_query(socket, requests.AttachQuery)
    found = sandbox.commands.get(socket.path_params["process"])
    with _claim_reader(found):
        await socket.accept()
        await _attach_socket_to_program(socket, found, query.raw)


def _claim_reader(program: SandboxProgram) -> contextlib.AbstractContextManager[None]:
    """A terminal has any number of readers, other programs have one. Raises InvalidRequest."""
    return program.reading() if isinstance(program, SandboxProcess) else contextlib.nullcontext()


async def _attach_socket_to_program(socket: WebSocket, program: SandboxProgram, raw: bool) -> None:
    await _send_event(socket, responses.AttachedMessage(id=program.id, pid=program.pid))
    telling = (
        _send_process_events(socket, program)
        if isinstance(program, SandboxProcess)
        else _send_job_events(socket, program, raw)
    )
    async with open_stdin_queue(program) as stdin:
        await run_until_first_ends(telling, _handle_process_messages(socket, program, stdin))


async def _send_process_events(socket: WebSocket, program: SandboxProcess) -> None:
    while events := await program.next_events():
        for event in events:
            await _send_event(socket, event)


async def _handle_process_messages(socket: WebSocket, program: SandboxProgram, stdin: StdinQueue) -> None:
    """Handles input and control messages. Waits only if the program leaves too much input unread."""
    while True:
        message = await _receive_message(
            socket, requests.CloseStdinRequest | requests.KillRequest | requests.ResizeRequest
        )
        match message:
            case bytes():
                await stdin.put(message, STUCK_INPUT_SECONDS)
            case requests.CloseStdinRequest():
                stdin.end()
            case requests.KillRequest(signal=number):
                check_signal_number(number)
                program.kill(number)
            case requests.ResizeRequest(rows=rows, columns=columns):
                program.resize(rows, columns)


async def _send_job_events(socket: WebSocket, program: SandboxProgram, raw: bool) -> None:
    assert isinstance(program, CommandJob)
    decoders = {"stdout": _decoder("replace"), "stderr": _decoder("replace")}
    async with program.listen() as listener:
        while events := await listener.next_events():
            for event in events:
                if isinstance(event, Exited):
                    await _send_event(socket, event)
                elif raw:
                    await socket.send_bytes(event.data)
                elif text := decoders[event.stream].decode(event.data):
                    await _send_event(socket, Output(stream=event.stream, text=text))
