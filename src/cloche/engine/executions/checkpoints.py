"""Copies of kernels: made by the kernel itself, by a fork. See "branch" in `cloche.guest.wire`."""

from __future__ import annotations

import asyncio
import signal
import time

from cloche import errors
from cloche.engine.executions.kernel import Kernel
from cloche.engine.sandboxes.init_client import Guest, Reply, is_kernel
from cloche.isolation.channel import Header, close_all
from cloche.model import Mark, new_id

MAX_MARKS = 32
COLLECT_SECONDS = 0.25  # after which nobody waits any longer to hear how a copy ended


class Marks:
    """The marks of one context: for each a kernel that does nothing, from which others are forked."""

    def __init__(self) -> None:
        self._kernels: dict[str, Kernel] = {}
        self._marks: dict[str, Mark] = {}

    def check_room(self) -> None:
        """Raises InvalidRequest."""
        if len(self._marks) >= MAX_MARKS:
            raise errors.InvalidRequest(f"a context can have {MAX_MARKS} checkpoints: forget one first")

    def add(self, kernel: Kernel) -> Mark:
        mark = Mark(id=new_id("m"), created_at=time.time())
        self._marks[mark.id], self._kernels[mark.id] = mark, kernel
        kernel.on_exit = lambda _kernel, _told: self._lose(mark.id)
        return mark

    def list(self) -> list[Mark]:
        return list(self._marks.values())

    def kernel(self, id: str) -> Kernel:
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
        self._lose(id)
        kernel.discard()

    def configure(self, env: dict[str, str]) -> None:
        """What is the sandbox's own affair is the same in all of them."""
        for kernel in self._kernels.values():
            kernel.configure(env, None, {})

    def end(self) -> None:
        for id in list(self._marks):
            self.forget(id)

    def _lose(self, id: str) -> None:
        self._marks.pop(id, None)
        self._kernels.pop(id, None)


class _Watch:
    """How a copy ends: init sees that it has, and the kernel that forked it is asked how.

    One that executes something does not answer. It is not waited for: the copy is then said to have been killed.
    """

    def __init__(self, guest: Guest, origin: Kernel, copy: Kernel):
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


async def branch(guest: Guest, origin: Kernel, id: str, *, user: str) -> Kernel:
    """A copy of that kernel, which must not be executing anything; ready. It is called `id`.

    Raises NotCopyable if what it runs cannot be copied, Unavailable if it ends meanwhile or takes too long,
    ProtocolViolation if the program has taken the kernel's place and lies, or Gone.
    """
    reply = await guest.request("kernel_wires", kernel=id, user=user)
    token, wires = _checked(reply)
    copy = Kernel(guest, id, token, wires[:3])
    try:
        pid = await origin.branch(id, token, wires[3:])
        await copy.wait_ready()
        await _introduce(guest, origin, id, pid)
    except BaseException:
        copy.discard()
        raise
    _Watch(guest, origin, copy)
    return copy


async def _introduce(guest: Guest, origin: Kernel, id: str, pid: int) -> None:
    """Init checks that it is what `origin` says. Raises ProtocolViolation if it is not."""
    try:
        await guest.request("kernel_branched", kernel=id, of=origin.id, pid=pid)
    except errors.ContextNotFound:
        raise errors.Unavailable("the kernel has ended while it was copied") from None
    except (errors.InvalidRequest, errors.ProcessNotFound) as error:
        raise errors.ProtocolViolation(f"a kernel did not name its copy: {error}") from None


def _checked(reply: Reply) -> tuple[str, list[int]]:
    """Raises ProtocolViolation."""
    ours, theirs = Reply(reply.ok, b"", reply.fds[:3]), reply.fds[3:]
    if len(theirs) != 3 or not is_kernel(ours):
        close_all(reply.fds)
        raise errors.ProtocolViolation("the guest's init did not pass channels and pipes for a kernel's copy")
    return str(reply.ok["token"]), reply.fds
