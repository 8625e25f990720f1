"""The asynchronous library: the same as `cloche.sdk.sandbox`, with `await` and `async for`."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Awaitable, Callable, Generator, Mapping
from types import TracebackType
from typing import Any, Literal, TypedDict, Unpack, overload

from cloche import errors
from cloche.events import AnyEvent, Run, RunFold
from cloche.input_answers import InputSource
from cloche.model import OnDeadline, SandboxInfo, SnapshotInfo, check_seconds
from cloche.sdk import backend
from cloche.sdk.arguments import (
    LimitsLike,
    NetworkLike,
    SandboxState,
    SecretsLike,
    TemplateLike,
    VolumesLike,
    check_count,
    check_flag,
    check_state,
    detached_input,
    input_from_loop,
    run_env,
    sandbox_spec,
)
from cloche.sdk.async_parts import AsyncAttachment, AsyncCommands, AsyncDetachedRun, AsyncFiles, AsyncStream
from cloche.sdk.backend import Transport, transport_to
from cloche.sdk.inspect import AsyncContextCheckpoints, AsyncContextInspection, AsyncSandboxInspection
from cloche.sdk.network import AsyncNetwork
from cloche.sdk.tools import ToolsLike, answering_tools, toolbox_from_loop

AsyncInput = InputSource | Callable[[str], Awaitable[str]]
OnEvent = Callable[[AnyEvent], object]


class AsyncRunOptions(TypedDict, total=False):
    """The keyword arguments of `AsyncContext.run`."""

    env: Mapping[str, str] | None
    cwd: str | None
    timeout: float | None
    input: AsyncInput
    on_event: OnEvent | None
    tools: ToolsLike


class AsyncSandboxRunOptions(AsyncRunOptions, total=False):
    """The keyword arguments of `AsyncSandbox.run`."""

    context: AsyncContext | str | None


class AsyncSandbox(AsyncSandboxInspection["AsyncContext"]):
    """A sealed place to run code in: `async with AsyncSandbox() as box`, or `box = await AsyncSandbox()`.

    It may be used from several tasks, threads and event loops. Everything else is as in `Sandbox`.
    """

    def __init__(
        self,
        template: TemplateLike = "python",
        *,
        env: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        limits: LimitsLike = None,
        timeout: float | None = None,
        network: NetworkLike = None,
        secrets: SecretsLike = None,
        on_timeout: OnDeadline = "kill",
        pause_memory: bool = True,
        auto_resume: bool = False,
        volumes: VolumesLike = None,
        url: str | None = None,
        api_key: str | None = None,
    ):
        self._server = (url, api_key)
        self._spec = sandbox_spec(
            template, env, metadata, limits, timeout, network, secrets, on_timeout, pause_memory, auto_resume, volumes
        )
        self._made: backend.BackendSandbox | None = None

    @classmethod
    async def connect(
        cls, id: str, *, timeout: float | None = None, url: str | None = None, api_key: str | None = None
    ) -> AsyncSandbox:
        """The sandbox of that id; one that is paused is resumed. See `Sandbox.connect`."""
        check_seconds("timeout", timeout)
        transport = await _open_transport(url, api_key)
        return cls._from_core(transport, await transport.acall(lambda: transport.connect(id, timeout)))

    @classmethod
    async def list(
        cls, state: SandboxState | None = None, *, url: str | None = None, api_key: str | None = None
    ) -> builtins.list[SandboxInfo]:
        """The caller's sandboxes that run or are paused; with `state`, "running" or "paused", only these."""
        check_state(state)
        transport = await _open_transport(url, api_key)
        return [each for each in await transport.acall(transport.list) if state in (None, each.state)]

    @classmethod
    def _from_core(cls, transport: Transport, core: backend.BackendSandbox) -> AsyncSandbox:
        self = cls()
        self._attach_core(transport, core)
        return self

    def __await__(self) -> Generator[Any, None, AsyncSandbox]:
        return self._create_once().__await__()

    async def __aenter__(self) -> AsyncSandbox:
        return await self._create_once()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _create_once(self) -> AsyncSandbox:
        if self._made is None:
            transport = await _open_transport(*self._server)
            self._attach_core(transport, await transport.acall(lambda: transport.create(self._spec)))
        return self

    def _attach_core(self, transport: Transport, core: backend.BackendSandbox) -> None:
        self._transport = transport
        self._made = core
        self.files = AsyncFiles(transport, core)
        self.commands = AsyncCommands(transport, core)
        self.network = AsyncNetwork(transport, core)
        self.contexts = AsyncContexts(transport, core)

    @property
    def _core(self) -> backend.BackendSandbox:
        if self._made is None:
            raise errors.InvalidRequest("await the AsyncSandbox first, or use it with `async with`")
        return self._made

    def __repr__(self) -> str:
        return f"<cloche.AsyncSandbox {self._made.id if self._made else 'not yet made'}>"

    @property
    def id(self) -> str:
        return self._core.id

    async def info(self) -> SandboxInfo:
        """The description of the sandbox and its lifetime, also when it has ended."""
        return await self._transport.acall(self._core.describe)

    async def renew(self, seconds: float) -> SandboxInfo:
        """Moves its deadline to `seconds` from now, at most to the longest lifetime that the host allows."""
        return await self._transport.acall(lambda: self._core.renew(seconds))

    async def kill(self) -> None:
        """Ends it. Nothing of it remains. Harmless when it has ended."""
        await self._transport.acall(self._core.kill)

    async def close(self) -> None:
        """The same as `kill`."""
        if not self._core.ended:
            await self.kill()

    async def pause(self, *, memory: bool = True) -> SandboxInfo:
        """Stops all its programs, until `resume` or `connect`. See `Sandbox.pause`."""
        check_flag("memory", memory)
        return await self._transport.acall(lambda: self._core.pause(memory=memory))

    async def resume(self, *, timeout: float | None = None) -> SandboxInfo:
        """Lets it go on, for `timeout` seconds, or as many as it was first given. Harmless when it runs."""
        check_seconds("timeout", timeout)
        return await self._transport.acall(lambda: self._core.resume(timeout))

    async def snapshot(self, name: str | None = None) -> SnapshotInfo:
        """Keeps its files and environment as they are now. See `Sandbox.snapshot`."""
        return await self._transport.acall(lambda: self._core.snapshot(name))

    async def fork(self, count: int = 1, *, timeout: float | None = None) -> builtins.list[AsyncSandbox]:
        """Makes `count` new sandboxes with its files and environment, without its memory. It runs on itself."""
        check_count(count)
        check_seconds("timeout", timeout)
        made = await self._transport.acall(lambda: self._core.fork(count, timeout))
        return [self._from_core(self._transport, each) for each in made]

    @overload
    async def run(self, code: str, *, detach: Literal[False] = False, **how: Unpack[AsyncSandboxRunOptions]) -> Run: ...

    @overload
    async def run(
        self, code: str, *, detach: Literal[True], **how: Unpack[AsyncSandboxRunOptions]
    ) -> AsyncDetachedRun: ...

    async def run(
        self,
        code: str,
        *,
        context: AsyncContext | str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        input: AsyncInput = None,
        on_event: OnEvent | None = None,
        tools: ToolsLike = None,
        detach: bool = False,
    ) -> Run | AsyncDetachedRun:
        """Runs code to its end; see `Sandbox.run`. Cancelling the task interrupts the program.

        `tools` that are coroutine functions run on the caller's own event loop.
        """
        chosen = self._choose_context(context)
        return await chosen.run(
            code, env=env, cwd=cwd, timeout=timeout, input=input, on_event=on_event, tools=tools, detach=detach
        )

    def attach(self, id: str, *, after: int = 0) -> AsyncAttachment:
        """The events of a detached run after number `after`, live until `Ended`; see `Sandbox.attach`."""
        return AsyncAttachment(self._transport, id, after)

    async def runs(self) -> builtins.list[AsyncDetachedRun]:
        """Its detached runs that are kept, the newest first."""
        found = await self._transport.acall(lambda: self._transport.runs.list(self.id))
        return [AsyncDetachedRun(self._transport, each) for each in found]

    def stream(
        self,
        code: str,
        *,
        context: AsyncContext | str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        input: AsyncInput = None,
        tools: ToolsLike = None,
    ) -> AsyncStream:
        """The events of a run as they come, `Started` to `Ended`. Leaving its `async with` early interrupts."""
        return self._choose_context(context).stream(code, env=env, cwd=cwd, timeout=timeout, input=input, tools=tools)

    def _choose_context(self, context: AsyncContext | str | None) -> AsyncContext:
        if isinstance(context, AsyncContext):
            return context
        return AsyncContext(self._transport, self._core.context(context))


