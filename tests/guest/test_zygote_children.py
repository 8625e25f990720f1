"""Children of the zygote that are given up while they are made: they end, and are no second zygote."""

from __future__ import annotations

import os
import socket

from cloche.guest import init


def test_a_first_kernel_that_cannot_begin_ends_and_is_no_second_zygote():
    read, entrance = os.pipe()  # an entrance of a cgroup that is gone
    os.close(read)
    door, other = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            init.be_first_kernel(None, None, {}, [-1, -1, -1, -1, entrance], door, 1)
        finally:
            os._exit(77)  # it came back
    os.close(entrance)
    with door, other:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_a_first_kernel_ends_when_init_dies_before_it_asks_for_its_maps():
    read, entrance = os.pipe()
    door, other = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            other.close()
            init.be_first_kernel(None, None, {}, [-1, -1, -1, -1, entrance], door, 1)
        finally:
            os._exit(77)  # it came back
    with door, other:
        other.shutdown(socket.SHUT_RDWR)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    os.close(read)
    os.close(entrance)
