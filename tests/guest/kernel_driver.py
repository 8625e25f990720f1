"""Drives one kernel over its raw channel and pipes, as the engine does, and puts output and frames in order."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cloche.guest import wire

HERE = Path(__file__).parent
SOURCE = HERE.parent.parent / "src"
TOKEN = "0123456789abcdef"
PYTHON = os.environ.get("GUEST_PYTHON", sys.executable)  # a template may have an older one than we do
IMPORTS = ("numpy", "pandas", "matplotlib.pyplot")
SECONDS = 60  # a bound for a hanging kernel, never a measure


class Zygote:
    """The process that kernels are forked from."""

    def __init__(self, imports: tuple = IMPORTS, env: dict | None = None):
        self.control, theirs = socket.socketpair()
        command = [PYTHON, str(HERE / "kernel_zygote.py"), str(theirs.fileno()), *imports]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
            **(env or {}),
        }
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self.control.settimeout(SECONDS * 2)
        self._reader = wire.FrameReader(self.control)
        self.ready = self._reader.next()[0]

    def ask(self, header: dict, fds: tuple = ()) -> dict:
        wire.send_frame(self.control, header, fds=fds)
        return self._reader.next()[0]

    def close(self) -> None:
        self.control.close()
        self.process.wait(SECONDS)


class Output(str):
    """Text between two marks, with the stream it came from."""

    stream = "stdout"


class Driver:
    """One kernel. `run(code)` gives its events in order: dicts of frames, and Output texts."""

    def __init__(self, zygote: Zygote, directory: Path, env: dict | None = None):
        self.zygote = zygote
        self.data = directory / "data"
        self.data.mkdir(exist_ok=True)
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(SECONDS)
        pipes = [os.pipe(), os.pipe()]
        self._pipes = {"stdout": pipes[0][0], "stderr": pipes[1][0]}
        for fd in self._pipes.values():
            os.set_blocking(fd, False)
        self._text = {"stdout": b"", "stderr": b""}
        request = {"do": "spawn", "token": TOKEN, "data": str(self.data), "cwd": str(self.data), "env": env or {}}
        self.spawned_at = time.perf_counter()
        self.pid = zygote.ask(request, (theirs.fileno(), pipes[0][1], pipes[1][1]))["pid"]
        theirs.close()
        for _read, write in pipes:
            os.close(write)
        self._decoder = wire.FrameDecoder(wire.MAX_BODY_FROM_GUEST)
        self._frames: list = []
        self._runs = 0
        self._next: int | None = 1
        assert self.frame()[0] == {"ev": "ready", "next": 1}
        self.ready_seconds = time.perf_counter() - self.spawned_at

    def close(self) -> int:
        self.sock.close()
        for fd in self._pipes.values():
            os.close(fd)
        return self.zygote.ask({"do": "wait", "pid": self.pid})["status"]

    def send(self, header: dict, body: bytes = b"") -> None:
        wire.send_frame(self.sock, header, body)

    def frame(self) -> tuple:
        """The next frame. Pipes are read meanwhile, so that a kernel never waits for room."""
        deadline = time.monotonic() + SECONDS
        while not self._frames:
            ready, _, _ = select.select([self.sock, *self._pipes.values()], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("no frame from the kernel")
            self._read_pipes()
            if self.sock in ready:
                data = self.sock.recv(1 << 20)
                if not data:
                    raise EOFError("the kernel is gone")
                self._decoder.feed(data)
                self._frames += self._decoder.frames()
        return self._frames.pop(0)

    def _read_pipes(self) -> None:
        for stream, fd in self._pipes.items():
            try:
                self._text[stream] += os.read(fd, 1 << 16)
            except BlockingIOError:
                continue

    def text_before(self, mark: int | None) -> list:
        """What was written before that mark. When the frame is here, the mark is in the pipe, or all was read."""
        outputs, sign = [], wire.mark_bytes(TOKEN, mark) if mark is not None else b""
        for stream in self._text:
            deadline = time.monotonic() + SECONDS
            while sign not in self._text[stream]:
                assert time.monotonic() < deadline, f"mark {mark} never came on {stream}"
                self._read_pipes()
            text, self._text[stream] = self._text[stream], b""
            if sign:
                text, _, self._text[stream] = text.partition(sign)
            if text:
                output = Output(text.decode())
                output.stream = stream
                outputs.append(output)
        return outputs

    def start(self, code: str | bytes, **fields: Any) -> str:
        self._runs += 1
        run = f"r{self._runs}"
        header = {
            "do": "execute",
            "run": run,
            "env": {},
            "cwd": None,
            "input": False,
            "display_bytes": 1 << 24,
            **({} if self._next is None else {"next": self._next}),
            **fields,
        }
        self.send(header, code.encode("utf-8", "surrogatepass") if isinstance(code, str) else code)
        self.count, self._next = self._next, None
        if self.count is None:
            header, _body = self.frame()
            assert header["ev"] == "started" and header["run"] == run
            self.count = header["count"]
        return run

    def events(self) -> Any:
        """Events of the running cell, ending with `ended`."""
        marked: int | None = 0
        while True:
            header, body = self.frame()
            if header.get("mark", marked) != marked:
                marked = header["mark"]
                yield from self.text_before(marked)
            self._next = header.get("next")
            yield _event(header, body)
            if header["ev"] == "ended":
                return

    def run(self, code: str | bytes, **fields: Any) -> Outcome:
        self.start(code, **fields)
        return Outcome(list(self.events()))

    def interrupt(self) -> None:
        self.send({"do": "interrupt", "run": f"r{self._runs}"})
        os.kill(self.pid, signal.SIGINT)

    def wait_for_output(self, text: str) -> None:
        """Until the cell has printed that."""
        deadline = time.monotonic() + SECONDS
        while text.encode() not in self._text["stdout"]:
            assert time.monotonic() < deadline, "the cell did not print"
            select.select(list(self._pipes.values()), [], [], 1)
            self._read_pipes()


def _event(header: dict, body: bytes) -> dict:
    event = dict(header)
    if header["ev"] == "display":
        event["data"], at = {}, 0
        for mime, length in header["parts"]:
            event["data"][mime] = _value(mime, body[at : at + length])
            at += length
        assert at == len(body)
    if header["ev"] == "raised":
        event["traceback"] = body.decode()
    return event


def _value(mime: str, data: bytes) -> Any:
    if mime.endswith("json"):
        return json.loads(data, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))
    return data if (mime.startswith("image/") and "svg" not in mime) or mime == "application/pdf" else data.decode()


class Outcome:
    """The events of one run, with short names for what tests ask."""

    def __init__(self, events: list):
        self.events = events
        self.ended = events[-1]
        self.outcome = self.ended["outcome"]

    def of(self, kind: str) -> list:
        return [event for event in self.events if isinstance(event, dict) and event["ev"] == kind]

    @property
    def displays(self) -> list:
        return self.of("display")

    @property
    def error(self) -> dict | None:
        return next(iter(self.of("raised")), None)

    @property
    def main(self) -> dict | None:
        return next((event["data"] for event in self.displays if event["main"]), None)

    @property
    def text(self) -> str | None:
        return self.main["text/plain"] if self.main else None

    def output(self, stream: str) -> str:
        return "".join(event for event in self.events if isinstance(event, Output) and event.stream == stream)

    @property
    def stdout(self) -> str:
        return self.output("stdout")

    @property
    def stderr(self) -> str:
        return self.output("stderr")
