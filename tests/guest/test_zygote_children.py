"""Children of the zygote that are given up while they are made: they end, and are no second zygote."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from cloche.guest.init import init
from cloche.guest.zygote import fork_server


def ends_with(child: Callable[[], None]) -> int:
    """The exit status of a fork that does that; 77 if it came back."""
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(77)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def entrance_of_a_cgroup_that_is_gone() -> int:
    read, entrance = os.pipe()
    os.close(read)
    return entrance


def test_a_first_kernel_that_cannot_begin_ends_and_is_no_second_zygote():
    door, other = socket.socketpair()
    with door, other:
        fds = [-1, -1, -1, entrance_of_a_cgroup_that_is_gone()]
        assert ends_with(lambda: init.be_first_kernel(None, None, {}, fds, door)) == 1
        os.close(fds[-1])


def test_a_seed_that_cannot_begin_ends_and_is_no_second_zygote():
    door, other = socket.socketpair()
    with door, other:
        fds = [entrance_of_a_cgroup_that_is_gone()]
        assert ends_with(lambda: fork_server.main(None, None, {}, door, fds)) == 1
        os.close(fds[-1])


def test_a_seed_ends_when_init_dies_before_it_lets_it_in():
    door, other = socket.socketpair()
    with door, other:
        other.shutdown(socket.SHUT_RDWR)
        assert ends_with(lambda: fork_server.main(None, None, {}, door, [])) == 1


def test_an_embryo_ends_when_the_zygote_has_no_use_for_it():
    (embryo, other), (cradle, _) = socket.socketpair(), socket.socketpair()
    with embryo, other, cradle, _:
        other.shutdown(socket.SHUT_RDWR)
        assert ends_with(lambda: init.main(None, None, embryo, cradle)) == 0
