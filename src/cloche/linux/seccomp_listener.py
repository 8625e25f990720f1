"""The listener of a seccomp filter: system calls that the filter hands over to another process, which answers them.

A caller waits until its call is answered, or is killed. Its arguments are the ones that the filter saw; memory behind
pointers may change meanwhile, so that only calls without pointers should be decided here.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import NamedTuple

# struct seccomp_notif, seccomp_notif_resp, seccomp_notif_addfd; the numbers are those of every machine with 64 bits.
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_RESPONSE = struct.Struct("=QqiI")
_ADDITION = struct.Struct("=QIIII")
_RECEIVE, _SEND, _IS_VALID, _ADD_DESCRIPTOR = 0xC0502100, 0xC0182101, 0x40082102, 0x40182103
_CONTINUE = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE
_AND_ANSWER = 2  # SECCOMP_ADDFD_FLAG_SEND, from Linux 5.14 on


class WaitingCall(NamedTuple):
    """A system call that waits for its answer."""

    id: int
    thread: int  # of the caller, as seen from our pid namespace
    arguments: tuple[int, ...]


def receive_call(listener: int) -> WaitingCall | None:
    """The next call, waiting for one; None if its caller was killed or interrupted just now."""
    buffer = bytearray(_NOTIFICATION.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, buffer)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EINTR):
            raise
        return None
    number, thread, _, _, _, _, *arguments = _NOTIFICATION.unpack(buffer)
    return WaitingCall(number, thread, tuple(arguments))


def is_waiting(listener: int, call: WaitingCall) -> bool:
    """Whether the caller still waits; if so, its thread's number was its own until now."""
    try:
        fcntl.ioctl(listener, _IS_VALID, struct.pack("=Q", call.id))
    except OSError:
        return False
    return True


def refuse_call(listener: int, call: WaitingCall, number: int) -> None:
    """Answers with that errno. The caller may be gone."""
    _send(listener, _SEND, _RESPONSE.pack(call.id, 0, -number, 0))


def let_call_go(listener: int, call: WaitingCall) -> None:
    """Lets the kernel make the call as if there were no filter. The caller may be gone."""
    _send(listener, _SEND, _RESPONSE.pack(call.id, 0, 0, _CONTINUE))


def answer_with_descriptor(listener: int, call: WaitingCall, fd: int, *, close_on_exec: bool) -> None:
    """Gives the caller a copy of `fd`, whose number is the call's result. The caller may be gone, or have no room."""
    flags = os.O_CLOEXEC if close_on_exec else 0
    try:
        fcntl.ioctl(listener, _ADD_DESCRIPTOR, _ADDITION.pack(call.id, _AND_ANSWER, fd, 0, flags))
    except OSError as error:
        if error.errno != errno.ENOENT:
            refuse_call(listener, call, errno.ENOSYS if error.errno == errno.EINVAL else error.errno or errno.EMFILE)


def _send(listener: int, request: int, response: bytes) -> None:
    try:
        fcntl.ioctl(listener, request, response)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
