"""The official package's server, with our tools in it. This module imports `mcp`: import it only where it is used."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from typing import Any, TypeVar

import mcp_types as types
from mcp.server.caching import CacheableMethod, CacheHint
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    ResourcesListChanged,
    ResourceUpdated,
)
from mcp.shared.exceptions import MCPError
from mcp_types.version import is_version_at_least

from cloche import errors
from cloche.mcp import tools
from cloche.mcp.call import MOST_BYTES
from cloche.mcp.content import contents, mime_of, resource, sayable
from cloche.mcp.tools_files import decoded
from cloche.mcp.uris import TEMPLATE, path_of, uri_of
from cloche.mcp.workspace import Workspace
from cloche.model import FileInfo
from cloche.sdk import backend

# Two beginnings of a conversation that clients offer to people.

LISTED: list[dict[str, Any]] = [
    {
        "name": "analyse_file",
        "title": "Analyse a file",
        "description": "Look at a data file in the sandbox, and say what is in it.",
        "arguments": [
            {"name": "path", "description": "Below /mnt/data, or absolute.", "required": True},
            {"name": "question", "description": "What you want to know.", "required": False},
        ],
    },
    {
        "name": "work_in_sandbox",
        "title": "Work in the sandbox",
        "description": "Solve a task by writing and running code in the sandbox.",
        "arguments": [{"name": "task", "description": "What is to be done.", "required": True}],
    },
]
WORDS = {
    "analyse_file": "Analyse the file {path} in the sandbox with run_code. Look at its kind and its first rows before "
    "anything else, check for missing and odd values, then draw what is worth seeing, and say what you found. "
    "{question}",
    "work_in_sandbox": "Solve this by writing and running code in the sandbox, in small steps whose results you check: "
    "{task}",
}


def filled(name: str, given: dict[str, str] | None) -> dict[str, Any]:
    """Raises InvalidRequest that says what is missing."""
    known = {each["name"]: each for each in LISTED}
    if name not in known:
        raise errors.InvalidRequest(f"there is no prompt {name[:100]!r}; there are: {', '.join(known)}")
    values = {each["name"]: (given or {}).get(each["name"], "") for each in known[name]["arguments"]}
    for each in known[name]["arguments"]:
        if each["required"] and not values[each["name"]]:
            raise errors.InvalidRequest(f"the prompt {name} needs {each['name']}: {each['description']}")
    words = WORDS[name].format(**values).strip()
    return {
        "description": known[name]["description"],
        "messages": [{"role": "user", "content": {"type": "text", "text": words}}],
    }


# The sandbox's files as resources: listed and read.

HOME = "/mnt/data"
DEPTH = 4
PAGE = 200
MOST = 5000
TEMPLATES = [
    {
        "uriTemplate": TEMPLATE,
        "name": "file",
        "title": "A file of the sandbox",
        "description": "By its absolute path: sandbox:///mnt/data/plot.png",
    }
]


async def listed(workspace: Workspace, cursor: str | None) -> dict[str, Any]:
    """A page of the files below /mnt/data; none where no sandbox is in use yet. Raises InvalidRequest."""
    start = _start(cursor)
    box = workspace.current
    if box is None:
        return {"resources": []}
    found = [each for each in await _files(box) if each.kind == "file"][:MOST]
    page = found[start : start + PAGE]
    more = {"nextCursor": str(start + PAGE)} if len(found) > start + PAGE else {}
    return {"resources": [_described(each) for each in page], **more}


async def _files(box: backend.Sandbox) -> list[FileInfo]:
    try:
        return await box.files.list(HOME, depth=DEPTH)
    except (errors.Gone, errors.NotFound, errors.FileError):
        return []


def _start(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 10):
        raise errors.InvalidRequest(f"{cursor[:100]!r} is no cursor of this list")
    return int(cursor)


def _described(info: FileInfo) -> dict[str, Any]:
    found: dict[str, Any] = {"uri": uri_of(info.path), "name": sayable(info.path.removeprefix(f"{HOME}/"))}
    mime = mime_of(info.path)
    return {**found, "size": info.size_bytes, **({"mimeType": mime} if mime else {})}


async def read(workspace: Workspace, uri: str) -> dict[str, Any]:
    """Raises FileNotFound, TooLarge and what reading does."""
    path = path_of(uri)
    if workspace.current is None:
        raise errors.FileNotFound("there are no files yet: this session has not used its sandbox")
    data = await contents(workspace.current.files, path)
    words = decoded(data)
    return {"contents": [resource(uri, mime_of(path), data if words is None else words)]}


T = TypeVar("T")
Context = ServerRequestContext[Workspace, Any]

LINKS_SINCE = "2025-06-18"
RESOURCE_NOT_FOUND = -32002
INSTRUCTIONS = (
    "A code interpreter: a sealed Linux sandbox of your own, made at the first call, which keeps variables and files "
    "until the session ends. run_code runs Python, JavaScript, TypeScript or bash; files live below /mnt/data. There "
    "is no network unless the operator allows it; install_packages installs packages where that is allowed, and "
    "`pip list` says what is there."
)


CACHE_HINTS: dict[CacheableMethod, CacheHint] = {
    "tools/list": CacheHint(ttl_ms=3_600_000),
    "prompts/list": CacheHint(ttl_ms=3_600_000),
    "resources/templates/list": CacheHint(ttl_ms=3_600_000),
    "resources/list": CacheHint(),
    "resources/read": CacheHint(),
}


class Heard:
    """How the client of a request hears of things, by the package's own ways."""

    most_bytes = MOST_BYTES

    def __init__(self, context: Context, bus: InMemorySubscriptionBus):
        self._context = context
        self._bus = bus
        self.wants_progress = bool(context.meta) and "progress_token" in (context.meta or {})
        self.knows_links = is_version_at_least(context.protocol_version, LINKS_SINCE)

    async def progress(self, count: int, message: str) -> None:
        await self._context.session.report_progress(count, None, message)

    async def resources_changed(self) -> None:
        await self._context.session.send_resource_list_changed()
        await self._bus.publish(ResourcesListChanged())


