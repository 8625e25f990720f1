"""The synchronous library: every call waits for its result."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Literal, TypedDict, Unpack, overload

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
    run_env,
    sandbox_spec,
)
from cloche.sdk.backend import Transport, transport_to
from cloche.sdk.inspect import ContextCheckpoints, ContextInspection, SandboxInspection
from cloche.sdk.network import Network
from cloche.sdk.parts import Attachment, Commands, DetachedRun, Files, Stream
from cloche.sdk.tools import ToolsLike, answering_tools, make_toolbox

OnEvent = Callable[[AnyEvent], object]


class RunOptions(TypedDict, total=False):
    """The keyword arguments of `Context.run`."""

    env: Mapping[str, str] | None
    cwd: str | None
    timeout: float | None
    input: InputSource
    on_event: OnEvent | None
    tools: ToolsLike


class SandboxRunOptions(RunOptions, total=False):
    """The keyword arguments of `Sandbox.run`."""

    context: Context | str | None


class Sandbox(SandboxInspection["Context"]):
    """A sealed place to run code in. Use it with `with`, or `close()` it; several threads may use it.

        with cloche.Sandbox() as box:
            box.run("x = 6 * 7")
            box.run("x").text            # '42': state lives on

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
        spec = sandbox_spec(
            template, env, metadata, limits, timeout, network, secrets, on_timeout, pause_memory, auto_resume, volumes
        )
        transport = transport_to(url, api_key)
        self._attach_core(transport, transport.call(lambda: transport.create(spec)))

    @classmethod
    def connect(
        cls, id: str, *, timeout: float | None = None, url: str | None = None, api_key: str | None = None
    ) -> Sandbox:
        """The sandbox of that id; one that is paused is resumed. `timeout` moves its deadline, in seconds from now.

        Raises SandboxNotFound, SandboxExpired, SandboxKilled or SandboxLost.
        """
        check_seconds("timeout", timeout)
        transport = transport_to(url, api_key)
        return cls._from_core(transport, transport.call(lambda: transport.connect(id, timeout)))

    @classmethod
    def list(
        cls, state: SandboxState | None = None, *, url: str | None = None, api_key: str | None = None
    ) -> builtins.list[SandboxInfo]:
        """The caller's sandboxes that run or are paused; with `state`, "running" or "paused", only these."""
        check_state(state)
        transport = transport_to(url, api_key)
        return [each for each in transport.call(transport.list) if state in (None, each.state)]

    @classmethod
    def _from_core(cls, transport: Transport, core: backend.BackendSandbox) -> Sandbox:
        self = cls.__new__(cls)
        self._attach_core(transport, core)
        return self

    def _attach_core(self, transport: Transport, core: backend.BackendSandbox) -> None:
        self._transport = transport
        self._core = core
        self.files = Files(transport, core)
        self.commands = Commands(transport, core)
        self.network = Network(transport, core)
        self.contexts = Contexts(transport, core)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<cloche.Sandbox {self.id}>"

    @property
    def id(self) -> str:
        return self._core.id

    def info(self) -> SandboxInfo:
        """The description of the sandbox and its lifetime, also when it has ended."""
        return self._transport.call(self._core.describe)

    def renew(self, seconds: float) -> SandboxInfo:
        """Moves its deadline to `seconds` from now, at most to the longest lifetime that the host allows."""
        return self._transport.call(lambda: self._core.renew(seconds))

    def kill(self) -> None:
        """Ends it. Nothing of it remains. Harmless when it has ended."""
        self._transport.call(self._core.kill)

    def close(self) -> None:
        """The same as `kill`."""
        if not self._core.ended:
            self.kill()

    def pause(self, *, memory: bool = True) -> SandboxInfo:
        """Stops its programs and its deadline; `resume` or `connect` lets them go on as if nothing had been.

        Without `memory` they end: only its files, environment and network policy are kept, and it takes no memory.
        Raises SandboxPaused if it is paused already, and Unavailable if it cannot be paused: then it runs on.
        """
        check_flag("memory", memory)
        return self._transport.call(lambda: self._core.pause(memory=memory))

    def resume(self, *, timeout: float | None = None) -> SandboxInfo:
        """Lets it go on, for `timeout` seconds, or as many as it was first given. Harmless when it runs."""
        check_seconds("timeout", timeout)
        return self._transport.call(lambda: self._core.resume(timeout))

    def snapshot(self, name: str | None = None) -> SnapshotInfo:
        """Keeps its files and environment as they are now: `Sandbox(template=snapshot)` begins there.

        A name that another snapshot has is this one's from now on. Programs stand still for a moment; one that is
        paused stays so. Raises Unavailable or TooLarge.
        """
        return self._transport.call(lambda: self._core.snapshot(name))

    def fork(self, count: int = 1, *, timeout: float | None = None) -> builtins.list[Sandbox]:
        """Makes `count` new sandboxes with its files and environment, without its memory. It runs on itself."""
        check_count(count)
        check_seconds("timeout", timeout)
        made = self._transport.call(lambda: self._core.fork(count, timeout))
        return [self._from_core(self._transport, each) for each in made]

    @overload
    def run(self, code: str, *, detach: Literal[False] = False, **how: Unpack[SandboxRunOptions]) -> Run: ...

    @overload
    def run(self, code: str, *, detach: Literal[True], **how: Unpack[SandboxRunOptions]) -> DetachedRun: ...

    def run(
        self,
        code: str,
        *,
        context: Context | str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        input: InputSource = None,
        on_event: OnEvent | None = None,
        tools: ToolsLike = None,
        detach: bool = False,
    ) -> Run | DetachedRun:
        """Runs code to its end. What the program does wrong is in the Run, never an exception.

        `env` and `cwd` hold for this run. `timeout` in seconds; when it passes the program is interrupted, then
        killed. `input` answers `input()`: a string's lines, strings, or a callable that is given the prompt.
        `on_event` sees every event as it comes. `tools` are functions by their names, or `cloche.Tool`s, which the code
        may call: `await get_weather(city="SF")`. Those of a `gather` run at the same time, each in a thread, and the
        program's time stands still meanwhile.

        With `detach` it returns at once with a DetachedRun, which continues without a client: see `attach`. No client
        answers it, so `input` must be text or lines, and there are no `on_event` and `tools`.
        """
        chosen = self._choose_context(context)
        return chosen.run(
            code, env=env, cwd=cwd, timeout=timeout, input=input, on_event=on_event, tools=tools, detach=detach
        )

    def attach(self, id: str, *, after: int = 0) -> Attachment:
        """The events of a detached run after number `after`, live until `Ended`.

        Raises RunNotFound, and InvalidRequest if it has not that many events.
        """
        return Attachment(self._transport, id, after)

    def runs(self) -> builtins.list[DetachedRun]:
        """Its detached runs that are kept, the newest first."""
        found = self._transport.call(lambda: self._transport.runs.list(self.id))
        return [DetachedRun(self._transport, each) for each in found]

    def stream(
        self,
        code: str,
        *,
        context: Context | str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        input: InputSource = None,
        tools: ToolsLike = None,
    ) -> Stream:
        """The events of a run as they come, `Started` to `Ended`. Leaving it early interrupts the program."""
        return self._choose_context(context).stream(code, env=env, cwd=cwd, timeout=timeout, input=input, tools=tools)

    def _choose_context(self, context: Context | str | None) -> Context:
        if isinstance(context, Context):
            return context
        return Context(self._transport, self._core.context(context))


