"""Checkpoints: copies of kernels, forked by the kernel itself. See "branch" in `cloche.guest.wire`."""

from __future__ import annotations

import asyncio
import signal
import time

from cloche import errors
from cloche.engine.executions.kernel import KernelClient
from cloche.engine.sandboxes.init_client import InitClient
from cloche.isolation.channel import Header, make_kernel_wires
from cloche.model import Mark, new_id

MAX_CHECKPOINTS = 32
COLLECT_SECONDS = 0.25  # the longest wait for the report of a copy's end


class KernelCheckpoints:
    """The checkpoints of one context: for each an idle kernel, from which others are forked."""

    def __init__(self) -> None:
        self._kernels: dict[str, KernelClient] = {}
        self._marks: dict[str, Mark] = {}

    def check_room(self) -> None:
        """Raises InvalidRequest."""
        if len(self._marks) >= MAX_CHECKPOINTS:
            raise errors.InvalidRequest(f"a context can have {MAX_CHECKPOINTS} checkpoints: forget one first")

    def add(self, kernel: KernelClient) -> Mark:
        mark = Mark(id=new_id("m"), created_at=time.time())
        self._marks[mark.id], self._kernels[mark.id] = mark, kernel
        kernel.on_exit = lambda _kernel, _told: self._drop_checkpoint(mark.id)
        return mark

    def list(self) -> list[Mark]:
        return list(self._marks.values())

    def kernel(self, id: str) -> KernelClient:
        """Raises CheckpointNotFound."""
        try:
            return self._kernels[id]
        except KeyError:
            raise errors.CheckpointNotFound(
                f"this context has no checkpoint {id!r}: it was forgotten, has ended, or is another context's"
                " (a mark belongs to its own context)"
            ) from None

    def forget(self, id: str) -> None:
        """Raises CheckpointNotFound."""
        kernel = self.kernel(id)
        self._drop_checkpoint(id)
        kernel.discard()

    def configure(self, env: dict[str, str]) -> None:
        """Adds the sandbox's environment to all of them."""
        for kernel in self._kernels.values():
            kernel.configure(env, None, {})

    def end(self) -> None:
        for id in list(self._marks):
            self.forget(id)

    def _drop_checkpoint(self, id: str) -> None:
        self._marks.pop(id, None)
        self._kernels.pop(id, None)


class _CopyExitWatch:
    """Learns how a copy ends: init reports its end, and the kernel that forked it is asked for the exit status.

    A kernel that executes something does not answer and is not waited for: the copy then counts as killed.
    """

    def __init__(self, guest: InitClient, origin: KernelClient, copy: KernelClient):
        self._guest = guest
        self._origin = origin
        self._copy = copy
        guest.subscribe("branch_ended", copy.id, self._on_ended)
        origin.on_collected[copy.id] = self._on_collected

    def _on_ended(self, _header: Header) -> None:
        self._guest.unsubscribe("branch_ended", self._copy.id)
        self._origin.collect()
        killed = {"status": signal.SIGKILL.value}
        asyncio.get_running_loop().call_later(COLLECT_SECONDS, self._on_collected, killed)

    def _on_collected(self, header: Header) -> None:
        self._origin.on_collected.pop(self._copy.id, None)
        self._copy.exited(header)


async def copy_kernel(guest: InitClient, origin: KernelClient, id: str) -> KernelClient:
    """A ready copy of that kernel, which must not be executing anything, under the id `id`.

    Raises NotCopyable if the running program cannot be copied, Unavailable if the kernel ends meanwhile or
    takes too long, ProtocolViolation if the program has taken the kernel's place and lies, or Gone.
    """
    wires = make_kernel_wires()
    copy = KernelClient(guest, id, wires.token, wires.ours)
    try:
        pid = await origin.branch(id, wires.token, wires.theirs)
        await copy.wait_ready()
        await _register_kernel_copy(guest, origin, id, pid)
    except BaseException:
        copy.discard()
        raise
    _CopyExitWatch(guest, origin, copy)
    return copy


async def _register_kernel_copy(guest: InitClient, origin: KernelClient, id: str, pid: int) -> None:
    """Init checks that the copy is a child of `origin`. Raises ProtocolViolation if it is not."""
    try:
        await guest.request("kernel_branched", kernel=id, of=origin.id, pid=pid)
    except errors.ContextNotFound:
        raise errors.Unavailable("the kernel has ended while it was copied") from None
    except (errors.InvalidRequest, errors.ProcessNotFound) as error:
        raise errors.ProtocolViolation(f"a kernel did not name its copy: {error}") from None
