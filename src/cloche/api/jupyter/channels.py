"""The WebSocket of a kernel: `/api/kernels/{kernel}/channels`.

Executions of a kernel run one after another and go on without clients. All other requests are answered at once, also
while a cell runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from cloche import errors
from cloche.api.http import decode_apart, internal_error, request_id_of
from cloche.api.jupyter.answers import (
    encode_check,
    encode_completions,
    encode_description,
    select_history,
)
from cloche.api.jupyter.context import JupyterContext, error_reply
from cloche.api.jupyter.kernels import ExecuteTask, JupyterKernel, log_failed_task
from cloche.api.jupyter.messages import (
    V1_PROTOCOL,
    ClientMessage,
    CodeRequestContent,
    CommOpenContent,
    ExecuteRequestContent,
    HistoryRequestContent,
    InputReplyContent,
    KernelMessage,
    ShutdownRequestContent,
    decode_binary_message,
    decode_content,
    decode_text_message,
    encode_text_message,
    encode_v1_message,
    make_message,
)
from cloche.engine.executions.history import read_history
from cloche.tasks import TaskSet, run_until_first_ends
from cloche.telemetry import log

SEND_SECONDS = 60.0  # a client that takes nothing for so long is disconnected: others wait for it
RENEW_SECONDS = 60.0  # how often the sandbox of a connected kernel gets more time
MAX_ASIDES = 32  # requests of one client that are answered at once
_CLOSED_NORMALLY = 1000
_CLOSED_BY_ERROR = 1011


class KernelSockets:
    """The ASGI endpoint of the WebSocket."""

    def __init__(self, api: JupyterContext):
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket = WebSocket(scope, receive, send)
        try:
            kernel = self._api.kernel(socket)
            await kernel.sandbox()
            await KernelConnection(self._api, kernel, socket).talk()
        except WebSocketDisconnect:
            pass
        except errors.ClocheError as error:
            await self._refuse(socket, error)
        except Exception as error:  # noqa: BLE001 - the dialect's edge
            log.error("socket.failed", request=request_id_of(scope), error=type(error).__name__)
            await self._refuse(socket, internal_error(request_id_of(scope)))

    async def _refuse(self, socket: WebSocket, error: errors.ClocheError) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # the client has disconnected meanwhile
            if socket.application_state == WebSocketState.CONNECTING:
                await socket.send_denial_response(error_reply(error))
            else:
                await socket.close(_CLOSED_BY_ERROR)


class KernelConnection:
    """One client of a kernel."""

    def __init__(self, api: JupyterContext, kernel: JupyterKernel, socket: WebSocket):
        self._api = api
        self._kernel = kernel
        self._socket = socket
        self._v1 = V1_PROTOCOL in socket.scope.get("subprotocols", ())
        self._sending = asyncio.Lock()
        self._asides = TaskSet()
        self._lost = False

    async def talk(self) -> None:
        """Serves the client until it, or the kernel, has left."""
        await self._socket.accept(subprotocol=V1_PROTOCOL if self._v1 else None)
        self._kernel.join(self.deliver)
        try:
            await run_until_first_ends(self._receive_all(), self._renew(), self._wait_ended())
        finally:
            self._kernel.leave(self.deliver)
            for task in self._asides:
                task.cancel()
            await asyncio.gather(*self._asides, return_exceptions=True)
        await self._socket.close(_CLOSED_NORMALLY)

    async def deliver(self, message: KernelMessage) -> None:
        """Sends a message. One that does not get through ends the connection, and nothing else."""
        if self._lost:
            return
        try:
            async with asyncio.timeout(SEND_SECONDS), self._sending:
                if self._v1:
                    await self._socket.send_bytes(encode_v1_message(message))
                else:
                    await self._socket.send_text(encode_text_message(message).decode())
        except (TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
            self._lost = True

    async def _receive_all(self) -> None:
        while not self._lost:
            received = await self._socket.receive()
            if received["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(received.get("code", 1006))
            data = received.get("bytes")
            try:
                if data is None:
                    message = await decode_apart(decode_text_message, received.get("text") or "")
                else:
                    message = await decode_apart(partial(decode_binary_message, v1=self._v1), data)
                await self._handle(message)
            except errors.InvalidRequest:
                log.info("jupyter.message_dropped", request=request_id_of(self._socket.scope))

    async def _wait_ended(self) -> None:
        await self._kernel.ended.wait()

    async def _renew(self) -> None:
        """Keeps the sandbox for as long as a client is connected, and notices its end."""
        while True:
            sandbox = await self._kernel.sandbox()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_SECONDS):
                    await sandbox.wait_ended()
                return

    # -- messages

    async def _handle(self, message: ClientMessage) -> None:
        kind = message.header.msg_type
        if kind == "execute_request":
            await self._execute(message)
        elif kind == "input_reply":
            self._kernel.answer(decode_content(message, InputReplyContent).value)
        elif kind in _ANSWERS:
            while len(self._asides) >= MAX_ASIDES:
                await asyncio.wait(self._asides, return_when=asyncio.FIRST_COMPLETED)
            self._asides.start(self._answer_aside(message)).add_done_callback(log_failed_task)

    async def _answer_aside(self, message: ClientMessage) -> None:
        """Answers a request that does not wait for the running cell. What fails is told in the reply."""
        kind, header = message.header.msg_type, message.header
        await self._kernel.set_state("busy", header)
        try:
            await _ANSWERS[kind](self, message)
        except errors.ClocheError as error:
            await self._reply(message, kind.replace("_request", "_reply"), _error_status(error))
        await self._kernel.end_aside(header)

    async def _execute(self, message: ClientMessage) -> None:
        content = decode_content(message, ExecuteRequestContent)
        try:
            self._kernel.submit(ExecuteTask(client=self.deliver, parent=message.header, content=content))
        except errors.ClocheError as error:
            await self._reply(message, "execute_reply", _error_status(error))

    async def _reply(self, message: ClientMessage, msg_type: str, content: Any) -> None:
        channel: Any = "control" if message.channel == "control" else "shell"
        await self.deliver(make_message(channel, msg_type, content, message.header, self._kernel.session))

    async def _tell_kernel(self, message: ClientMessage) -> None:
        """Has the kernel get ready for questions, too: who asks this first mostly has some."""
        await (await self._kernel.context()).assistant()
        await self._reply(message, "kernel_info_reply", await self._api.kernel_info(self._kernel))

    async def _complete(self, message: ClientMessage) -> None:
        asked = decode_content(message, CodeRequestContent)
        found = await (await self._kernel.context()).complete(asked.code, asked.cursor_pos)
        await self._reply(message, "complete_reply", encode_completions(found))

    async def _inspect(self, message: ClientMessage) -> None:
        asked = decode_content(message, CodeRequestContent)
        context = await self._kernel.context()
        found = await context.describe(asked.code, asked.cursor_pos, detail=asked.detail_level > 0)
        await self._reply(message, "inspect_reply", encode_description(found))

    async def _check(self, message: ClientMessage) -> None:
        asked = decode_content(message, CodeRequestContent)
        found = await (await self._kernel.context()).check(asked.code)
        await self._reply(message, "is_complete_reply", encode_check(found))

    async def _tell_history(self, message: ClientMessage) -> None:
        asked = decode_content(message, HistoryRequestContent)
        cells = read_history(await self._kernel.sandbox(), (await self._kernel.context()).id)
        await self._reply(message, "history_reply", {"status": "ok", "history": select_history(cells, asked)})

    async def _tell_comms(self, message: ClientMessage) -> None:
        await self._reply(message, "comm_info_reply", {"status": "ok", "comms": {}})

    async def _close_comm(self, message: ClientMessage) -> None:
        """Nothing in a sandbox takes comms: the client hears so."""
        id = decode_content(message, CommOpenContent).comm_id
        await self._kernel.publish("comm_close", {"comm_id": id, "data": {}}, message.header)

    async def _interrupt(self, message: ClientMessage) -> None:
        await self._kernel.interrupt()
        await self._reply(message, "interrupt_reply", {"status": "ok"})

    async def _shut_down(self, message: ClientMessage) -> None:
        restart = decode_content(message, ShutdownRequestContent).restart
        if restart:
            await self._kernel.restart()
        await self._reply(message, "shutdown_reply", {"status": "ok", "restart": restart})
        if not restart:
            await self._api.kernels.end(self._kernel)


_ANSWERS = {
    "kernel_info_request": KernelConnection._tell_kernel,
    "complete_request": KernelConnection._complete,
    "inspect_request": KernelConnection._inspect,
    "is_complete_request": KernelConnection._check,
    "history_request": KernelConnection._tell_history,
    "comm_info_request": KernelConnection._tell_comms,
    "comm_open": KernelConnection._close_comm,
    "interrupt_request": KernelConnection._interrupt,
    "shutdown_request": KernelConnection._shut_down,
}


def _error_status(error: errors.ClocheError) -> dict[str, Any]:
    return {"status": "error", "ename": type(error).__name__, "evalue": str(error), "traceback": [str(error)]}
