"""Copies of a kernel, made by a fork of itself: see "branch" in `cloche.guest.wire`.

Memory is shared until one of the two writes to it. Resources that a fork would leave shared for good are made
anew for the copy: its channel and output, its open files (so that each has its own offset), the event loop's
descriptors. `forkable` lists those that cannot be. The fork is the C library's, so that registered fork hooks
of libraries run.
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import platform
import random
import re
import selectors
import signal
import struct
import sys
import threading
import time
import warnings
from typing import Any

from cloche.guest.kernel import forkable, tracebacks
from cloche.guest.kernel.channel import KernelChannel, flush_quietly
from cloche.guest.kernel.forkable import KernelNotForkable

# Threads of libraries that start them again after a fork: at rest they hold nothing, and are not copied.
#
# OpenBLAS ends its own in a fork (it has registered for that). OpenMP's, which get no notice, are ended before
# it. Those of Arrow, and of the allocator in it, stay in the kernel and are started anew in the copy by their
# own hooks.

_OPENMP = re.compile(r"(/\S*/lib(?:gomp|omp|iomp5)[-.\w]*\.so[.\d]*)$", re.MULTILINE)
_ARROW = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r-xp .*/libarrow\.so[.\d]*$", re.MULTILINE)
_PAUSE_HARD = 2  # of omp_pause_resource_all: threads are ended, what the program has set is kept
_KNOWN = ("pyarrow", "polars", "torch", "tensorflow", "jax", "duckdb", "cv2", "numba", "grpc", "zmq")
_END_SECONDS = 0.25  # what a thread may take to end that was told to
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())
_STACK_BYTES = 1024  # of a worker that waits for work: it has not come far
_FORKS_SINCE = 12  # the version of Arrow


def thread_ids() -> list:
    """The ids of all threads of this process but the main one."""
    main = str(os.getpid())
    return [task for task in os.listdir("/proc/self/task") if task != main]


def end_openmp() -> None:
    """Ends the threads of every OpenMP that is loaded. The next parallel region starts new ones."""
    with open("/proc/self/maps") as file:
        paths = set(_OPENMP.findall(file.read()))
    for path in paths:
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            library.omp_pause_resource_all(_PAUSE_HARD)
        except (OSError, AttributeError):  # an old one: its threads are found where those are that stay
            continue


def threads_remain() -> bool:
    """Whether threads remain after a moment, other than those known to be started again in a copy."""
    until, arrow = time.monotonic() + _END_SECONDS, _arrow_code_ranges()
    while (left := [task for task in thread_ids() if not _is_restarted(task, arrow)]) and time.monotonic() < until:
        time.sleep(0.001)
    return bool(left)


def suspected_libraries() -> str:
    """The libraries that may own these threads, which have no names that would tell."""
    found = [name for name in _KNOWN if name in sys.modules]
    return f"a library of it ({' or '.join(found)}, it seems)" if found else "a library of it"


def _is_restarted(task: str, arrow: list) -> bool:
    try:
        with open(f"/proc/self/task/{task}/comm") as file:
            if file.read() == "jemalloc_bg_thd\n":
                return True
        return bool(arrow) and _is_waiting_in(task, arrow)
    except (OSError, ValueError):  # it has just ended, or cannot be looked at
        return False


def _is_waiting_in(task: str, places: list) -> bool:
    """Whether a thread sleeps, and was sent to sleep by code that lies there."""
    with open(f"/proc/self/task/{task}/syscall") as file:
        call, *_, stack, _ = file.read().split()  # one word if it runs
    if call != _FUTEX:
        return False
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        words = struct.unpack(f"{_STACK_BYTES // 8}Q", os.pread(memory, _STACK_BYTES, int(stack, 16)))
    except struct.error:
        return False
    finally:
        os.close(memory)
    return any(first <= word < last for word in words for first, last in places)


def _arrow_code_ranges() -> list:
    """Where its code lies, if it is one that can be forked."""
    version = getattr(sys.modules.get("pyarrow"), "__version__", "0")
    if not re.match(r"\d+", str(version)) or int(str(version).partition(".")[0]) < _FORKS_SINCE:
        return []
    with open("/proc/self/maps") as file:
        return [(int(first, 16), int(last, 16)) for first, last in _ARROW.findall(file.read())]


_FIRST_OPEN_FLAGS = (
    os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_NOFOLLOW | os.O_TMPFILE
)  # only when a file is first opened
_WRITERS = (io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)
_NO_ROOM = "the sandbox has as many processes, or as much memory, as it may have: end something first"


class KernelForker:
    """The copies that one kernel makes."""

    def __init__(self) -> None:
        self._names: dict = {}  # by pid

    def branch(self, header: dict, channel: KernelChannel, score_fd: int, loop: Any) -> KernelChannel | None:
        """Makes a copy that has the header's `wires` as channel, stdout and stderr, and answers on `channel`.

        In the copy it gives the copy's own channel; in the kernel, None. `loop` is that of the kernel's cells.
        """
        wires, name = header["wires"], header["branch"]
        try:
            pid = self._fork_copy({*wires, channel.fileno(), *channel.pipes, score_fd}, channel.pipes, wires, loop)
        except BaseException as refusal:  # noqa: BLE001 - the program may have put anything where we look
            answer = {"ev": "refused", "branch": name, "message": _refusal_message(refusal)}
        else:
            if pid == 0:
                self._names.clear()
                own, out, err = wires
                return KernelChannel(own, out, err, header["token"], channel.interrupts)
            self._names[pid] = name
            answer = {"ev": "branched", "branch": name, "pid": pid}
        for fd in wires:
            os.close(fd)
        channel.send(answer)
        return None

    def collect(self, channel: KernelChannel) -> None:
        """Some of the copies have ended: tells how."""
        for pid, name in list(self._names.items()):
            try:
                ended, status, usage = os.wait4(pid, os.WNOHANG)
            except ChildProcessError:  # the program has waited for it, and knows
                del self._names[pid]
                continue
            if ended:
                del self._names[pid]
                used = {"cpu": usage.ru_utime + usage.ru_stime, "rss": usage.ru_maxrss * 1024}
                channel.send({"ev": "collected", "branch": name, "status": status, **used})

    def _fork_copy(self, own: set, outputs: tuple, wires: list, loop: Any) -> int:
        """Returns 0 in the copy. Raises KernelNotForkable."""
        _end_tqdm_monitors()
        crowded = bool(thread_ids())
        found = forkable.OpenDescriptors(own.union(_loop_descriptors(loop)), outputs)
        shared = forkable.find_shared_mappings()
        forkable.check_forkable(loop, set(self._names), found, shared)
        _flush_files(found.files)
        if crowded:
            end_openmp()
        again, state = _reopen_files(found.files), random.getstate()
        try:
            pid = _fork_process()
            if pid == 0:
                _become_copy(again, found.aliases, wires[1:], state, loop, shared)
                return 0
        finally:
            for fd in again.values():
                os.close(fd)
        if crowded:
            _refuse_remaining_threads(pid)
        return pid


def _refuse_remaining_threads(pid: int) -> None:
    """Refuses the copy if threads remain: libraries that support a fork have ended theirs by now."""
    if threads_remain():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise KernelNotForkable(
            f"this program cannot be copied: {suspected_libraries()} has threads of its own that stay"
        )


def _become_copy(again: dict, aliases: list, outputs: list, state: tuple, loop: Any, shared: list) -> None:
    try:
        os.setsid()
        random.setstate(state)  # a fork has seeded it anew
        for fd, own in again.items():
            _replace_descriptor(own, fd)
        for output, fds in zip(outputs, aliases, strict=True):
            for fd in fds:
                _replace_descriptor(output, fd)
        _renew_loop(loop)
        forkable.renew_mappings(shared)
    except BaseException:  # noqa: BLE001 - a fork must never run on into its parent's code
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def _refusal_message(refusal: BaseException) -> str:
    if isinstance(refusal, KernelNotForkable):
        return str(refusal)
    return f"this program cannot be copied: {type(refusal).__name__} was raised ({tracebacks.error_text(refusal)})"


def _replace_descriptor(new: int, fd: int) -> None:
    """Replaces a descriptor, unless a library's own fork hook has closed it, as matplotlib does with its fonts."""
    try:
        os.dup2(new, fd, os.get_inheritable(fd))
    except OSError:
        pass


