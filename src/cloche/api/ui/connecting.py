"""How clients are pointed at this server: what to paste where. Never with a key: whoever pastes it puts theirs in."""

from __future__ import annotations

import json
from typing import NamedTuple

from starlette.requests import Request

from cloche.config import Config

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
