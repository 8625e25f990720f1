"""The guest of a sandbox that has a kernel of its own. It is started once, saved, and restored for each sandbox.

Pid 1 is init, with nothing imported. Its child has made the template's imports; it has forked the first kernel and
will be the fork server. All three wait, and hold no descriptor of the host's but stdin, stdout and stderr, which are
others after each restore: in this state the host saves them.

  guest -> stdout   {"ev":"ready"} | {"ev":"failed","message":..}      one line; it can be saved
  host -> stdin     a line: it was restored, and the host listens at HOST_SOCKET
  host -> guest     {"spec":{..}}  fds=[init's channel, kernel 0's channel, stdout, stderr]   there; then it is closed

What every restored sandbox would share is made anew: seeds of random numbers by each program as after a fork (see
`cloche.guest.kernel.reseed`), the boot id with the walls, tokens by the host. The kernel sets the clocks.
"""

from __future__ import annotations

import json
import os
import socket
import sys

from cloche.guest import wire
from cloche.guest.init import init, memory_watch
from cloche.guest.init.programs import close_others
from cloche.guest.paths import HOST_SOCKET, STANDALONE_FILTER, STANDALONE_ORDER
from cloche.guest.zygote import enclosure, fork_server
from cloche.linux import syscalls


def main() -> None:
    """Never returns."""
    with open(STANDALONE_ORDER, encoding="utf-8") as file:
        order = json.load(file)
    with open(STANDALONE_FILTER, "rb") as file:
        program = file.read()
    walls = enclosure.Enclosure.with_own_kernel(program)
    served = init.Init(False, program, order["env"], walls=True)
    warm = WarmProcess(served, walls, order["imports"])
    served.adopt_environment()
    _say({"ev": "ready"} if warm.failure is None else {"ev": "failed", "message": warm.failure})
    if warm.failure is not None or not os.read(0, 4096):  # from here on it may be another host
        os._exit(1)
    _begin_sandbox(served, walls, warm)


def _say(line: dict) -> None:
    os.write(1, json.dumps(line).encode() + b"\n")


def _begin_sandbox(served: init.Init, walls: enclosure.Enclosure, warm: WarmProcess) -> None:
    """Never returns."""
    with socket.socket(socket.AF_UNIX) as host:
        host.connect(HOST_SOCKET)
        order, _, fds = wire.FrameReader(host).next() or os._exit(1)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    spec = {**order["spec"], "zygote_bytes": warm.anonymous_bytes, "kernel_bytes": memory_watch.all_bytes()}
    warm.begin(spec, fds[1:])
    for fd in (null, *fds[1:]):
        os.close(fd)
    init.begin_with_own_kernel(served, walls, spec, socket.socket(fileno=fds[0]), warm.door, warm.fork_server)


class WarmProcess:
    """Init's side of the process that has made the imports, and of the first kernel."""

    def __init__(self, served: init.Init, walls: enclosure.Enclosure, imports: list):
        self.fork_server, server = socket.socketpair()
        self.door, kernel = socket.socketpair()
        reading, writing = os.pipe2(os.O_CLOEXEC)
        if syscalls.fork_bare() == 0:
            self.fork_server.close()
            self.door.close()
            os.close(reading)
            _run_warm(served, walls, imports, server, kernel, writing)
        for end in (server, kernel):
            end.close()
        os.close(writing)
        with open(reading, encoding="utf-8") as file:
            said = json.loads(file.read() or '{"failure": "the process that makes the imports was killed"}')
        self.failure: str | None = said.get("failure")
        self.anonymous_bytes: int = said.get("anonymous_bytes", 0)

    def begin(self, spec: dict, kernel_wires: list) -> None:
        """Gives both their sandbox. They wait at their doors then, until the walls stand."""
        wire.send_frame(self.fork_server, {"spec": spec})
        wire.send_frame(self.door, {"spec": spec}, fds=tuple(kernel_wires))


def _run_warm(served, walls, imports: list, server: socket.socket, kernel: socket.socket, report: int) -> None:
    """Never returns."""
    try:
        try:
            _make_imports(served, imports)
        except BaseException as error:  # noqa: BLE001 - a template's code may raise anything
            os.write(report, json.dumps({"failure": f"{type(error).__name__}: {error}"}).encode())
            os._exit(1)
        if syscalls.fork_bare() == 0:
            server.close()
            os.close(report)
            order, _, fds = wire.FrameReader(kernel).next() or os._exit(0)
            init.be_first_kernel(served, walls, order["spec"], fds, kernel)
        kernel.close()
        os.write(report, json.dumps({"anonymous_bytes": memory_watch.anonymous_bytes(os.getpid())}).encode())
        close_others([server.fileno()])
        order, _, _ = wire.FrameReader(server).next() or os._exit(0)
        fork_server.main(served, walls, order["spec"], server, [])
    finally:  # a fork must never run on into its parent's code
        os._exit(1)


def _make_imports(served: init.Init, imports: list) -> None:
    """As the zygote does: see `Zygote.prepare`."""
    from cloche.guest.python import command_line, run  # noqa: F401, I001 - before the kernel
    from cloche.guest.kernel import kernel
    from cloche.guest.zygote import warmup

    sys.stdout = sys.stderr  # the host reads stdout
    warmup.prepare_kernel(imports)
    run.record_own_modules()
    served.processes.kernels = kernel
    served.adopt_environment()  # the template's imports were made with another
