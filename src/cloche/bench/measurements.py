"""Measurements through the library: starts, round trips, pauses, forks, memory, load, files and installations."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType

import msgspec

from cloche.bench import programs
from cloche.bench.lab import SETTLE_SECONDS, TRANSPORTS, IpykernelProcess, Lab, SampleCounts, SampleTarget, expect_two
from cloche.bench.samples import SampleBook, expect_answer, split_evenly
from cloche.config import Config, PoolConfig
from cloche.config.sections import PackagesConfig
from cloche.events import Ended, Output, Run
from cloche.sdk.embedded import EmbeddedEngine, use_engine
from cloche.sdk.sandbox import Context, Sandbox

PNG_SIGNATURE = b"\x89PNG"


def measure_first_answers(lab: Lab) -> None:
    """Create to ready and to `1+1`, with a pool and without; the raw cost between; the peer in turns."""
    counts = lab.counts
    turns = zip(split_evenly(counts.fast, counts.peer), split_evenly(counts.lean, counts.peer), strict=True)
    for count, lean in turns:
        measure_kernel_start(lab, "kernel_one", programs.ONE, "text/plain")
        for _ in range(lean):
            measure_kernel_start(lab, "kernel_one_lean", programs.ONE, "text/plain", lean=True)
        for _ in range(count):
            with lab.book.attempt("ready_pool", "one_pool"), lab.with_pool():
                lab.wait_for_pool()
                _create_and_answer(lab, "ready_pool", "one_pool")
            with lab.book.attempt("raw"):
                time.sleep(SETTLE_SECONDS)
                lab.book.add("raw", lab.raw_cost_seconds())
            with lab.book.attempt("ready_empty", "one_empty"), lab.without_pool():
                time.sleep(SETTLE_SECONDS)
                _create_and_answer(lab, "ready_empty", "one_empty")


def measure_first_frame(lab: Lab) -> None:
    _measure_first(lab, "frame_pool", "kernel_frame", programs.FRAME, "text/html", _expect_frame)


def measure_first_picture(lab: Lab) -> None:
    _measure_first(lab, "png_pool", "kernel_png", programs.PLOT, "image/png", _expect_picture)


def _measure_first(lab: Lab, key: str, peer_key: str, code: str, mime: str, check: Callable[[Run], None]) -> None:
    for count in split_evenly(lab.counts.fast, lab.counts.peer):
        measure_kernel_start(lab, peer_key, code, mime)
        for _ in range(count):
            with lab.book.attempt(key), lab.with_pool():
                lab.wait_for_pool()
                began = time.perf_counter()
                with Sandbox() as box:
                    run = box.run(code)
                    seconds = time.perf_counter() - began
                check(run)
                lab.book.add(key, seconds)


def _create_and_answer(lab: Lab, ready_key: str, one_key: str) -> None:
    began = time.perf_counter()
    with Sandbox() as box:
        ready = time.perf_counter()
        run = box.run(programs.ONE)
        ended = time.perf_counter()
    expect_two(run)
    lab.book.add(ready_key, ready - began)
    lab.book.add(one_key, ended - began)


def measure_kernel_start(lab: SampleTarget, key: str, code: str, mime: str, *, lean: bool = False) -> None:
    """One start of the peer until the answer has come; ours counts until the whole run has ended."""
    if not lab.peer:
        return
    with lab.book.attempt(key):
        began = time.perf_counter()
        with IpykernelProcess(lean=lean) as kernel:
            kernel.first(code, mime)
            lab.book.add(key, time.perf_counter() - began)


def _expect_frame(run: Run) -> None:
    expect_answer(bool(run.results) and "<table" in (run.results[0].html or ""), run)


def _expect_picture(run: Run) -> None:
    expect_answer(any((result.png or b"").startswith(PNG_SIGNATURE) for result in run.results), run.error)


# --- Measurement: round trips to a running kernel.

TURNS = 20
KILOBYTE_CHARS = 1024


def measure_round_trips(lab: Lab) -> None:
    """`1+1`, 1 kB of output, a 1 MB image; the peer's two transports in turns with ours."""
    counts = lab.counts
    with lab.with_pool(), contextlib.ExitStack() as stack:
        box = stack.enter_context(Sandbox())
        box.run(programs.PREPARE_IMAGE)
        kernels = {name: stack.enter_context(IpykernelProcess(name)) for name in TRANSPORTS} if lab.peer else {}
        for kernel in kernels.values():
            kernel.run(programs.PREPARE_IMAGE)
        _take_turns(lab, box, kernels, "warm", programs.ONE, counts.warm, expect_two)
        _take_turns(lab, box, kernels, "warm_kilobyte", programs.KILOBYTE, counts.warm, _expect_kilobyte)
        _take_turns(lab, box, kernels, "warm_image", programs.IMAGE, counts.images, _expect_image)


