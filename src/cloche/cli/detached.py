"""Runs that a server goes on with: `cloche run --detach` begins one, `cloche attach` shows one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from cloche import errors
from cloche.cli import OUR_FAILURE, network_options
from cloche.cli.control import no_server, sockets
from cloche.cli.run_program import last_word, upload, view_of
from cloche.cli.session import asked_of
from cloche.cli.terminal import STDOUT, View, say, write
from cloche.config import Config
from cloche.events import Ended, Numbered, RunInfo
from cloche.model import SandboxSpec, check_seconds
from cloche.protocol import requests
from cloche.sdk import remote_sandbox
from cloche.sdk.remote_sandbox import RemoteRuns, RemoteSandbox
from cloche.sdk.remote_server import Server

if TYPE_CHECKING:
    from cloche.cli.run import Ask


async def start(config: Config, ask: Ask) -> int:
    """Prints its id. Its sandbox ends with it. Raises Unavailable where no server runs, and as `Engine.create`."""
    check_seconds("--timeout", ask.timeout_seconds)
    found = sockets(config)
    if not found:
        raise no_server(config)
    spec = SandboxSpec(template=ask.template, env=ask.env, network=network_options.policy_of(ask.network))
    async with contextlib.aclosing(Server(f"unix:{found[0]}", "")) as server:
        box = await remote_sandbox.create_as(server, asked_of(spec, ask.limits))
        try:
            info = await _begin(server, box, ask)
        except BaseException:
            await asyncio.shield(box.kill())
            raise
    write(STDOUT, f"{info.id}\n")
    return 0


async def _begin(server: Server, box: RemoteSandbox, ask: Ask) -> RunInfo:
    for path, place in ask.uploads:
        await upload(box, path, place)
    asked = requests.Detach(
        code=ask.code, argv=ask.argv, timeout_seconds=ask.timeout_seconds, input=ask.answers, last=True
    )
    info: RunInfo = await server.ask("POST", f"/sandboxes/{box.id}/runs", RunInfo, body=asked)
    return info


async def show(config: Config, id: str, after: int, form: str) -> int:
    """Shows its events, and gives its exit status. Raises Unavailable, RunNotFound, InvalidRequest."""
    view, ended = view_of(form), None
    async with contextlib.aclosing(_followed(config, id, after)) as followed:
        async for batch in followed:
            ended = _seen(view, batch) or ended
    if ended is None:
        say("it ended before that event")
        return OUR_FAILURE
    return last_word(ended)


def _seen(view: View, batch: list[Numbered]) -> Ended | None:
    for numbered in batch:
        view.show(numbered.event)
    return batch[-1].event if batch and isinstance(batch[-1].event, Ended) else None


async def _followed(config: Config, id: str, after: int) -> AsyncGenerator[list[Numbered], None]:
    """From whichever live server knows it."""
    found = sockets(config)
    if not found:
        raise no_server(config)
    for last, socket in enumerate(found, 1 - len(found)):
        async with contextlib.aclosing(Server(f"unix:{socket}", "")) as server:
            try:
                followed = await RemoteRuns(server).attach(id, after)
            except errors.RunNotFound:
                if last:
                    continue
                raise
            async for batch in followed:
                yield batch
            return
