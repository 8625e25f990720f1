"""A sandbox of a built template begins: its start command runs, and it is there when its ready command succeeds."""

from __future__ import annotations

import asyncio
import contextlib
import time

from cloche import errors
from cloche.engine.sandbox import Sandbox
from cloche.model import Launch
from cloche.telemetry import log

READY_SECONDS = 30.0  # clients wait a minute for a sandbox
POLL_SECONDS = 0.2
DEFAULT_USER = "default_user"  # a note: as whom clients run what they run as nobody in particular
SHELL = ("/bin/bash", "-l", "-c")


async def launch(sandbox: Sandbox, how: Launch) -> None:
    """Returns when it is ready, or after so many seconds all the same: then the log says so. Raises Gone."""
    if how.start_command is not None:
        await sandbox.commands.launch(
            (*SHELL, how.start_command), user=how.user, cwd=how.cwd, tag="start", counted=False
        )
    if how.ready_command is None:
        return
    try:
        async with asyncio.timeout(READY_SECONDS):
            await _wait_ready(sandbox, how, how.ready_command)
    except TimeoutError:
        log.warning("sandbox.not_ready", sandbox=sandbox.id, owner=sandbox.spec.owner, seconds=READY_SECONDS)


async def _wait_ready(sandbox: Sandbox, how: Launch, command: str) -> None:
    while True:
        began_at = time.monotonic()
        process = await sandbox.commands.start(
            (*SHELL, command), user=how.user, cwd=how.cwd, timeout_seconds=READY_SECONDS, counted=False
        )
        async with contextlib.aclosing(process):  # killed where the time is over
            async for _ in process:  # nobody wants what it says
                pass
        sandbox.check_running()
        if process.exited is not None and process.exited.exit_code == 0:
            log.info("sandbox.ready", sandbox=sandbox.id, seconds=round(time.monotonic() - began_at, 3))
            return
        await asyncio.sleep(POLL_SECONDS)


async def launched(sandbox: Sandbox, how: Launch | None) -> Sandbox:
    """The same, once it has begun, as far as it can. It ends where whoever asked for it has left. Raises Gone."""
    if how is None:
        return sandbox
    try:
        await launch(sandbox, how)
    except errors.Gone:
        raise
    except errors.ClocheError as error:  # a working directory that somebody removed, say: the sandbox is there
        log.warning("sandbox.not_started", sandbox=sandbox.id, owner=sandbox.spec.owner, reason=error.code)
    except BaseException:
        await sandbox.kill("whoever asked for it left before it was ready")
        raise
    return sandbox
