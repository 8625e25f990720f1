"""A context of a sandbox on a server, and its executions."""

from __future__ import annotations

import asyncio
import builtins
import codecs
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any
from urllib.parse import quote

from cloche import errors
from cloche.events import (
    AnyEvent,
    Ended,
    EventQueue,
    Exited,
    Input,
    Output,
    ProcessEvent,
    ProcessResult,
    Run,
    RunFold,
    RunInfo,
)
from cloche.input_answers import NO_MORE_ANSWERS, InputAnswers, InputSource, answer_failure_message, make_input_answers
from cloche.model import (
    Completions,
    Mark,
    ProcessInfo,
    ToolDefinition,
    ToolResult,
    User,
    Variables,
    check_command_words,
    check_copy_count,
    check_environment,
    check_seconds,
    check_terminal_size,
    check_user,
)
from cloche.notebook import History
from cloche.protocol import requests, responses
from cloche.sdk.remote_server import ServerClient, ServerSocket
from cloche.tasks import TaskSet

ACCEPTED_SECONDS = 10.0  # less than the server waits for the begin


class RemoteContext:
    def __init__(self, server: ServerClient, sandbox: str, info: responses.ContextInfo):
        self._server = server
        self._sandbox = sandbox
        self.id = info.id
        self.language = info.language
        self.cwd = info.cwd

    async def execute(
        self,
        code: str,
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        input: InputSource = None,
        argv: Sequence[str] | None = None,
        tools: Sequence[ToolDefinition] = (),
    ) -> RemoteExecution:
        answers = make_input_answers(input)
        message = self._execute_request(
            code, env, cwd, timeout_seconds, answers is not None or input is True, argv, tools
        )

        async def ask() -> ServerSocket:
            return await self._open_accepted(message)

        return RemoteExecution(await ask(), ask, answers)

    async def _open_accepted(self, request: requests.ExecuteRequest) -> ServerSocket:
        """A connection on which the execution can start. Raises the server's error if it refuses the request."""
        socket = await self._server.connect(f"/sandboxes/{quote(self._sandbox)}/execute")
        try:
            await socket.send(request)
            await socket.expect(responses.AcceptedMessage)
        except BaseException:
            await socket.close()
            raise
        return socket

    async def run(
        self,
        code: str,
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        input: InputSource = None,
    ) -> Run:
        """A single request, where the answers are known now."""
        lines = _known_lines(input)
        if lines is _ASKED_LATER:
            execution = await self.execute(code, env=env, cwd=cwd, timeout_seconds=timeout_seconds, input=input)
            return await execution.result()
        message = self._execute_request(code, env, cwd, timeout_seconds, lines)
        return responses.decode_run(
            await self._server.ask("POST", f"/sandboxes/{quote(self._sandbox)}/run", body=message)
        )

    async def detach(
        self,
        code: str,
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        input: list[str] | None = None,
    ) -> RunInfo:
        message = self._execute_request(code, env, cwd, timeout_seconds, input)
        path = f"/sandboxes/{quote(self._sandbox)}/runs"
        info: RunInfo = await self._server.ask("POST", path, RunInfo, body=message)
        return info

    def _execute_request(
        self,
        code: str,
        env: dict[str, str] | None,
        cwd: str | None,
        timeout_seconds: float | None,
        input: Any,
        argv: Sequence[str] | None = None,
        tools: Sequence[ToolDefinition] = (),
    ) -> requests.ExecuteRequest:
        """The request. Raises the engine's own errors before anything is sent."""
        if not isinstance(code, str):
            raise errors.InvalidRequest(f"code must be a string, not {type(code).__name__}")
        check_environment(env or {})
        check_seconds("timeout", timeout_seconds)
        return requests.ExecuteRequest(
            code=code,
            context=self.id,
            env=env or {},
            cwd=cwd,
            timeout_seconds=timeout_seconds,
            input=input,
            argv=None if argv is None else list(argv),
            tools=[
                requests.ToolRequest(name=t.name, description=t.description, parameters=t.parameters) for t in tools
            ],
        )

    async def interrupt(self) -> bool:
        answer: responses.InterruptedResponse = await self._server.ask(
            "POST", f"{self._context_path}/interrupt", responses.InterruptedResponse
        )
        return answer.interrupted

    async def restart(self) -> None:
        await self._server.ask("POST", f"{self._context_path}/restart")

    async def checkpoint(self) -> Mark:
        mark: Mark = await self._server.ask("POST", f"{self._context_path}/checkpoints", Mark)
        return mark

    async def rollback(self, mark: str) -> None:
        await self._server.ask("POST", f"{self._context_path}/rollback", body=requests.RollbackRequest(checkpoint=mark))

    async def fork(self, count: int = 1) -> list[RemoteContext]:
        check_copy_count(count)
        body = requests.ForkContextRequest(count=count)
        made = await self._server.ask("POST", f"{self._context_path}/fork", list[responses.ContextInfo], body=body)
        return [RemoteContext(self._server, self._sandbox, each) for each in made]

    async def checkpoints(self) -> list[Mark]:
        found: list[Mark] = await self._server.ask("GET", f"{self._context_path}/checkpoints", list[Mark])
        return found

    async def forget(self, mark: str) -> None:
        await self._server.ask("DELETE", f"{self._context_path}/checkpoints/{quote(mark, safe='')}")

    async def variables(self) -> Variables:
        found: responses.VariablesInfo = await self._server.ask(
            "GET", f"{self._context_path}/variables", responses.VariablesInfo
        )
        return Variables(found.variables, found.more)

    async def complete(self, code: str, cursor: int | None = None) -> Completions:
        asked = requests.CodeQuestionRequest(code=code, cursor=cursor)
        found: Completions = await self._server.ask("POST", f"{self._context_path}/complete", Completions, body=asked)
        return found

    async def history(self) -> History:
        return await fetch_history(self._server, self._sandbox, self.id)

    async def notebook(self) -> bytes:
        path = f"/sandboxes/{quote(self._sandbox)}/notebook"
        content: bytes = await self._server.ask("GET", path, query={"context": self.id})
        return content

    @property
    def _context_path(self) -> str:
        return f"/sandboxes/{quote(self._sandbox)}/contexts/{quote(self.id, safe='')}"


