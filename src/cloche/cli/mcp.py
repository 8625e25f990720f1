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
from cloche.cli import configuration
from cloche.cli.network_options import NetworkAsk, network_options, policy_of, taken
from cloche.config import Config, Pool, for_oneself

if TYPE_CHECKING:
    from cloche.mcp.backend import Place
    from cloche.model import SandboxSpec

URL_VARIABLE = "CLOCHE_URL"
KEY_VARIABLE = "CLOCHE_API_KEY"


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line said."""

    url: str | None
    key: str | None
    template: str
    sandbox: str
    tools: str | None
    alone: bool
    network: NetworkAsk


@click.command("mcp")
@click.option("--url", help=f"The server whose sandboxes are used; by default ${URL_VARIABLE}.")
@click.option("--key", help=f"Its key; by default ${KEY_VARIABLE}, which others on this machine cannot see.")
@click.option("--template", default="python", show_default=True, help="NAME, NAME@VERSION, or a snapshot.")
@click.option("--sandbox", default="", metavar="ID", help="Use that sandbox, which stays, instead of a new one.")
@click.option("--tools", metavar="NAME,NAME", help="Offer these tools only.")
@network_options
@click.option("--alone", is_flag=True, help="Use no server, even where one runs.")
def command(**options: Any) -> None:
    """Serve one agent over stdin and stdout (MCP): run code, commands and files in a sandbox of its own.

    The sandbox is one of the server at --url, else of a server that runs on this machine, else of our own. It ends
    when the agent leaves.
    """
    from cloche import mcp

    mcp.check_installed()
    ask = Ask(network=taken(options), **options)
    config = configuration()
    asyncio.run(_serve(config, ask))


async def _serve(config: Config, ask: Ask) -> None:
    from cloche.cli.session import ending_by_signal
    from cloche.mcp import stdio
    from cloche.mcp import tools as toolbox
    from cloche.mcp.stdio import OpeningPlace
    from cloche.mcp.workspace import Workspace
    from cloche.model import SandboxSpec

    spec = SandboxSpec(template=ask.template, network=policy_of(ask.network), metadata={"made_by": "mcp"})
    tools = toolbox.ALL if ask.tools is None else toolbox.checked(frozenset(ask.tools.split(",")))
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(ending_by_signal())
        place = OpeningPlace(_place(stack, config, ask, spec))
        try:
            await stdio.serve(Workspace(place, ask.template, ask.sandbox, tools))
        finally:
            if not place.is_open:
                os._exit(0)  # a template may still be built in a thread: nobody waits for it


async def _place(stack: contextlib.AsyncExitStack, config: Config, ask: Ask, spec: SandboxSpec) -> Place:
    """Where sandboxes are. Raises what opening it does."""
    url, key = ask.url or os.environ.get(URL_VARIABLE), ask.key or os.environ.get(KEY_VARIABLE) or ""
    if url and not ask.alone:
        return await _remote(stack, url, key, spec)
    servers = [] if ask.alone or ask.network.packages else _servers(config)
    if servers:
        return await _remote(stack, f"unix:{servers[0]}", "", spec)
    if ask.key:
        raise errors.InvalidRequest(f"--key is for a server: say which with --url, or {URL_VARIABLE}")
    return await _own(stack, config, ask, spec)


def _servers(config: Config) -> list[Path]:
    from cloche.engine.instance import live_control_sockets

    return live_control_sockets(Path(config.data_dir) / "run")


async def _remote(stack: contextlib.AsyncExitStack, url: str, key: str, spec: SandboxSpec) -> Place:
    from cloche.mcp.backend import RemotePlace
    from cloche.sdk.remote_server import Server

    server = Server(url, key, own_only=True)  # an agent is nobody's operator, whatever it was told to do
    return RemotePlace(await stack.enter_async_context(contextlib.aclosing(server)), spec)


async def _own(stack: contextlib.AsyncExitStack, config: Config, ask: Ask, spec: SandboxSpec) -> Place:
    from cloche.mcp.backend import NearPlace
    from cloche.sdk.assembly import assemble
    from cloche.sdk.embedded import Announcement

    if ask.network.packages:
        config = msgspec.structs.replace(config, packages=msgspec.structs.replace(config.packages, enabled=True))
    alone = msgspec.structs.replace(for_oneself(config), pool=Pool(ready=1))  # the next of new_sandbox and fork
    engine = await stack.enter_async_context(assemble(alone, Announcement()))
    return NearPlace(engine, spec)