class Context(ContextCheckpoints, ContextInspection):
    """A namespace with its own kernel in a sandbox. Keeps its id when it is restarted or its kernel dies."""

    def __repr__(self) -> str:
        return f"<cloche.Context {self.id}>"

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
    def run(self, code: str, *, detach: Literal[False] = False, **how: Unpack[RunOptions]) -> Run: ...

    @overload
    def run(self, code: str, *, detach: Literal[True], **how: Unpack[RunOptions]) -> DetachedRun: ...

    @overload
    def run(self, code: str, *, detach: bool, **how: Unpack[RunOptions]) -> Run | DetachedRun: ...

    def run(
        self,
        code: str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        input: InputSource = None,
        on_event: OnEvent | None = None,
        tools: ToolsLike = None,
        detach: bool = False,
    ) -> Run | DetachedRun:
        """As `Sandbox.run`."""
        check_flag("detach", detach)
        if detach:
            return self._start_detached(code, env, cwd, timeout, detached_input(input, on_event, tools))
        if on_event is not None or tools is not None:
            stream = self.stream(code, env=env, cwd=cwd, timeout=timeout, input=input, tools=tools)
            return self._run_watched(stream, on_event or _ignore_event)
        given = run_env(env, cwd)
        return self._transport.call(
            lambda: self._core.run(code, env=given, cwd=cwd, timeout_seconds=timeout, input=input)
        )

    def stream(
        self,
        code: str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        input: InputSource = None,
        tools: ToolsLike = None,
    ) -> Stream:
        """As `Sandbox.stream`."""
        given, toolbox = run_env(env, cwd), make_toolbox(tools)
        offered = toolbox.offered if toolbox is not None else ()

        async def make() -> backend.BackendExecution:
            execution = await self._core.execute(
                code, env=given, cwd=cwd, timeout_seconds=timeout, input=input, tools=offered
            )
            return answering_tools(execution, toolbox)

        return Stream(self._transport, make)

    def interrupt(self) -> bool:
        """Interrupts the running execution; the state is kept. False if nothing runs."""
        return self._transport.call(self._core.interrupt)

    def restart(self) -> None:
        """Starts a new kernel under the same id; the state is lost, and a running execution ends."""
        self._transport.call(self._core.restart)

    def _start_detached(
        self,
        code: str,
        env: Mapping[str, str] | None,
        cwd: str | None,
        timeout: float | None,
        input: builtins.list[str] | None,
    ) -> DetachedRun:
        given = run_env(env, cwd)
        info = self._transport.call(
            lambda: self._core.detach(code, env=given, cwd=cwd, timeout_seconds=timeout, input=input)
        )
        return DetachedRun(self._transport, info)

    def _run_watched(self, stream: Stream, on_event: OnEvent) -> Run:
        folding = RunFold()
        with stream:
            for event in stream:
                folding.feed(event)
                on_event(event)
        return folding.run()


