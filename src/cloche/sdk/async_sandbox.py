"""The awaiting library: `cloche.sdk.sandbox`, the blocking one, is generated from it."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Awaitable, Callable, Generator, Mapping
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack, overload

from cloche import errors
from cloche.events import AnyEvent, Run, RunFold
from cloche.input_answers import InputSource
from cloche.model import Mark, OnDeadline, SandboxInfo, SnapshotInfo, Variables, check_seconds
from cloche.notebook import History
from cloche.sdk import backend
from cloche.sdk.arguments import (
    LimitsLike,
    NetworkLike,
    PathLike,
    SandboxState,
    SecretsLike,
    TemplateLike,
    VolumesLike,
    check_count,
    check_flag,
    check_state,
    checkpoint_id,
    detached_input,
    input_from_loop,
    run_env,
    sandbox_spec,
    writable_path,
)
from cloche.sdk.async_parts import (
    AsyncAttachment,
    AsyncCommands,
    AsyncDetachedRun,
    AsyncFiles,
    AsyncNetwork,
    AsyncStream,
)
from cloche.sdk.backend import Transport, open_transport
from cloche.sdk.tools import ToolsLike, answering_tools, offered_tools, toolbox_from_loop

AsyncInput = InputSource | Callable[[str], Awaitable[str]]  # awaiting only
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


class AsyncSandbox:
    """A sealed place to run code in: `async with AsyncSandbox() as box`, or `box = await AsyncSandbox()`.

        async with cloche.AsyncSandbox() as box:
            await box.run("x = 6 * 7")
            (await box.run("x")).text    # '42': state lives on

    It may be used from several tasks, threads and event loops.

    `template` can also be a snapshot of a sandbox. `timeout` is its lifetime in seconds (by default until
    closed); with `on_timeout="pause"` it is paused then, with its memory unless `pause_memory` is False. With
    `auto_resume` any use of a paused sandbox resumes it; else that raises SandboxPaused. `network` is its network
    policy, such as `{"allow": ["pypi.org", "*.example.com"]}`: by default that of the template and the host,
    which allows nothing unless they were changed; False or `{}` allows nothing in any case. `secrets`, each
    `{"domain", "header" or "name", "value"}`, are added to its requests on their way out, and never seen inside.
    `volumes` has named volumes by path, such as `{"/mnt/data-set": volume}`. With `url` and `api_key`, or
    CLOCHE_URL and CLOCHE_API_KEY, it is on a server, else in this process, where the first use of the built-in
    template builds it. Raises TemplateNotFound, InvalidRequest, IsolationUnavailable (`cloche doctor` explains),
    NurseryFailed, Unauthenticated, or Unavailable where there is no server.
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
        # blocking: self._create_once()

    @classmethod
    async def connect(
        cls, id: str, *, timeout: float | None = None, url: str | None = None, api_key: str | None = None
    ) -> AsyncSandbox:
        """The sandbox of that id; one that is paused is resumed. `timeout` moves its deadline, in seconds from now.

        Raises SandboxNotFound, SandboxExpired, SandboxKilled or SandboxLost.
        """
        check_seconds("timeout", timeout)
        transport = await open_transport(url, api_key)
        return cls._from_core(transport, await transport.acall(lambda: transport.connect(id, timeout)))

    @classmethod
    async def list(
        cls, state: SandboxState | None = None, *, url: str | None = None, api_key: str | None = None
    ) -> builtins.list[SandboxInfo]:
        """The caller's sandboxes that run or are paused; with `state`, "running" or "paused", only these."""
        check_state(state)
        transport = await open_transport(url, api_key)
        return [each for each in await transport.acall(transport.list) if state in (None, each.state)]

    @classmethod
    def _from_core(cls, transport: Transport, core: backend.BackendSandbox) -> AsyncSandbox:
        self = cls()  # blocking: self = cls.__new__(cls)
        self._attach_core(transport, core)
        return self

    def __await__(self) -> Generator[Any, None, AsyncSandbox]:  # awaiting only
        return self._create_once().__await__()

    async def __aenter__(self) -> AsyncSandbox:
        return await self._create_once()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _create_once(self) -> AsyncSandbox:
        if self._made is None:
            transport = await open_transport(*self._server)
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
        """Stops its programs and its deadline; `resume` or `connect` lets them go on as if nothing had been.

        Without `memory` they end: only its files, environment and network policy are kept, and it takes no memory.
        Raises SandboxPaused if it is paused already, and Unavailable if it cannot be paused: then it runs on.
        """
        check_flag("memory", memory)
        return await self._transport.acall(lambda: self._core.pause(memory=memory))

    async def resume(self, *, timeout: float | None = None) -> SandboxInfo:
        """Lets it go on, for `timeout` seconds, or as many as it was first given. Harmless when it runs."""
        check_seconds("timeout", timeout)
        return await self._transport.acall(lambda: self._core.resume(timeout))

    async def snapshot(self, name: str | None = None) -> SnapshotInfo:
        """Keeps its files and environment as they are now: `Sandbox(template=snapshot)` begins there.

        A name that another snapshot has is this one's from now on. Programs stand still for a moment; one that is
        paused stays so. Raises Unavailable or TooLarge.
        """
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
        """Runs code to its end. What the program does wrong is in the Run, never an exception.

        `env` and `cwd` hold for this run. `timeout` in seconds; when it passes the program is interrupted, then
        killed. `input` answers `input()`: a string's lines, strings, or a callable that is given the prompt.
        `on_event` sees every event as it comes. `tools` are functions by their names, or `cloche.Tool`s, which the code
        may call: `await get_weather(city="SF")`. Those of a `gather` run at the same time, each in a thread, and the
        program's time stands still meanwhile.

        With `detach` it returns at once with an AsyncDetachedRun, which continues without a client: see `attach`. No
        client answers it, so `input` must be text or lines, and there are no `on_event` and `tools`.

        Cancelling the task interrupts the program. `tools` that are coroutine functions run on the caller's loop.
        """
        chosen = self._choose_context(context)
        return await chosen.run(
            code, env=env, cwd=cwd, timeout=timeout, input=input, on_event=on_event, tools=tools, detach=detach
        )

    def attach(self, id: str, *, after: int = 0) -> AsyncAttachment:
        """The events of a detached run after number `after`, live until `Ended`.

        Raises RunNotFound, and InvalidRequest if it has not that many events.
        """
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
        """The events of a run as they come, `Started` to `Ended`. Leaving it early interrupts the program."""
        return self._choose_context(context).stream(code, env=env, cwd=cwd, timeout=timeout, input=input, tools=tools)

    async def variables(self, *, context: AsyncContext | str | None = None) -> Variables:
        """The variables of a context, by default of the default one; see `AsyncContext.variables`."""
        return await self._choose_context(context).variables()

    async def history(self, *, context: AsyncContext | str | None = None) -> History:
        """The cells that ran in it, or in one context, with their outputs. The history is bounded: see `dropped`."""
        if context is not None:
            return await self._choose_context(context).history()
        return await self._transport.acall(self._core.history)

    async def export_notebook(self, path: PathLike, *, context: AsyncContext | str | None = None) -> None:
        """Writes the history of a context, by default of the default one, to a file that Jupyter opens."""
        await self._choose_context(context).export_notebook(path)

    def _choose_context(self, context: AsyncContext | str | None) -> AsyncContext:
        if isinstance(context, AsyncContext):
            return context
        return AsyncContext(self._transport, self._core.context(context))


