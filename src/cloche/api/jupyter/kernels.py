"""Kernels: each is one context of a sandbox, with its clients and its queue of executions.

A kernel has a sandbox of its own, or shares that of a named session. Kernels are in memory only: they end with the
server, as those of a Jupyter Server do, while the sandbox of a named session is paused and keeps its files.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from cloche import errors
from cloche.api.http import raise_location_of
from cloche.api.jupyter.messages import ExecuteRequestContent, KernelMessage, MessageHeader, make_message
from cloche.api.jupyter.outputs import OutputEncoder, aborted_reply, error_content, execute_reply
from cloche.engine.executions.context import Context
from cloche.engine.executions.execution import Execution
from cloche.engine.sandboxes.handle import SandboxHandle
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Ended, Input, Started
from cloche.languages import LANGUAGES
from cloche.model import MIB, ExecutionRequest, Struct
from cloche.tasks import TaskSet
from cloche.telemetry import log

IDLE_SECONDS = 3600.0  # how long a sandbox lives at least after a use of its kernel
DEFAULT_KERNEL = LANGUAGES["python"].kernel_name
MAX_WAITING = 1000  # executions of one kernel
MAX_WAITING_BYTES = 32 * MIB  # of their code

Deliver = Callable[[KernelMessage], Awaitable[None]]


class KernelNotFound(errors.NotFound):
    code = "kernel_not_found"


class ExecuteTask(Struct):
    """An execution that waits. `client` gets the reply and questions; outputs go to all clients."""

    client: Deliver
    parent: MessageHeader
    content: ExecuteRequestContent


class JupyterKernel:
    """`own` says that the sandbox is the kernel's alone, and ends with it."""

    def __init__(self, name: str, handle: SandboxHandle, context: str, *, own: bool, env: Mapping[str, str]):
        self.id = str(uuid.uuid4())
        self.name = name
        self.language = language_of(name)
        self.owner = handle.owner
        self.own = own
        self.session = uuid.uuid4().hex  # of its messages
        self.state = "starting"
        self.last_activity = time.time()
        self.ended = asyncio.Event()
        self._handle = handle
        self._context = context
        self._env = dict(env)
        self._clients: list[Deliver] = []
        self._waiting: deque[ExecuteTask] = deque()
        self._tasks = TaskSet()
        self._worker: asyncio.Task[None] | None = None
        self._execution: Execution | None = None
        self._running: MessageHeader | None = None
        self.count = 0

    @property
    def alive(self) -> bool:
        return not self.ended.is_set() and not self._handle.ended

    @property
    def connections(self) -> int:
        return len(self._clients)

    async def sandbox(self) -> Sandbox:
        """Its sandbox, running, and for an hour at least. Raises Gone, SandboxPaused."""
        sandbox = await self._handle.running()
        sandbox.extend(min(IDLE_SECONDS, sandbox.record.spec.lifetime_seconds or IDLE_SECONDS))
        return sandbox

    async def context(self) -> Context:
        """Raises as `sandbox`, and ContextNotFound after a pause that kept files only."""
        return (await self.sandbox()).context(self._context)

    # -- clients

    def join(self, client: Deliver) -> None:
        self._clients.append(client)

    def leave(self, client: Deliver) -> None:
        self._clients.remove(client)

    async def publish(self, msg_type: str, content: Any, parent: MessageHeader | None) -> None:
        """Sends an output to all clients."""
        message = make_message("iopub", msg_type, content, parent, self.session)
        for client in list(self._clients):
            await client(message)

    async def set_state(self, state: str, parent: MessageHeader | None) -> None:
        self.state = state
        self.last_activity = time.time()
        await self.publish("status", {"execution_state": state}, parent)

    async def end_aside(self, parent: MessageHeader) -> None:
        """A request that did not wait for the running cell is done: the kernel is what it was before."""
        running = self._running
        await self.set_state("idle", parent)
        if running is not None and running is self._running:
            await self.set_state("busy", running)

    # -- executions

    def submit(self, task: ExecuteTask) -> None:
        """Queues an execution. Raises QuotaExceeded."""
        if len(self._waiting) >= MAX_WAITING:
            raise errors.QuotaExceeded(f"{MAX_WAITING} executions wait for this kernel: wait for their end")
        size = sys.getsizeof(task.content.code)
        if self._waiting and size + sum(sys.getsizeof(each.content.code) for each in self._waiting) > MAX_WAITING_BYTES:
            raise errors.QuotaExceeded("too much code waits for this kernel: wait for the end of the executions")
        self._waiting.append(task)
        if self._worker is None or self._worker.done():
            self._worker = self._tasks.start(self._work())
            self._worker.add_done_callback(log_failed_task)

    def answer(self, value: str) -> None:
        """The answer to the question of the running execution."""
        if self._execution is not None:
            self._execution.answer(value)

    async def interrupt(self) -> None:
        (await self.context()).interrupt()

    async def restart(self) -> None:
        """Its state is lost; clients stay. Executions that wait are aborted."""
        context = await self.context()
        self.state = "restarting"
        await self.publish("status", {"execution_state": "restarting"}, None)
        await self._abort_waiting()
        await context.restart()
        context.configure(self._env)
        self.count = 0
        await self.set_state("idle", None)

    async def end(self) -> None:
        """Ends it with everything that it runs. Harmless when it has ended."""
        self.ended.set()
        self._waiting.clear()
        try:
            if self.own:
                await self._handle.kill()
            else:
                (await self._handle.running()).remove_context(self._context)
        except (errors.NotFound, errors.Gone, errors.SandboxPaused):
            pass
        self.state = "dead"

    async def _work(self) -> None:
        """Runs the executions that wait, one after another."""
        while self._waiting and not self.ended.is_set():
            task = self._waiting.popleft()
            await self.set_state("busy", task.parent)
            failed = await self._execute_task(task)
            self._running = None
            await self.set_state("idle", task.parent)
            if failed and task.content.stop_on_error:
                await self._abort_waiting()

    async def _abort_waiting(self) -> None:
        waiting, self._waiting = list(self._waiting), deque()
        for task in waiting:
            await self.set_state("busy", task.parent)
            await self._reply(task, aborted_reply(self.count))
            await self.set_state("idle", task.parent)

    async def _execute_task(self, task: ExecuteTask) -> bool:
        """Whether it failed."""
        self._running = task.parent
        outputs = OutputEncoder()
        try:
            await self._run(task, outputs)
        except errors.ClocheError as error:
            if not self.ended.is_set():
                outputs.error = error_content(type(error).__name__, str(error), str(error))
                await self.publish("error", outputs.error, task.parent)
        await self._reply(task, execute_reply(outputs.count or self.count, outputs.error))
        return outputs.error is not None

    async def _run(self, task: ExecuteTask, outputs: OutputEncoder) -> None:
        asked = task.content
        request = ExecutionRequest(
            code=asked.code, until_deadline=True, recorded=asked.store_history and not asked.silent
        )
        context = await self.context()
        self._execution = context.submit(request, asked.allow_stdin or None)
        try:
            async with aclosing(self._execution) as execution:
                while events := await execution.next_events():
                    for event in events:
                        await self._pass_on(event, task, outputs)
        finally:
            self._execution = None

    async def _pass_on(self, event: Any, task: ExecuteTask, outputs: OutputEncoder) -> None:
        if isinstance(event, Started):
            self.count = outputs.count = event.count
            if not task.content.silent:
                await self.publish(
                    "execute_input", {"code": task.content.code, "execution_count": event.count}, task.parent
                )
        elif isinstance(event, Input):
            question = {"prompt": event.prompt, "password": event.secret}
            await task.client(make_message("stdin", "input_request", question, task.parent, self.session))
        elif (message := outputs.encode(event)) is not None:
            await self.publish(*message, task.parent)
        if isinstance(event, Ended) and event.outcome in ("died", "out_of_memory") and not self.ended.is_set():
            await self.publish("status", {"execution_state": "restarting"}, None)

    async def _reply(self, task: ExecuteTask, content: Any) -> None:
        await task.client(make_message("shell", "execute_reply", content, task.parent, self.session))