class AsyncContext(AsyncContextCheckpoints, AsyncContextInspection):
    """A namespace with its own kernel in a sandbox. Keeps its id when it is restarted or its kernel dies."""

    def __repr__(self) -> str:
        return f"<cloche.AsyncContext {self.id}>"

    @property
    def id(self) -> str:
        return self._core.id

    @property
    def language(self) -> str:
        return self._core.language

    @property
    def cwd(self) -> str:
        return self._core.cwd

    @overload
    async def run(self, code: str, *, detach: Literal[False] = False, **how: Unpack[AsyncRunOptions]) -> Run: ...

    @overload
    async def run(self, code: str, *, detach: Literal[True], **how: Unpack[AsyncRunOptions]) -> AsyncDetachedRun: ...

    @overload
    async def run(self, code: str, *, detach: bool, **how: Unpack[AsyncRunOptions]) -> Run | AsyncDetachedRun: ...

    async def run(
        self,
        code: str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        input: AsyncInput = None,
        on_event: OnEvent | None = None,
        tools: ToolsLike = None,
        detach: bool = False,
    ) -> Run | AsyncDetachedRun:
        """As `AsyncSandbox.run`."""
        check_flag("detach", detach)
        if detach:
            return await self._start_detached(code, env, cwd, timeout, detached_input(input, on_event, tools))
        if on_event is not None or tools is not None:
            stream = self.stream(code, env=env, cwd=cwd, timeout=timeout, input=input, tools=tools)
            return await _run_watched(stream, on_event or _ignore_event)
        given, answers = run_env(env, cwd), input_from_loop(input)
        return await self._transport.acall(
            lambda: self._core.run(code, env=given, cwd=cwd, timeout_seconds=timeout, input=answers)
        )

    def stream(
        self,
        code: str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        input: AsyncInput = None,
        tools: ToolsLike = None,
    ) -> AsyncStream:
        """As `AsyncSandbox.stream`."""
        given, answers = run_env(env, cwd), input_from_loop(input)
        toolbox = toolbox_from_loop(tools)
        offered = toolbox.offered if toolbox is not None else ()

        async def make() -> backend.BackendExecution:
            execution = await self._core.execute(
                code, env=given, cwd=cwd, timeout_seconds=timeout, input=answers, tools=offered
            )
            return answering_tools(execution, toolbox)

        return AsyncStream(self._transport, make)

    async def interrupt(self) -> bool:
        """Interrupts the running execution; the state is kept. False if nothing runs."""
        return await self._transport.acall(self._core.interrupt)

    async def restart(self) -> None:
        """Starts a new kernel under the same id; the state is lost, and a running execution ends."""
        await self._transport.acall(self._core.restart)

    async def _start_detached(
        self,
        code: str,
        env: Mapping[str, str] | None,
        cwd: str | None,
        timeout: float | None,
        input: builtins.list[str] | None,
    ) -> AsyncDetachedRun:
        given = run_env(env, cwd)
        info = await self._transport.acall(
            lambda: self._core.detach(code, env=given, cwd=cwd, timeout_seconds=timeout, input=input)
        )
        return AsyncDetachedRun(self._transport, info)


