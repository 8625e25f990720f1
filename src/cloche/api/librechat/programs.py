"""A program of any language, started in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import secrets
from collections.abc import AsyncGenerator

import msgspec

from cloche import errors
from cloche.api.librechat.languages import MAX_ARGUMENT_BYTES, Language
from cloche.api.librechat.request import Asked
from cloche.engine.commands.jobs import Capture
from cloche.engine.commands.program import Script
from cloche.engine.executions.tools import Offer
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import Struct

SHELL = "/bin/bash"
# A figure that a program shows becomes a file: nobody would see it otherwise. See guest/show.py.
ENVIRONMENT = {"CLOCHE_FIGURES": "files"}


class Bounds(Struct):
    """What a program may take."""

    seconds: float
    output_bytes: int  # of each stream


@contextlib.asynccontextmanager
async def running(
    sandbox: Sandbox, language: Language, asked: Asked, bounds: Bounds, offer: Offer | None = None
) -> AsyncGenerator[Capture, None]:
    """The program, in /mnt/data. Leaving the block kills it. Raises InvalidRequest for arguments that are too long.

    With an `offer` it has those tools, and Python may await anywhere.
    """
    if language.name == "bash":  # which passes over NULs where it reads them, and takes a file with them for no script
        asked = msgspec.structs.replace(asked, code=asked.code.replace("\0", ""))
    source = asked.code.encode("utf-8", "surrogatepass")
    tools = offer.env if offer is not None else {}
    async with contextlib.AsyncExitStack() as stack:
        if language.name == "py":
            starting = _start(sandbox, bounds, script=_script(asked, offer))
        elif language.name == "bash" and len(source) <= MAX_ARGUMENT_BYTES:
            starting = _start(sandbox, bounds, (SHELL, "-c", asked.code, "bash", *asked.args), env=tools)
        elif language.source:
            directory = await stack.enter_async_context(_source_file(sandbox, language.source, source))
            starting = _start(sandbox, bounds, (SHELL, "-c", language.recipe, directory, *asked.args), env=tools)
        else:
            starting = _start(sandbox, bounds, (SHELL, "-c", language.recipe, language.name, *asked.args), stdin=source)
        yield await stack.enter_async_context(await starting)


def _script(asked: Asked, offer: Offer | None) -> Script:
    if offer is None:
        return Script(source=asked.code, argv=asked.args)
    return Script(source=asked.code, argv=asked.args, awaits=True, tools=offer.header)


@contextlib.asynccontextmanager
async def _source_file(sandbox: Sandbox, name: str, source: bytes) -> AsyncGenerator[str, None]:
    """In a directory of its own, so that it is neither among the user's files nor in the way of one.

    With its program it goes: the sandbox may be a session's.
    """
    directory = f"/tmp/.program-{secrets.token_hex(8)}"
    try:
        await sandbox.files.write(posixpath.join(directory, name), source)
        yield directory
    finally:
        with contextlib.suppress(errors.FileError, errors.FileNotFound, errors.Gone):
            await sandbox.files.remove(directory)


async def _start(
    sandbox: Sandbox,
    bounds: Bounds,
    command: tuple[str, ...] = (),
    *,
    script: Script | None = None,
    stdin: bytes | None = None,
    env: dict[str, str] | None = None,
) -> Capture:
    program = await sandbox.commands.capture(
        command,
        script=script,
        keep_bytes=bounds.output_bytes,
        env={**ENVIRONMENT, **(env or {})},
        timeout_seconds=bounds.seconds,
        stdin=stdin is not None,
    )
    if stdin is not None:
        try:
            await _feed(program, stdin, bounds.seconds)
        except BaseException:  # whoever waited for it has left
            program.kill()
            raise
    return program


async def _feed(program: Capture, source: bytes, seconds: float) -> None:
    """An interpreter reads all of it before it does anything; whatever else it does, it has no more time than that."""
    with contextlib.suppress(errors.InvalidRequest, TimeoutError):
        async with asyncio.timeout(seconds):
            await program.send_stdin(source)
    program.close_stdin()
