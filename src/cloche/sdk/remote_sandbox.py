"""A sandbox on a server, behind the interface of `cloche.sdk.backend`."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from types import TracebackType
from typing import Any, cast
from urllib.parse import quote

import msgspec

from cloche import errors
from cloche.events import Ended, NumberedEvent, Run, RunInfo, Signal
from cloche.file_content import Content, encode_chunk, encode_chunks
from cloche.model import (
    MAX_WAITING_CHANGES,
    FileChange,
    FileInfo,
    SandboxInfo,
    SandboxSpec,
    SnapshotInfo,
    User,
    VolumeInfo,
    check_mode,
    check_seconds,
    check_user,
    sandbox_path,
)
from cloche.network_policy import NetworkPolicy
from cloche.notebook import History
from cloche.protocol import requests, responses
from cloche.sdk import backend
from cloche.sdk.backend import NetworkLog
from cloche.sdk.remote_execution import RemoteCommands, RemoteContext, fetch_history
from cloche.sdk.remote_server import ServerClient, decode_events

# The files of a sandbox on a server.


class RemoteFiles:
    def __init__(self, server: ServerClient, sandbox: str):
        self._server = server
        self._path = f"/sandboxes/{quote(sandbox)}/files"

    async def read(self, path: str, *, user: User | None = None) -> bytes:
        query = {**_path_query(path, user), "whole": True}
        content: bytes = await self._server.ask("GET", f"{self._path}/content", query=query)
        return content

    async def open_read(self, path: str, *, user: User | None = None) -> AsyncGenerator[bytes, None]:
        opening = contextlib.AsyncExitStack()
        streaming = self._server.open_stream(f"{self._path}/content", _path_query(path, user))
        chunks = await opening.enter_async_context(streaming)

        async def read() -> AsyncGenerator[bytes, None]:
            async with opening:
                async for chunk in chunks:
                    yield chunk

        return read()

    async def write(
        self, path: str, content: Content, *, user: User | None = None, mode: int | None = None
    ) -> FileInfo:
        check_mode(mode)
        query = {**_path_query(path, user), "mode": None if mode is None else f"{mode:o}"}
        info: FileInfo = await self._server.ask(
            "PUT", f"{self._path}/content", FileInfo, query=query, content=_body_content(content)
        )
        return info

    async def list(self, path: str = ".", *, depth: int = 1, user: User | None = None) -> builtins.list[FileInfo]:
        if type(depth) is not int or depth < 1:
            raise errors.InvalidRequest(f"depth must be 1 or more, not {depth!r}")
        found: list[FileInfo] = await self._server.ask(
            "GET", f"{self._path}/list", list[FileInfo], query={**_path_query(path, user), "depth": depth}
        )
        return found

    async def stat(self, path: str, *, user: User | None = None) -> FileInfo:
        info: FileInfo = await self._server.ask("GET", f"{self._path}/stat", FileInfo, query=_path_query(path, user))
        return info

    async def exists(self, path: str, *, user: User | None = None) -> bool:
        found: responses.ExistsResponse = await self._server.ask(
            "GET", f"{self._path}/exists", responses.ExistsResponse, query=_path_query(path, user)
        )
        return found.exists

    async def make_dir(self, path: str, *, user: User | None = None) -> bool:
        body = requests.FilePathRequest(**_path_query(path, user))
        made: responses.CreatedResponse = await self._server.ask(
            "POST", f"{self._path}/make_dir", responses.CreatedResponse, body=body
        )
        return made.created

    async def move(self, path: str, to: str, *, user: User | None = None) -> FileInfo:
        sandbox_path(to, "/")
        body = requests.MovePathRequest(**_path_query(path, user), to=to)
        info: FileInfo = await self._server.ask("POST", f"{self._path}/move", FileInfo, body=body)
        return info

    async def remove(self, path: str, *, user: User | None = None) -> None:
        await self._server.ask("POST", f"{self._path}/remove", body=requests.FilePathRequest(**_path_query(path, user)))

    def watch(self, path: str, *, recursive: bool = False, user: User | None = None) -> RemoteWatch:
        return RemoteWatch(self._server, f"{self._path}/watch", {**_path_query(path, user), "recursive": recursive})


class RemoteWatch:
    """As `cloche.engine.sandboxes.files.DirectoryWatch`."""

    def __init__(self, server: ServerClient, path: str, query: dict[str, Any]):
        self.missed = 0
        self._server = server
        self._target = (path, query)
        self._changes: deque[FileChange] = deque()
        self._bell = Signal()
        self._begun = False
        self._error: errors.ClocheError | None = None
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RemoteWatch:
        """Returns when changes are seen. Raises the server's error."""
        self._reading = asyncio.create_task(self._read_changes())
        try:
            while not self._begun and not self._reading.done():
                await self._bell.wait()
        except BaseException:
            self.close()
            raise
        if self._error is not None:
            raise self._error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> RemoteWatch:
        return self

    async def __anext__(self) -> FileChange:
        while not self._changes:
            if self._error is not None:
                raise self._error
            if self._reading is None or self._reading.done():
                raise StopAsyncIteration
            await self._bell.wait()
        return self._changes.popleft()

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        self._bell.wake_all()

    def _add_change(self, change: FileChange) -> None:
        if len(self._changes) < MAX_WAITING_CHANGES:
            self._changes.append(change)
        else:
            self.missed += 1

    async def _read_changes(self) -> None:
        try:
            async with self._server.open_stream(*self._target) as chunks:
                async for event in decode_events(chunks):
                    self._begun = True
                    if isinstance(event, responses.ChangeMessage):
                        self._add_change(FileChange(kind=cast(Any, event.kind), path=event.path))
                    self._bell.wake_all()
            raise self._server.lost()
        except errors.ClocheError as error:
            self._error = error
        finally:
            asyncio.get_running_loop().call_soon(self._bell.wake_all)  # once this task is done


