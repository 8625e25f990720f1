"""One kernel, one FIFO of executions, one namespace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from cloche import errors
from cloche.engine.executions.checkpoints import KernelCheckpoints
from cloche.engine.executions.execution import Execution
from cloche.engine.executions.history import SandboxHistory
from cloche.engine.executions.kernel import KernelClient
from cloche.engine.executions.tools import SandboxTools
from cloche.engine.operations.audit import ENDED, STARTED
from cloche.engine.principal import current_principal
from cloche.engine.quotas.capacity import ExecutionSlots, Ticket
from cloche.engine.sandboxes.init_client import InitClient
from cloche.events import Ended
from cloche.input_answers import InputSource
from cloche.model import (
    DisplayOptions,
    Limits,
    Mark,
    ToolDefinition,
    Variables,
    check_command_size,
    check_copy_count,
    check_environment,
    check_seconds,
    new_id,
)

if TYPE_CHECKING:
    pass

# The part of a sandbox that its contexts use.


class ContextHost(Protocol):
    """The part of a sandbox that its contexts use."""

    limits: Limits
    tools: SandboxTools
    transcript: SandboxHistory
    turns: ExecutionSlots

    async def start_kernel(self, context: Context) -> KernelClient:
        """Raises SandboxLost or the error that init answers."""

    async def branch_kernel(self, origin: KernelClient) -> KernelClient:
        """A copy of that kernel. Raises NotCopyable, Unavailable or Gone."""

    def check_room(self, count: int) -> None:
        """Raises InvalidRequest unless it can have so many contexts more."""

    def add_contexts(self, contexts: list[Context]) -> None:
        """Raises as `check_room` and `check_running` do, with none added."""

    def oom_kills(self) -> int: ...

    def abandon(self, why: str) -> None: ...

    def execution_ended(self, ended: Ended) -> None:
        """Is called for each execution that has ended."""

    def count_execution(self) -> None:
        """Raises QuotaExceeded if there can be no more now."""

    def check_running(self) -> None:
        """Raises Gone if the sandbox has ended."""

    @property
    def has_deadline(self) -> bool: ...

    @property
    def ending(self) -> str | None: ...

    @property
    def guest(self) -> InitClient: ...


LANGUAGES = ("python", "javascript", "typescript", "bash")
EXIT_SECONDS = 10.0
_LONG_EXECUTION_SECONDS = 0.005  # an execution shorter than this did not run the sandbox out of memory


class Context:
    """Keeps its id when its kernel dies or is restarted; the state is lost then."""

    def __init__(
        self, home: ContextHost, id: str, *, language: str = "python", cwd: str, kernel: KernelClient | None = None
    ):
        if language not in LANGUAGES:
            raise errors.InvalidRequest(f"there is no language {language!r}: a context can be {', '.join(LANGUAGES)}")
        self.id = id
        self.language = language
        self.cwd = cwd
        self.created_at = time.time()
        self.removed = False
        self._home = home
        self._kernel: KernelClient | None = None
        self._turn = asyncio.Lock()  # FIFO
        self._starting = asyncio.Lock()
        self._running: Execution | None = None
        self._waiter: Ticket | None = None  # of the execution whose turn it is here, but not yet on this host
        self._began_at = 0.0
        self._asked_by = current_principal()  # who has it run what it runs
        self._oom_kills = 0
        self._notice: str | None = None
        self._marks = KernelCheckpoints()
        if kernel is not None:
            self._adopt_kernel(kernel)

    @property
    def limits(self) -> Limits:
        return self._home.limits

    @property
    def ending(self) -> str:
        return self._home.ending or "the context was removed"

    def execute(
        self,
        code: str,
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        input: InputSource = None,
        argv: Sequence[str] | None = None,
        until_deadline: bool = False,
        showing: DisplayOptions | None = None,
        tools: Sequence[ToolDefinition] = (),
        recorded: bool = True,
    ) -> Execution:
        """An execution, which starts when it is used. `timeout_seconds` counts from when the program starts.

        `env`, `cwd` and `argv` (its `sys.argv`) hold for as long as it runs. With `until_deadline` it has no time
        limit but the sandbox's deadline, where there is one. `tools` are functions for it, whose calls are reported
        as ToolsCalled events; its time does not run while it waits for them. It is in the sandbox's history if
        `recorded`. Raises InvalidRequest for invalid arguments, Gone if the sandbox has ended, QuotaExceeded, Busy.
        """
        self._home.check_running()
        self._check_exists()
        if not isinstance(code, str):
            raise errors.InvalidRequest(f"code must be a string, not {type(code).__name__}")
        check_environment(env or {})
        _check_argv(argv or (), env or {})
        check_seconds("timeout", timeout_seconds)
        if timeout_seconds is None and not (until_deadline and self._home.has_deadline):
            timeout_seconds = self._home.limits.execution_seconds
        self._home.turns.check()
        self._home.count_execution()
        return Execution(
            self,
            code,
            env=env or {},
            cwd=cwd,
            timeout_seconds=timeout_seconds,
            input=input,
            argv=argv,
            showing=showing or DisplayOptions(),
            offer=self._home.tools.make_offer(tools, language=self.language) if tools else None,
            heard=self._home.transcript.start_recording(self.id, self.language, code).hear if recorded else None,
        )

    async def variables(self) -> Variables:
        """The variables of its namespace, read between two executions without running any of the program's code.

        Empty for a context without a kernel. Raises ProtocolViolation for a kernel that lies, Unavailable for one
        that does not answer, or Gone.
        """
        self._check_usable()
        async with self._turn:
            self._check_usable()
            kernel = self._kernel
            if kernel is None or not kernel.alive:
                return Variables()
            await kernel.settle()
            return await kernel.inspect_variables()

    def interrupt(self) -> bool:
        """Interrupts the running execution (see `Execution.interrupt`). False if nothing runs."""
        if self._running is None:
            return False
        self._running.interrupt()
        return True

    async def restart(self) -> None:
        """Kills the kernel with all that it started and starts a new one. A running execution ends as `died`."""
        self._home.check_running()
        self._check_exists()
        self.stop("kernel killed: the context was restarted")
        await self.kernel()
        self._notice = None

    async def checkpoint(self) -> Mark:
        """Keeps its state as it is between two executions. Files are no part of it.

        Raises NotCopyable if the running program cannot be copied, InvalidRequest if there are too many marks.
        """
        self._marks.check_room()
        async with self._idle_kernel() as kernel:
            self._marks.check_room()
            copy = await self._home.branch_kernel(kernel)
            self._check_same_kernel(kernel, copy)
            return self._marks.add(copy)

    async def rollback(self, mark: str) -> None:
        """Takes its state back to that mark, which stays. Its kernel is killed with all that it started since.

        Works also where the kernel has died. Raises CheckpointNotFound.
        """
        self._check_usable()
        self._marks.kernel(mark)
        async with self._turn:
            self._check_usable()
            copy = await self._home.branch_kernel(self._marks.kernel(mark))
            try:
                self._marks.kernel(mark)  # a restart forgets it
            except errors.CheckpointNotFound:
                copy.discard()
                raise
            await self._replace_kernel(copy)

    async def fork(self, count: int = 1) -> list[Context]:
        """So many new contexts that have its state. Raises as `checkpoint` does, and if there is no room for them."""
        check_copy_count(count)
        self._home.check_room(count)
        copies: list[KernelClient] = []
        try:
            async with self._idle_kernel() as kernel:
                for _ in range(count):
                    copies.append(await self._home.branch_kernel(kernel))
            made = [
                Context(self._home, new_id("c"), language=self.language, cwd=self.cwd, kernel=copy) for copy in copies
            ]
            self._home.add_contexts(made)
            self._home.transcript.branch(self.id, [each.id for each in made])
        except BaseException:
            for copy in copies:
                copy.discard()
            raise
        return made

    def marks(self) -> list[Mark]:
        """The checkpoints that it can be rolled back to, the oldest first."""
        self._check_usable()
        return self._marks.list()

    def forget(self, mark: str) -> None:
        """Raises CheckpointNotFound."""
        self._check_usable()
        self._marks.forget(mark)

    def remove(self) -> None:
        """Ends the context with all that it started."""
        self.removed = True
        self.stop("kernel killed: the context was removed")

    def stop(self, reason: str) -> None:
        """Ends the running execution and the kernel, and removes all checkpoints."""
        self._marks.end()
        kernel, self._kernel = self._kernel, None
        if self._running is not None:
            self._running.finish("died", reason)
        if self._waiter is not None and self._is_over:
            self._waiter.withdraw()
        if kernel is not None:
            kernel.discard()

    def configure(self, env: dict[str, str]) -> None:
        """Adds to the environment of its kernel, if it has one."""
        if self._kernel is not None and self._kernel.alive:
            self._kernel.configure(env, None, {})
        self._marks.configure(env)

    async def kernel(self) -> KernelClient:
        """The live kernel; a new one where the last has died."""
        if self._kernel is not None and self._kernel.alive:
            return self._kernel
        async with self._starting:
            if self._kernel is None or not self._kernel.alive:
                self._adopt_kernel(await self._home.start_kernel(self))
            assert self._kernel is not None
            return self._kernel

    # -- Stage: what an execution needs of its context

    async def enter(self, execution: Execution) -> KernelClient | None:
        await self._turn.acquire()
        try:
            kernel = await self._admitted_kernel()
        except BaseException:
            self._turn.release()
            raise
        if kernel is None:
            self._turn.release()
            return None
        self._running = execution
        self._began_at = time.monotonic()
        self._asked_by = current_principal()
        self._home.guest.noted(STARTED, id=execution.id)
        return kernel

    async def _admitted_kernel(self) -> KernelClient | None:
        """The kernel, with a slot for one more execution on this host. Raises Busy, QuotaExceeded, ShuttingDown."""
        if self._is_over or not (self._home.turns.enter_now() or await self._wait_for_slot()):
            return None
        kernel = None
        try:
            kernel = await self._kernel_unless_over()
            return kernel
        finally:
            if kernel is None:
                self._home.turns.leave()

    async def _wait_for_slot(self) -> bool:
        self._waiter = self._home.turns.join_queue()
        try:
            return await self._home.turns.enter(self._waiter)
        finally:
            self._waiter = None

    @property
    def _is_over(self) -> bool:
        return self.removed or self._home.ending is not None

    async def _kernel_unless_over(self) -> KernelClient | None:
        if self._is_over:
            return None
        try:
            while True:
                kernel = await self.kernel()
                await kernel.settle()
                if kernel.alive:
                    return kernel
        except errors.Gone:
            if self._home.ending:
                return None
            raise

    def leave(self, execution: Execution) -> None:
        if self._running is execution:
            self._running = None
            if execution.ended is not None:
                self._home.execution_ended(execution.ended)
                outcome, who = execution.ended.outcome, self._asked_by
                self._home.guest.noted(ENDED, id=execution.id, outcome=outcome, who=who)
            if time.monotonic() - self._began_at > _LONG_EXECUTION_SECONDS:
                self.out_of_memory()
            self._home.turns.leave()
            self._turn.release()

    def out_of_memory(self) -> bool:
        before, self._oom_kills = self._oom_kills, self._home.oom_kills()
        return self._oom_kills > before

    def abandon(self, why: str) -> None:
        self._home.abandon(why)

    def take_notice(self) -> str | None:
        notice, self._notice = self._notice, None
        return notice

    def _adopt_kernel(self, kernel: KernelClient) -> None:
        kernel.on_exit = self._on_exit
        self._kernel = kernel

    def _on_exit(self, kernel: KernelClient, told: bool) -> None:
        """The kernel died. It is reported once: by the execution that ran on it, else by the next."""
        if kernel is not self._kernel:
            return
        self._kernel = None
        if not told:
            self._notice = f"[cloche] the {kernel.exit} since the last execution; the context's state was lost\n"

    @asynccontextmanager
    async def _idle_kernel(self) -> AsyncIterator[KernelClient]:
        """Waits its turn: its kernel, which executes nothing meanwhile. Raises Gone, NotCopyable, ContextNotFound."""
        self._check_usable()
        if self.language != "python":
            raise errors.NotCopyable(f"only Python contexts can be copied, and this one is {self.language}")
        async with self._turn:
            kernel = await self._kernel_unless_over()
            if kernel is None:
                self._check_usable()
                raise errors.SandboxLost(self.ending)
            yield kernel

    def _check_same_kernel(self, kernel: KernelClient, copy: KernelClient) -> None:
        """Discards the copy and raises if the context was restarted, or has ended, while `kernel` was copied."""
        if self._kernel is not kernel:
            copy.discard()
            self._check_usable()
            raise errors.Unavailable("the context was restarted, or has died, while it was copied: try again")

    async def _replace_kernel(self, copy: KernelClient) -> None:
        old, self._kernel, self._notice = self._kernel, None, None
        self._adopt_kernel(copy)
        if old is not None:
            old.discard()
            await copy.settle(always=True)  # init is done with the old one then

    def _check_usable(self) -> None:
        self._home.check_running()
        self._check_exists()

    def _check_exists(self) -> None:
        if self.removed:
            raise errors.ContextNotFound(f"context {self.id} was removed")


def _check_argv(argv: Sequence[str], env: dict[str, str]) -> None:
    if isinstance(argv, str) or not all(isinstance(word, str) for word in argv):
        raise errors.InvalidRequest("argv must be a list of strings")
    check_command_size(argv, env)
