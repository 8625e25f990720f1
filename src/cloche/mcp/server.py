"""The official package's server, with our tools in it.

This module imports `mcp`: import it only where it is used.
"""

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
from cloche.languages import list_titles
from cloche.mcp import tools
from cloche.mcp.call import MAX_ANSWER_BYTES
from cloche.mcp.content import escape_surrogates, guess_mime, read_file_bytes, resource_contents
from cloche.mcp.tools_files import decode_text
from cloche.mcp.uris import URI_TEMPLATE, path_to_uri, uri_to_path
from cloche.mcp.workspace import McpWorkspace
from cloche.model import FileInfo
from cloche.sdk import backend

# The two prompts that clients offer to their users.

PROMPTS: list[dict[str, Any]] = [
    {
        "name": "analyse_file",
        "title": "Analyse a file",
        "description": "Inspect a data file in the sandbox, and describe its contents.",
        "arguments": [
            {"name": "path", "description": "Below /mnt/data, or absolute.", "required": True},
            {"name": "question", "description": "Your question about the file.", "required": False},
        ],
    },
    {
        "name": "work_in_sandbox",
        "title": "Work in the sandbox",
        "description": "Solve a task by writing and running code in the sandbox.",
        "arguments": [{"name": "task", "description": "The task.", "required": True}],
    },
]
PROMPT_TEXTS = {
    "analyse_file": "Analyse the file {path} in the sandbox with run_code. Check its type and its first rows before "
    "anything else, check for missing and unusual values, then plot the interesting parts, and report your findings. "
    "{question}",
    "work_in_sandbox": "Solve this by writing and running code in the sandbox, in small steps whose results you check: "
    "{task}",
}


def fill_prompt(name: str, given: dict[str, str] | None) -> dict[str, Any]:
    """The prompt with its arguments filled in. Raises InvalidRequest that names the missing argument."""
    known = {each["name"]: each for each in PROMPTS}
    if name not in known:
        raise errors.InvalidRequest(f"there is no prompt {name[:100]!r}; there are: {', '.join(known)}")
    values = {each["name"]: (given or {}).get(each["name"], "") for each in known[name]["arguments"]}
    for each in known[name]["arguments"]:
        if each["required"] and not values[each["name"]]:
            raise errors.InvalidRequest(f"the prompt {name} needs {each['name']}: {each['description']}")
    words = PROMPT_TEXTS[name].format(**values).strip()
    return {
        "description": known[name]["description"],
        "messages": [{"role": "user", "content": {"type": "text", "text": words}}],
    }


# The sandbox's files as MCP resources: list and read.

DATA_DIRECTORY = "/mnt/data"
LIST_DEPTH = 4
PAGE_SIZE = 200
MAX_RESOURCES = 5000
RESOURCE_TEMPLATES = [
    {
        "uriTemplate": URI_TEMPLATE,
        "name": "file",
        "title": "A file of the sandbox",
        "description": "By its absolute path: sandbox:///mnt/data/plot.png",
    }
]


async def list_resources(workspace: McpWorkspace, cursor: str | None) -> dict[str, Any]:
    """A page of the files below /mnt/data; none where no sandbox is in use yet. Raises InvalidRequest."""
    start = _parse_cursor(cursor)
    box = workspace.current_sandbox
    if box is None:
        return {"resources": []}
    found = [each for each in await _list_files(box) if each.kind == "file"][:MAX_RESOURCES]
    page = found[start : start + PAGE_SIZE]
    more = {"nextCursor": str(start + PAGE_SIZE)} if len(found) > start + PAGE_SIZE else {}
    return {"resources": [_describe_resource(each) for each in page], **more}


async def _list_files(box: backend.BackendSandbox) -> list[FileInfo]:
    try:
        return await box.files.list(DATA_DIRECTORY, depth=LIST_DEPTH)
    except (errors.Gone, errors.NotFound, errors.FileError):
        return []


