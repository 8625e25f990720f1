"""Trace one sandbox creation and one run of `1+1` through a real server, and count what they call.

    .venv/bin/python tools/trace_walk.py [--data-dir DIR] [--list] [--json]

Use the Python of the checkout to measure: the package `cloche` that it imports is the one that is traced. The command
`cloche serve` runs in this process with a profile function and is driven over the loopback, on a connection that is
already open. Only the command line, the HTTP API and the names of loaded modules are relied on, so any version of the
tree can be traced.

For the run, the kernel inside the sandbox is traced too: an earlier run in the same context sets the profile function
there. Other guest processes (zygote, init) are not traced. A step is one call; resuming a coroutine or generator is
none, and comprehensions, module bodies and generated methods are none.

Background work is left out in two ways. Each walk is taken several times, and only steps that are in all of them count.
And after the task that handles the request has ended, steps of other tasks and threads (the pool makes the next cell,
records are written) do not count; callbacks that belong to no task (the reply is flushed) do.

Without --data-dir a temporary one is used, and the server first builds the built-in template in it: a minute or two.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import http.client
import importlib
import inspect
import json
import operator
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

START_SECONDS = 900.0  # the template may have to be built
REQUEST_SECONDS = 60.0
SETTLE_SECONDS = 1.5  # after which a new sandbox and the pool behind it are quiet
GRACE_SECONDS = 0.008  # after the reply is read, for the end of the request: its log line, its accounts
KERNEL = "kernel"
THREAD = "thread"


class Step(NamedTuple):
    """One call of a function."""

    nanoseconds: int  # of the wall clock, which host and guest share
    module: str
    function: str
    task: str  # the name of the server's asyncio task, "" for a callback, THREAD; KERNEL for a step inside the sandbox


class Recorder:
    """A profile function that collects calls of functions of Cloche. Its source is sent to the kernel as well."""

    def __init__(self) -> None:
        self.active = False
        self.steps: list[tuple[int, str, str, str]] = []
        self._is_ours: dict[CodeType, bool] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if not self.active or event != "call":
            return
        code = frame.f_code
        module = frame.f_globals.get("__name__") or ""
        ours = self._is_ours.get(code)
        if ours is None:
            ours = self._is_ours[code] = self.is_ours(module, code)
        if ours and code.co_code[frame.f_lasti + 1] & 3 == 0:  # RESUME 0: the beginning, else it goes on after a yield
            self.steps.append((time.time_ns(), module, code.co_qualname, self.task()))

    def task(self) -> str:
        return "kernel"

    def is_ours(self, module: str, code: CodeType) -> bool:
        written = not code.co_filename.startswith("<")  # dataclasses and named tuples generate theirs
        named = not code.co_name.startswith("<") or code.co_name == "<lambda>"
        return module.split(".")[0] == "cloche" and written and named


class ServerRecorder(Recorder):
    """The same for the server, where every step has its task."""

    def task(self) -> str:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # there is no loop
            return THREAD
        return task.get_name() if task else ""


KERNEL_START = """
import sys, threading, time
{source}
_recorder = Recorder()
_recorder.active = True
threading.setprofile(_recorder)
sys.setprofile(_recorder)
"""

KERNEL_STOP = """
sys.setprofile(None)
threading.setprofile(None)
import json
print(json.dumps([step for step in _recorder.steps if {begin} <= step[0] <= {end}]))
"""


def kernel_start() -> str:
    """Return the program that sets the profile function inside the sandbox."""
    source = "from __future__ import annotations\n" + KERNEL_START
    return source.format(source=inspect.getsource(Recorder))


# --- the client


class Client:
    """A connection to the server that stays open."""

    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._key = key
        self._connection = self._new_connection()

    def _new_connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_SECONDS)

    def request(self, method: str, path: str, body: object = None) -> Any:
        """Return the decoded reply. Raises RuntimeError if it is an error."""
        headers = {"X-API-Key": self._key, "Content-Type": "application/json"}
        self._connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = self._connection.getresponse()
        content = response.read()
        if response.status >= 400:
            raise RuntimeError(f"{method} {path}: {response.status} {content.decode(errors='replace')}")
        return json.loads(content) if content else None

    def wait_until_ready(self) -> None:
        """Return once the server makes sandboxes. Raises TimeoutError."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            try:
                self.request("GET", "/ready")
            except (OSError, http.client.HTTPException, RuntimeError):
                self._connection.close()
                time.sleep(0.5)
            else:
                return
        raise TimeoutError(f"the server was not ready after {START_SECONDS:g} s")

    def create(self) -> str:
        """Create a sandbox and return its path."""
        return f"/api/v1/sandboxes/{self.request('POST', '/api/v1/sandboxes', {})['id']}"

    def run(self, sandbox: str, code: str) -> Any:
        """Return the finished run."""
        return self.request("POST", f"{sandbox}/run", {"code": code})


