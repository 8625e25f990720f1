"""Detached runs: `cloche run --detach` starts one, `cloche attach` shows one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from cloche import errors
from cloche.cli import EXIT_CLOCHE_FAILED, network_options
from cloche.cli.control import control_sockets, no_server_error
from cloche.cli.run_program import make_view, report_end, upload_file
from cloche.cli.session import to_create_request
from cloche.cli.terminal import STDOUT, EventView, print_message, write_all
from cloche.config import Config
from cloche.events import Ended, NumberedEvent, RunInfo
from cloche.model import SandboxSpec, check_seconds
from cloche.protocol import requests
from cloche.sdk import remote_sandbox
from cloche.sdk.remote_sandbox import RemoteRuns, RemoteSandbox
from cloche.sdk.remote_server import ServerClient

if TYPE_CHECKING:
    from cloche.cli.run import RunCommandOptions


async def start_detached(config: Config, ask: RunCommandOptions) -> int:
    """Starts a run and prints its id. Its sandbox ends with it.

    Raises Unavailable where no server runs, and as `Engine.create`.
    """
    check_seconds("--timeout", ask.timeout_seconds)
    found = control_sockets(config)
    if not found:
        raise no_server_error(config)
    spec = SandboxSpec(template=ask.template, env=ask.env, network=network_options.to_network_policy(ask.network))
    async with contextlib.aclosing(ServerClient(f"unix:{found[0]}", "")) as server:
        box = await remote_sandbox.create_requested(server, to_create_request(spec, ask.limits))
        try:
            info = await _start_run(server, box, ask)
        except BaseException:
            await asyncio.shield(box.kill())
            raise
    write_all(STDOUT, f"{info.id}\n")
    return 0


async def _start_run(server: ServerClient, box: RemoteSandbox, ask: RunCommandOptions) -> RunInfo:
    for path, place in ask.uploads:
        await upload_file(box, path, place)
    message = requests.DetachRequest(
        code=ask.code, argv=ask.argv, timeout_seconds=ask.timeout_seconds, input=ask.answers, last=True
    )
    info: RunInfo = await server.ask("POST", f"/sandboxes/{box.id}/runs", RunInfo, body=message)
    return info


async def show_run(config: Config, id: str, after: int, form: str) -> int:
    """Shows the events of a run and returns its exit status. Raises Unavailable, RunNotFound, InvalidRequest."""
    view, ended = make_view(form), None
    async with contextlib.aclosing(_follow_run(config, id, after)) as followed:
        async for batch in followed:
            ended = _show_batch(view, batch) or ended
    if ended is None:
        print_message("it ended before that event")
        return EXIT_CLOCHE_FAILED
    return report_end(ended)


def _show_batch(view: EventView, batch: list[NumberedEvent]) -> Ended | None:
    for numbered in batch:
        view.show(numbered.event)
    return batch[-1].event if batch and isinstance(batch[-1].event, Ended) else None


async def _follow_run(config: Config, id: str, after: int) -> AsyncGenerator[list[NumberedEvent], None]:
    """Yields batches of events from the first live server that knows the run."""
    found = control_sockets(config)
    if not found:
        raise no_server_error(config)
    for last, socket in enumerate(found, 1 - len(found)):
        async with contextlib.aclosing(ServerClient(f"unix:{socket}", "")) as server:
            try:
                followed = await RemoteRuns(server).attach(id, after)
            except errors.RunNotFound:
                if last:
                    continue
                raise
            async for batch in followed:
                yield batch
            return
