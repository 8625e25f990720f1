"""The kernel: one forked process that runs one cell after the other. See KERNEL in `cloche.guest.wire`."""

from __future__ import annotations

import builtins
import gc
import getpass
import io
import os
import resource
import sys
from typing import Any

from IPython.core.error import StdinNotImplementedError as _StdinNotImplementedError

from cloche.guest.init.limits import OOM_EXECUTING, OOM_IDLE, limit_process
from cloche.guest.kernel import figures, proxies, tools, tracebacks, variables
from cloche.guest.kernel.assistant import CodeAssistant
from cloche.guest.kernel.channel import KernelChannel
from cloche.guest.kernel.display_writer import DEFAULT_DISPLAY_BYTES, DisplayWriter
from cloche.guest.kernel.fork import KernelForker
from cloche.guest.kernel.reseed import reseed_after_fork
from cloche.guest.kernel.shell import Shell
from cloche.guest.kernel.threads import BUSY_SECONDS, NumericThreads
from cloche.guest.kernel.written_files import WrittenFiles

REHEARSAL = "rehearsal"  # a run that nobody listens to
prepared: list = []  # the kernel that `warmup.prepare` made, for the forks
NO_INPUT = (
    "the program asked for input, but nobody answers in this run"
    " (the library takes answers as `input=`, `cloche run` on its stdin)"
)


class StdinNotImplementedError(_StdinNotImplementedError, EOFError):
    """input() in a run that cannot be asked."""


StdinNotImplementedError.__module__ = "IPython.core.error"


def main(channel_fd: int, stdout_fd: int, stderr_fd: int, token: str) -> None:
    """Serves one channel in a process that was forked from one where `warmup.prepare_kernel` ran.

    Never returns.

    Descriptors 1 and 2 are the output pipes; `stdout_fd` and `stderr_fd` are the kernel's own duplicates of them.
    """
    serve(get_ready(channel_fd, stdout_fd, stderr_fd, token))


def get_ready(channel_fd: int, stdout_fd: int, stderr_fd: int, token: str) -> KernelChannel:
    """The part of the start without user and place, which the first kernel does before the walls stand."""
    gc.enable()
    prepared[0].installed.follow()
    return KernelChannel(channel_fd, stdout_fd, stderr_fd, token, prepared[0].interrupts)


def serve(channel: KernelChannel) -> None:
    """Never returns."""
    try:
        prepared[0].serve(channel)
        os._exit(0)
    finally:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


