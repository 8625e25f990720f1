"""The server of `sudo`: commands that init runs as another user of the sandbox.

no_new_privs rules setuid programs out, so the `sudo` on the PATH is a client (see `bin/sudo.py`) of a socket
that init has in sandboxes with an owner that may be root. It widens nothing: that owner can start programs as
root without it.

An attendant (see `service_sockets`) starts the command as its child, passes signals on, and reports how it
ended. When the client is gone, the command is killed with its session.

  client -> attendant  {"argv":[..],"user":name,"cwd":path,"env":{..},"umask":n,"reset":bool,"home":bool,
                        "pty":[rows, columns]|null}    fds=[stdin, stdout, stderr], none with a pty
                       {"signal":n}
  attendant -> client  {"error":..} | {"started":true} fds=[pty master] with a pty
                       {"status":wait status}          the last
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import termios

from cloche.guest import wire
from cloche.guest.init import identity
from cloche.guest.init.service_sockets import (
    RequestRefused,
    ServiceSocket,
    caller,
    detach_from_init,
    fork_per_connection,
    fork_process,
    request,
)
from cloche.guest.init.sessions import signal_session

SUDO_SOCKET = "/run/cloche-sudo"
MAX_ATTENDANTS = 32
_FULL = f"{MAX_ATTENDANTS} commands run by sudo already: wait until one has ended"
_KILL = 9
_MAX_COMMAND_BYTES = 2 << 20  # the kernel's limit of arguments and environment
_FORWARDED_SIGNALS = frozenset({1, 2, 3, 10, 12, 14, 15, 18})  # HUP INT QUIT USR1 USR2 ALRM TERM CONT
_SANDBOX_VARIABLES = ("PATH", "LD_LIBRARY_PATH")  # whatever the caller has: programs find what the sandbox has


def sudo_socket(processes, watch_fd) -> ServiceSocket:
    """Returns the socket, not open yet. `processes` starts programs."""
    start = fork_per_connection(lambda fd: _serve_connection(fd, processes))
    return ServiceSocket(SUDO_SOCKET, watch_fd, start, most=MAX_ATTENDANTS, full=_FULL)


def _serve_connection(fd: int, processes) -> None:
    """In a fork of init. Never returns."""
    try:
        with detach_from_init(fd) as connection:
            try:
                _run_request(connection, processes)
            except RequestRefused as error:
                wire.send_frame(connection, {"error": str(error)})
    except BaseException:  # noqa: BLE001 - a fork must never run on into its parent's code
        pass
    os._exit(1)


def _run_request(connection: socket.socket, processes) -> None:
    reader = wire.FrameReader(connection, max_body=0)
    asked, _, fds = request(connection, reader)
    order = SudoRequest(asked, caller(connection)[1], processes)
    pid, answer = (_start_in_terminal if order.size else _start_with_files)(order, fds, processes)
    ended = False
    try:
        wire.send_frame(connection, {"started": True}, b"", answer)
        for fd in (*fds, *answer):
            os.close(fd)
        connection.settimeout(None)
        status = _await_command(connection, reader, pid)
        ended = True
    finally:
        if not ended:  # whatever went wrong: no command runs on that nobody attends to
            signal_session(pid, _KILL)
    wire.send_frame(connection, {"status": status})
    os._exit(0)


class SudoRequest:
    """A checked request: no other part of the client's message is used. Raises RequestRefused."""

    def __init__(self, request: dict, uid: int, processes):
        argv, env, cwd, size = (request.get(name) for name in ("argv", "env", "cwd", "pty"))
        if not (isinstance(argv, list) and argv and all(map(_is_text, argv)) and isinstance(env, dict)):
            raise RequestRefused("there is no command in that request")
        if not all(_is_text(name) and name and "=" not in name and _is_text(value) for name, value in env.items()):
            raise RequestRefused("the environment of that request is none")
        if not _is_text(cwd) or (size is not None and not _is_size(size)):
            raise RequestRefused("the directory or the terminal of that request is none")
        if sum(map(len, (*argv, *env, *env.values()))) > _MAX_COMMAND_BYTES:
            raise RequestRefused("the arguments and the environment are too long")
        self.user = _resolve_user(request.get("user"))
        self.argv = argv
        self.cwd = cwd if str(cwd).startswith("/") else "/"
        self.size = size or ()
        umask = request.get("umask")
        self.umask = umask & 0o777 if type(umask) is int else 0o022
        self.env = _command_environment(request, self, uid, processes.fresh_environment(self.user))


def _command_environment(request: dict, order: SudoRequest, uid: int, fresh: dict) -> dict:
    """The command's environment: a new one plus the variables kept by the client; without `reset`, all of them."""
    own = {name: fresh[name] for name in ("USER", "LOGNAME", *_SANDBOX_VARIABLES) if name in fresh}
    if request.get("home", True):
        own["HOME"] = fresh["HOME"]
    caller = {"SUDO_USER": identity.user_name(uid), "SUDO_UID": str(uid), "SUDO_GID": str(uid)}
    caller["SUDO_COMMAND"] = " ".join(order.argv)[:4096]
    base = fresh if request.get("reset", True) else {}
    given = request.get("set")
    chosen = given if isinstance(given, dict) and all(map(_is_text, (*given, *given.values()))) else {}
    return {**base, **request["env"], **own, **caller, **chosen}


def _resolve_user(name: object) -> str:
    if isinstance(name, str) and name.startswith("#") and name[1:].isdigit():
        name = {str(uid): known for known, uid in identity.UIDS.items()}.get(name[1:], name)
    if not isinstance(name, str) or name not in identity.UIDS:
        raise RequestRefused(f"unknown user {name}" if isinstance(name, str) else "no user was named")
    return name


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_size(size: object) -> bool:
    return isinstance(size, list) and len(size) == 2 and all(type(side) is int and 0 <= side < 1 << 16 for side in size)


def _start_with_files(order: SudoRequest, fds: list, processes) -> tuple:
    if len(fds) != 3:
        raise RequestRefused("the command's stdin, stdout and stderr must come with the request")
    pid = fork_process()
    if pid == 0:
        processes.become_program(order.user, order.cwd, order.env, order.argv, fds, order.umask)
    return pid, ()


def _start_in_terminal(order: SudoRequest, fds: list, processes) -> tuple:
    master, slave = processes.open_terminal(order.user)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *order.size, 0, 0))
    pid = fork_process()
    if pid == 0:
        processes.become_program(order.user, order.cwd, order.env, order.argv, [slave] * 3, order.umask, terminal=True)
    os.close(slave)
    return pid, (master,)


def _await_command(connection: socket.socket, reader: wire.FrameReader, pid: int) -> int:
    """Passes signals on until the command has ended; kills it when its client is gone. Returns its wait status."""
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(connection, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        if pidfd in ready:
            return os.waitpid(pid, 0)[1]
        if not _pass_signals(reader, pid):
            signal_session(pid, _KILL)
            poll.unregister(connection)


def _pass_signals(reader: wire.FrameReader, pid: int) -> bool:
    """Passes received signals on. False when the client is gone, or sends anything else."""
    try:
        if not reader.pump():
            return False
    except (OSError, wire.WireError):
        return False
    for header, _, fds in reader.take():
        for fd in fds:
            os.close(fd)
        if type(header.get("signal")) is not int or header["signal"] not in _FORWARDED_SIGNALS:
            return False
        _signal_group(pid, header["signal"])
    return True


def _signal_group(pid: int, number: int) -> None:
    for send in (os.killpg, os.kill):  # one that has only just been forked leads no group yet
        try:
            send(pid, number)
            return
        except ProcessLookupError:
            continue