async def fetch_history(server: ServerClient, sandbox: str, context: str | None = None) -> History:
    """The history of a sandbox, or of one context of it."""
    query = {} if context is None else {"context": context}
    path = f"/sandboxes/{quote(sandbox)}/history"
    found: responses.HistoryInfo = await server.ask("GET", path, responses.HistoryInfo, query=query)
    return History(found.cells, found.dropped)


class RemoteExecution:
    """An accepted execution, which begins when its first event is requested.

    The server waits for that for a limited time: if it comes late, the request is sent once more.
    """

    def __init__(self, socket: ServerSocket, ask: Callable[[], Awaitable[ServerSocket]], answers: InputAnswers | None):
        self.ended: Ended | None = None
        self._socket = socket
        self._ask = ask
        self._stale_at = time.monotonic() + ACCEPTED_SECONDS
        self._answers = answers
        self._begun = False
        self._closed = False
        self._tasks = TaskSet()

    async def __aenter__(self) -> RemoteExecution:
        await self._begin_once()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> RemoteExecution:
        return self

    async def __anext__(self) -> AnyEvent:
        for event in await self.next_events():
            return event
        raise StopAsyncIteration

    async def next_events(self) -> list[AnyEvent]:
        """One event; none after `Ended`."""
        if self.ended is not None or self._closed:
            return []
        await self._begin_once()
        event = await self._socket.receive()
        if event is None:
            if self._closed:  # meanwhile
                return []
            raise self._socket.lost()
        if not isinstance(event, AnyEvent):
            raise responses.unexpected_answer_error(f"{type(event).__name__} in an execution")
        if isinstance(event, Ended):
            self.ended = event
            self._tasks.start(self._socket.close())
        elif isinstance(event, Input) and self._answers is not None:
            self._tasks.start(self._answer_input(self._answers, event))
        return [event]

    async def result(self) -> Run:
        folding = RunFold()
        async with self:
            async for event in self:
                folding.feed(event)
        return folding.run()

    async def aclose(self) -> None:
        """The program is interrupted, and has ended when this returns."""
        if self._closed or self.ended is not None:
            return
        self._closed = True
        try:
            await self._socket.send(requests.LeaveRequest())
            while await self._socket.receive() is not None:
                pass
        except errors.ClocheError:
            pass  # it has ended with its sandbox, or the server has
        finally:
            await self._socket.close()

    def interrupt(self) -> None:
        if self.ended is None:
            self._tasks.start(self._send_quietly(requests.InterruptRequest()))

    def answer(self, text: str | None) -> None:
        if self.ended is None:
            self._tasks.start(self._send_quietly(requests.InputAnswerRequest(text=text)))

    def answer_tools(self, results: Iterable[ToolResult]) -> None:
        for result in results:
            if self.ended is None:
                answer = requests.ToolAnswerRequest(call_id=result.call_id, result=result.result, error=result.error)
                self._tasks.start(self._send_quietly(answer))

    async def _begin_once(self) -> None:
        if not self._begun:
            self._begun = True
            if time.monotonic() >= self._stale_at:
                await self._socket.close()
                self._socket = await self._ask()
            await self._socket.send(requests.StartExecutionRequest())

    async def _send_quietly(self, message: object) -> None:
        try:
            await self._socket.send(message)
        except errors.Unavailable:
            pass  # the next read of an event raises it

    async def _answer_input(self, answers: InputAnswers, event: Input) -> None:
        try:
            message = requests.InputAnswerRequest(text=await answers.next(event))
        except StopAsyncIteration:
            message = requests.InputAnswerRequest(text=None, problem=NO_MORE_ANSWERS)
        except Exception as error:  # noqa: BLE001 - the caller's own function: the program gets its error
            message = requests.InputAnswerRequest(text=None, problem=answer_failure_message(error))
        await self._send_quietly(message)


