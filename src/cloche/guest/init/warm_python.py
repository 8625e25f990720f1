"""What `python3` asks for: a fork in which everything is imported, that becomes the caller's program.

The `python3` on the PATH is a client (see `python_client.py`) of a socket that init has in every sandbox. The fork
takes the caller's descriptors, arguments, environment, working directory, limits and so on, and runs the program as an
interpreter would that has just started. Where it would not be the same, it says so, and the client runs the real one.

It does not widen what a program may do: the fork is the user that the caller is, behind the same filter, and has the
limits that every program has, or lower ones, if the caller has. It is that user before it reads what the caller says.
Its memory is a copy of the seed's (see `seed.py`), which has read nothing of anybody's. Init keeps its side of the
connection: when the client is gone, the program is killed, and when the program has ended, the client is told.

  client -> fork   {"kind":"file|command|module|stdin","uid":n,"rest":n,"words":n,"env":n,"numbers":[fd,..],
                    "unbuffered":0|1,"dont_write_bytecode":0|1}
                   body=sys.argv, the argument of `kind`, the words of the command line, NAME=value.., with NUL between
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
from cloche.guest.init.programs import NoRoom, NoSeed
from cloche.guest.init.service_sockets import CONNECTION, Reception, Refused, caller, forget_init, request
from cloche.guest.init.sessions import signal_session
from cloche.guest.python.client import ADDRESS, MAX_EXTRA_FILES
from cloche.linux import syscalls

MAX_PROGRAMS = 64
_FULL = f"{MAX_PROGRAMS} programs of Python run already"
_NO_SEED = "there is no seed yet"
_KILL = 9
_MAX_BODY_BYTES = 4 << 20  # twice the kernel's limit of arguments and environment: some of the words come twice
_KINDS = ("file", "command", "module", "stdin")
_MAX_NUMBER = 1 << 16


def reception(processes, seed, watch_fd) -> Reception:
    """The socket, not open yet. `processes` knows what programs may use; of `seed` they are forks."""
    return Reception(
        ADDRESS,
        watch_fd,
        lambda fd: _start(fd, processes),
        most=MAX_PROGRAMS,
        full=_FULL,
        keeps=lambda pid: signal_session(pid, _KILL),
        prepare=lambda reception: _prepare(reception, seed),
    )


def _prepare(reception: Reception, seed) -> bool:
    """Whoever comes first waits until there is a seed, or until it is known that there will be none."""
    if seed.is_let_in or not seed.may_come:
        return True
    reception.rest(_NO_SEED)
    seed.ask_for(lambda: reception.go_on(_NO_SEED))
    return False


def _start(fd: int, processes) -> int:
    try:
        return processes.fork_to_attend(fd)
    except (NoSeed, NoRoom) as error:
        raise Refused(f"the program cannot be forked: {error}") from None


def attend(fd: int, processes) -> None:
    """In a fork in which everything is imported. Never returns."""
    from cloche.guest.python import command_line

    try:
        connection = forget_init(fd)
        try:
            order = _receive(connection, processes)
            connection = _take(order, connection)
        except (Refused, OSError, ValueError, LookupError, wire.WireError) as error:
            wire.send(connection, {"error": str(error)})
            os._exit(1)
        wire.send(connection, {"started": os.getpid()})
        connection.close()
        command_line.run(order)
    except BaseException as error:  # noqa: BLE001 - a fork must never run on into its parent's code
        os.write(2, f"{error}\n".encode(errors="backslashreplace"))
    os._exit(1)


def _receive(connection: socket.socket, processes) -> Order:
    pid, uid = caller(connection)
    processes.become_user(identity.name_of(uid))
    head, body, fds = request(connection, wire.Reader(connection, max_body=_MAX_BODY_BYTES))
    from cloche.guest.python import command_line

    order = Order(head, body, fds, uid)
    caller_attributes.take_after(pid, order.env, processes.inherited_environment())
    os.fchdir(order.directory)
    command_line.check(order)
    return order


def _take(order: Order, connection: socket.socket) -> socket.socket:
    """Puts the caller's descriptors where the caller has them, and closes all others.

    Gives the connection, which is elsewhere now.
    """
    # Out of the way of the numbers that they will get, and above all that is open.
    above = max(CONNECTION, order.directory, *order.places, *order.places.values()) + 1
    high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for number, fd in order.places.items()}
    moved = socket.socket(fileno=fcntl.fcntl(connection.detach(), fcntl.F_DUPFD_CLOEXEC, above))
    syscalls.close_range(CONNECTION, above - 1)
    for number, fd in high.items():
        os.dup2(fd, number)
        os.close(fd)
    return moved


class Order:
    """What was asked for, checked: nothing else of the request is used. Raises Refused."""

    def __init__(self, head: dict, body: bytes, fds: list, uid: int):
        kind = head.get("kind")
        counts: list = [head.get(name) for name in ("rest", "words", "env")]
        numbers: list = head.get("numbers")  # type: ignore[assignment]  # checked below
        if kind not in _KINDS or head.get("uid") != uid:
            raise Refused("there is no such kind of program, or another caller than that")
        if not all(type(count) is int and count >= 0 for count in counts) or not _are_numbers(numbers):
            raise Refused("the numbers of that request are none")
        if len(fds) != 4 + len(numbers) + (kind == "file"):
            raise Refused("the descriptors of that request are not as announced")
        texts = os.fsdecode(body).split("\0")
        rest, words, env = counts
        if len(texts) != rest + 1 + words + env:
            raise Refused("the words of that request are not as announced")
        self.kind = kind
        self.argv, self.argument, self.words = texts[:rest], texts[rest], texts[rest + 1 : rest + 1 + words]
        self.env = _environment(texts[rest + 1 + words :])
        self.flags = {name: head.get(name) == 1 for name in ("unbuffered", "dont_write_bytecode")}
        self.directory = fds[3]
        self.places = dict(zip((0, 1, 2, *numbers), (*fds[:3], *fds[4:]), strict=False))
        self.file = fds[-1] if kind == "file" else -1
        self.source = b""  # of a program that is no stdin, once it was looked at


def _are_numbers(numbers: object) -> bool:
    """Of descriptors beyond the first three, each once."""
    return (
        isinstance(numbers, list)
        and len(numbers) <= MAX_EXTRA_FILES
        and all(type(number) is int and 2 < number < _MAX_NUMBER for number in numbers)
        and len(set(numbers)) == len(numbers)
    )


def _environment(texts: list) -> dict:
    pairs = [text.partition("=") for text in texts]
    if not all(name and equals for name, equals, _ in pairs):
        raise Refused("the environment of that request is none")
    return {name: value for name, _, value in pairs}
