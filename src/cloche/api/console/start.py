"""`/ui/`: where one begins: what runs now, how much room there is, and how clients are connected."""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from cloche.api.admin import capacity_of
from cloche.api.console import format
from cloche.api.console.context import House, Page, Visitor, is_partial
from cloche.api.console.health import failing_parts, meaning_of
from cloche.api.console.keys import meter
from cloche.config import Config
from cloche.engine.quotas.usage import OwnerUsage

# How clients are pointed at this server: what to paste where. Never with a key: whoever pastes it puts theirs in.

KEY = "YOUR_KEY"


class Snippet(NamedTuple):
    id: str
    title: str
    about: str
    url: str  # what most forms ask for
    text: str


def base_url(request: Request, config: Config) -> str:
    """As clients reach the server: as it is configured, else as this browser did."""
    return (config.server.public_url or str(request.base_url)).rstrip("/")


def snippets(base: str) -> list[Snippet]:
    scheme, _, place = base.partition("://")
    return [
        Snippet(
            "openai",
            "OpenAI SDKs",
            "Responses and Chat Completions with the code interpreter, containers, files. The model cloche/echo needs "
            "no upstream.",
            f"{base}/v1",
            f"export OPENAI_API_KEY={KEY}\nexport OPENAI_BASE_URL={base}/v1",
        ),
        Snippet(
            "e2b",
            "E2B SDKs",
            "Sandboxes and the code interpreter, for Python and JavaScript.",
            f"{base}/e2b",
            f"export E2B_API_KEY={KEY}\nexport E2B_API_URL={base}/e2b\nexport E2B_SANDBOX_URL={base}/e2b",
        ),
        Snippet(
            "librechat",
            "LibreChat",
            "In its environment: its code interpreter runs here.",
            f"{base}/librechat/v1",
            f"LIBRECHAT_CODE_BASEURL={scheme}://cloche:{KEY}@{place}/librechat/v1",
        ),
        Snippet(
            "opensandbox",
            "OpenSandbox, LiteLLM",
            "As the sandbox provider of LiteLLM's interceptor.",
            f"{base}/opensandbox/v1",
            f"export OPEN_SANDBOX_API_KEY={KEY}\nexport OPEN_SANDBOX_API_BASE={base}/opensandbox/v1",
        ),
        Snippet(
            "cloche",
            "Cloche's own library",
            "import cloche, and the command line.",
            f"{base}/api/v1",
            f"export CLOCHE_API_KEY={KEY}\nexport CLOCHE_URL={base}",
        ),
        Snippet(
            "claude",
            "Claude Code, by MCP",
            "One line in a terminal.",
            f"{base}/mcp",
            f'claude mcp add --transport http cloche {base}/mcp --header "Authorization: Bearer {KEY}"',
        ),
        Snippet(
            "mcp",
            "Cursor, VS Code and others, by MCP",
            "The form of configuration that most agents read.",
            f"{base}/mcp",
            _mcp(base),
        ),
    ]


def _mcp(base: str) -> str:
    server = {"url": f"{base}/mcp", "headers": {"Authorization": f"Bearer {KEY}"}}
    return json.dumps({"mcpServers": {"cloche": server}}, indent=2)


SHOWN = 6  # sandboxes
ABOUT = {
    "/playground": "Run code in a live sandbox: cells, files, a terminal, a chat.",
    "/sandboxes": "What runs, what it uses, and why it ended.",
    "/requests": "What a model's answer took, step by step.",
    "/templates": "Versions, packages and builds.",
    "/network": "What sandboxes tried to reach.",
    "/keys": "Who may use this server, and how much.",
    "/health": "Whether all is well, and how full it is.",
}


class Start:
    def __init__(self, house: House):
        self._house = house

    async def show(self, request: Request, visitor: Visitor) -> Response:
        name, values = "start_now.html", await self._now(visitor)
        if not is_partial(request):
            name = "start.html"
            values |= {"about": ABOUT, "snippets": snippets(base_url(request, self._house.config))}
        return self._house.render(request, visitor, name, words=format, now=time.time(), **values)

    async def _now(self, visitor: Visitor) -> dict[str, Any]:
        engine, verdict = self._house.engine, self._house.health.verdict
        live = sorted(engine.known(visitor.sees), key=lambda each: -each.created_at)
        return {
            "running": sum(each.state == "running" for each in live),
            "paused": sum(each.state == "paused" for each in live),
            "newest": live[:SHOWN],
            "capacity": capacity_of(engine) if visitor.is_admin else None,
            "meters": _meters(await engine.quotas.usage(visitor.owner)),
            "verdict": verdict,
            "meaning": meaning_of(verdict),
            "failing": failing_parts(self._house) if visitor.is_admin else [],
        }


def _meters(used: OwnerUsage) -> list[Any]:
    return [
        meter("Executions/min", used.executions_last_minute, used.quota.executions_per_minute, _count),
        meter("CPU seconds/h", used.cpu_seconds_last_hour, used.quota.cpu_seconds_per_hour, _tenths),
        meter("Stored", used.stored_bytes, used.quota.stored_bytes, format.size),
    ]


def _count(amount: float) -> str:
    return f"{amount:,.0f}"


def _tenths(amount: float) -> str:
    return f"{amount:,.1f}"


def pages(house: House) -> list[Page]:
    return [Page("/", Start(house).show)]