def _path_query(path: str, user: User | None) -> dict[str, Any]:
    """The query of a path. Raises the engine's own errors before anything is sent."""
    sandbox_path(path, "/")
    check_user(user)
    return {"path": path, "user": user}


def _body_content(content: Content) -> bytes | AsyncIterable[bytes]:
    if isinstance(content, (Iterable, AsyncIterable)) and not isinstance(content, (str, bytes, bytearray, memoryview)):
        return encode_chunks(content)
    return encode_chunk(content)


# The network of a sandbox on a server.


class RemoteNetwork:
    def __init__(self, server: ServerClient, id: str):
        self._server = server
        self._path = f"/sandboxes/{quote(id, safe='')}/network"

    async def policy(self) -> NetworkPolicy:
        return _policy_from_info(await self._server.ask("GET", self._path, responses.NetworkInfo))

    async def log(self) -> NetworkLog:
        logged: responses.NetworkLogResponse = await self._server.ask(
            "GET", f"{self._path}/log", responses.NetworkLogResponse
        )
        return NetworkLog(logged.entries, logged.dropped)

    async def set(self, policy: NetworkPolicy, *, keep_secrets: bool) -> NetworkPolicy:
        message = requests.policy_to_request(policy)
        body = requests.SetNetworkRequest(
            allow=message.allow,
            deny=message.deny,
            rules=message.rules,
            secrets=None if keep_secrets else requests.secrets_to_requests(policy),
        )
        return _policy_from_info(await self._server.ask("PUT", self._path, responses.NetworkInfo, body=body))


def _policy_from_info(info: responses.NetworkInfo) -> NetworkPolicy:
    try:
        return requests.info_to_policy(info)
    except errors.InvalidRequest as error:
        raise responses.unexpected_answer_error(error) from None


DEFAULT_CONTEXT_INFO = responses.ContextInfo(id="default", language="python", cwd="/mnt/data")


async def create_sandbox(server: ServerClient, spec: SandboxSpec) -> RemoteSandbox:
    """Raises as `Engine.create` does."""
    limits = None if spec.limits is None else requests.LimitsRequest(**msgspec.structs.asdict(spec.limits))
    message = requests.CreateSandbox(
        template=spec.template,
        env=spec.env,
        metadata=spec.metadata,
        limits=limits,
        timeout_seconds=spec.lifetime_seconds,
        network=None if spec.network is None else requests.policy_to_request(spec.network),
        secrets=[] if spec.network is None else requests.secrets_to_requests(spec.network),
        on_timeout=spec.on_deadline,
        pause_memory=spec.pause_memory,
        auto_resume=spec.auto_resume,
        volumes=spec.volumes,
    )
    return await create_requested(server, message)


