"""Kernels, commands and terminals: all processes that init forks, itself or by the fork server.

Init has nothing imported: modules that only a warm process needs (see `fork_server`) are imported there when
used.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed knows only `signal`
import fcntl
import os
import pty
import signal
import struct
import termios
import time
from typing import Any

from cloche.guest.init import identity, sessions
from cloche.guest.init.children import (
    KERNEL_FDS,
    ChildProcess,
    ProgramStart,
    command_words,
    enter_enclosure,
    take_descriptors,
)
from cloche.guest.init.defaults import Defaults
from cloche.guest.init.limits import limit_process, prefer_for_oom_kill
from cloche.guest.init.programs import OWN_SIGNALS, NoForkServer, TooManyProcesses, default_signals, enter, exec_program
from cloche.guest.languages import languages
from cloche.guest.python import script
from cloche.linux import syscalls

_FORK_TRIES, _FORK_PAUSE_SECONDS = 25, 0.02


class UnknownProcess(LookupError):
    code = "process_not_found"


class UnknownKernel(LookupError):
    code = "context_not_found"


class Processes:
    """`warm`: the `fork_server.ForkServerClient` that forks processes with everything imported."""

    def __init__(self, identities: identity.Identities, defaults: Defaults, event, reap):
        self._identities = identities
        self._defaults = defaults
        self._event = event
        self.reap = reap
        self.warm: Any = None
        self.kernels: Any = None  # the module of that name, where it is imported: to look for it copies fifty pages
        self._kernels: dict = {}
        self._commands: dict = {}

    def verb_handlers(self) -> dict:
        return {
            "kernel_start": self.start_kernel,
            "kernel_signal": self.signal_kernel,
            "process_start": self.start_command,
            "process_signal": self.signal_command,
            "process_list": self.list,
            "stirring": self.is_active,
        }

    def configure(self, header: dict) -> None:
        defaults = self._defaults
        defaults.env = {**defaults.env, **header.get("env", {})}
        defaults.cwd = header.get("cwd") or defaults.cwd
        defaults.user = header.get("user") or defaults.user
        defaults.processes = header.get("processes") or defaults.processes
        defaults.data_bytes = header.get("data_bytes") or defaults.data_bytes
        defaults.open_files = header.get("open_files") or defaults.open_files

    # --- kernels

    def start_kernel(self, header: dict, _: bytes) -> dict:
        name, user = header["kernel"], header.get("user") or self._defaults.user
        env = self._defaults.environment(user, header.get("env", {}))
        cwd = self._defaults.path(header.get("cwd") or self._defaults.cwd)
        self._identities.uid(user)
        self._defaults.memory_bytes = header.get("memory_bytes")
        token, wires, language = header["token"], tuple(header["wires"]), header.get("language") or "python"
        become_kernel, make_room = languages.kernel_starter(language, KERNEL_FDS, token, self._defaults)
        order = {"kind": "kernel", "user": user, "cwd": cwd, "env": env, "token": token}
        pid = self._fork_warm(order, b"", wires, ()) if language == "python" else None
        if pid is None:
            pid = self.fork()
            if pid == 0:
                self._run_child(user, cwd, env, wires, None, become_kernel, first=make_room)
        self._kernels[name] = ChildProcess(name, pid, f"{language} kernel", user, cwd)
        return {"pid": pid}

    def _fork_warm(self, order: dict, body: bytes, fds: tuple, held: tuple) -> int | None:
        """A fork with everything imported, with these descriptors; None without a fork server.

        Raises TooManyProcesses, and closes `held`.
        """
        if not self.warm.is_there:
            return None
        try:
            return self.warm.fork({**order, **self._defaults.limits()}, body, fds)
        except NoForkServer:
            return None
        except TooManyProcesses:
            for fd in held:
                os.close(fd)
            raise

    def fork_connection_handler(self, connection: int) -> int:
        """A fork with everything imported that serves a connection: see `warm_python`.

        Raises NoForkServer, TooManyProcesses.
        """
        return int(self.warm.fork({"kind": "attend", **self._defaults.limits()}, b"", (connection,)))

    def become(self, order: dict, body: bytes, fds: list) -> None:
        """In a fork with everything imported: becomes the ordered process. Never returns."""
        self._defaults.take_limits(order)
        if order["kind"] == "attend":
            from cloche.guest.init import warm_python

            warm_python.serve_connection(fds[0], self)
        elif order["kind"] == "kernel":
            work, outputs, stdin = languages.become_python, (KERNEL_FDS, order["token"]), None
            self._run_child(order["user"], order["cwd"], order["env"], tuple(fds), stdin, lambda: work(*outputs))
        else:
            outputs, stdin = tuple(fds[:2]), fds[2] if len(fds) > 2 else None
            run, terminal = lambda: script.run_script(order["script"], body), bool(order["terminal"])
            self._run_child(order["user"], order["cwd"], order["env"], outputs, stdin, run, terminal)
        os._exit(127)

    def start_first_kernel(self, token: str, fds: tuple) -> None:
        """The kernel that every sandbox begins with. The host has its other ends already: there is no answer."""
        pid = syscalls.fork_bare()
        if pid == 0:
            user, cwd, env = self._defaults.first_kernel_settings()
            self._run_child(user, cwd, env, fds, None, lambda: languages.become_python(KERNEL_FDS, token))
        self.register_first_kernel(pid)

    def be_first_kernel(self, token: str, fds: tuple, door: int, enter) -> None:
        """In a process that the zygote has forked beside init: waits to be admitted, then is the first kernel."""
        user, cwd, env = self._defaults.first_kernel_settings()
        channels: list = []
        kernel = self.kernels
        first = lambda: channels.append(enter_enclosure(kernel, token, enter))  # noqa: E731
        self._run_child(user, cwd, env, (*fds, door), None, lambda: kernel.serve(*channels), first=first)

    def register_first_kernel(self, pid: int) -> None:
        user, cwd, _ = self._defaults.first_kernel_settings()
        self.register_kernel(ChildProcess("0", pid, "python kernel", user, cwd))

    def register_kernel(self, child: ChildProcess) -> None:
        self._kernels[child.name] = child

    def remove_kernel(self, child: ChildProcess) -> None:
        if self._kernels.get(child.name) is child:
            del self._kernels[child.name]

    def kernel(self, name: str) -> ChildProcess | None:
        return self._kernels.get(name)

    def knows(self, pid: int) -> bool:
        return any(child.pid == pid for child in (*self._kernels.values(), *self._commands.values()))

    def signal_kernel(self, header: dict, _: bytes) -> dict:
        child = self._kernels.get(header["kernel"])
        if child is None:
            raise UnknownKernel(f"no kernel {header['kernel']!r}")
        if header.get("group"):
            sessions.signal_session(child.pid, header["signal"], header.get("brief", False))
        else:
            os.killpg(child.pid, header["signal"])
        return {}

    def kernel_of(self, pid: int) -> str | None:
        """The name of the kernel that has `pid` in its session."""
        known = {pid, *sessions.session_lineage(pid)}
        return next((name for name, child in self._kernels.items() if child.pid in known), None)

    # --- commands and terminals

    def start_command(self, header: dict, body: bytes) -> tuple:
        name, user = header["process"], header.get("user") or self._defaults.user
        cwd = self._defaults.path(header.get("cwd") or self._defaults.cwd)
        env = self._defaults.environment(user, header.get("env", {}))
        self._identities.uid(user)
        if not header.get("make_cwd", True):
            self._check_directory(user, cwd)
        order = header.get("script")
        argv = command_words(header)
        work = (lambda: script.exec_interpreter(order, body)) if order else (lambda: exec_program(argv, env))
        warm = {"kind": "script", "script": order, "user": user, "cwd": cwd, "env": env} if order else None
        start = self._start_in_terminal if header.get("pty") else self._start_with_pipes
        pid, fds = start(header, user, cwd, env, ProgramStart(work, warm, body))
        self._commands[name] = ChildProcess(name, pid, header.get("command") or " ".join(argv), user, cwd)
        return {"pid": pid}, b"", fds

    def _launch_command(
        self,
        user: str,
        cwd: str,
        env: dict,
        outputs: tuple,
        stdin: int | None,
        held: tuple,
        start: ProgramStart,
        terminal=False,
    ) -> int:
        """Forks a command, with everything imported if it is such a one. Closes `held` if it cannot."""
        if start.warm is not None:
            fds = outputs if stdin is None else (*outputs, stdin)
            pid = self._fork_warm({**start.warm, "terminal": terminal}, start.body, fds, held)
            if pid is not None:
                return pid
        pid = self.fork(*held)
        if pid == 0:
            self._run_child(user, cwd, env, outputs, stdin, start.work, terminal)
        return pid

    def _start_with_pipes(self, header: dict, user: str, cwd: str, env: dict, start: ProgramStart) -> tuple:
        out, err, *stdin = header["wires"]
        return self._launch_command(user, cwd, env, (out, err), stdin[0] if stdin else None, (), start), ()

    def _start_in_terminal(self, header: dict, user: str, cwd: str, env: dict, start: ProgramStart) -> tuple:
        rows, columns = header["pty"]
        master, slave = self.open_terminal(user)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        env.setdefault("TERM", "xterm-256color")
        pid = self._launch_command(user, cwd, env, (slave, slave), slave, (master, slave), start, terminal=True)
        os.close(slave)
        return pid, (master,)

    def open_terminal(self, user: str) -> tuple:
        """Both sides of a new terminal, owned by `user`."""
        self._identities.act_on_files_as(user)
        try:
            return pty.openpty()
        finally:
            self._identities.act_as_init()

    def _check_directory(self, user: str, path: str) -> None:
        self._identities.act_on_files_as(user)
        try:
            os.close(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        finally:
            self._identities.act_as_init()

    def signal_command(self, header: dict, _: bytes) -> dict:
        child = self._commands.get(header["process"])
        if child is None:
            raise UnknownProcess(f"no process {header['process']!r}")
        if header.get("group", True):
            sessions.signal_session(child.pid, header["signal"], header.get("brief", False))
        else:
            os.kill(child.pid, header["signal"])
        return {}

    def list(self, *_) -> dict:
        return {"processes": [child.info() for child in self._commands.values()]}

    # --- both

    def is_active(self, header: dict, _: bytes) -> dict:
        """Whether something in the session of a command or a kernel runs just now."""
        child = self._kernels.get(header.get("kernel")) or self._commands.get(header.get("process"))
        return {"stirring": child is not None and sessions.is_active(child.pid)}

    def fork(self, *held: int, patient: bool = True) -> int:
        """Forks. If that fails, `held`, the descriptors opened for the child, are closed. Raises TooManyProcesses.

        Init ignores signals that its children must not miss: they wait until the child has set its own dispositions.
        """
        _signal.pthread_sigmask(_signal.SIG_BLOCK, OWN_SIGNALS)
        pid = -1
        try:
            pid = self._fork_patiently() if patient else syscalls.fork_bare()
            return pid
        except OSError as error:
            for fd in held:
                os.close(fd)
            if isinstance(error, BlockingIOError):
                raise TooManyProcesses from None
            raise
        finally:
            if pid:
                _signal.pthread_sigmask(_signal.SIG_UNBLOCK, OWN_SIGNALS)

    def _fork_patiently(self) -> int:
        """At the limit of processes it waits a moment for those just dying: a killed fork bomb, say."""
        for _ in range(_FORK_TRIES):
            try:
                return syscalls.fork_bare()
            except BlockingIOError:
                self.reap()
                time.sleep(_FORK_PAUSE_SECONDS)
        return syscalls.fork_bare()

    def _run_child(
        self, user: str, cwd: str, env: dict, outputs: tuple, stdin: int | None, work, terminal=False, first=None
    ) -> None:
        """Turns a fresh fork into `user`'s process with its descriptors in place, then does `work`. Never returns."""
        try:
            take_descriptors(outputs, stdin)
            default_signals()
            os.setsid()
            if terminal:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            if first:
                first()
            self._identities.become(user)
            # After the change of uid: a limit on processes counts those of the uid.
            limit_process(**self._defaults.limits())
            if len(outputs) == 2:  # a command: see `take_descriptors`
                prefer_for_oom_kill()
            enter(cwd, self._defaults.root)
            if env != self._defaults.inherited:
                os.environ.clear()
                os.environ.update(env)
            work()
        except BaseException as error:  # noqa: BLE001 - a fork must never run on into its parent's code
            os.write(2, f"{error}\n".encode(errors="backslashreplace"))
        os._exit(127)

    # --- for `elevation` and `warm_python`: programs that others than the host ask for

    def fresh_environment(self, user: str) -> dict:
        """That of a program that knows nothing of this sandbox's own environment."""
        return {**self._defaults.inherited, "HOME": identity.HOMES[user], "USER": user, "LOGNAME": user}

    def become_program(self, user: str, cwd: str, env: dict, argv, fds, umask: int, terminal=False) -> None:
        """In a fresh fork: becomes that program, with stdin, stdout and stderr from `fds`. Never returns."""
        os.umask(umask)
        self._run_child(user, cwd, env, (fds[1], fds[2]), fds[0], lambda: exec_program(argv, env), terminal)

    def become_user(self, user: str) -> None:
        """In a fresh fork: becomes `user` for good, with that user's limits."""
        self._identities.become(user)
        limit_process(**self._defaults.limits())

    def inherited_environment(self) -> dict:
        """The environment of this process when its modules were imported."""
        return self._defaults.inherited

    def kill_descendants(self) -> None:
        """Ends everything below this process, as far as it can be seen."""
        for _ in range(16):
            children = sessions.children_of(os.getpid())
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            if not children:
                return

    def ended(self, pid: int, status: int, usage) -> None:
        for children, key, event in (
            (self._kernels, "kernel", "kernel_exited"),
            (self._commands, "process", "process_exited"),
        ):
            for name, child in list(children.items()):
                if child.pid == pid:
                    del children[name]
                    cpu = usage.ru_utime + usage.ru_stime + child.cpu_seconds
                    rss = max(usage.ru_maxrss * 1024, child.peak_bytes)
                    self._event({"ev": event, key: name, "status": status, "cpu": cpu, "rss": rss})
                    return

    def add_usage(self, session: int | None, usage) -> None:
        """Adds the usage of a program that init forked for a command to the command's."""
        for child in self._commands.values() if session is not None else ():
            if child.pid == session:
                child.cpu_seconds += usage.ru_utime + usage.ru_stime
                child.peak_bytes = max(child.peak_bytes, usage.ru_maxrss * 1024)