_ASKED_LATER = object()


def _known_lines(source: InputSource) -> object:
    """The answers to `input()` where they are known now. Raises InvalidRequest for a source that cannot give
    any.
    """
    make_input_answers(source)
    if source is None or source is False:
        return None
    if isinstance(source, str):
        return source.splitlines()
    return list(source) if isinstance(source, (list, tuple)) else _ASKED_LATER


# The commands and processes of a sandbox on a server.

_TYPED_BYTES = 1 << 16

_decoder = codecs.getincrementaldecoder("utf-8")


class RemoteCommands:
    def __init__(self, server: ServerClient, sandbox: str):
        self._server = server
        self._path = f"/sandboxes/{quote(sandbox)}"

    async def start(
        self,
        command: str | Sequence[str],
        *,
        user: User | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        stdin: bool = False,
        pty: tuple[int, int] | None = None,
        background: bool = False,
    ) -> RemoteProcess:
        if pty is not None:
            check_terminal_size(pty)
        message = requests.StartProcessRequest(
            **_command_fields(command, user, env, cwd, timeout_seconds),
            stdin=stdin,
            terminal=None if pty is None else requests.TerminalSize(rows=pty[0], columns=pty[1]),
            attached=not background,
        )
        socket = await self._server.connect(f"{self._path}/process", {"raw": pty is not None})
        try:
            await socket.send(message)
            return RemoteProcess(
                self._server, self._path, socket, await socket.expect(responses.AttachedMessage), message
            )
        except BaseException:
            await socket.close()
            raise

    async def run(
        self,
        command: str | Sequence[str],
        *,
        user: User | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ProcessResult:
        content = stdin.encode() if isinstance(stdin, str) else stdin
        message = requests.RunCommandRequest(
            **_command_fields(command, user, env, cwd, timeout_seconds), stdin_base64=content
        )
        done: ProcessResult = await self._server.ask("POST", f"{self._path}/commands", ProcessResult, body=message)
        return done

    async def list(self) -> builtins.list[ProcessInfo]:
        found: list[ProcessInfo] = await self._server.ask("GET", f"{self._path}/processes", list[ProcessInfo])
        return found

    async def kill(self, id: str) -> None:
        await self._server.ask("DELETE", f"{self._path}/processes/{quote(id, safe='')}")


class RemoteProcess:
    """A process on a server. Its output is read at once: the server bounds its amount, except for a terminal.

    A terminal's output is not read from the server while much of it waits here for the reader.
    """

    def __init__(
        self,
        server: ServerClient,
        path: str,
        socket: ServerSocket,
        attached: responses.AttachedMessage,
        request: requests.StartProcessRequest,
    ):
        self.id = attached.id
        self.pid = attached.pid
        self.exited: Exited | None = None
        self._server = server
        self._path = f"{path}/processes/{quote(attached.id, safe='')}"
        self._socket = socket
        self._asked = request
        self._lost: errors.ClocheError | None = None
        self._texts: dict[str, list[str]] | None = None
        self._decode = _decoder("replace").decode
        self._room = asyncio.Event()
        self._room.set()
        pause = self._room.clear if request.terminal is not None else _keep_reading
        self._events: EventQueue[ProcessEvent] = EventQueue(pause, self._room.set)
        self._tasks = TaskSet()
        self._tasks.start(self._read_events())

    async def __aenter__(self) -> RemoteProcess:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._asked.attached and self.exited is None:
            self._events.divert_events(_discard_event)
            self.kill()
            await self._events.wait_closed()

    def __aiter__(self) -> RemoteProcess:
        return self

    async def __anext__(self) -> ProcessEvent:
        event = await self._events.next_event()
        if event is None:
            if self._lost is not None:
                raise self._lost
            raise StopAsyncIteration
        return event

    async def next_events(self) -> list[ProcessEvent]:
        events = await self._events.next_events()
        if not events and self._lost is not None:
            raise self._lost
        return events

    async def result(self) -> ProcessResult:
        if self._texts is None:
            self._texts = {"stdout": [], "stderr": []}
            self._events.divert_events(partial(_collect_output, self._texts))
        await self._events.wait_closed()
        if self.exited is None:
            raise self._lost or self._server.lost()
        return ProcessResult(
            exit_code=self.exited.exit_code,
            stdout="".join(self._texts["stdout"]),
            stderr="".join(self._texts["stderr"]),
            outcome=self.exited.outcome,
            reason=self.exited.reason,
        )

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a separate request: on the WebSocket it would wait behind typed input that the program does not
        read.
        """
        if self.exited is None:
            self._tasks.start(self._send_signal(int(number)))

    def close_stdin(self) -> None:
        self._send_soon(requests.CloseStdinRequest())

    def resize(self, rows: int, columns: int) -> None:
        if self._asked.terminal is None or self.exited is not None:
            raise errors.InvalidRequest(f"process {self.id} has no terminal")
        check_terminal_size((rows, columns))
        self._send_soon(requests.ResizeRequest(rows=rows, columns=columns))

    async def send_stdin(self, data: bytes) -> None:
        """Terminal input is sent without waiting; piped input is awaited, so that the caller learns of its end."""
        if self._asked.terminal is not None:
            for at in range(0, len(data), _TYPED_BYTES):
                await self._socket.send(data[at : at + _TYPED_BYTES])
            return
        try:
            await self._server.ask("PUT", f"{self._path}/stdin", content=data)
        except errors.ProcessNotFound:
            raise errors.InvalidRequest(f"process {self.id} does not read its stdin any more") from None

    async def _read_events(self) -> None:
        try:
            while (event := await self._socket.receive()) is not None:
                self._take_event(event)
                await self._room.wait()
        except errors.ClocheError as error:
            self._lost = error
        finally:
            self._events.close()
            await self._socket.close()

    def _take_event(self, event: Any) -> None:
        if isinstance(event, bytes) and self._asked.terminal is not None:
            event = Output(stream="stdout", text=self._decode(event))
        if isinstance(event, Exited):
            self.exited = event
        elif not isinstance(event, ProcessEvent):
            raise responses.unexpected_answer_error(f"{type(event).__name__} of a process")
        self._events.put(event, len(event.text) if isinstance(event, Output) else 0)

    async def _send_signal(self, number: int) -> None:
        with contextlib.suppress(errors.ClocheError):  # it has ended; or the wait for its end raises it
            await self._server.ask("POST", f"{self._path}/signal", body=requests.SignalRequest(signal=number))

    def _send_soon(self, message: object) -> None:
        if self.exited is None:
            self._tasks.start(self._send_quietly(message))

    async def _send_quietly(self, message: object) -> None:
        try:
            await self._socket.send(message)
        except errors.Unavailable:
            pass  # the wait for its end raises it


def _command_fields(
    command: str | Sequence[str],
    user: User | None,
    env: dict[str, str] | None,
    cwd: str | None,
    timeout_seconds: float | None,
) -> dict[str, Any]:
    """The fields that both kinds of command have. Raises the engine's own errors before anything is sent."""
    check_seconds("timeout", timeout_seconds)
    check_user(user)
    words = [command] if isinstance(command, str) else list(command)
    check_command_words(words)
    return {
        "command": command if isinstance(command, str) else words,
        "user": user,
        "env": env or {},
        "cwd": cwd,
        "timeout_seconds": timeout_seconds,
    }


def _collect_output(texts: dict[str, list[str]], event: ProcessEvent) -> None:
    if isinstance(event, Output):
        texts[event.stream].append(event.text)


def _discard_event(event: ProcessEvent) -> None:
    """Discards an event after the last reader has left."""


def _keep_reading() -> None:
    """Never pauses reading: the server bounds the total output of a process."""
