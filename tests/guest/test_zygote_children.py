"""Children of the zygote whose host gives them up while they are made: they end, and the zygote goes on."""

from __future__ import annotations

import os
import socket

from cloche.guest import init, zygote


def test_a_first_kernel_that_cannot_begin_ends_and_is_no_second_zygote():
    read, entrance = os.pipe()  # an entrance of a cgroup that is gone
    os.close(read)
    door, other = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            init.be_first_kernel(None, None, {}, [-1, -1, -1, -1, entrance], door)
        finally:
            os._exit(77)  # it came back
    os.close(entrance)
    with door, other:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_a_child_that_dies_is_told_from_one_that_lives():
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    assert not zygote.is_ending(pid)
    os.close(write)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert zygote.is_ending(pid)
    os.waitpid(pid, 0)
    os.close(read)