class PythonKernel:
    """Made once, before the forks, so that its data is in their memory. `serve` gives it its channel."""

    def __init__(self, shell: Shell):
        self._shell = self.shell = shell
        self._formatter = self._shell.display_formatter  # ours, whatever a program puts there
        self.interrupts = shell.interrupts
        self.installed = shell.installed
        self._channel: Any = None
        self._namespace: Any = None
        self._written = WrittenFiles()
        self._threads = NumericThreads()
        self._branching = KernelForker()
        self._assistant = CodeAssistant(shell)
        self._screen = shell.screen = DisplayWriter()
        self._run: Any = None
        self._may_ask = False
        self._oom_fd = -1
        builtins.input = self._read_input
        getpass.getpass = self._getpass
        sys.stdin = StandardInput(self._read_line)
        replace_streams()

    def attach(self, channel: KernelChannel) -> None:
        self._channel = channel
        self.interrupts.install()
        try:
            self._oom_fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            self._oom_fd = -1

    def detach(self) -> None:
        """Undoes `attach`; the channel's descriptors are closed."""
        channel, self._channel = self._channel, None
        channel.close()
        if self._oom_fd >= 0:
            os.close(self._oom_fd)
            self._oom_fd = -1

    def serve(self, channel: KernelChannel) -> None:
        """Answers requests until the stream ends.

        The kernel is ready as soon as it can take requests: the rest of the start is done while the host announces it
        and a request comes. It was tried in the zygote. Should it fail here all the same, this kernel had not run
        anything.
        """
        self.attach(channel)
        channel.send({"ev": "ready", **self._next_count()})
        reseed_after_fork()
        self._namespace = variables.KernelNamespace(self._shell.user_ns)
        self.installed.begin()
        while True:
            self._await_request()
            frame = self._channel.receive()
            if frame is None:
                return
            self.handle_request(*frame)

    def handle_request(self, header: dict, body: bytes) -> None:
        """One request. An answer to a question that is no longer asked is dropped."""
        verb = header.get("do")
        if verb == "execute":
            self._execute_cell(header, body)
        elif verb == "configure":
            os.environ.update(header.get("env") or {})
            proxies.reset_urllib_opener(header.get("env") or {})
            _enter_directory(header.get("cwd"))
            limit_process(**header.get("limits") or {})
        elif verb == "inspect":
            self._channel.send(*variables.answer_inspect(self._namespace, header.get("ask")))
        elif verb == "rehearse":
            self._rehearse_cell()
        elif verb == "attend":
            self._assistant.attend(header["wires"][0])
        elif verb == "branch":
            self._assistant.dismiss()  # a thread cannot be copied: the host attends again
            self._attach_copy(self._branching.branch(header, self._channel, self._oom_fd, self._shell.loop))
        elif verb == "collect":
            self._branching.collect(self._channel)

    def _attach_copy(self, channel: KernelChannel | None) -> None:
        """In a copy of a kernel, just made: attaches its own channel."""
        if channel is not None:
            if self._oom_fd >= 0:
                os.close(self._oom_fd)
            self.attach(channel)
            channel.send({"ev": "ready", **self._next_count()})

    def _next_count(self) -> dict:
        """The number of the next cell, which then starts on arrival. Empty where a loop's tasks run between cells.

        The host may interrupt it from now on, so our signal handler is installed again: a program may have replaced
        it.
        """
        if self._shell.loop is not None:
            return {}
        self.interrupts.install()
        return {"next": self._cell_count}

    @property
    def _cell_count(self) -> int:
        count = self._shell.execution_count  # which a program can set to what is no number
        return count if type(count) is int and count >= 0 else 0

    def _await_request(self) -> None:
        """Waits for the next request; inside the loop, if there is one, so that the program's tasks go on."""
        loop = self._shell.loop
        while loop is not None and not loop.is_closed() and not self._channel.has_frame:
            try:
                loop.run_until_complete(self._channel_readable(loop))
                return
            except BaseException:  # noqa: BLE001 - a task may raise SystemExit, or stop the loop
                continue
            finally:
                loop.remove_reader(self._channel.fileno())

    def _channel_readable(self, loop: Any) -> Any:
        """A future that is done when the channel can be read."""
        arrived = loop.create_future()
        loop.add_reader(self._channel.fileno(), lambda: arrived.done() or arrived.set_result(None))
        return arrived

    def _rehearse_cell(self) -> None:
        """Runs a first execution and removes its traces: the pages that it writes to are then the kernel's own.

        In a fork each of them has to be copied at its first write, which is half the time of a first execution. It
        shows a value, since most do; the host drops the events of a run that it has not asked for.
        """
        self._execute_cell({"run": REHEARSAL}, b"0")
        self._shell.forget_cells()

    # One run

    def _execute_cell(self, header: dict, body: bytes) -> None:
        self._run = header["run"]
        self._may_ask = bool(header.get("input"))
        known = header.get("next") == self._cell_count
        if not known:
            self.interrupts.install()
        if self.interrupts.expect() and self._channel.interrupts_run(self._run):
            self.interrupts.recall()
        if not known:
            self._channel.send({"ev": "started", "run": self._run, "count": self._cell_count})
        self._set_oom_score(OOM_EXECUTING)
        self._screen.start(self._channel, self._run, header.get("display_bytes") or DEFAULT_DISPLAY_BYTES)
        self._formatter.show(header.get("show") or [])
        reopen_closed()
        self._written.start()
        before, _ = _resource_usage()
        error = self._run_in_place(header, body)
        if not self._channel.ours:
            _end_forked_child(error)
        after, peak_bytes = _resource_usage()
        self._end_run(error, after - before, peak_bytes)
        if after - before >= BUSY_SECONDS:
            self._threads.after_busy_cell()

    def _run_in_place(self, header: dict, body: bytes) -> BaseException | None:
        """Runs the cell with its variables, directory, arguments and tools, which last as long as it does."""
        env, cwd = header.get("env") or {}, header.get("cwd")
        argv, sys.argv = sys.argv, header.get("argv") or sys.argv
        saved = {name: os.environ.get(name) for name in env}
        home = _current_directory() if cwd else None
        if env:
            os.environ.update(env)
        offer = header.get("tools")
        take_back = tools.lend_functions(self._shell.user_ns, offer) if offer else None
        try:
            if cwd:
                os.chdir(cwd)
            inside = _current_directory() if cwd else None
            error = self._run_guarded(self._run_cell, body)
            if home and _current_directory() == inside:
                os.chdir(home)
            return error
        except (OSError, ValueError) as failure:
            return failure
        finally:
            if take_back is not None:
                take_back()
            for name, value in saved.items():
                _restore_variable(name, value)
            if header.get("argv"):
                sys.argv = argv

    def _run_cell(self, body: bytes) -> None:
        try:
            if body and not body.isspace():
                self._shell.run(body.decode("utf-8", "surrogatepass"))
        finally:
            self._screen.ending = True
            figures.show_open_figures(self._show_value)

    def _show_value(self, value: Any) -> None:
        bundle, _metadata = self._shell.display_formatter.format(value)
        self._shell.display_pub.publish(bundle)

    def _run_guarded(self, step: Any, *args: Any) -> BaseException | None:
        """Runs a step; returns the exception that the program raised, or None. Interrupts are possible inside only."""
        try:
            try:
                self.interrupts.arm()
                step(*args)
            finally:
                self.interrupts.disarm()
        except BaseException as error:  # noqa: BLE001 - the program may raise anything; the kernel outlives it
            self.interrupts.disarm()
            return error
        return None

    def _end_run(self, error: BaseException | None, cpu_seconds: float, peak_bytes: int) -> None:
        try:
            self._report_end(error, cpu_seconds, peak_bytes)
        except BaseException:  # noqa: BLE001 - the program broke what we stand on: say at least that it is over
            self._channel.post({"ev": "ended", "run": self._run, "outcome": "raised", "exit": None, "cpu": 0, "rss": 0})

    def _report_end(self, error: BaseException | None, cpu_seconds: float, peak_bytes: int) -> None:
        if sys.getrecursionlimit() < 500:
            sys.setrecursionlimit(1000)
        ended: dict = {"ev": "ended", "run": self._run, "outcome": "ok", "exit": None}
        if error is not None:
            ended["outcome"] = "interrupted" if isinstance(error, KeyboardInterrupt) else "raised"
            ended["exit"] = _exit_status(error)
            self._hold_raised(error)
        for info in self._written.changed():
            self._channel.send({"ev": "wrote", "run": self._run, "file": info})
        ended["cpu"] = round(cpu_seconds, 6)
        ended["rss"] = peak_bytes
        ended.update(self._next_count())
        self._screen.stop()
        self._channel.post(ended)
        self._set_oom_score(OOM_IDLE)
        self._run = None

    def _hold_raised(self, error: BaseException) -> None:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.last_exc = error  # type: ignore[attr-defined]
        body = tracebacks.render_traceback(error).encode("utf-8", "backslashreplace")
        value = tracebacks.error_text(error).encode("utf-8", "backslashreplace").decode()
        self._channel.hold({"ev": "raised", "run": self._run, "name": type(error).__name__, "value": value}, body)

    def _set_oom_score(self, value: bytes) -> None:
        """Sets the OOM score: a kernel that executes is killed before idle ones when memory is short."""
        if self._oom_fd >= 0:
            try:
                os.write(self._oom_fd, value)
            except OSError:
                self._oom_fd = -1

    # Questions of the program

    def _read_input(self, prompt: object = "", /) -> str:
        return self._ask_host(str(prompt), secret=False)

    def _getpass(self, prompt: str = "Password: ", stream: Any = None) -> str:
        return self._ask_host(str(prompt), secret=True)

    def _read_line(self) -> str:
        """A line for `sys.stdin`, which is at its end where the run takes no input."""
        try:
            return self._ask_host("", secret=False) + "\n"
        except EOFError:
            return ""

    def _ask_host(self, prompt: str, *, secret: bool) -> str:
        if not self._may_ask or self._run is None or not self._channel.ours:
            raise StdinNotImplementedError(NO_INPUT)
        text = prompt.encode("utf-8", "backslashreplace").decode()
        self._channel.post({"ev": "input", "run": self._run, "prompt": text, "secret": secret})
        answer = self._await_answer()
        if "error" in answer:
            raise StdinNotImplementedError(str(answer["error"]) or NO_INPUT)
        return str(answer.get("text", ""))

    def _await_answer(self) -> dict:
        frame = self._next_frame()
        while frame.get("do") in ("interrupt", "collect", "attend"):  # a signal counts; "collect" is said again
            if frame["do"] == "attend":
                self._assistant.attend(frame["wires"][0])
            frame = self._next_frame()
        return frame if frame.get("do") == "input" else {"error": "the question was not answered"}

    def _next_frame(self) -> dict:
        self._channel.wait()
        self.interrupts.hold()  # an interrupt between reading and keeping a frame would lose it
        try:
            frame = self._channel.receive()
        finally:
            self.interrupts.release()
        if frame is None:
            os._exit(0)
        return frame[0]


