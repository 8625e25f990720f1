"""envd's service `filesystem.Filesystem`."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.e2b import envd_schema as wire
from cloche.api.e2b.connect import (
    ConnectMessage,
    ConnectRpcError,
    Reply,
    server_stream_handler,
    service_routes,
    unary_handler,
)
from cloche.api.e2b.context import e2b_sandbox_of
from cloche.api.http import Dialect
from cloche.engine.sandboxes.files import DirectoryWatch, TooManyWatches
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import FileChange, User, new_id
from cloche.tasks import TaskSet

MAX_DEPTH = 4096  # no path has more parts
KEEPALIVE: Reply = {"keepalive": {}}

_EVENTS = {
    "created": "EVENT_TYPE_CREATE",
    "written": "EVENT_TYPE_WRITE",
    "removed": "EVENT_TYPE_REMOVE",
    "renamed": "EVENT_TYPE_RENAME",
    "attributes": "EVENT_TYPE_CHMOD",
}


class EnvdPathRequest(ConnectMessage):
    path: str = ""


class EnvdListDirRequest(ConnectMessage):
    path: str = ""
    depth: int = 0


class EnvdMoveRequest(ConnectMessage):
    source: str = ""
    destination: str = ""


class EnvdWatchRequest(ConnectMessage):
    path: str = ""
    recursive: bool = False
    include_entry: bool = False


class EnvdWatcherRequest(ConnectMessage):
    watcher_id: str = ""


def filesystem_routes(dialect: Dialect) -> list[BaseRoute]:
    files = FilesystemService()
    return service_routes(
        "filesystem.Filesystem",
        dialect,
        {
            "Stat": unary_handler(EnvdPathRequest, files.stat),
            "MakeDir": unary_handler(EnvdPathRequest, files.make_dir),
            "Move": unary_handler(EnvdMoveRequest, files.move),
            "ListDir": unary_handler(EnvdListDirRequest, files.list_dir),
            "Remove": unary_handler(EnvdPathRequest, files.remove),
            "WatchDir": server_stream_handler(EnvdWatchRequest, files.watch_dir, keepalive=KEEPALIVE),
            "CreateWatcher": unary_handler(EnvdWatchRequest, files.create_watcher),
            "GetWatcherEvents": unary_handler(EnvdWatcherRequest, files.get_watcher_events),
            "RemoveWatcher": unary_handler(EnvdWatcherRequest, files.remove_watcher),
        },
    )


class FilesystemService:
    def __init__(self) -> None:
        self._watchers: dict[Sandbox, dict[str, DirectoryWatcher]] = {}  # those that clients poll for events
        self._until_end = TaskSet()

    async def stat(self, request: Request, message: EnvdPathRequest) -> Reply:
        user = wire.calling_user(request)
        path = wire.resolve_user_path(message.path, user)
        try:
            info = await e2b_sandbox_of(request).sandbox.files.stat(path, user=wire.file_access_user(user))
        except (errors.FileNotFound, errors.NotADirectory):
            raise errors.FileNotFound(f"path '{path}' does not exist") from None
        return {"entry": wire.encode_entry_info(info)}

    async def make_dir(self, request: Request, message: EnvdPathRequest) -> Reply:
        user, files = wire.calling_user(request), e2b_sandbox_of(request).sandbox.files
        path = wire.resolve_user_path(message.path, user)
        try:
            made = await files.make_dir(path, user=wire.file_access_user(user), owner=user)
        except (errors.FileExists, errors.NotADirectory):
            raise errors.InvalidRequest(f"path '{path}' cannot be a directory: a file is in the way") from None
        if not made:
            raise errors.FileExists(f"directory '{path}' already exists")
        return {"entry": wire.encode_entry_info(await files.stat(path, user=wire.file_access_user(user)))}

    async def move(self, request: Request, message: EnvdMoveRequest) -> Reply:
        user = wire.calling_user(request)
        source, destination = (
            wire.resolve_user_path(message.source, user),
            wire.resolve_user_path(message.destination, user),
        )
        info = await e2b_sandbox_of(request).sandbox.files.move(
            source, destination, user=wire.file_access_user(user), owner=user
        )
        return {"entry": wire.encode_entry_info(info)}

    async def list_dir(self, request: Request, message: EnvdListDirRequest) -> Reply:
        user = wire.calling_user(request)
        if message.depth < 0:
            raise errors.InvalidRequest("depth should be at least 1")
        depth = min(message.depth or 1, MAX_DEPTH)
        listed = await e2b_sandbox_of(request).sandbox.files.list(
            wire.resolve_user_path(message.path, user), depth=depth, user=wire.file_access_user(user)
        )
        return {"entries": [wire.encode_entry_info(info) for info in listed]}

    async def remove(self, request: Request, message: EnvdPathRequest) -> Reply:
        """Removes a path. A missing path is not an error."""
        user = wire.calling_user(request)
        try:
            await e2b_sandbox_of(request).sandbox.files.remove(
                wire.resolve_user_path(message.path, user), user=wire.file_access_user(user)
            )
        except errors.FileNotFound:
            pass
        return {}

    # -- watching

    async def watch_dir(self, request: Request, message: EnvdWatchRequest) -> AsyncGenerator[Reply, None]:
        return _stream_watch_replies(
            DirectoryWatcher(e2b_sandbox_of(request).sandbox, wire.calling_user(request), message)
        )

    async def create_watcher(self, request: Request, message: EnvdWatchRequest) -> Reply:
        sandbox = e2b_sandbox_of(request).sandbox
        watcher = DirectoryWatcher(sandbox, wire.calling_user(request), message)
        await watcher.start()
        sandbox.check_running()  # else nothing would remove the watcher
        id = new_id("w")
        self._watchers_of_sandbox(sandbox)[id] = watcher
        return {"watcherId": id}

    async def get_watcher_events(self, request: Request, message: EnvdWatcherRequest) -> Reply:
        watcher = self._find_watcher(request, message)
        watch = watcher.watch
        await watch.catch_up()
        if watch.missed:
            watch.missed = 0  # what was kept comes with the next call
            raise _missed_changes_error()
        return {"events": [await watcher.event(change) for change in watch.take()]}

    async def remove_watcher(self, request: Request, message: EnvdWatcherRequest) -> Reply:
        self._find_watcher(request, message).watch.close()
        del self._watchers_of_sandbox(e2b_sandbox_of(request).sandbox)[message.watcher_id]
        return {}

    def _find_watcher(self, request: Request, message: EnvdWatcherRequest) -> DirectoryWatcher:
        """Raises NotFound also for a watcher of another sandbox."""
        watcher = self._watchers.get(e2b_sandbox_of(request).sandbox, {}).get(message.watcher_id)
        if watcher is None:
            raise errors.NotFound(f"watcher with id {message.watcher_id!r} not found")
        return watcher

    def _watchers_of_sandbox(self, sandbox: Sandbox) -> dict[str, DirectoryWatcher]:
        if sandbox not in self._watchers:
            self._watchers[sandbox] = {}
            self._until_end.start(self._remove_watchers_at_end(sandbox))
        return self._watchers[sandbox]

    async def _remove_watchers_at_end(self, sandbox: Sandbox) -> None:
        await sandbox.wait_ended()
        del self._watchers[sandbox]


class DirectoryWatcher:
    """A watched directory, and the encoding of its changes."""

    def __init__(self, sandbox: Sandbox, user: User, request: EnvdWatchRequest):
        self.sandbox = sandbox
        self._user = wire.file_access_user(user)
        self._path = wire.resolve_user_path(request.path, user)
        self._with_entry = request.include_entry
        self.watch: DirectoryWatch = sandbox.files.watch(self._path, recursive=request.recursive, user=self._user)

    async def start(self) -> DirectoryWatch:
        """Raises ConnectRpcError if the sandbox has too many watches, and every other error of the engine."""
        try:
            return await self.watch.__aenter__()
        except TooManyWatches as error:
            raise ConnectRpcError("resource_exhausted", str(error)) from None

    async def event(self, change: FileChange) -> dict[str, Any]:
        """FilesystemEvent, with the entry's current state if requested."""
        told: dict[str, Any] = {
            "name": posixpath.relpath(change.path, self._path),
            "type": _EVENTS[change.kind],
        }
        if self._with_entry and change.kind not in ("removed", "renamed"):
            try:
                told["entry"] = wire.encode_entry_info(await self.sandbox.files.stat(change.path, user=self._user))
            except (errors.FileNotFound, errors.FileError):
                pass  # gone by now
        return told


async def _stream_watch_replies(watcher: DirectoryWatcher) -> AsyncGenerator[Reply, None]:
    changes = await watcher.start()
    with contextlib.closing(changes):
        yield {"start": {}}
        while await changes.news():
            if changes.missed:
                raise _missed_changes_error()
            yield {"filesystem": await watcher.event(await anext(changes))}


def _missed_changes_error() -> ConnectRpcError:
    return ConnectRpcError("data_loss", "more has changed than could be told in time: ask more often, or watch less")
