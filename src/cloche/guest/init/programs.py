"""Steps of a fresh fork on its way to being a program."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed knows only `signal`
import os

from cloche.linux import syscalls

OWN_SIGNALS = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP)  # init ignores these, and a program must not


def detach_from_parent(keep: list) -> None:
    """Detaches from the parent: keeps only these descriptors."""
    _signal.set_wakeup_fd(-1)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    close_others(keep)
    os.setsid()


def close_others(keep: list) -> None:
    """Every descriptor but the first three and these."""
    lowest = 3
    for fd in sorted(keep):
        if fd > lowest:
            syscalls.close_range(lowest, fd - 1)
        lowest = fd + 1
    syscalls.close_from(lowest)


class NoForkServer(Exception):
    """There is no fork server to fork a process with everything imported: see `fork_server`."""


class TooManyProcesses(ValueError):
    """The sandbox has as many processes as it may have."""

    code = "invalid_request"

    def __str__(self) -> str:
        return "the sandbox has as many processes as it may have: end some first"


def exec_program(argv: list, env: dict) -> None:
    try:
        os.execvpe(argv[0], argv, env)
    except FileNotFoundError:
        os.write(2, f"{argv[0]}: command not found\n".encode())
    except PermissionError:
        os.write(2, f"{argv[0]}: permission denied\n".encode())
        os._exit(126)


def enter(cwd: str, root: str) -> None:
    """Into a directory, made if it is not there; but not `root`, without which there is no sandbox any more."""
    try:
        os.chdir(cwd)
    except FileNotFoundError:
        if root != "/" and f"{cwd}/".startswith(f"{root}/"):
            os.chdir(root)  # in one that was removed nothing can be made; by its name it could be made again
            cwd = os.path.relpath(cwd, root)
        os.makedirs(cwd, exist_ok=True)
        os.chdir(cwd)


def ignore_own_signals() -> None:
    """For processes that run as long as the sandbox: these signals are for its programs."""
    for ignored in (*OWN_SIGNALS, _signal.SIGPIPE):
        _signal.signal(ignored, _signal.SIG_IGN)


def default_signals() -> None:
    """By the C module: the functions of `signal` go through enumerations, which touches many pages."""
    _signal.set_wakeup_fd(-1)
    for number in (_signal.SIGCHLD, _signal.SIGPIPE, *OWN_SIGNALS):
        _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