class AsyncContext:
    """A namespace with its own kernel in a sandbox. Keeps its id when it is restarted or its kernel dies."""

    def __init__(self, transport: Transport, core: backend.BackendContext):
        self._transport = transport
        self._core = core

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
        given = run_env(env, cwd)
        answers = input_from_loop(input)  # blocking: answers = input
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
        given, toolbox = run_env(env, cwd), toolbox_from_loop(tools)
        answers = input_from_loop(input)  # blocking: answers = input
        return AsyncStream(
            self._transport,
            lambda: answering_tools(
                self._core.execute(
                    code, env=given, cwd=cwd, timeout_seconds=timeout, input=answers, tools=offered_tools(toolbox)
                ),
                toolbox,
            ),
        )

    async def interrupt(self) -> bool:
        """Interrupts the running execution; the state is kept. False if nothing runs."""
        return await self._transport.acall(self._core.interrupt)

    async def restart(self) -> None:
        """Starts a new kernel under the same id; the state is lost, and a running execution ends."""
        await self._transport.acall(self._core.restart)

    async def checkpoint(self) -> Mark:
        """Saves its state (variables, imports, everything in memory) as it is when the running execution has ended.

        Raises NotCopyable for a program with threads, connections or child processes, and InvalidRequest where there
        are 32 already. Files are not part of it.
        """
        return await self._transport.acall(self._core.checkpoint)

    async def rollback(self, mark: Mark | str) -> None:
        """Takes its state back to a checkpoint, which stays. Processes that it has started since are killed.

        Files stay as they are. Raises CheckpointNotFound.
        """
        id = checkpoint_id(mark)
        await self._transport.acall(lambda: self._core.rollback(id))

    async def fork(self, count: int = 1) -> list[Self]:
        """New contexts of its sandbox that have its state; from then on each has its own. Raises as `checkpoint`."""
        made = await self._transport.acall(lambda: self._core.fork(count))
        return [type(self)(self._transport, core) for core in made]

    async def checkpoints(self) -> list[Mark]:
        """Its checkpoints, the oldest first."""
        return await self._transport.acall(self._core.checkpoints)

    async def forget(self, mark: Mark | str) -> None:
        """Lets go of a checkpoint, and of the memory that it holds. Raises CheckpointNotFound."""
        id = checkpoint_id(mark)
        await self._transport.acall(lambda: self._core.forget(id))

    async def variables(self) -> Variables:
        """The names in its namespace and their values, read between two executions, without running the program's
        code.

        Values of Python's own types, arrays and tables have a preview; other objects have the name of their class.
        Raises InvalidRequest for a language that has none.
        """
        return await self._transport.acall(self._core.variables)

    async def history(self) -> History:
        """The cells that ran in it with their outputs, in their order. The history is bounded: see `dropped`."""
        return await self._transport.acall(self._core.history)

    async def export_notebook(self, path: PathLike) -> None:
        """Writes its history to a file that Jupyter opens. Raises OSError where it cannot be written."""
        place = writable_path(path)
        content = await self._transport.acall(self._core.notebook)
        await asyncio.to_thread(place.write_bytes, content)  # blocking: place.write_bytes(content)

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


async def _run_watched(stream: AsyncStream, on_event: OnEvent) -> Run:
    folding = RunFold()
    async with stream:
        async for event in stream:
            folding.feed(event)
            on_event(event)
    return folding.run()


def _ignore_event(event: AnyEvent) -> None:
    """The `on_event` of a run without a watcher."""
