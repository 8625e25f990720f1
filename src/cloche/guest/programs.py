"""What a fresh fork of init does on its way to being a program."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed knows only `signal`
import os

OWN_SIGNALS = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP)  # init ignores these, and a program must not


def exec_program(argv: list, env: dict) -> None:
    try:
        os.execvpe(argv[0], argv, env)
    except FileNotFoundError:
        os.write(2, f"{argv[0]}: command not found\n".encode())
    except PermissionError:
        os.write(2, f"{argv[0]}: permission denied\n".encode())
        os._exit(126)


def enter(cwd: str) -> None:
    try:
        os.chdir(cwd)
    except FileNotFoundError:
        os.makedirs(cwd, exist_ok=True)
        os.chdir(cwd)


def default_signals() -> None:
    """By the C module: the functions of `signal` go through enumerations, which touches many pages."""
    _signal.set_wakeup_fd(-1)
    for number in (_signal.SIGCHLD, _signal.SIGPIPE, *OWN_SIGNALS):
        _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