class JupyterKernels:
    """The kernels of all owners."""

    def __init__(self) -> None:
        self._all: dict[str, JupyterKernel] = {}

    def add(self, kernel: JupyterKernel) -> None:
        """Forgets those whose sandbox has ended, too."""
        self._all = {id: each for id, each in self._all.items() if each.alive}
        self._all[kernel.id] = kernel

    def find(self, id: str, owner: str) -> JupyterKernel:
        """Raises KernelNotFound, also for one of another owner."""
        kernel = self._all.get(id)
        if kernel is None or kernel.owner != owner or not kernel.alive:
            raise KernelNotFound(f"Kernel does not exist: {id}")
        return kernel

    def list(self, owner: str) -> list[JupyterKernel]:
        return [each for each in self._all.values() if each.owner == owner and each.alive]

    async def end(self, kernel: JupyterKernel) -> None:
        self._all.pop(kernel.id, None)
        await kernel.end()


def kernel_model(kernel: JupyterKernel) -> dict[str, Any]:
    return {
        "id": kernel.id,
        "name": kernel.name,
        "last_activity": format_time(kernel.last_activity),
        "execution_state": kernel.state,
        "connections": kernel.connections,
    }


def format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def log_failed_task(task: asyncio.Task[None]) -> None:
    """Logs the unexpected error of a task for which nothing waits."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("jupyter.task_failed", error=type(error).__name__, where=raise_location_of(error))


def language_of(name: str) -> str:
    """The language of a kernelspec. Raises InvalidRequest."""
    for language, about in LANGUAGES.items():
        if name in (about.kernel_name, language):
            return language
    names = ", ".join(each.kernel_name for each in LANGUAGES.values())
    raise errors.InvalidRequest(f"there is no kernel {name!r} here: use {names}")