def _exit_status(error: BaseException) -> int | None:
    if not isinstance(error, SystemExit):
        return None
    code = error.code
    if code is None or isinstance(code, int):
        return int(code or 0) & 0xFF
    return 1


def _end_forked_child(error: BaseException | None) -> None:
    """A process that the cell forked came to the cell's end: it ends as a script would."""
    status = 0 if error is None else _exit_status(error)
    try:
        if status is None and error is not None:
            print(tracebacks.render_traceback(error), end="", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1 if status is None else status)


def _resource_usage() -> tuple:
    """Seconds of CPU, with those of children that have ended, and the most memory, of this process alone."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime, own.ru_maxrss * 1024


def _current_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


def _enter_directory(path: str | None) -> None:
    """Enters the sandbox's working directory, made if it is not there. A failure is printed on stderr."""
    if path is not None:
        try:
            os.makedirs(path, exist_ok=True)
            os.chdir(path)
        except OSError as error:
            print(f"cannot work in {path!r}: {error.strerror}", file=sys.stderr, flush=True)


def _restore_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


# The program's sys.stdin, sys.stdout and sys.stderr.


def replace_streams() -> None:
    """New text streams over descriptors 1 and 2, unless they are ours already."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        if not isinstance(getattr(sys, name), StandardOutput):
            stream = StandardOutput(fd)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def reopen_closed() -> None:
    """Gives the program its streams back if an earlier cell closed or removed them."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name, None)
        if stream is None or getattr(stream, "closed", False) is True:
            setattr(sys, name, StandardOutput(fd))


class StandardOutput(io.TextIOWrapper):
    """Line-buffered UTF-8 over a descriptor that it does not own.

    Unencodable characters are escaped, never an error.
    """

    def __init__(self, fd: int):
        raw = io.FileIO(fd, "wb", closefd=False)
        super().__init__(io.BufferedWriter(raw, 8192), "utf-8", "backslashreplace", "\n", line_buffering=True)


class StandardInput(io.TextIOBase):
    """Lines that the caller of the run gives when asked."""

    encoding = "utf-8"

    def __init__(self, line: Any):
        self._line = line

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        return self._line()

    def read(self, size: int | None = -1, /) -> str:
        return "".join(iter(self._line, ""))