# --- the walks


Walk = list[Step]  # in order of time


class Tracer:
    """Drives a server that runs in this process, and takes both walks."""

    def __init__(self, client: Client, recorder: Recorder) -> None:
        self._client = client
        self._recorder = recorder

    def warm_up(self) -> None:
        """Make all requests once, so that lazy imports and first uses are not in a walk."""
        self.creation_and_run()

    def creation_and_run(self) -> tuple[Walk, Walk]:
        """Take both walks, with a sandbox of their own."""
        time.sleep(SETTLE_SECONDS)
        self._begin()
        sandbox = self._client.create()
        creation = self._end()
        try:
            return creation, self._run(sandbox)
        finally:
            self._client.request("DELETE", sandbox)

    def _run(self, sandbox: str) -> Walk:
        self._client.run(sandbox, kernel_start())
        time.sleep(SETTLE_SECONDS)
        begin = self._begin()
        reply = self._client.run(sandbox, "1+1")
        walk, end = self._end(), time.time_ns()
        stopped = self._client.run(sandbox, KERNEL_STOP.format(begin=begin, end=end))
        if "2" not in json.dumps(reply["results"]) or stopped["error"]:
            raise RuntimeError(f"the run failed: {reply} {stopped}")
        return sorted([*walk, *(Step(*step) for step in json.loads(stopped["stdout"]))])

    def _begin(self) -> int:
        self._recorder.steps = []
        self._recorder.active = True
        return time.time_ns()

    def _end(self) -> Walk:
        time.sleep(GRACE_SECONDS)
        self._recorder.active = False
        return without_background(sorted(Step(*step) for step in self._recorder.steps))


def without_background(walk: Walk) -> Walk:
    """Leave out steps of other tasks and threads after the last step of the request's task, which is the first seen."""
    request = next((step.task for step in walk if step.task not in ("", THREAD)), "")
    last = max((step.nanoseconds for step in walk if step.task == request), default=0)
    return [step for step in walk if step.nanoseconds <= last or not step.task]


def function_counts(walk: Walk) -> Counter[tuple[str, str, bool]]:
    """Count the calls of every function, in the order of their first call; those inside the sandbox apart."""
    return Counter((step.module, step.function, step.task == KERNEL) for step in walk)


def common(walks: list[Walk]) -> Walk:
    """Return the steps of the first walk, without calls that another walk has not as often."""
    left = functools.reduce(operator.and_, map(function_counts, walks))
    kept: Walk = []
    for step in walks[0]:
        key = (step.module, step.function, step.task == KERNEL)
        if left[key] > 0:
            left[key] -= 1
            kept.append(step)
    return kept


# --- the server


