"""The server of `python3`: a fork with everything imported that becomes the caller's program.

The `python3` on the PATH is a client (see `python/client.py`) of a socket that init has in every sandbox. The
fork takes the caller's descriptors, arguments, environment, working directory, limits and so on, and runs the
program as an interpreter would that has just started. Where it would not be the same, it says so, and the
client runs the real one.

It does not widen the rights of a program: the fork is the user that the caller is, behind the same filter,
and has the limits that every program has, or lower ones, if the caller has. It is that user before it reads
the request. Its memory is a copy of the fork server's (see `fork_server`), which has read no program's data.
Init keeps its side of the connection: when the client is gone, the program is killed, and when the program
has ended, the client is told.

  client -> fork   {"kind":"file|command|module|stdin","uid":n,"rest":n,"words":n,"env":n,"numbers":[fd,..],
                    "unbuffered":0|1,"dont_write_bytecode":0|1}
                   body=sys.argv, the argument of `kind`, the words of the command line, NAME=value.., NUL between
                   fds=[stdin, stdout, stderr, working directory, others of the caller's (by `numbers`), the file]
  fork -> client   {"error":..} | {"started":pid}
  init -> client   {"status":wait status}
"""

from __future__ import annotations

import fcntl
import os
import socket

from cloche.guest import wire
from cloche.guest.init import caller_attributes, identity
from cloche.guest.init.programs import NoForkServer, TooManyProcesses
from cloche.guest.init.service_sockets import (
    CONNECTION_FD,
    RequestRefused,
    ServiceSocket,
    caller,
    detach_from_init,
    request,
)
from cloche.guest.init.sessions import signal_session
from cloche.guest.python.client import MAX_EXTRA_FILES, SOCKET_ADDRESS
from cloche.linux import syscalls

MAX_PROGRAMS = 64
_FULL = f"{MAX_PROGRAMS} programs of Python run already"
_NO_SEED = "there is no seed yet"
_KILL = 9
_MAX_BODY_BYTES = 4 << 20  # twice the kernel's limit of arguments and environment: some of the words come twice
_KINDS = ("file", "command", "module", "stdin")
_MAX_NUMBER = 1 << 16


def reception(processes, seed, watch_fd) -> ServiceSocket:
    """Returns the socket, not open yet. `processes` knows the limits of programs; `seed` forks them."""
    return ServiceSocket(
        SOCKET_ADDRESS,
        watch_fd,
        lambda fd: _start_program(fd, processes),
        most=MAX_PROGRAMS,
        full=_FULL,
        keeps=lambda pid: signal_session(pid, _KILL),
        prepare=lambda reception: _await_fork_server(reception, seed),
    )


def _await_fork_server(reception: ServiceSocket, seed) -> bool:
    """Makes the first client wait until there is a fork server, or until it is known that there will be none."""
    if seed.is_let_in or not seed.may_come:
        return True
    reception.rest(_NO_SEED)
    seed.ask_for(lambda: reception.go_on(_NO_SEED))
    return False


def _start_program(fd: int, processes) -> int:
    try:
        return processes.fork_connection_handler(fd)
    except (NoForkServer, TooManyProcesses) as error:
        raise RequestRefused(f"the program cannot be forked: {error}") from None


def serve_connection(fd: int, processes) -> None:
    """In a fork with everything imported. Never returns."""
    from cloche.guest.python import command_line

    try:
        connection = detach_from_init(fd)
        try:
            order = _receive_request(connection, processes)
            connection = _take_descriptors(order, connection)
        except (RequestRefused, OSError, ValueError, LookupError, wire.WireError) as error:
            wire.send_frame(connection, {"error": str(error)})
            os._exit(1)
        wire.send_frame(connection, {"started": os.getpid()})
        connection.close()
        command_line.run_program(order)
    except BaseException as error:  # noqa: BLE001 - a fork must never run on into its parent's code
        os.write(2, f"{error}\n".encode(errors="backslashreplace"))
    os._exit(1)


def _receive_request(connection: socket.socket, processes) -> PythonRequest:
    pid, uid = caller(connection)
    processes.become_user(identity.user_name(uid))
    head, body, fds = request(connection, wire.FrameReader(connection, max_body=_MAX_BODY_BYTES))
    from cloche.guest.python import command_line

    order = PythonRequest(head, body, fds, uid)
    caller_attributes.copy_caller_attributes(pid, order.env, processes.inherited_environment())
    os.fchdir(order.directory)
    command_line.check_request(order)
    return order


def _take_descriptors(order: PythonRequest, connection: socket.socket) -> socket.socket:
    """Puts the caller's descriptors at the caller's numbers, and closes all others.

    Returns the connection, which has another descriptor now.
    """
    # Out of the way of the numbers that they will get, and above all that is open.
    above = max(CONNECTION_FD, order.directory, *order.places, *order.places.values()) + 1
    high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for number, fd in order.places.items()}
    moved = socket.socket(fileno=fcntl.fcntl(connection.detach(), fcntl.F_DUPFD_CLOEXEC, above))
    syscalls.close_range(CONNECTION_FD, above - 1)
    for number, fd in high.items():
        os.dup2(fd, number)
        os.close(fd)
    return moved


class PythonRequest:
    """A checked request: no other part of the client's message is used. Raises RequestRefused."""

    def __init__(self, head: dict, body: bytes, fds: list, uid: int):
        kind = head.get("kind")
        counts: list = [head.get(name) for name in ("rest", "words", "env")]
        numbers: list = head.get("numbers")  # type: ignore[assignment]  # checked below
        if kind not in _KINDS or head.get("uid") != uid:
            raise RequestRefused("there is no such kind of program, or another caller than that")
        if not all(type(count) is int and count >= 0 for count in counts) or not _are_descriptors(numbers):
            raise RequestRefused("the numbers of that request are none")
        if len(fds) != 4 + len(numbers) + (kind == "file"):
            raise RequestRefused("the descriptors of that request are not as announced")
        texts = os.fsdecode(body).split("\0")
        rest, words, env = counts
        if len(texts) != rest + 1 + words + env:
            raise RequestRefused("the words of that request are not as announced")
        self.kind = kind
        self.argv, self.argument, self.words = texts[:rest], texts[rest], texts[rest + 1 : rest + 1 + words]
        self.env = _parse_environment(texts[rest + 1 + words :])
        self.flags = {name: head.get(name) == 1 for name in ("unbuffered", "dont_write_bytecode")}
        self.directory = fds[3]
        self.places = dict(zip((0, 1, 2, *numbers), (*fds[:3], *fds[4:]), strict=False))
        self.file = fds[-1] if kind == "file" else -1
        self.source = b""  # of a program that is no stdin, once it was looked at


def _are_descriptors(numbers: object) -> bool:
    """Whether these are numbers of descriptors beyond the first three, each once."""
    return (
        isinstance(numbers, list)
        and len(numbers) <= MAX_EXTRA_FILES
        and all(type(number) is int and 2 < number < _MAX_NUMBER for number in numbers)
        and len(set(numbers)) == len(numbers)
    )


def _parse_environment(texts: list) -> dict:
    pairs = [text.partition("=") for text in texts]
    if not all(name and equals for name, equals, _ in pairs):
        raise RequestRefused("the environment of that request is none")
    return {name: value for name, _, value in pairs}