async def create_requested(server: ServerClient, message: requests.CreateSandbox) -> RemoteSandbox:
    """Raises as `Engine.create` does."""
    return RemoteSandbox(server, await server.ask("POST", "/sandboxes", SandboxInfo, body=message))


async def connect_sandbox(server: ServerClient, id: str, timeout_seconds: float | None = None) -> RemoteSandbox:
    """Resumes it, where it is paused. Raises SandboxNotFound, SandboxExpired, SandboxKilled or SandboxLost."""
    if not isinstance(id, str) or not id or "/" in id:
        raise errors.SandboxNotFound(f"there is no sandbox {id!r}")
    check_seconds("timeout", timeout_seconds)
    body = requests.ResumeRequest(timeout_seconds=timeout_seconds)
    return RemoteSandbox(server, await server.ask("POST", f"{_sandbox_path(id)}/resume", SandboxInfo, body=body))


class RemoteSandbox:
    def __init__(self, server: ServerClient, info: SandboxInfo):
        self._server = server
        self._path = _sandbox_path(info.id)
        self.id = info.id
        self.limits = info.limits
        self.ended = False
        self.files: backend.BackendFiles = RemoteFiles(server, info.id)
        self.commands: backend.BackendCommands = RemoteCommands(server, info.id)
        self.network: backend.BackendNetwork = RemoteNetwork(server, info.id)

    def check_running(self) -> None:
        """Does nothing: the server reports by itself that a sandbox has ended, and why."""

    async def describe(self) -> SandboxInfo:
        info: SandboxInfo = await self._server.ask("GET", self._path, SandboxInfo)
        return info

    async def renew(self, seconds: float) -> SandboxInfo:
        check_seconds("lifetime", seconds)
        if seconds is None:
            raise errors.InvalidRequest("renew needs a number of seconds")
        body = requests.RenewRequest(seconds=seconds)
        info: SandboxInfo = await self._server.ask("POST", f"{self._path}/renew", SandboxInfo, body=body)
        return info

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """While it lasts the sandbox lives; then it ends, also where this process is killed."""
        async with self._server.open_stream(f"{self._path}/hold", {}) as told_:
            await anext(told_)
            yield

    async def kill(self) -> None:
        try:
            await self._server.ask("DELETE", self._path)
        except errors.Gone:
            pass
        self.ended = True

    async def pause(self, *, memory: bool = True) -> SandboxInfo:
        body = requests.PauseRequest(memory=memory)
        info: SandboxInfo = await self._server.ask("POST", f"{self._path}/pause", SandboxInfo, body=body)
        return info

    async def resume(self, timeout_seconds: float | None = None) -> SandboxInfo:
        body = requests.ResumeRequest(timeout_seconds=timeout_seconds)
        info: SandboxInfo = await self._server.ask("POST", f"{self._path}/resume", SandboxInfo, body=body)
        return info

    async def snapshot(self, name: str | None = None) -> SnapshotInfo:
        body = requests.MakeSnapshotRequest(name=name)
        info: SnapshotInfo = await self._server.ask("POST", f"{self._path}/snapshots", SnapshotInfo, body=body)
        return info

    async def fork(self, count: int = 1, timeout_seconds: float | None = None) -> list[RemoteSandbox]:
        body = requests.ForkSandboxRequest(count=count, timeout_seconds=timeout_seconds)
        made = await self._server.ask("POST", f"{self._path}/fork", list[SandboxInfo], body=body)
        return [RemoteSandbox(self._server, each) for each in made]

    async def history(self) -> History:
        return await fetch_history(self._server, self.id)

    def context(self, id: str | None = None) -> RemoteContext:
        info = msgspec.structs.replace(DEFAULT_CONTEXT_INFO, id=id or DEFAULT_CONTEXT_INFO.id)
        return RemoteContext(self._server, self.id, info)

    async def find_context(self, id: str) -> RemoteContext:
        info = await self._server.ask("GET", f"{self._path}/contexts/{quote(id, safe='')}", responses.ContextInfo)
        return RemoteContext(self._server, self.id, info)

    async def list_contexts(self) -> list[backend.BackendContext]:
        found = await self._server.ask("GET", f"{self._path}/contexts", list[responses.ContextInfo])
        return [RemoteContext(self._server, self.id, each) for each in found]

    async def create_context(self, *, language: str = "python", cwd: str | None = None) -> RemoteContext:
        body = requests.CreateContextRequest(language=language, cwd=cwd)
        info = await self._server.ask("POST", f"{self._path}/contexts", responses.ContextInfo, body=body)
        return RemoteContext(self._server, self.id, info)

    async def remove_context(self, id: str) -> None:
        await self._server.ask("DELETE", f"{self._path}/contexts/{quote(id, safe='')}")