class AsyncContexts:
    """A sandbox's contexts. There is always a default one, which `AsyncSandbox.run` uses."""

    def __init__(self, transport: Transport, core: backend.BackendSandbox):
        self._transport = transport
        self._core = core

    async def create(self, language: str = "python", cwd: str | None = None) -> AsyncContext:
        """A new context. Raises InvalidRequest for a language that does not exist."""
        core = await self._transport.acall(lambda: self._core.create_context(language=language, cwd=cwd))
        return AsyncContext(self._transport, core)

    async def list(self) -> list[AsyncContext]:
        return [AsyncContext(self._transport, core) for core in await self._transport.acall(self._core.list_contexts)]

    async def get(self, id: str = "default") -> AsyncContext:
        """Raises ContextNotFound."""
        return AsyncContext(self._transport, await self._transport.acall(lambda: self._core.find_context(id)))

    async def restart(self, context: AsyncContext | str) -> None:
        """Raises ContextNotFound."""
        await (context if isinstance(context, AsyncContext) else await self.get(context)).restart()

    async def remove(self, context: AsyncContext | str) -> None:
        """Ends a context with all that it started. Raises ContextNotFound."""
        id = context if isinstance(context, str) else context.id
        await self._transport.acall(lambda: self._core.remove_context(id))


async def arun(code: str, *, template: str = "python", timeout: float | None = None, input: AsyncInput = None) -> Run:
    """Runs code in a sandbox of its own, which is gone afterwards."""
    async with AsyncSandbox(template) as box:
        return await box.run(code, timeout=timeout, input=input)


async def _open_transport(url: str | None, api_key: str | None) -> Transport:
    """An engine's first start takes a moment, which must not stop the caller's loop."""
    return await asyncio.to_thread(transport_to, url, api_key)


async def _run_watched(stream: AsyncStream, on_event: OnEvent) -> Run:
    folding = RunFold()
    async with stream:
        async for event in stream:
            folding.feed(event)
            on_event(event)
    return folding.run()


def _ignore_event(event: AnyEvent) -> None:
    """The `on_event` of a run without a watcher."""