class Handlers:
    """What is answered to each method. The session's workspace is the context's `lifespan_context`."""

    def __init__(self) -> None:
        self._bus = InMemorySubscriptionBus()
        self._listening = ListenHandler(self._bus)
        self._described: dict[str, dict[str, Any]] = {}

    async def list_tools(self, context: Context, asked: types.PaginatedRequestParams | None) -> Any:
        if not self._described:
            self._described = {each.name: tools.described(each) for each in tools.TOOLS}
        allowed = context.lifespan_context.tools
        return _whole({"tools": [each for name, each in self._described.items() if name in allowed]})

    async def call_tool(self, context: Context, asked: types.CallToolRequestParams) -> Any:
        told = Heard(context, self._bus)
        calling = tools.call_tool(context.lifespan_context, told, asked.name, asked.arguments)
        return _whole((await said(unhurried(calling))).encode())

    async def list_resources(self, context: Context, asked: types.PaginatedRequestParams | None) -> Any:
        cursor = asked.cursor if asked is not None else None
        return _whole(await said(listed(context.lifespan_context, cursor)))

    async def list_templates(self, context: Context, asked: types.PaginatedRequestParams | None) -> Any:
        return _whole({"resourceTemplates": TEMPLATES})

    async def read_resource(self, context: Context, asked: types.ReadResourceRequestParams) -> Any:
        return _whole(await said(read(context.lifespan_context, str(asked.uri))))

    async def subscribe(self, context: Context, asked: types.SubscribeRequestParams) -> types.EmptyResult:
        workspace, session = context.lifespan_context, context.session
        await said(unhurried(workspace.watch(str(asked.uri), session.send_resource_updated)))
        return types.EmptyResult()

    async def unsubscribe(self, context: Context, asked: types.UnsubscribeRequestParams) -> types.EmptyResult:
        context.lifespan_context.watches.remove(str(asked.uri))
        return types.EmptyResult()

    async def listen(self, context: Context, asked: types.SubscriptionsListenRequestParams) -> Any:
        """The same as `subscribe`, as the protocol has it since 2026-07-28."""
        workspace, uris = context.lifespan_context, asked.notifications.resource_subscriptions or []
        for uri in uris:
            await said(unhurried(workspace.watch(str(uri), self._updated)))
        try:
            return await self._listening(context, asked)
        finally:
            for uri in uris:
                workspace.watches.remove(str(uri))

    async def _updated(self, uri: str) -> None:
        await self._bus.publish(ResourceUpdated(uri))

    async def list_prompts(self, context: Context, asked: types.PaginatedRequestParams | None) -> Any:
        return _whole({"prompts": LISTED})

    async def get_prompt(self, context: Context, asked: types.GetPromptRequestParams) -> Any:
        async def fill() -> dict[str, Any]:
            return filled(asked.name, asked.arguments)

        return _whole(await said(fill()))


def _whole(result: dict[str, Any]) -> dict[str, Any]:
    """As versions since 2026-07-28 want it; for older ones, the package leaves that out again."""
    return {**result, "resultType": "complete"}


def server_of(lifespan: Callable[[Any], AbstractAsyncContextManager[Workspace]] | None = None) -> Server[Workspace]:
    """`lifespan` makes the workspace of the one client of a server on stdio."""
    handlers = Handlers()
    server: Server[Workspace] = Server(
        "cloche",
        version=version("cloche"),
        title="Cloche",
        instructions=INSTRUCTIONS,
        cache_hints=CACHE_HINTS,
        lifespan=lifespan or _none,
        on_list_tools=handlers.list_tools,
        on_call_tool=handlers.call_tool,
        on_list_resources=handlers.list_resources,
        on_list_resource_templates=handlers.list_templates,
        on_read_resource=handlers.read_resource,
        on_subscribe_resource=handlers.subscribe,
        on_unsubscribe_resource=handlers.unsubscribe,
        on_subscriptions_listen=handlers.listen,
        on_list_prompts=handlers.list_prompts,
        on_get_prompt=handlers.get_prompt,
    )
    server.middleware.clear()  # spans of OpenTelemetry, which Cloche makes itself
    return server


@contextlib.asynccontextmanager
async def _none(server: Server[Workspace]) -> AsyncIterator[Workspace]:
    raise AssertionError("each session has a workspace of its own here")
    yield


def options_of(server: Server[Workspace]) -> InitializationOptions:
    return server.create_initialization_options(NotificationOptions(resources_changed=True))


async def said(work: Coroutine[Any, Any, T]) -> T:
    """What the work gives. An error of ours is one of the protocol's, in our words."""
    try:
        return await work
    except errors.NotFound as error:
        raise MCPError(RESOURCE_NOT_FOUND, str(error), {"code": error.code}) from None
    except errors.InvalidRequest as error:
        raise MCPError(types.INVALID_PARAMS, str(error), {"code": error.code}) from None
    except errors.ClocheError as error:
        raise MCPError(types.INTERNAL_ERROR, str(error), {"code": error.code}) from None


async def unhurried(work: Coroutine[Any, Any, T]) -> T:
    """The same in a task of its own, which is cancelled once.

    The package cancels again and again, also while a program is being interrupted and its process waited for.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            task.cancel()
            _ENDING.add(task)
            task.add_done_callback(_ENDING.discard)
        raise


_ENDING: set[asyncio.Task[Any]] = set()  # calls that were cancelled, and clean up