def _sandbox_path(id: str) -> str:
    return f"/sandboxes/{quote(id, safe='')}"


# Detached runs on a server.

_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class RemoteRuns:
    def __init__(self, server: ServerClient):
        self._server = server

    async def info(self, id: str) -> RunInfo:
        info: RunInfo = await self._server.ask("GET", _run_path(id), RunInfo)
        return info

    async def list(self, sandbox: str) -> builtins.list[RunInfo]:
        path = f"/sandboxes/{quote(sandbox, safe='')}/runs"
        found: builtins.list[RunInfo] = await self._server.ask("GET", path, builtins.list[RunInfo])
        return found

    async def attach(self, id: str, after: int) -> AsyncGenerator[builtins.list[NumberedEvent], None]:
        """Raises when there is nothing to be attached to, not only when it is used."""
        followed = self._follow_events(id, after)
        await anext(followed)
        return followed

    async def _follow_events(self, id: str, after: int) -> AsyncGenerator[builtins.list[NumberedEvent], None]:
        events, last = responses.EventStreamParser(), None
        async with self._server.open_stream(f"{_run_path(id)}/events", {"after": after}) as chunks:
            yield []  # the answer has begun
            async for chunk in chunks:
                if batch := list(events.feed_numbered(chunk)):
                    last = batch[-1].event
                    yield batch
        if last is not None and not isinstance(last, Ended):
            raise self._server.lost()

    async def result(self, id: str) -> Run:
        return responses.decode_run(await self._server.ask("GET", f"{_run_path(id)}/result"))

    async def interrupt(self, id: str) -> bool:
        answer: responses.InterruptedResponse = await self._server.ask(
            "POST", f"{_run_path(id)}/interrupt", responses.InterruptedResponse
        )
        return answer.interrupted

    async def remove(self, id: str) -> None:
        await self._server.ask("DELETE", _run_path(id))


def _run_path(id: str) -> str:
    """The route of a run. Raises RunNotFound for an invalid id, which could lead to another path."""
    if not isinstance(id, str) or not _RUN_ID.fullmatch(id):
        raise errors.RunNotFound(f"there is no run {str(id)[:100]!r}")
    return f"/runs/{id}"


# The snapshots that a server has for the library.


class RemoteSnapshots:
    def __init__(self, server: ServerClient):
        self._server = server

    async def list(self, sandbox: str | None = None) -> builtins.list[SnapshotInfo]:
        found: builtins.list[SnapshotInfo] = await self._server.ask(
            "GET", "/snapshots", builtins.list[SnapshotInfo], query={"sandbox": sandbox}
        )
        return found

    async def get(self, ref: str) -> SnapshotInfo:
        found: SnapshotInfo = await self._server.ask("GET", _snapshot_path(ref), SnapshotInfo)
        return found

    async def remove(self, ref: str) -> None:
        await self._server.ask("DELETE", _snapshot_path(ref))


def _snapshot_path(ref: str) -> str:
    return f"/snapshots/{quote(ref, safe='')}"


# The volumes that a server has for the library.


class RemoteVolumes:
    def __init__(self, server: ServerClient):
        self._server = server

    async def create(self, name: str) -> VolumeInfo:
        made: VolumeInfo = await self._server.ask(
            "POST", "/volumes", VolumeInfo, body=requests.MakeVolumeRequest(name=name)
        )
        return made

    async def list(self) -> builtins.list[VolumeInfo]:
        found: builtins.list[VolumeInfo] = await self._server.ask("GET", "/volumes", builtins.list[VolumeInfo])
        return found

    async def get(self, ref: str) -> VolumeInfo:
        found: VolumeInfo = await self._server.ask("GET", _volume_path(ref), VolumeInfo)
        return found

    async def remove(self, ref: str) -> None:
        await self._server.ask("DELETE", _volume_path(ref))


def _volume_path(ref: str) -> str:
    return f"/volumes/{quote(ref, safe='')}"
