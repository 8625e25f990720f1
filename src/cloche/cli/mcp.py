"""`cloche mcp`: a code interpreter for an agent that starts us and speaks MCP over our stdin and stdout."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cloche import errors
from cloche.cli import load_command_config
from cloche.cli.network_options import NetworkOptions, network_options, take_network_options, to_network_policy
from cloche.config import Config, PoolConfig, for_embedded_use

if TYPE_CHECKING:
    from cloche.mcp.backend import SandboxBackend
    from cloche.model import SandboxSpec

URL_VARIABLE = "CLOCHE_URL"
KEY_VARIABLE = "CLOCHE_API_KEY"


class McpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed command line."""

    url: str | None
    key: str | None
    template: str
    sandbox: str
    tools: str | None
    alone: bool
    network: NetworkOptions


@click.command("mcp")
@click.option("--url", help=f"The server whose sandboxes are used; by default ${URL_VARIABLE}.")
@click.option("--key", help=f"Its key; by default ${KEY_VARIABLE}, which other users cannot read.")
@click.option("--template", default="python", show_default=True, help="NAME, NAME@VERSION, or a snapshot.")
@click.option("--sandbox", default="", metavar="ID", help="Use that sandbox, which stays, not a new one.")
@click.option("--tools", metavar="NAME,NAME", help="Offer these tools only.")
@network_options
@click.option("--alone", is_flag=True, help="Use no server, even if one runs.")
def command(**options: Any) -> None:
    """Serve one agent over stdin and stdout (MCP): run code, commands and files in a sandbox of its own.

    The sandbox is on the server at --url, else on a server that runs on this machine, else in this process. It ends
    when the agent leaves.
    """
    from cloche import mcp

    mcp.check_installed()
    ask = McpOptions(network=take_network_options(options), **options)
    config = load_command_config()
    asyncio.run(_serve_agent(config, ask))


async def _serve_agent(config: Config, ask: McpOptions) -> None:
    from cloche.cli.session import cancel_on_signal
    from cloche.mcp import stdio
    from cloche.mcp import tools as toolbox
    from cloche.mcp.stdio import OpeningBackend
    from cloche.mcp.workspace import McpWorkspace
    from cloche.model import SandboxSpec

    spec = SandboxSpec(template=ask.template, network=to_network_policy(ask.network), metadata={"made_by": "mcp"})
    tools = toolbox.ALL_TOOL_NAMES if ask.tools is None else toolbox.check_tool_names(frozenset(ask.tools.split(",")))
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(cancel_on_signal())
        place = OpeningBackend(_open_backend(stack, config, ask, spec))
        try:
            await stdio.serve_stdio(McpWorkspace(place, ask.template, ask.sandbox, tools))
        finally:
            if not place.is_open:
                os._exit(0)  # does not wait for a thread that still builds a template


async def _open_backend(
    stack: contextlib.AsyncExitStack, config: Config, ask: McpOptions, spec: SandboxSpec
) -> SandboxBackend:
    """Opens the backend of sandboxes. Raises the errors of opening it."""
    url, key = ask.url or os.environ.get(URL_VARIABLE), ask.key or os.environ.get(KEY_VARIABLE) or ""
    if url and not ask.alone:
        return await _remote_backend(stack, url, key, spec)
    servers = [] if ask.alone or ask.network.packages else _live_servers(config)
    if servers:
        return await _remote_backend(stack, f"unix:{servers[0]}", "", spec)
    if ask.key:
        raise errors.InvalidRequest(f"--key requires a server: name it with --url, or {URL_VARIABLE}")
    return await _own_backend(stack, config, ask, spec)


def _live_servers(config: Config) -> list[Path]:
    from cloche.engine.instance import live_control_sockets

    return live_control_sockets(Path(config.data_dir) / "run")


async def _remote_backend(stack: contextlib.AsyncExitStack, url: str, key: str, spec: SandboxSpec) -> SandboxBackend:
    from cloche.mcp.backend import RemoteSandboxBackend
    from cloche.sdk.remote_server import ServerClient

    server = ServerClient(url, key, own_only=True)  # an agent never acts as the operator
    return RemoteSandboxBackend(await stack.enter_async_context(contextlib.aclosing(server)), spec)


async def _own_backend(
    stack: contextlib.AsyncExitStack, config: Config, ask: McpOptions, spec: SandboxSpec
) -> SandboxBackend:
    from cloche.mcp.backend import LocalSandboxBackend
    from cloche.sdk.assembly import assemble_engine
    from cloche.sdk.embedded import BuildAnnouncer

    if ask.network.packages:
        config = msgspec.structs.replace(config, packages=msgspec.structs.replace(config.packages, enabled=True))
    alone = msgspec.structs.replace(
        for_embedded_use(config), pool=PoolConfig(ready=1)
    )  # the next of new_sandbox and fork
    engine = await stack.enter_async_context(assemble_engine(alone, BuildAnnouncer()))
    return LocalSandboxBackend(engine, spec)
