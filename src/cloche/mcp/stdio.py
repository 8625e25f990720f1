"""MCP over stdin and stdout, for the one client that started us. This module imports `mcp`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

from mcp.server.stdio import stdio_server

from cloche.mcp.pipes import Lines, Mouth, own_pipes
from cloche.mcp.server import options_of, server_of
from cloche.mcp.workspace import Workspace


async def serve(workspace: Workspace) -> None:
    """Until the client closes our stdin. Then what was made ends."""

    @contextlib.asynccontextmanager
    async def lifespan(server: Any) -> AsyncIterator[Workspace]:
        yield workspace

    server = server_of(lifespan)
    with own_pipes() as (stdin, stdout):
        lines = Lines(stdin)
        try:
            # It wants anyio's files, of which it uses no more than these have.
            ours = cast(Any, lines), cast(Any, Mouth(stdout, lines))
            async with stdio_server(*ours) as (reading, writing):
                await server.run(reading, writing, options_of(server))
        finally:
            await workspace.aclose()
