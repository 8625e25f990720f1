"""`/ui/`: the start page: running sandboxes, free capacity, and snippets that connect clients."""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from cloche.api.admin import measure_capacity
from cloche.api.console import format
from cloche.api.console.context import ConsoleContext, ConsolePage, ConsoleVisitor, is_partial
from cloche.api.console.health import explain_verdict, failing_parts
from cloche.api.console.keys import quota_meter
from cloche.config import Config
from cloche.engine.quotas.quotas import OwnerUsage

# Snippets that connect clients to this server. They never contain a key: users insert their own.

KEY_PLACEHOLDER = "YOUR_KEY"


class ConnectionSnippet(NamedTuple):
    id: str
    title: str
    about: str
    url: str  # what most forms ask for
    text: str


def base_url(request: Request, config: Config) -> str:
    """The server's address as clients reach it: as configured, else as this browser did."""
    return (config.server.public_url or str(request.base_url)).rstrip("/")


def connection_snippets(base: str) -> list[ConnectionSnippet]:
    scheme, _, place = base.partition("://")
    return [
        ConnectionSnippet(
            "openai",
            "OpenAI SDKs",
            "Responses and Chat Completions with the code interpreter, containers, files. The model cloche/echo needs "
            "no upstream.",
            f"{base}/v1",
            f"export OPENAI_API_KEY={KEY_PLACEHOLDER}\nexport OPENAI_BASE_URL={base}/v1",
        ),
        ConnectionSnippet(
            "e2b",
            "E2B SDKs",
            "Sandboxes and the code interpreter, for Python and JavaScript.",
            f"{base}/e2b",
            f"export E2B_API_KEY={KEY_PLACEHOLDER}\nexport E2B_API_URL={base}/e2b\nexport E2B_SANDBOX_URL={base}/e2b",
        ),
        ConnectionSnippet(
            "librechat",
            "LibreChat",
            "In its environment: its code interpreter runs here.",
            f"{base}/librechat/v1",
            f"LIBRECHAT_CODE_BASEURL={scheme}://cloche:{KEY_PLACEHOLDER}@{place}/librechat/v1",
        ),
        ConnectionSnippet(
            "opensandbox",
            "OpenSandbox, LiteLLM",
            "As the sandbox provider of LiteLLM's interceptor.",
            f"{base}/opensandbox/v1",
            f"export OPEN_SANDBOX_API_KEY={KEY_PLACEHOLDER}\nexport OPEN_SANDBOX_API_BASE={base}/opensandbox/v1",
        ),
        ConnectionSnippet(
            "cloche",
            "Cloche's own library",
            "import cloche, and the command line.",
            f"{base}/api/v1",
            f"export CLOCHE_API_KEY={KEY_PLACEHOLDER}\nexport CLOCHE_URL={base}",
        ),
        ConnectionSnippet(
            "claude",
            "Claude Code, by MCP",
            "One line in a terminal.",
            f"{base}/mcp",
            f'claude mcp add --transport http cloche {base}/mcp --header "Authorization: Bearer {KEY_PLACEHOLDER}"',
        ),
        ConnectionSnippet(
            "mcp",
            "Cursor, VS Code and others, by MCP",
            "The form of configuration that most agents read.",
            f"{base}/mcp",
            _mcp_config(base),
        ),
    ]


def _mcp_config(base: str) -> str:
    server = {"url": f"{base}/mcp", "headers": {"Authorization": f"Bearer {KEY_PLACEHOLDER}"}}
    return json.dumps({"mcpServers": {"cloche": server}}, indent=2)


SHOWN_SANDBOXES = 6  # sandboxes
PAGE_DESCRIPTIONS = {
    "/playground": "Run code in a live sandbox: cells, files, a terminal, a chat.",
    "/sandboxes": "What runs, what it uses, and why it ended.",
    "/requests": "What a model's answer took, step by step.",
    "/templates": "Versions, packages and builds.",
    "/network": "What sandboxes tried to reach.",
    "/keys": "Who may use this server, and how much.",
    "/health": "Whether all is well, and how full it is.",
}


class StartPage:
    def __init__(self, context: ConsoleContext):
        self._context = context

    async def show(self, request: Request, visitor: ConsoleVisitor) -> Response:
        name, values = "start_now.html", await self._current_values(visitor)
        if not is_partial(request):
            name = "start.html"
            values |= {
                "about": PAGE_DESCRIPTIONS,
                "snippets": connection_snippets(base_url(request, self._context.config)),
            }
        return self._context.render(request, visitor, name, words=format, now=time.time(), **values)

    async def _current_values(self, visitor: ConsoleVisitor) -> dict[str, Any]:
        engine, verdict = self._context.engine, self._context.health.verdict
        live = sorted(engine.known(visitor.visible_owner), key=lambda each: -each.created_at)
        return {
            "running": sum(each.state == "running" for each in live),
            "paused": sum(each.state == "paused" for each in live),
            "newest": live[:SHOWN_SANDBOXES],
            "capacity": measure_capacity(engine) if visitor.is_admin else None,
            "meters": _quota_meters(await engine.quotas.usage(visitor.owner)),
            "verdict": verdict,
            "meaning": explain_verdict(verdict),
            "failing": failing_parts(self._context) if visitor.is_admin else [],
        }


def _quota_meters(used: OwnerUsage) -> list[Any]:
    return [
        quota_meter("Executions/min", used.executions_last_minute, used.quota.executions_per_minute, _format_count),
        quota_meter("CPU seconds/h", used.cpu_seconds_last_hour, used.quota.cpu_seconds_per_hour, _format_tenths),
        quota_meter("Stored", used.stored_bytes, used.quota.stored_bytes, format.size),
    ]


def _format_count(amount: float) -> str:
    return f"{amount:,.0f}"


def _format_tenths(amount: float) -> str:
    return f"{amount:,.1f}"


def pages(context: ConsoleContext) -> list[ConsolePage]:
    return [ConsolePage("/", StartPage(context).show)]