def measure_interrupts(lab: Lab) -> None:
    """From the interrupt of an endless loop to its end."""
    with lab.with_pool(), contextlib.ExitStack() as stack:
        box = stack.enter_context(Sandbox())
        kernel = stack.enter_context(IpykernelProcess()) if lab.peer else None
        for _ in range(lab.counts.interrupts):
            with lab.book.attempt("interrupt"):
                lab.book.add("interrupt", _interrupt_seconds(box))
            if kernel is not None:
                with lab.book.attempt("kernel_interrupt"):
                    lab.book.add("kernel_interrupt", kernel.interrupt_seconds(programs.SPIN))


def _take_turns(
    lab: Lab,
    box: Sandbox,
    kernels: dict[str, IpykernelProcess],
    key: str,
    code: str,
    total: int,
    check: Callable[[Run], None],
) -> None:
    for count in split_evenly(total, min(TURNS, total)):
        for _ in range(count):
            with lab.book.attempt(key):
                began = time.perf_counter()
                run = box.run(code)
                seconds = time.perf_counter() - began
                check(run)
                lab.book.add(key, seconds)
        for transport, kernel in kernels.items():
            measure_peer_turn(lab, kernel, f"kernel_{key}_{transport}", code, max(count // 2, 1))


def measure_peer_turn(lab: SampleTarget, kernel: IpykernelProcess, key: str, code: str, count: int) -> None:
    for _ in range(count):
        with lab.book.attempt(key):
            began = time.perf_counter()
            said = kernel.run(code)
            seconds = time.perf_counter() - began
            expect_answer(bool(said), said)
            lab.book.add(key, seconds)


def _interrupt_seconds(box: Sandbox) -> float:
    began = 0.0
    with box.stream(programs.SPIN) as stream:
        for event in stream:
            if isinstance(event, Output) and not began:
                began = time.perf_counter()
                stream.interrupt()
            elif isinstance(event, Ended):
                expect_answer(event.outcome == "interrupted", event)
    return time.perf_counter() - began


def _expect_kilobyte(run: Run) -> None:
    expect_answer(len(run.stdout) == KILOBYTE_CHARS, run.stdout)


def _expect_image(run: Run) -> None:
    found = [len(result.png or b"") for result in run.results]
    expect_answer(found == [programs.IMAGE_BYTES], (found, run.error))


# --- Measurement: `python3` in a sandbox's shell, beside the real interpreter behind it, in turns.

# By its path, the interpreter itself is started, and imports what the program imports.
PYTHONS = {"python_warm": "python3", "python_cold": "/opt/cloche/env/bin/python3"}
HEREDOC_PROGRAM = "import pandas\nprint(pandas.Series([20, 22]).sum())"


def measure_heredocs(lab: Lab) -> None:
    """bash that runs a program with pandas from a heredoc."""
    with lab.with_pool(), Sandbox() as box:
        for python in PYTHONS.values():
            _heredoc_seconds(box, python)  # what the host reads from disk, it reads now
        for _ in range(lab.counts.peer):
            for key, python in PYTHONS.items():
                with lab.book.attempt(key):
                    lab.book.add(key, _heredoc_seconds(box, python))


def _heredoc_seconds(box: Sandbox, python: str) -> float:
    began = time.perf_counter()
    result = box.commands.run(f"{python} - <<'END'\n{HEREDOC_PROGRAM}\nEND")
    seconds = time.perf_counter() - began
    expect_answer((result.exit_code, result.stdout) == (0, "42\n"), result)
    return seconds


# --- Measurement: pause with memory, and resume.

WARM_RUNS = 3  # after each resume


def measure_pauses(lab: Lab) -> None:
    """One sandbox, again and again: paused, at rest for a moment, resumed; then warm executions to compare with."""
    with lab.with_pool(), Sandbox() as box:
        expect_two(box.run(programs.ONE))
        for _ in range(lab.counts.fast):
            with lab.book.attempt("pause"):
                began = time.perf_counter()
                box.pause()
                lab.book.add("pause", time.perf_counter() - began)
            time.sleep(SETTLE_SECONDS)
            _time_run(lab, "resume_one", lambda: _resume_and_run(box))
            for _ in range(WARM_RUNS):
                _time_run(lab, "resumed_warm", lambda: box.run(programs.ONE))


def _resume_and_run(box: Sandbox) -> Run:
    box.resume()
    return box.run(programs.ONE)


def _time_run(lab: Lab, key: str, work: Callable[[], Run]) -> None:
    with lab.book.attempt(key):
        began = time.perf_counter()
        run = work()
        seconds = time.perf_counter() - began
        expect_two(run)
        lab.book.add(key, seconds)


# --- Measurement: forks of a context with a large DataFrame, beside bare forks of the same process.

BRANCH_COPIES = 8  # at once, for their memory
BRANCH_REST_SECONDS = 0.5  # after which all that is taken and given back is counted


def measure_branches(lab: Lab) -> None:
    """In turns: the kernel forks a child that writes a byte, and a fork of its context, to ready."""
    with lab.with_pool(), Sandbox() as box:
        context = box.contexts.get()
        expect_answer(context.run(programs.LARGE_FRAME).text == str(programs.LARGE_FRAME_BYTES), "the DataFrame")
        for _ in range(lab.counts.fast):
            with lab.book.attempt("branch_raw"):
                lab.book.add("branch_raw", _raw_fork_seconds(context))
            with lab.book.attempt("branch"):
                lab.book.add("branch", _fork_seconds(box, context))
        for _ in range(lab.counts.measured):
            with lab.book.attempt("branch_memory"):
                lab.book.add("branch_memory", _added_bytes(lab, box, context))
                lab.book.add("branch_frame", programs.LARGE_FRAME_BYTES)


def _raw_fork_seconds(context: Context) -> float:
    time.sleep(SETTLE_SECONDS)
    return float(context.run(programs.RAW_FORK).stdout)


def _fork_seconds(box: Sandbox, context: Context) -> float:
    time.sleep(SETTLE_SECONDS)
    began = time.perf_counter()
    (copy,) = context.fork()
    seconds = time.perf_counter() - began
    expect_two(copy.run(programs.ONE))
    box.contexts.remove(copy)
    return seconds


def _added_bytes(lab: Lab, box: Sandbox, context: Context) -> float:
    """The memory that one unused copy adds, measured over several."""
    time.sleep(BRANCH_REST_SECONDS)
    before = lab.memory_bytes(box)
    copies = context.fork(BRANCH_COPIES)
    time.sleep(BRANCH_REST_SECONDS)
    added = (lab.memory_bytes(box) - before) / BRANCH_COPIES
    for copy in copies:
        box.contexts.remove(copy)
    return added


# --- Measurement: the host memory of an idle sandbox, and of a kernel.

MEMORY_SETTLE_SECONDS = 1.0  # namespaces and page tables of what ended before are freed in the background
MEMORY_FIELDS = {"anon": "AnonPages", "page_tables": "PageTables", "slab": "Slab"}


def measure_memory(lab: Lab) -> None:
    """The change of the host's own figures, divided by the number of sandboxes or kernels."""
    for _ in range(lab.counts.measured):
        with lab.book.attempt("memory", "memory_used"):
            _measure_sandboxes(lab)
    if lab.peer:
        with lab.book.attempt("kernel_memory"):
            _measure_kernels(lab)


def _measure_sandboxes(lab: Lab) -> None:
    count = lab.counts.live
    before = _settled_figures()
    with lab.without_pool(), contextlib.ExitStack() as stack:
        boxes = [stack.enter_context(Sandbox()) for _ in range(count)]
        idle = _settled_figures()
        lab.book.add("memory", _memory_taken(before, idle) / count)
        for key, field in MEMORY_FIELDS.items():
            lab.book.add(f"memory_{key}", (idle[field] - before[field]) / count)
        _use_sandboxes(boxes)
        lab.book.add("memory_used", _memory_taken(before, _settled_figures()) / count)


def _use_sandboxes(boxes: list[Sandbox]) -> None:
    for box in boxes:
        expect_two(box.run(programs.ONE))


def _measure_kernels(lab: Lab) -> None:
    """Adds one kernel at a time, so that other events on the host spoil one sample and not all."""
    with contextlib.ExitStack() as stack:
        kernels = []
        for _ in range(lab.counts.kernels):
            before = _settled_figures()
            kernels.append(stack.enter_context(IpykernelProcess()))
            kernels[-1].run(programs.IMPORTS)
            lab.book.add("kernel_memory", _memory_taken(before, _settled_figures()))
        for kernel in kernels:
            rollup = read_figures(Path(f"/proc/{kernel.pid}/smaps_rollup"))
            lab.book.add("kernel_pss", rollup["Pss"])
            lab.book.add("kernel_private", rollup["Private_Clean"] + rollup["Private_Dirty"])


def _memory_taken(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    return before["MemAvailable"] - after["MemAvailable"]


def _settled_figures() -> dict[str, int]:
    gc.collect()
    time.sleep(MEMORY_SETTLE_SECONDS)
    return host_figures()


def host_figures() -> dict[str, int]:
    return read_figures(Path("/proc/meminfo"))


def read_figures(path: Path) -> dict[str, int]:
    """Parses lines such as `Pss:  123 kB`, in bytes."""
    words = (line.split() for line in path.read_text().splitlines())
    return {found[0].rstrip(":"): int(found[1]) * 1024 for found in words if len(found) == 3 and found[2] == "kB"}


# --- Measurement: many operations at once, and large transfers.

LoadOperation = Callable[[int], None]


def measure_creations(lab: Lab) -> None:
    """Sandboxes per second, each created, used and destroyed, by several threads."""

    def operation(thread: int) -> None:
        with Sandbox() as box:
            expect_two(box.run(programs.ONE))

    with lab.with_pool():
        _measure_under_load(lab, "creations", operation)


def measure_executions(lab: Lab) -> None:
    """Executions per second in warm sandboxes, by several threads."""
    threads = lab.counts.threads
    with lab.with_pool(), contextlib.ExitStack() as stack:
        boxes = [stack.enter_context(Sandbox()) for _ in range(lab.counts.warm_sandboxes)]
        turns = [boxes[thread::threads] or boxes for thread in range(threads)]

        def operation(thread: int) -> None:
            box = turns[thread].pop(0)
            turns[thread].append(box)
            expect_two(box.run(programs.ONE))

        _measure_under_load(lab, "executions", operation)


def measure_transfers(lab: Lab) -> None:
    """A large file in and out, in bytes per second."""
    size = lab.counts.transfer_bytes
    content = os.urandom(1 << 20) * (size // (1 << 20) + 1)
    content = content[:size]
    for _ in range(lab.counts.transfers):
        with lab.book.attempt("file_write", "file_read"), lab.with_pool(), Sandbox() as box:
            _measure_transfer(lab, box, content)


def _measure_transfer(lab: Lab, box: Sandbox, content: bytes) -> None:
    began = time.perf_counter()
    box.files.write("/mnt/data/large", content)
    written = time.perf_counter()
    found = box.files.read("/mnt/data/large")
    ended = time.perf_counter()
    expect_answer(found == content, f"{len(found)} bytes")
    lab.book.add("file_write", len(content) / (written - began))
    lab.book.add("file_read", len(content) / (ended - written))


def _measure_under_load(lab: Lab, key: str, operation: LoadOperation) -> None:
    for _ in range(lab.counts.loads):
        lab.wait_for_pool()
        with lab.book.attempt(key):
            lab.book.add(key, _operations_per_second(lab, key, operation))


def _operations_per_second(lab: Lab, key: str, operation: LoadOperation) -> float:
    done = [0] * lab.counts.threads
    began = time.perf_counter()
    end = began + lab.counts.load_seconds

    def work(thread: int) -> None:
        while time.perf_counter() < end:
            with lab.book.attempt(key):
                operation(thread)
                done[thread] += 1

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(lab.counts.threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    expect_answer(sum(done) > 0, "not one operation succeeded")
    return sum(done) / (time.perf_counter() - began)


# --- Measurement: installers in a sandbox, first without anything in the host's cache, then with it.

INSTALL_COMMANDS = {
    "uv": "uv pip install rich",
    "pip": "pip install rich",
    "npm": "npm install is-odd",
}
CACHED_INSTALLS = 3  # installations from the cache for each first one
INSTALL_SETTLE_SECONDS = 0.3  # until the sandbox before is gone, and the next one waits in the pool


class InstallLab:
    """Engines with package indexes, each with an empty cache of its own. Use with `with`."""

    def __init__(self, config: Config, counts: SampleCounts, *, peer: bool = True):
        self.counts = counts
        self.book = SampleBook()
        self.peer = False
        self._templates = Path(config.data_dir).absolute() / "templates"
        packages = msgspec.structs.replace(config.packages or PackagesConfig(), enabled=True)
        self._config = msgspec.structs.replace(config, packages=packages, pool=PoolConfig(ready=1))
        self._place = tempfile.TemporaryDirectory(prefix="cloche-bench-")

    def __enter__(self) -> InstallLab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._place.cleanup()

    def engine(self) -> EmbeddedEngine:
        """A new engine that never fetched a package."""
        data_dir = Path(tempfile.mkdtemp(dir=self._place.name))
        (data_dir / "templates").symlink_to(self._templates)
        return EmbeddedEngine(msgspec.structs.replace(self._config, data_dir=str(data_dir)))


def measure_installs(lab: InstallLab, names: Iterable[str] = INSTALL_COMMANDS) -> None:
    for _ in range(lab.counts.installs):
        for name in names:
            with lab.book.attempt(f"{name}_first", f"{name}_second"):
                _measure_install(lab, name, INSTALL_COMMANDS[name])


def _measure_install(lab: InstallLab, name: str, command: str) -> None:
    engine = lab.engine()
    engine.open()
    try:
        with use_engine(engine):
            lab.book.add(f"{name}_first", _install_seconds(command))
            for _ in range(CACHED_INSTALLS):
                lab.book.add(f"{name}_second", _install_seconds(command))
    finally:
        engine.close()


def _install_seconds(command: str) -> float:
    with Sandbox() as box:
        expect_answer(box.run("1+1").text == "2", command)
        time.sleep(INSTALL_SETTLE_SECONDS)
        began = time.perf_counter()
        done = box.commands.run(command)
        seconds = time.perf_counter() - began
        expect_answer(done.exit_code == 0, done)
    return seconds
