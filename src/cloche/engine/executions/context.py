"""One kernel, one FIFO of executions, one namespace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from cloche import errors
from cloche.engine.executions.assistance import KernelAssistant
from cloche.engine.executions.checkpoints import KernelCheckpoints
from cloche.engine.executions.execution import Execution
from cloche.engine.executions.kernel import KernelClient
from cloche.engine.operations.audit import ENDED, STARTED
from cloche.engine.principal import current_principal
from cloche.engine.quotas.capacity import Ticket
from cloche.events import AnyEvent
from cloche.input_answers import InputSource
from cloche.languages import LANGUAGE_NAMES
from cloche.model import (
    CodeCheck,
    CodeDescription,
    Completions,
    ExecutionRequest,
    Limits,
    Mark,
    Variables,
    check_copy_count,
    new_id,
)

if TYPE_CHECKING:
    from cloche.engine.sandboxes.sandbox import Sandbox

EXIT_SECONDS = 10.0
_LONG_EXECUTION_SECONDS = 0.005  # an execution shorter than this did not run the sandbox out of memory


class Context:
    """Keeps its id when its kernel dies or is restarted; the state is lost then."""

    def __init__(
        self, sandbox: Sandbox, id: str, *, language: str = "python", cwd: str, kernel: KernelClient | None = None
    ):
        if language not in LANGUAGE_NAMES:
            raise errors.InvalidRequest(
                f"there is no language {language!r}: a context can be {', '.join(LANGUAGE_NAMES)}"
            )
        self.id = id
        self.language = language
        self.cwd = cwd
        self.created_at = time.time()
        self.removed = False
        self._sandbox = sandbox
        self._kernel: KernelClient | None = None
        self._turn = asyncio.Lock()  # FIFO
        self._starting = asyncio.Lock()
        self._running: Execution | None = None
        self._waiter: Ticket | None = None  # of the execution that has its turn here, but not yet on this host
        self._began_at = 0.0
        self._asked_by = current_principal()  # the principal of its executions
        self._oom_kills = 0
        self._notice: str | None = None
        self._marks = KernelCheckpoints()
        if kernel is not None:
            self._adopt_kernel(kernel)

    @property
    def limits(self) -> Limits:
        return self._sandbox.limits

    @property
    def ending(self) -> str:
        return self._sandbox.ending or "the context was removed"

    def execute(self, code: str, *, input: InputSource = None, **settings: Any) -> Execution:
        """As `submit`, for code and some settings of an ExecutionRequest; one that is None is left at its default."""
        given = {name: value for name, value in settings.items() if value is not None}
        return self.submit(ExecutionRequest(code=code, **given), input)

    def submit(self, request: ExecutionRequest, input: InputSource = None) -> Execution:
        """An execution of that request, which starts when it is used.

        Its time does not run while it waits for tools. Raises InvalidRequest for invalid arguments, Gone if the
        sandbox has ended, QuotaExceeded, Busy.
        """
        self._check_usable()
        request.check()
        timeout_seconds = request.timeout_seconds
        if timeout_seconds is None and not (request.until_deadline and self._sandbox.has_deadline):
            timeout_seconds = self._sandbox.limits.execution_seconds
        self._sandbox.execution_slots.check()
        self._sandbox.count_execution()
        return Execution(
            self,
            request,
            timeout_seconds=timeout_seconds,
            input=input,
            offer=self._sandbox.tools.make_offer(request.tools, language=self.language) if request.tools else None,
            on_event=self._recording(request.code) if request.recorded else None,
        )

    def _recording(self, code: str) -> Callable[[AnyEvent, int], None]:
        return self._sandbox.history.start_recording(self.id, self.language, code).on_event

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

    async def assistant(self) -> KernelAssistant | None:
        """Answers questions about code beside the running cell; None for a language that has nobody to ask.

        The one that is made while a cell runs answers after it. Raises Gone, SandboxPaused, ContextNotFound.
        """
        self._check_usable()
        return (await self.kernel()).assistant() if self.language == "python" else None

    async def complete(self, code: str, cursor: int | None = None) -> Completions:
        """Completions at the cursor, or at the end. Raises InvalidRequest, Unavailable without an answer, and Gone."""
        cursor = len(code) if cursor is None else min(max(cursor, 0), len(code))
        assistant = await self.assistant()
        return Completions(start=cursor, end=cursor) if assistant is None else await assistant.complete(code, cursor)

    async def describe(self, code: str, cursor: int | None = None, *, detail: bool = False) -> CodeDescription:
        """The documentation of the name at the cursor; with `detail`, its source too. Raises as `complete` does."""
        cursor = len(code) if cursor is None else min(max(cursor, 0), len(code))
        assistant = await self.assistant()
        if assistant is None:
            return CodeDescription(found=False)
        return await assistant.describe(code, cursor, detail=detail)

    async def check(self, code: str) -> CodeCheck:
        """Whether the code is a whole cell. Raises as `complete` does."""
        assistant = await self.assistant()
        return CodeCheck(status="unknown") if assistant is None else await assistant.check(code)

    def interrupt(self) -> bool:
        """Interrupts the running execution (see `Execution.interrupt`). False if nothing runs."""
        if self._running is None:
            return False
        self._running.interrupt()
        return True

    async def restart(self) -> None:
        """Kills the kernel with all that it started and starts a new one. A running execution ends as `died`."""
        self._sandbox.check_running()
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
            copy = await self._sandbox.branch_kernel(kernel)
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
            copy = await self._sandbox.branch_kernel(self._marks.kernel(mark))
            try:
                self._marks.kernel(mark)  # a restart forgets it
            except errors.CheckpointNotFound:
                copy.discard()
                raise
            await self._replace_kernel(copy)

    async def fork(self, count: int = 1) -> list[Context]:
        """So many new contexts that have its state. Raises as `checkpoint` does, and if there is no room for them."""
        check_copy_count(count)
        self._sandbox.check_room(count)
        copies: list[KernelClient] = []
        try:
            async with self._idle_kernel() as kernel:
                for _ in range(count):
                    copies.append(await self._sandbox.branch_kernel(kernel))
            made = [self._copy_with(copy) for copy in copies]
            self._sandbox.add_contexts(made)
            self._sandbox.history.branch(self.id, [each.id for each in made])
        except BaseException:
            for copy in copies:
                copy.discard()
            raise
        return made

    def _copy_with(self, kernel: KernelClient) -> Context:
        return Context(self._sandbox, new_id("c"), language=self.language, cwd=self.cwd, kernel=kernel)

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
                self._adopt_kernel(await self._sandbox.start_kernel(self))
            assert self._kernel is not None
            return self._kernel

    # -- used by its executions

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
        self._sandbox.guest.noted(STARTED, id=execution.id)
        return kernel

    async def _admitted_kernel(self) -> KernelClient | None:
        """The kernel, with a slot for one more execution on this host. Raises Busy, QuotaExceeded, ShuttingDown."""
        if self._is_over or not (self._sandbox.execution_slots.enter_now() or await self._wait_for_slot()):
            return None
        kernel = None
        try:
            kernel = await self._kernel_unless_over()
            return kernel
        finally:
            if kernel is None:
                self._sandbox.execution_slots.leave()

    async def _wait_for_slot(self) -> bool:
        self._waiter = self._sandbox.execution_slots.join_queue()
        try:
            return await self._sandbox.execution_slots.enter(self._waiter)
        finally:
            self._waiter = None

    @property
    def _is_over(self) -> bool:
        return self.removed or self._sandbox.ending is not None

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
            if self._sandbox.ending:
                return None
            raise

    def leave(self, execution: Execution) -> None:
        if self._running is execution:
            self._running = None
            if execution.ended is not None:
                self._sandbox.execution_ended(execution.ended)
                outcome, who = execution.ended.outcome, self._asked_by
                self._sandbox.guest.noted(ENDED, id=execution.id, outcome=outcome, who=who)
            if time.monotonic() - self._began_at > _LONG_EXECUTION_SECONDS:
                self.out_of_memory()
            self._sandbox.execution_slots.leave()
            self._turn.release()

    def out_of_memory(self) -> bool:
        before, self._oom_kills = self._oom_kills, self._sandbox.oom_kills()
        return self._oom_kills > before

    def abandon(self, why: str) -> None:
        self._sandbox.abandon(why)

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
        self._sandbox.check_running()
        self._check_exists()

    def _check_exists(self) -> None:
        if self.removed:
            raise errors.ContextNotFound(f"context {self.id} was removed")