def serve(recorder: Recorder, data_dir: str, port: int, key: str) -> None:
    """Run `cloche serve` in the main thread until SIGTERM, under the profile function."""
    for name in [name for name in os.environ if name.startswith(("CLOCHE_", "CODEAPI_"))]:
        del os.environ[name]  # the developer's settings
    os.environ["CLOCHE_API_KEY"] = key
    sys.argv = ["cloche", "--data-dir", data_dir, "serve", "--port", str(port)]
    main = importlib.import_module("cloche.cli").main
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):
            main()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class Driver(threading.Thread):
    """Takes the walks while the server has the main thread, and then stops it."""

    def __init__(self, tracer: Tracer, client: Client, repeats: int) -> None:
        super().__init__(daemon=True)
        self._tracer = tracer
        self._client = client
        self._repeats = repeats
        self.pairs: list[tuple[Walk, Walk]] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self._client.wait_until_ready()
            self._tracer.warm_up()
            self.pairs = [self._tracer.creation_and_run() for _ in range(self._repeats)]
        except (OSError, ValueError, KeyError, RuntimeError, http.client.HTTPException) as error:
            self.failure = error
        finally:
            os.kill(os.getpid(), signal.SIGTERM)


def trace(data_dir: str, repeats: int) -> dict[str, Walk]:
    """Return the steps of both walks by name. Raises RuntimeError if a request failed or the server ended."""
    recorder, key, port = ServerRecorder(), "e2b_" + secrets.token_hex(20), _free_port()
    client = Client(port, key)
    driver = Driver(Tracer(client, recorder), client, repeats)
    driver.start()
    serve(recorder, data_dir, port, key)
    if not driver.pairs:
        raise RuntimeError(f"no walk was taken: {driver.failure or 'the server ended'}")
    creations, runs = zip(*driver.pairs, strict=True)
    return {"creation": common(list(creations)), "run of 1+1": common(list(runs))}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- the report


def summary(walk: Walk) -> dict[str, int]:
    """Count distinct modules and functions, and steps."""
    return {
        "modules": len({step.module for step in walk}),
        "functions": len({(step.module, step.function) for step in walk}),
        "steps": len(walk),
    }


def parts(name: str, walk: Walk) -> dict[str, Walk]:
    """Return the whole walk, and its steps on each side if it has two."""
    inside = [step for step in walk if step.task == KERNEL]
    if not inside:
        return {name: walk}
    server = [step for step in walk if step.task != KERNEL]
    return {name: walk, f"{name}, in the server": server, f"{name}, in the kernel": inside}


def print_table(walks: dict[str, Walk]) -> None:
    print("| walk | modules | functions | steps |\n|---|---|---|---|")
    for name, walk in walks.items():
        for title, part in parts(name, walk).items():
            print(f"| {title} | " + " | ".join(str(count) for count in summary(part).values()) + " |")


def print_list(walks: dict[str, Walk]) -> None:
    """Print every function in order of its first call, with the number of its calls if it is not one."""
    for name, walk in walks.items():
        print(f"\n{name}:")
        for (module, function, inside), count in function_counts(walk).items():
            times = f"  ×{count}" if count > 1 else ""
            print(f"  {'kernel' if inside else 'server'}  {module}  {function}{times}")


def main() -> int:
    given = _arguments()
    with contextlib.ExitStack() as stack:
        data_dir = given.data_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="cloche-walk-"))
        walks = trace(str(Path(data_dir).resolve()), given.repeats)
    if given.json:
        listed = {name: [f"{step.module}:{step.function}" for step in walk] for name, walk in walks.items()}
        print(json.dumps({name: {**summary(walks[name]), "calls": calls} for name, calls in listed.items()}, indent=1))
        return 0
    print(f"{Path(str(importlib.import_module('cloche').__file__)).parent}\n")
    print_table(walks)
    if given.list:
        print_list(walks)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="reuse this data directory, and the template in it")
    parser.add_argument("--repeats", type=int, default=5, help="how often each walk is taken; 5 by default")
    parser.add_argument("--list", action="store_true", help="list functions in order of their first call")
    parser.add_argument("--json", action="store_true", help="print one JSON object with all calls in order")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