def _fork_process() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: they are counted by us
        try:
            return os.fork()
        except OSError:
            raise KernelNotForkable(_NO_ROOM) from None


def _end_tqdm_monitors() -> None:
    """Ends the thread that tqdm leaves behind to monitor open progress bars; the next bar starts it again."""
    for thread in threading.enumerate():
        if type(thread).__module__ == "tqdm._monitor":
            thread.exit()  # type: ignore[attr-defined]


def _flush_files(files: list) -> None:
    """Flushes Python's buffers of files, which both processes would otherwise write."""
    if any(forkable.is_writable(fd) for fd in files):
        for each in gc.get_objects():
            if issubclass(type(each), _WRITERS):  # `isinstance` would ask the program's own objects
                flush_quietly(each)


def _reopen_files(files: list) -> dict:
    """Opens every one of these files once more, at the same offset; by descriptor. Raises KernelNotForkable.

    Two descriptors that share an offset share one in the copy again.
    """
    again: dict = {}
    for fd in files:
        try:
            twin = next((other for other in again if forkable.share_offset(other, fd)), None)
            again[fd] = _reopen_file(fd) if twin is None else os.dup(again[twin])
        except OSError as error:
            for opened in again.values():
                os.close(opened)
            why = f"{forkable.descriptor_target(fd)} cannot be opened again ({error.strerror}): close it"
            raise KernelNotForkable(f"this program cannot be copied now: {why}") from None
    return again


def _reopen_file(fd: int) -> int:
    place, flags = forkable.offset_and_flags(fd)
    own = os.open(f"/proc/self/fd/{fd}", flags & ~_FIRST_OPEN_FLAGS | os.O_CLOEXEC)
    if place and not flags & os.O_PATH:
        os.lseek(own, place, os.SEEK_SET)
    return own


def _loop_descriptors(loop: Any) -> list:
    """The event loop's own."""
    if loop is None or loop.is_closed() or not hasattr(loop, "_ssock"):
        return []
    return [loop._selector.fileno(), loop._ssock.fileno(), loop._csock.fileno()]


def _renew_loop(loop: Any) -> None:
    """The loop stays the one that the program knows, with descriptors of its own.

    The old ones are closed and no more: to remove a reader would edit the other's epoll, which is the same one.
    """
    if _loop_descriptors(loop):
        for old in (loop._selector, loop._ssock, loop._csock):
            old.close()
        loop._selector = selectors.DefaultSelector()
        loop._internal_fds -= 1
        loop._make_self_pipe()
        if loop._signal_handlers:
            signal.set_wakeup_fd(loop._csock.fileno())