class Contexts:
    """A sandbox's contexts. There is always a default one, which `Sandbox.run` uses."""

    def __init__(self, transport: Transport, core: backend.BackendSandbox):
        self._transport = transport
        self._core = core

    def create(self, language: str = "python", cwd: str | None = None) -> Context:
        """A new context. Raises InvalidRequest for a language that does not exist."""
        core = self._transport.call(lambda: self._core.create_context(language=language, cwd=cwd))
        return Context(self._transport, core)

    def list(self) -> list[Context]:
        return [Context(self._transport, core) for core in self._transport.call(self._core.list_contexts)]

    def get(self, id: str = "default") -> Context:
        """Raises ContextNotFound."""
        return Context(self._transport, self._transport.call(lambda: self._core.find_context(id)))

    def restart(self, context: Context | str) -> None:
        """Raises ContextNotFound."""
        (context if isinstance(context, Context) else self.get(context)).restart()

    def remove(self, context: Context | str) -> None:
        """Ends a context with all that it started. Raises ContextNotFound."""
        id = context if isinstance(context, str) else context.id
        self._transport.call(lambda: self._core.remove_context(id))


def run(code: str, *, template: str = "python", timeout: float | None = None, input: InputSource = None) -> Run:
    """Runs code in a sandbox of its own, which is gone afterwards."""
    with Sandbox(template) as box:
        return box.run(code, timeout=timeout, input=input)


def _ignore_event(event: AnyEvent) -> None:
    """The `on_event` of a run without a watcher."""