def _parse_cursor(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 10):
        raise errors.InvalidRequest(f"{cursor[:100]!r} is not a cursor of this list")
    return int(cursor)


def _describe_resource(info: FileInfo) -> dict[str, Any]:
    found: dict[str, Any] = {
        "uri": path_to_uri(info.path),
        "name": escape_surrogates(info.path.removeprefix(f"{DATA_DIRECTORY}/")),
    }
    mime = guess_mime(info.path)
    return {**found, "size": info.size_bytes, **({"mimeType": mime} if mime else {})}


async def read_resource(workspace: McpWorkspace, uri: str) -> dict[str, Any]:
    """Reads a resource. Raises FileNotFound, TooLarge and the errors of reading."""
    path = uri_to_path(uri)
    if workspace.current_sandbox is None:
        raise errors.FileNotFound("there are no files yet: this session has not used its sandbox")
    data = await read_file_bytes(workspace.current_sandbox.files, path)
    words = decode_text(data)
    return {"contents": [resource_contents(uri, guess_mime(path), data if words is None else words)]}


T = TypeVar("T")
McpContext = ServerRequestContext[McpWorkspace, Any]

LINKS_SINCE_VERSION = "2025-06-18"
RESOURCE_NOT_FOUND = -32002
INSTRUCTIONS = (
    "A code interpreter: an isolated Linux sandbox, created at the first call, which keeps variables and files "
    f"until the session ends. run_code runs {list_titles()}; files live below /mnt/data. There "
    "is no network unless the operator allows it; install_packages installs packages if that is allowed, and "
    "`pip list` shows the installed ones."
)


CACHE_HINTS: dict[CacheableMethod, CacheHint] = {
    "tools/list": CacheHint(ttl_ms=3_600_000),
    "prompts/list": CacheHint(ttl_ms=3_600_000),
    "resources/templates/list": CacheHint(ttl_ms=3_600_000),
    "resources/list": CacheHint(),
    "resources/read": CacheHint(),
}


class PackageClientChannel:
    """The channel to the client of a request, through the package's own session."""

    most_bytes = MAX_ANSWER_BYTES

    def __init__(self, context: McpContext, bus: InMemorySubscriptionBus):
        self._context = context
        self._bus = bus
        self.wants_progress = bool(context.meta) and "progress_token" in (context.meta or {})
        self.knows_links = is_version_at_least(context.protocol_version, LINKS_SINCE_VERSION)

    async def progress(self, count: int, message: str) -> None:
        await self._context.session.report_progress(count, None, message)

    async def resources_changed(self) -> None:
        await self._context.session.send_resource_list_changed()
        await self._bus.publish(ResourcesListChanged())


