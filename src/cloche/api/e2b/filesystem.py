"""envd's service `filesystem.Filesystem`."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.e2b import envd_schema as wire
from cloche.api.e2b.connect import Message, Refusal, Reply, server_stream, service, unary
from cloche.api.http import Dialect
from cloche.engine.sandboxes.files import TooManyWatches, Watch
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import FileChange, User, new_id

MAX_DEPTH = 4096  # no path has more parts
KEEPALIVE: Reply = {"keepalive": {}}

_EVENTS = {
    "created": "EVENT_TYPE_CREATE",
    "written": "EVENT_TYPE_WRITE",
    "removed": "EVENT_TYPE_REMOVE",
    "renamed": "EVENT_TYPE_RENAME",
    "attributes": "EVENT_TYPE_CHMOD",
}


class PathRequest(Message):
    path: str = ""


class ListDirRequest(Message):
    path: str = ""
    depth: int = 0


class MoveRequest(Message):
    source: str = ""
    destination: str = ""


class WatchRequest(Message):
    path: str = ""
    recursive: bool = False
    include_entry: bool = False


class WatcherRequest(Message):
    watcher_id: str = ""


def routes(dialect: Dialect) -> list[BaseRoute]:
    files = Filesystem()
    return service(
        "filesystem.Filesystem",
        dialect,
        {
            "Stat": unary(PathRequest, files.stat),
            "MakeDir": unary(PathRequest, files.make_dir),
            "Move": unary(MoveRequest, files.move),
            "ListDir": unary(ListDirRequest, files.list_dir),
            "Remove": unary(PathRequest, files.remove),
            "WatchDir": server_stream(WatchRequest, files.watch_dir, keepalive=KEEPALIVE),
            "CreateWatcher": unary(WatchRequest, files.create_watcher),
            "GetWatcherEvents": unary(WatcherRequest, files.get_watcher_events),
            "RemoveWatcher": unary(WatcherRequest, files.remove_watcher),
        },
    )


class Filesystem:
    def __init__(self) -> None:
        self._watchers: dict[Sandbox, dict[str, Watcher]] = {}  # those that are asked for their events
        self._until_end: set[asyncio.Task[None]] = set()

    async def stat(self, request: Request, asked: PathRequest) -> Reply:
        user = wire.caller(request)
        path = wire.absolute(asked.path, user)
        try:
            info = await _sandbox(request).files.stat(path, user=wire.rights(user))
        except (errors.FileNotFound, errors.NotADirectory):
            raise errors.FileNotFound(f"path '{path}' does not exist") from None
        return {"entry": wire.entry(info)}

    async def make_dir(self, request: Request, asked: PathRequest) -> Reply:
        user, files = wire.caller(request), _sandbox(request).files
        path = wire.absolute(asked.path, user)
        try:
            made = await files.make_dir(path, user=wire.rights(user), owner=user)
        except (errors.FileExists, errors.NotADirectory):
            raise errors.InvalidRequest(f"path '{path}' cannot be a directory: a file is in the way") from None
        if not made:
            raise errors.FileExists(f"directory '{path}' already exists")
        return {"entry": wire.entry(await files.stat(path, user=wire.rights(user)))}

    async def move(self, request: Request, asked: MoveRequest) -> Reply:
        user = wire.caller(request)
        source, destination = wire.absolute(asked.source, user), wire.absolute(asked.destination, user)
        info = await _sandbox(request).files.move(source, destination, user=wire.rights(user), owner=user)
        return {"entry": wire.entry(info)}

    async def list_dir(self, request: Request, asked: ListDirRequest) -> Reply:
        user = wire.caller(request)
        if asked.depth < 0:
            raise errors.InvalidRequest("depth should be at least 1")
        depth = min(asked.depth or 1, MAX_DEPTH)
        listed = await _sandbox(request).files.list(
            wire.absolute(asked.path, user), depth=depth, user=wire.rights(user)
        )
        return {"entries": [wire.entry(info) for info in listed]}

    async def remove(self, request: Request, asked: PathRequest) -> Reply:
        """What is not there is as good as removed."""
        user = wire.caller(request)
        try:
            await _sandbox(request).files.remove(wire.absolute(asked.path, user), user=wire.rights(user))
        except errors.FileNotFound:
            pass
        return {}

    # -- watching

    async def watch_dir(self, request: Request, asked: WatchRequest) -> AsyncGenerator[Reply, None]:
        return _told(Watcher(_sandbox(request), wire.caller(request), asked))

    async def create_watcher(self, request: Request, asked: WatchRequest) -> Reply:
        sandbox = _sandbox(request)
        watcher = Watcher(sandbox, wire.caller(request), asked)
        await watcher.start()
        sandbox.check_running()  # else nobody would forget it
        id = new_id("w")
        self._of(sandbox)[id] = watcher
        return {"watcherId": id}

    async def get_watcher_events(self, request: Request, asked: WatcherRequest) -> Reply:
        watcher = self._watcher(request, asked)
        watch = watcher.watch
        await watch.catch_up()
        if watch.missed:
            watch.missed = 0  # what was kept comes with the next call
            raise _missed()
        return {"events": [await watcher.event(change) for change in watch.take()]}

    async def remove_watcher(self, request: Request, asked: WatcherRequest) -> Reply:
        self._watcher(request, asked).watch.close()
        del self._of(_sandbox(request))[asked.watcher_id]
        return {}

    def _watcher(self, request: Request, asked: WatcherRequest) -> Watcher:
        """Raises NotFound also for one of another sandbox."""
        watcher = self._watchers.get(_sandbox(request), {}).get(asked.watcher_id)
        if watcher is None:
            raise errors.NotFound(f"watcher with id {asked.watcher_id!r} not found")
        return watcher

    def _of(self, sandbox: Sandbox) -> dict[str, Watcher]:
        if sandbox not in self._watchers:
            self._watchers[sandbox] = {}
            until_end = asyncio.create_task(self._forget_at_end(sandbox))
            self._until_end.add(until_end)
            until_end.add_done_callback(self._until_end.discard)
        return self._watchers[sandbox]

    async def _forget_at_end(self, sandbox: Sandbox) -> None:
        await sandbox.wait_ended()
        del self._watchers[sandbox]


class Watcher:
    """A watched directory, and how its changes are told."""

    def __init__(self, sandbox: Sandbox, user: User, asked: WatchRequest):
        self.sandbox = sandbox
        self._user = wire.rights(user)
        self._path = wire.absolute(asked.path, user)
        self._with_entry = asked.include_entry
        self.watch: Watch = sandbox.files.watch(self._path, recursive=asked.recursive, user=self._user)

    async def start(self) -> Watch:
        """Raises Refusal where the sandbox has too many, and what else the engine says."""
        try:
            return await self.watch.__aenter__()
        except TooManyWatches as error:
            raise Refusal("resource_exhausted", str(error)) from None

    async def event(self, change: FileChange) -> dict[str, Any]:
        """FilesystemEvent, with what is there now where that is asked for."""
        told: dict[str, Any] = {
            "name": posixpath.relpath(change.path, self._path),
            "type": _EVENTS[change.kind],
        }
        if self._with_entry and change.kind not in ("removed", "renamed"):
            try:
                told["entry"] = wire.entry(await self.sandbox.files.stat(change.path, user=self._user))
            except (errors.FileNotFound, errors.FileError):
                pass  # gone by now
        return told


async def _told(watcher: Watcher) -> AsyncGenerator[Reply, None]:
    changes = await watcher.start()
    with contextlib.closing(changes):
        yield {"start": {}}
        while await changes.news():
            if changes.missed:
                raise _missed()
            yield {"filesystem": await watcher.event(await anext(changes))}


def _sandbox(request: Request) -> Sandbox:
    sandbox: Sandbox = request.scope["state"]["resident"].sandbox
    return sandbox


def _missed() -> Refusal:
    return Refusal("data_loss", "more has changed than could be told in time: ask more often, or watch less")
