"""A sandbox for the length of a command, and one execution in it that a terminal can watch, feed and interrupt."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from cloche import errors
from cloche.cli import network_options
from cloche.cli.network_options import NetworkAsk
from cloche.cli.progress import showing
from cloche.cli.terminal import Lines, View
from cloche.config import Config, Pool, for_oneself
from cloche.engine.instance import live_control_sockets
from cloche.events import Ended, Input
from cloche.model import SandboxSpec
from cloche.sdk.backend import Execution, Sandbox

if TYPE_CHECKING:
    from cloche.protocol.requests import CreateSandbox

INTERRUPTED = 130
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.asynccontextmanager
async def sandbox(
    config: Config,
    template: str,
    *,
    env: Mapping[str, str] | None = None,
    limits: Mapping[str, float] | None = None,
    network: NetworkAsk | None = None,
    alone: bool = False,
) -> AsyncIterator[Sandbox]:
    """A new sandbox: of a server that runs in the data directory, else, or if `alone`, of a nursery of its own.

    `limits` change the template's. Raises what `Engine.create` does.
    """
    network = network or NetworkAsk()
    policy = network_options.policy_of(network)
    spec = SandboxSpec(template=template, env=dict(env or {}), network=policy)  # refuses what makes no sense, anywhere
    alone = alone or _asks_for_backend(config) or network.packages  # which a server's own operator decides there
    async with contextlib.AsyncExitStack() as stack:
        box: Sandbox | None = None
        servers = [] if alone else live_control_sockets(Path(config.data_dir) / "run")
        if servers:
            box = await stack.enter_async_context(_of_server(servers[0], spec, limits or {}))
        if box is None:
            own = _with_packages(config) if network.packages else config
            box = await stack.enter_async_context(_own(own, spec, limits or {}))
        yield box


def _asks_for_backend(config: Config) -> bool:
    """A server has its own, which may be another."""
    return config.origins.get("backend", "").startswith("flag")


def _with_packages(config: Config) -> Config:
    return msgspec.structs.replace(config, packages=msgspec.structs.replace(config.packages, enabled=True))


@contextlib.asynccontextmanager
async def _of_server(socket: Path, spec: SandboxSpec, limits: Mapping[str, float]) -> AsyncIterator[Sandbox | None]:
    """A sandbox of that server, which ends with us however we end; None where it does not answer."""
    from cloche.sdk import remote_sandbox  # here, and below: without a server, none of this is needed
    from cloche.sdk.remote_server import Server

    asked = asked_of(spec, limits)
    async with contextlib.aclosing(Server(f"unix:{socket}", "")) as server:
        try:
            box = await remote_sandbox.create_as(server, asked)
        except errors.Unavailable as error:
            if type(error) is not errors.Unavailable:
                raise
            yield None  # it begins just now, or is about to end
            return
        async with box.held():
            try:
                yield box
            finally:
                with contextlib.suppress(errors.ClocheError):
                    await asyncio.shield(box.kill())


def asked_of(spec: SandboxSpec, limits: Mapping[str, float]) -> CreateSandbox:
    """How a server is asked for it; `limits` change the template's."""
    from cloche.protocol import requests

    changed = requests.LimitsAsked(**limits) if limits else None  # type: ignore[arg-type]
    return requests.CreateSandbox(
        template=spec.template,
        env=spec.env,
        limits=changed,
        network=None if spec.network is None else requests.asked_of(spec.network),
        secrets=[] if spec.network is None else requests.secrets_asked(spec.network),
    )


@contextlib.asynccontextmanager
async def attached(config: Config, id: str) -> AsyncIterator[Sandbox]:
    """A sandbox that runs on a server of the data directory. It stays when this ends.

    Raises Unavailable where no server runs, SandboxNotFound, SandboxExpired, SandboxKilled or SandboxLost.
    """
    from cloche.cli.control import no_server, sockets
    from cloche.sdk import remote_sandbox
    from cloche.sdk.remote_server import Server

    found = sockets(config)
    if not found:
        raise no_server(config)
    for last, socket in enumerate(found, 1 - len(found)):
        async with contextlib.aclosing(Server(f"unix:{socket}", "")) as server:
            try:
                box = await remote_sandbox.connect(server, id)
            except errors.SandboxNotFound:
                if last:
                    continue
                raise
            yield box
            return


@contextlib.asynccontextmanager
async def _own(config: Config, spec: SandboxSpec, limits: Mapping[str, float]) -> AsyncIterator[Sandbox]:
    """A sandbox of an engine for it alone. A built-in template is built first, with its progress on stderr."""
    from cloche.sdk.assembly import assemble  # here: with a server, none of the engine is needed
    from cloche.sdk.local import NearSandbox
    from cloche.templates import Catalogue, ensure

    alone = msgspec.structs.replace(for_oneself(config), pool=Pool(ready=0))  # one sandbox: none need wait in advance
    template = spec.template
    with showing(f"building {template}") as report, contextlib.suppress(errors.TemplateNotFound):  # a snapshot, perhaps
        await asyncio.to_thread(ensure, Catalogue(config.data_dir, config.aliases), template, report)
    async with assemble(alone, preload=False) as engine:
        if limits:
            usual = await engine.limits_of(template, spec.owner)
            spec = msgspec.structs.replace(spec, limits=msgspec.structs.replace(usual, **limits))
        yield NearSandbox(engine, await engine.create(spec))


async def watch(
    execution: Execution, view: View, lines: Lines | None, presses: Sequence[Callable[[], object]]
) -> Ended:
    """Runs it: the view sees every event, `lines` answer `input()`. The n-th Ctrl-C does the n-th of `presses`."""
    answering: asyncio.Task[None] | None = None
    with on_interrupt(presses):
        try:
            async with execution:
                async for event in execution:
                    if isinstance(event, Input) and lines is not None:
                        answering = asyncio.create_task(_answer(execution, lines, view, event))
                    else:
                        view.show(event)
        finally:
            if answering is not None:
                answering.cancel()
                await asyncio.wait([answering])
    if execution.ended is None:
        raise errors.SandboxLost("the sandbox ended before the program did")
    return execution.ended


async def _answer(execution: Execution, lines: Lines, view: View, asked: Input) -> None:
    """The prompt is shown once the terminal echoes no more: whoever sees it may type a password at once."""
    execution.answer(await lines.next(secret=asked.secret, ask=lambda: view.show(asked)))


@contextlib.contextmanager
def on_interrupt(presses: Sequence[Callable[[], object]]) -> Iterator[None]:
    """While it lasts, the n-th Ctrl-C calls the n-th of `presses` on the loop; the last once more ends us at once."""
    loop = asyncio.get_running_loop()
    left = list(presses)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: Ctrl-C is for somebody else
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        # Not loop.add_signal_handler: this one also runs while we wait in a write to a pipe that nobody reads.
        if not left:
            os._exit(INTERRUPTED)  # what is in the sandbox dies with us
        loop.call_soon_threadsafe(left.pop(0))

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def ending_by_signal() -> Iterator[None]:
    """SIGTERM and SIGHUP cancel the current task, so that everything is closed; then SystemExit says which it was."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    came: list[int] = []

    def end(number: int) -> None:
        came.append(number)
        task.cancel()

    for each in ENDING_SIGNALS:
        loop.add_signal_handler(each, end, each)
    try:
        yield
    except asyncio.CancelledError:
        if not came:
            raise
        raise SystemExit(128 + came[0]) from None
    finally:
        for each in ENDING_SIGNALS:
            loop.remove_signal_handler(each)
