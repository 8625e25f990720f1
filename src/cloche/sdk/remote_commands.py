"""The commands and processes of a sandbox on a server."""

from __future__ import annotations

import asyncio
import builtins
import codecs
import contextlib
import signal
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any
from urllib.parse import quote

from cloche import errors
from cloche.engine.commands.commands import check_words
from cloche.engine.commands.process import ProcessEvent, ProcessResult
from cloche.engine.commands.program import Exited, check_size
from cloche.engine.executions.streams import EventQueue
from cloche.events import Output
from cloche.model import ProcessInfo, User, check_seconds, check_user
from cloche.protocol import requests, responses
from cloche.sdk.remote_server import Server, Socket

_TYPED_BYTES = 1 << 16

_decoder = codecs.getincrementaldecoder("utf-8")


class RemoteCommands:
    def __init__(self, server: Server, sandbox: str):
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
            check_size(pty)
        asked = requests.StartProcess(
            **_how(command, user, env, cwd, timeout_seconds),
            stdin=stdin,
            terminal=None if pty is None else requests.Terminal(rows=pty[0], columns=pty[1]),
            attached=not background,
        )
        socket = await self._server.connect(f"{self._path}/process", {"raw": pty is not None})
        try:
            await socket.send(asked)
            return RemoteProcess(self._server, self._path, socket, await socket.expect(responses.Attached), asked)
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
        asked = requests.RunCommand(**_how(command, user, env, cwd, timeout_seconds), stdin_base64=content)
        done: ProcessResult = await self._server.ask("POST", f"{self._path}/commands", ProcessResult, body=asked)
        return done

    async def list(self) -> builtins.list[ProcessInfo]:
        found: list[ProcessInfo] = await self._server.ask("GET", f"{self._path}/processes", list[ProcessInfo])
        return found

    async def kill(self, id: str) -> None:
        await self._server.ask("DELETE", f"{self._path}/processes/{quote(id, safe='')}")


class RemoteProcess:
    """What it writes is read at once: the server bounds how much that can be. A terminal has no such bound.

    There, the server is not listened to while much waits here for whoever reads it.
    """

    def __init__(
        self, server: Server, path: str, socket: Socket, attached: responses.Attached, asked: requests.StartProcess
    ):
        self.id = attached.id
        self.pid = attached.pid
        self.exited: Exited | None = None
        self._server = server
        self._path = f"{path}/processes/{quote(attached.id, safe='')}"
        self._socket = socket
        self._asked = asked
        self._lost: errors.ClocheError | None = None
        self._texts: dict[str, list[str]] | None = None
        self._decode = _decoder("replace").decode
        self._room = asyncio.Event()
        self._room.set()
        pause = self._room.clear if asked.terminal is not None else _nothing
        self._events: EventQueue[ProcessEvent] = EventQueue(pause, self._room.set)
        self._tasks: set[asyncio.Task[None]] = set()
        self._do(self._read())

    async def __aenter__(self) -> RemoteProcess:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._asked.attached and self.exited is None:
            self._events.divert(_forget)
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
            self._events.divert(partial(_collect, self._texts))
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
        """Not over the WebSocket, where it would wait behind what was typed and nobody reads."""
        if self.exited is None:
            self._do(self._signal(int(number)))

    def close_stdin(self) -> None:
        self._send(requests.CloseStdin())

    def resize(self, rows: int, columns: int) -> None:
        if self._asked.terminal is None or self.exited is not None:
            raise errors.InvalidRequest(f"process {self.id} has no terminal")
        check_size((rows, columns))
        self._send(requests.Resize(rows=rows, columns=columns))

    async def send_stdin(self, data: bytes) -> None:
        """What is typed is sent and forgotten; what is piped is awaited, so that the caller learns of its end."""
        if self._asked.terminal is not None:
            for at in range(0, len(data), _TYPED_BYTES):
                await self._socket.send(data[at : at + _TYPED_BYTES])
            return
        try:
            await self._server.ask("PUT", f"{self._path}/stdin", content=data)
        except errors.ProcessNotFound:
            raise errors.InvalidRequest(f"process {self.id} does not read its stdin any more") from None

    async def _read(self) -> None:
        try:
            while (event := await self._socket.receive()) is not None:
                self._take(event)
                await self._room.wait()
        except errors.ClocheError as error:
            self._lost = error
        finally:
            self._events.close()
            await self._socket.close()

    def _take(self, event: Any) -> None:
        if isinstance(event, bytes) and self._asked.terminal is not None:
            event = Output(stream="stdout", text=self._decode(event))
        if isinstance(event, Exited):
            self.exited = event
        elif not isinstance(event, ProcessEvent):
            raise responses.not_ours(f"{type(event).__name__} of a process")
        self._events.put(event, len(event.text) if isinstance(event, Output) else 0)

    async def _signal(self, number: int) -> None:
        with contextlib.suppress(errors.ClocheError):  # it has ended; or whoever waits for its end hears of it
            await self._server.ask("POST", f"{self._path}/signal", body=requests.Signal(signal=number))

    def _send(self, message: object) -> None:
        if self.exited is None:
            self._do(self._quietly(message))

    async def _quietly(self, message: object) -> None:
        try:
            await self._socket.send(message)
        except errors.Unavailable:
            pass  # whoever waits for its end hears of it

    def _do(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _how(
    command: str | Sequence[str],
    user: User | None,
    env: dict[str, str] | None,
    cwd: str | None,
    timeout_seconds: float | None,
) -> dict[str, Any]:
    """Refuses here what the engine would refuse, in its words."""
    check_seconds("timeout", timeout_seconds)
    check_user(user)
    words = [command] if isinstance(command, str) else list(command)
    check_words(words)
    return {
        "command": command if isinstance(command, str) else words,
        "user": user,
        "env": env or {},
        "cwd": cwd,
        "timeout_seconds": timeout_seconds,
    }


def _collect(texts: dict[str, list[str]], event: ProcessEvent) -> None:
    if isinstance(event, Output):
        texts[event.stream].append(event.text)


def _forget(event: ProcessEvent) -> None:
    """Nobody reads any more."""


def _nothing() -> None:
    """The server bounds what a process's output can be in all."""