class McpHandlers:
    """The handlers of the protocol's methods. The session's workspace is the context's `lifespan_context`."""

    def __init__(self) -> None:
        self._bus = InMemorySubscriptionBus()
        self._listening = ListenHandler(self._bus)
        self._described: dict[str, dict[str, Any]] = {}

    async def list_tools(self, context: McpContext, params: types.PaginatedRequestParams | None) -> Any:
        if not self._described:
            self._described = {each.name: tools.describe_tool(each) for each in tools.TOOLS}
        allowed = context.lifespan_context.tools
        return _complete_result({"tools": [each for name, each in self._described.items() if name in allowed]})

    async def call_tool(self, context: McpContext, params: types.CallToolRequestParams) -> Any:
        told = PackageClientChannel(context, self._bus)
        calling = tools.call_tool(context.lifespan_context, told, params.name, params.arguments)
        return _complete_result((await map_errors(cancel_once(calling))).encode())

    async def list_resources(self, context: McpContext, params: types.PaginatedRequestParams | None) -> Any:
        cursor = params.cursor if params is not None else None
        return _complete_result(await map_errors(list_resources(context.lifespan_context, cursor)))

    async def list_templates(self, context: McpContext, params: types.PaginatedRequestParams | None) -> Any:
        return _complete_result({"resourceTemplates": RESOURCE_TEMPLATES})

    async def read_resource(self, context: McpContext, params: types.ReadResourceRequestParams) -> Any:
        return _complete_result(await map_errors(read_resource(context.lifespan_context, str(params.uri))))

    async def subscribe(self, context: McpContext, params: types.SubscribeRequestParams) -> types.EmptyResult:
        workspace, session = context.lifespan_context, context.session
        await map_errors(cancel_once(workspace.watch(str(params.uri), session.send_resource_updated)))
        return types.EmptyResult()

    async def unsubscribe(self, context: McpContext, params: types.UnsubscribeRequestParams) -> types.EmptyResult:
        context.lifespan_context.watches.remove(str(params.uri))
        return types.EmptyResult()

    async def listen(self, context: McpContext, params: types.SubscriptionsListenRequestParams) -> Any:
        """The same as `subscribe`, in the form of the protocol since 2026-07-28."""
        workspace, uris = context.lifespan_context, params.notifications.resource_subscriptions or []
        for uri in uris:
            await map_errors(cancel_once(workspace.watch(str(uri), self._publish_update)))
        try:
            return await self._listening(context, params)
        finally:
            for uri in uris:
                workspace.watches.remove(str(uri))

    async def _publish_update(self, uri: str) -> None:
        await self._bus.publish(ResourceUpdated(uri))

    async def list_prompts(self, context: McpContext, params: types.PaginatedRequestParams | None) -> Any:
        return _complete_result({"prompts": PROMPTS})

    async def get_prompt(self, context: McpContext, params: types.GetPromptRequestParams) -> Any:
        async def fill() -> dict[str, Any]:
            return fill_prompt(params.name, params.arguments)

        return _complete_result(await map_errors(fill()))


def _complete_result(result: dict[str, Any]) -> dict[str, Any]:
    """Adds the field that versions since 2026-07-28 require; for older ones, the package removes it again."""
    return {**result, "resultType": "complete"}


def create_server(
    lifespan: Callable[[Any], AbstractAsyncContextManager[McpWorkspace]] | None = None,
) -> Server[McpWorkspace]:
    """Creates the server. `lifespan` makes the workspace of the one client of a server on stdio."""
    handlers = McpHandlers()
    server: Server[McpWorkspace] = Server(
        "cloche",
        version=version("cloche"),
        title="Cloche",
        instructions=INSTRUCTIONS,
        cache_hints=CACHE_HINTS,
        lifespan=lifespan or _no_lifespan,
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
async def _no_lifespan(server: Server[McpWorkspace]) -> AsyncIterator[McpWorkspace]:
    raise AssertionError("each session has a workspace of its own here")
    yield


def server_options(server: Server[McpWorkspace]) -> InitializationOptions:
    return server.create_initialization_options(NotificationOptions(resources_changed=True))


async def map_errors(work: Coroutine[Any, Any, T]) -> T:
    """Awaits the work and returns its result. An error of ours becomes one of the protocol, with our message."""
    try:
        return await work
    except errors.NotFound as error:
        raise MCPError(RESOURCE_NOT_FOUND, str(error), {"code": error.code}) from None
    except errors.InvalidRequest as error:
        raise MCPError(types.INVALID_PARAMS, str(error), {"code": error.code}) from None
    except errors.ClocheError as error:
        raise MCPError(types.INTERNAL_ERROR, str(error), {"code": error.code}) from None


async def cancel_once(work: Coroutine[Any, Any, T]) -> T:
    """Awaits the work in a task of its own, which is cancelled only once.

    The package cancels again and again, also while a program is being interrupted and its process waited for.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            task.cancel()
            _CANCELLED_CALLS.add(task)
            task.add_done_callback(_CANCELLED_CALLS.discard)
        raise


_CANCELLED_CALLS: set[asyncio.Task[Any]] = set()  # calls that were cancelled, and clean up
