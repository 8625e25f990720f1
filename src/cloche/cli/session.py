"""A sandbox for the length of a command, and an execution that a terminal watches, feeds and interrupts."""

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
from cloche.cli.network_options import NetworkOptions
from cloche.cli.progress import show_progress
from cloche.cli.terminal import EventView, StdinLines
from cloche.config import Config, PoolConfig, for_embedded_use
from cloche.engine.instance import live_control_sockets
from cloche.events import Ended, Input
from cloche.model import SandboxSpec
from cloche.sdk.backend import BackendExecution, BackendSandbox

if TYPE_CHECKING:
    from cloche.protocol.requests import CreateSandbox

EXIT_INTERRUPTED = 130
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.asynccontextmanager
async def open_sandbox(
    config: Config,
    template: str,
    *,
    env: Mapping[str, str] | None = None,
    limits: Mapping[str, float] | None = None,
    network: NetworkOptions | None = None,
    alone: bool = False,
) -> AsyncIterator[BackendSandbox]:
    """A new sandbox: of a server that runs in the data directory, else, or if `alone`, of a nursery of its own.

    `limits` change the template's. Raises the errors of `Engine.create`.
    """
    network = network or NetworkOptions()
    policy = network_options.to_network_policy(network)
    spec = SandboxSpec(template=template, env=dict(env or {}), network=policy)  # refuses invalid values
    alone = alone or _chose_backend(config) or network.packages  # which a server's own operator decides there
    async with contextlib.AsyncExitStack() as stack:
        box: BackendSandbox | None = None
        servers = [] if alone else live_control_sockets(Path(config.data_dir) / "run")
        if servers:
            box = await stack.enter_async_context(_open_server_sandbox(servers[0], spec, limits or {}))
        if box is None:
            own = _enable_packages(config) if network.packages else config
            box = await stack.enter_async_context(_open_own_sandbox(own, spec, limits or {}))
        yield box


def _chose_backend(config: Config) -> bool:
    """Whether the backend is set by a flag: a server has its own, which may be another."""
    return config.origins.get("backend", "").startswith("flag")


def _enable_packages(config: Config) -> Config:
    return msgspec.structs.replace(config, packages=msgspec.structs.replace(config.packages, enabled=True))


@contextlib.asynccontextmanager
async def _open_server_sandbox(
    socket: Path, spec: SandboxSpec, limits: Mapping[str, float]
) -> AsyncIterator[BackendSandbox | None]:
    """A sandbox of that server, which ends with us however we end; None where it does not answer."""
    from cloche.sdk import remote_sandbox  # here, and below: without a server, none of this is needed
    from cloche.sdk.remote_server import ServerClient

    message = to_create_request(spec, limits)
    async with contextlib.aclosing(ServerClient(f"unix:{socket}", "")) as server:
        try:
            box = await remote_sandbox.create_requested(server, message)
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


def to_create_request(spec: SandboxSpec, limits: Mapping[str, float]) -> CreateSandbox:
    """The request to a server for such a sandbox; `limits` change the template's."""
    from cloche.protocol import requests

    changed = requests.LimitsRequest(**limits) if limits else None  # type: ignore[arg-type]
    return requests.CreateSandbox(
        template=spec.template,
        env=spec.env,
        limits=changed,
        network=None if spec.network is None else requests.policy_to_request(spec.network),
        secrets=[] if spec.network is None else requests.secrets_to_requests(spec.network),
    )


@contextlib.asynccontextmanager
async def attach_sandbox(config: Config, id: str) -> AsyncIterator[BackendSandbox]:
    """A sandbox that runs on a server of the data directory. It stays when this ends.

    Raises Unavailable where no server runs, SandboxNotFound, SandboxExpired, SandboxKilled or SandboxLost.
    """
    from cloche.cli.control import control_sockets, no_server_error
    from cloche.sdk import remote_sandbox
    from cloche.sdk.remote_server import ServerClient

    found = control_sockets(config)
    if not found:
        raise no_server_error(config)
    for last, socket in enumerate(found, 1 - len(found)):
        async with contextlib.aclosing(ServerClient(f"unix:{socket}", "")) as server:
            try:
                box = await remote_sandbox.connect_sandbox(server, id)
            except errors.SandboxNotFound:
                if last:
                    continue
                raise
            yield box
            return


@contextlib.asynccontextmanager
async def _open_own_sandbox(
    config: Config, spec: SandboxSpec, limits: Mapping[str, float]
) -> AsyncIterator[BackendSandbox]:
    """A sandbox of an engine for it alone. A built-in template is built first, with its progress on stderr."""
    from cloche.sdk.assembly import assemble_engine  # here: with a server, none of the engine is needed
    from cloche.sdk.local import LocalSandbox
    from cloche.templates import Catalogue, ensure_template

    alone = msgspec.structs.replace(
        for_embedded_use(config), pool=PoolConfig(ready=0)
    )  # one sandbox: none need wait in advance
    template = spec.template
    with (
        show_progress(f"building {template}") as report,
        contextlib.suppress(errors.TemplateNotFound),
    ):  # a snapshot, perhaps
        await asyncio.to_thread(ensure_template, Catalogue(config.data_dir, config.aliases), template, report)
    async with assemble_engine(alone, preload=False) as engine:
        if limits:
            usual = await engine.limits_of(template, spec.owner)
            spec = msgspec.structs.replace(spec, limits=msgspec.structs.replace(usual, **limits))
        yield LocalSandbox(engine, await engine.create(spec))


async def watch_execution(
    execution: BackendExecution, view: EventView, lines: StdinLines | None, presses: Sequence[Callable[[], object]]
) -> Ended:
    """Runs it: the view sees every event, `lines` answer `input()`. The n-th Ctrl-C does the n-th of `presses`."""
    answering: asyncio.Task[None] | None = None
    with on_interrupt(presses):
        try:
            async with execution:
                async for event in execution:
                    if isinstance(event, Input) and lines is not None:
                        answering = asyncio.create_task(_answer_input(execution, lines, view, event))
                    else:
                        view.show(event)
        finally:
            if answering is not None:
                answering.cancel()
                await asyncio.wait([answering])
    if execution.ended is None:
        raise errors.SandboxLost("the sandbox ended before the program did")
    return execution.ended


async def _answer_input(execution: BackendExecution, lines: StdinLines, view: EventView, asked: Input) -> None:
    """Shows the prompt only when the terminal has stopped to echo: the user may type a password at once."""
    execution.answer(await lines.next(secret=asked.secret, ask=lambda: view.show(asked)))


@contextlib.contextmanager
def on_interrupt(presses: Sequence[Callable[[], object]]) -> Iterator[None]:
    """While it lasts, the n-th Ctrl-C calls the n-th of `presses` on the loop; the last once more ends us at once."""
    loop = asyncio.get_running_loop()
    left = list(presses)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: Ctrl-C is for another process
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        # Not loop.add_signal_handler: this one also runs during a blocked write to a pipe without a reader.
        if not left:
            os._exit(EXIT_INTERRUPTED)  # the programs of the sandbox end with this process
        loop.call_soon_threadsafe(left.pop(0))

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def cancel_on_signal() -> Iterator[None]:
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
