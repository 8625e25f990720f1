"""The host's client of one kernel: its channel, its two output pipes, and the order between them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from cloche import errors
from cloche.engine.executions.assistance import KernelAssistant
from cloche.engine.executions.variables import VariableInspection
from cloche.engine.sandboxes.endings import KernelExit, kernel_start_error
from cloche.engine.sandboxes.init_client import InitClient
from cloche.events import Cleared, Display, Input, Raised, Wrote
from cloche.guest import wire
from cloche.isolation.base import FirstKernel
from cloche.isolation.channel import (
    Header,
    HostChannel,
    OutputPipe,
    clean_text,
    close_all,
    join_objects,
    make_kernel_wires,
    require_protocol,
)
from cloche.mime_types import BINARY_MIMES
from cloche.model import FileInfo, Stream, Variables

if TYPE_CHECKING:
    from cloche.engine.executions.execution import Execution

# Decodes a kernel's frames into events. Pure; a hostile kernel's frame becomes an event or a WireError.

MAX_NAME = 1024
MAX_VALUE = 256 << 10
MAX_TRACEBACK = 1 << 20
MAX_PARTS = 64
MAX_JSON = 8 << 20
# The memory that each of these stands for, at most: a list, a dict, half a string, a place in a list with a number, one
# in a dict. Measured; where they stand inside strings too much is charged.
PARSED_BYTES = ((b"[", 88), (b"{", 184), (b'"', 26), (b",", 40), (b":", 48))
MAX_PATH = 8192
MAX_ATTRIBUTES = 128
_TEXT_FIELDS = ("path", "name", "owner", "group", "target")
DisplayPart = tuple[str, bytes]  # a MIME type and the encoded value


def text_field(header: Header, name: str, limit: int = MAX_NAME) -> str:
    value = header.get(name)
    require_protocol(isinstance(value, str), f"{name} is not a string")
    return clean_text(str(value), limit)


def next_count_field(header: Header) -> int | None:
    """The number of the execution that a kernel waits for, if it does."""
    count = header.get("next")
    return count if type(count) is int and 0 <= count < 1 << 53 else None


def number_field(header: Header, name: str) -> float:
    """A finite number ≥ 0; a missing or absurd one is 0: it only informs."""
    value = header.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    return float(value) if 0 <= value < 2**53 else 0.0


def exit_code_field(header: Header) -> int | None:
    """The program's own exit status; None unless it asked to exit."""
    value = header.get("exit")
    return value if type(value) is int and 0 <= value <= 255 else None


def parse_display(header: Header, parts: Sequence[DisplayPart]) -> Display:
    id = header.get("id")
    return Display(
        data={mime: decode_part(mime, content) for mime, content in parts},
        main=header.get("main") is True,
        id=None if id is None else text_field(header, "id"),
        update=header.get("update") is True,
    )


def estimate_parsed_bytes(parts: Sequence[DisplayPart]) -> int:
    """The memory that the JSON in a bundle takes once it is parsed, estimated too high rather than too low."""
    return sum(_estimate_json_bytes(content) for mime, content in parts if mime.endswith("json"))


def _estimate_json_bytes(content: bytes) -> int:
    width = 1 if content.isascii() else 4
    return width * len(content) + sum(content.count(sign) * size for sign, size in PARSED_BYTES)


def split_parts(header: Header, body: bytes) -> list[DisplayPart]:
    """The values of a MIME bundle, which lie one after another in `body`. JSON of more than 8 MiB is left out."""
    parts = header.get("parts")
    if not isinstance(parts, list) or len(parts) > MAX_PARTS:
        raise wire.WireError("parts of a display are not a short list")
    found: list[DisplayPart] = []
    at = 0
    for part in parts:
        mime, length = _parse_part(part)
        require_protocol(at + length <= len(body), "a display is shorter than its parts say")
        if length <= MAX_JSON or not mime.endswith("json"):
            found.append((mime, body[at : at + length]))
        at += length
    return found


def decode_part(mime: str, content: bytes) -> Any:
    """The value of one part of a bundle: JSON, bytes or text, by its MIME type."""
    if mime in BINARY_MIMES:
        return content
    if mime.endswith("json"):
        try:
            return _parse_json(content)
        except (ValueError, RecursionError):
            raise wire.WireError(f"a display's {clean_text(mime, 100)} is not JSON") from None
    return content.decode("utf-8", "replace")


def _parse_json(content: bytes) -> Any:
    """On the loop, so the fastest parser first: a figure of 8 MiB takes it 25 ms, the other one 170."""
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        return json.loads(content)  # this one knows NaN and lone surrogates, as Python's own `json.dumps` writes them


def parse_raised(header: Header, body: bytes) -> Raised:
    traceback = body[:MAX_TRACEBACK].decode("utf-8", "replace")
    return Raised(name=text_field(header, "name"), value=text_field(header, "value", MAX_VALUE), traceback=traceback)


def parse_cleared(header: Header) -> Cleared:
    return Cleared(wait=header.get("wait") is True)


def parse_input(header: Header) -> Input:
    return Input(prompt=text_field(header, "prompt", MAX_VALUE), secret=header.get("secret") is True)


def parse_wrote(header: Header) -> Wrote:
    return Wrote(file=parse_file_info(header.get("file")))


def parse_file_info(described: object) -> FileInfo:
    """A file as init or a kernel describes it. Raises WireError."""
    try:
        info = msgspec.convert(described, FileInfo)
    except (msgspec.ValidationError, UnicodeError):  # the latter for lone surrogates in unexpected places
        raise wire.WireError("a file is described badly") from None
    told = {name: value for name in _TEXT_FIELDS if (value := getattr(info, name)) is not None}
    cleaned: dict[str, Any] = {name: clean_text(value, MAX_PATH) for name, value in told.items()}
    if info.leads_to is not None:
        cleaned["leads_to"] = msgspec.structs.replace(info.leads_to, path=clean_text(info.leads_to.path, MAX_PATH))
    if info.attributes:
        given = list(info.attributes.items())[:MAX_ATTRIBUTES]
        cleaned["attributes"] = {clean_text(name, MAX_NAME): clean_text(value, MAX_PATH) for name, value in given}
    return info if cleaned == told else msgspec.structs.replace(info, **cleaned)


def _parse_part(part: object) -> tuple[str, int]:
    if not isinstance(part, list) or len(part) != 2:
        raise wire.WireError("a part of a display is not a pair")
    mime, length = part
    if not isinstance(mime, str) or type(length) is not int or length < 0:
        raise wire.WireError("a part of a display has no MIME type or length")
    return clean_text(mime, 256), length


# Finds marks in a kernel's output: see "Marks" in `cloche.guest.wire`.

_HEX = frozenset(b"0123456789abcdef")


class MarkedStream:
    """Takes the bytes of one output pipe, emits the text and stops at each mark whose frame has not come.

    A mark that is split across reads is found. While `held` is not None, `feed` must not be called. The work is
    linear in the bytes, also for a hostile kernel's marks.
    """

    def __init__(self, token: str, emit: Callable[[bytes], None]):
        self._start = wire.MARK_START + token.encode() + b";"
        self._emit = emit
        self._rest = b""  # after the mark that holds us, or the beginning of a possible mark
        self._released = -1
        self._ignoring = False
        self.held: int | None = None

    def feed(self, data: bytes) -> None:
        buffer = self._rest + data if self._rest else data
        self._rest = b""
        done = seen = 0  # given away up to `done`, looked at up to `seen`
        while self.held is None:
            at = buffer.find(self._start, seen)
            end = at + wire.MARK_LENGTH
            if at < 0 or end > len(buffer):
                self._keep_tail(buffer, done, at)
                return
            seen = at + 1  # bytes like a mark that are none are the program's
            mark = self._parse_mark(buffer, at)
            if mark is not None:
                self._emit_text(buffer[done:at])
                done = seen = end
                self.held = mark if mark > self._released and not self._ignoring else None
        self._rest = buffer[done:]

    def release(self, mark: int) -> bool:
        """Frame `mark` came. True if the stream stands at that mark or beyond; False if more must be read first."""
        if mark <= self._released:
            return True
        self._released = mark - 1
        self.go_on()
        if self.held is None:
            return False
        self._released = mark
        return True

    def skip_mark(self, mark: int) -> None:
        """Frame `mark` came and its mark did not: nothing waits for it any more."""
        self._released = max(self._released, mark)

    def go_on(self) -> None:
        """Emits the text behind a released mark."""
        if self.held is not None and self.held <= self._released:
            self.held = None
            rest, self._rest = self._rest, b""
            self.feed(rest)

    def let_go(self) -> None:
        """An execution has ended: marks that no frame claimed hold nothing back any longer."""
        if self.held is not None:
            self._ignoring, self.held = True, None
            rest, self._rest = self._rest, b""
            self.feed(rest)
            self._ignoring = False

    def flush(self) -> None:
        """All output has come: emits also text that waits for its frame, or might be the beginning of a mark."""
        self.let_go()
        rest, self._rest = self._rest, b""
        self._emit_text(rest)

    def _parse_mark(self, buffer: bytes, at: int) -> int | None:
        end = at + wire.MARK_LENGTH - 1
        digits = buffer[at + len(self._start) : end]
        return int(digits, 16) if buffer[end] == 0x07 and _HEX.issuperset(digits) else None

    def _keep_tail(self, buffer: bytes, done: int, at: int) -> None:
        if at < 0:
            at = buffer.rfind(b"\x1b", max(done, len(buffer) - len(self._start) + 1))
        if at >= 0 and (at + len(self._start) <= len(buffer) or self._start.startswith(buffer[at:])):
            self._rest = buffer[at:]
            self._emit_text(buffer[done:at])
        else:
            self._emit_text(buffer[done:] if done else buffer)

    def _emit_text(self, data: bytes) -> None:
        if data:
            self._emit(data)


FIRST_KERNEL = "0"
READY_SECONDS = 30.0
EXIT_ROUNDS = 4096  # more than a socket can hold of the smallest frames
ERROR_BYTES = 1000
IDLE_BYTES = 64 << 10
CLOSED_GRACE_SECONDS = 1.0
OUTPUT_STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")


class KernelClient:
    """Made by `start_kernel` or `take_first_kernel`. At most one `execution` runs on it at a time."""

    def __init__(self, guest: InitClient, id: str, token: str, fds: Sequence[int]):
        channel_fd, *outputs = fds
        self.id, self.time = id, guest.time
        self.execution: Execution | None = None
        self.exit: KernelExit | None = None
        self.on_exit: Callable[[KernelClient, bool], None] | None = None  # and whether an execution has reported it
        self._guest = guest
        self.unread = guest.unread
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._next_count: int | None = None  # of the next execution, if the kernel waits for it: see `wire`
        self._inspection: VariableInspection | None = None
        self._assistant: KernelAssistant | None = None
        self._idle: list[tuple[Stream, bytes]] = []
        self._idle_room = IDLE_BYTES
        self._over_memory = False
        self._signalled = False
        self._paused = False
        self._branching: dict[str, asyncio.Future[int]] = {}
        self.on_collected: dict[str, Callable[[Header], None]] = {}  # by its id, the callback for a copy's end
        self._streams = [MarkedStream(token, partial(self._on_text, name)) for name in OUTPUT_STREAMS]
        self._pipes = [
            OutputPipe(fd, stream.feed, stream.flush, partial(self._may_read, index))
            for index, (fd, stream) in enumerate(zip(outputs, self._streams, strict=True))
        ]
        self._channel = HostChannel(
            socket.socket(fileno=channel_fd), self._on_frame, self._on_channel_closed, max_fds=0
        )
        guest.subscribe("over_memory", id, self._on_over_memory)
        guest.subscribe("kernel_exited", id, self.exited)
        self._resume_pipes()

    @property
    def alive(self) -> bool:
        return self.exit is None and not self._channel.closed and self._guest.alive

    async def wait_ready(self) -> None:
        """Raises the start error if the kernel ends first, Unavailable if it takes far too long, or Gone."""
        try:
            async with self.time.timeout(READY_SECONDS):
                await self._guest.wait(self._ready)
        except TimeoutError:
            raise errors.Unavailable(f"a kernel was not ready within {READY_SECONDS:.0f} s") from None

    def configure(self, env: dict[str, str], cwd: str | None, limits: dict[str, int]) -> None:
        """Sets settings that were unknown when the kernel started. It applies them between two executions."""
        self._channel.send({"do": "configure", "env": env, "cwd": cwd, "limits": limits})

    def warm_up(self) -> None:
        """Has it do the work of a first execution in advance. Emits no events and leaves no state."""
        self._channel.send({"do": "rehearse"})

    def execute(self, execution: Execution, settings: bytes, code: bytes) -> None:
        """Starts an execution, which gets its output and frames. `settings`: a JSON object, the rest of the header."""
        self.execution = execution
        count, self._next_count = self._next_count, None
        given = b"" if count is None else b',"next":%d' % count
        head = b'{"do":"execute","run":"%s"%s}' % (execution.id.encode(), given)
        self._channel.send_encoded(join_objects(head, settings), code)
        if count is not None:
            execution.on_frame({"ev": "started", "count": count}, b"")

    async def inspect_variables(self) -> Variables:
        """Its variables. Nothing may execute meanwhile. Raises as `VariableInspection.answer` does."""
        asked = self._inspection = VariableInspection()
        self._channel.send({"do": "inspect", "ask": asked.id})
        try:
            return await asked.answer(self._guest)
        finally:
            self._inspection = None

    def assistant(self) -> KernelAssistant:
        """Its assistant. The first one waits for the end of a cell that runs."""
        if self._assistant is None or self._assistant.closed:
            self._assistant = KernelAssistant(self._guest, lambda fd: self._channel.send({"do": "attend"}, fds=(fd,)))
        return self._assistant

    def answer(self, answer: Header) -> None:
        """Answers `input()`: {"text": ..} or {"error": ..}. Raises InvalidRequest while the program takes none."""
        if self._channel.is_behind:
            raise errors.InvalidRequest("the program has not read the answers so far: wait until it asks")
        self._channel.send({"do": "input", **answer})

    def signal(self, number: int, *, group: bool = False) -> None:
        """Signals the kernel's process group; with `group` everything in its session."""
        self._signalled = True
        self._guest.tell("kernel_signal", kernel=self.id, signal=int(number), group=group, brief=self.time.is_frozen)

    def interrupt(self) -> None:
        """Interrupts the execution. A frame tells the kernel, if it reads it in time, which run the signal was for."""
        if self.execution is not None:
            self._channel.send({"do": "interrupt", "run": self.execution.id})
        self.signal(signal.SIGINT)

    async def settle(self, *, always: bool = False) -> None:
        """Waits until init has sent every signal: one that was meant for a run must not hit the next."""
        if self._signalled or always:
            self._signalled = False
            with contextlib.suppress(errors.ClocheError):  # it has ended: its next use reports it
                await self._guest.request("kernel_signal", kernel=self.id, signal=0, group=False)

    def kill(self) -> None:
        self.signal(signal.SIGKILL, group=True)

    def discard(self) -> None:
        """Kills it with all that it started; no callback is called."""
        self.on_exit = None
        self.kill()
        self.close()

    async def branch(self, id: str, token: str, wires: Sequence[int]) -> int:
        """Has it make a copy of itself that owns `wires`. Returns the pid that it reports. See `branching`."""
        future = self._branching[id] = self._loop.create_future()
        try:
            self._channel.send({"do": "branch", "branch": id, "token": token}, fds=wires)
            close_all(wires)
            if self._channel.closed:
                raise errors.Unavailable("the kernel has ended before it was copied")
            async with self.time.timeout(READY_SECONDS):
                return await self._guest.wait(future)
        except TimeoutError:
            raise errors.Unavailable(f"a kernel was not copied within {READY_SECONDS:.0f} s") from None
        finally:
            del self._branching[id]

    def collect(self) -> None:
        """One of its copies has ended: `on_collected` gets the exit status, if the kernel reports it."""
        self._channel.send({"do": "collect"})

    async def is_active(self) -> bool:
        """Whether anything in its session runs just now, and does not wait. Raises Gone."""
        return (await self._guest.request("stirring", kernel=self.id)).ok.get("stirring") is True

    def catch_up(self) -> None:
        """Reads the program's output so far, unless a slow consumer makes it wait."""
        for index, pipe in enumerate(self._pipes):
            room = 0 if self._paused else pipe.capacity_bytes
            while room > 0 and self._may_read(index) and (got := pipe.read_now()):
                room -= got

    def take_idle_output(self) -> list[tuple[Stream, bytes]]:
        """The kept part of the output that was written while nothing executed."""
        idle, self._idle, self._idle_room = self._idle, [], IDLE_BYTES
        return idle

    def pause(self) -> None:
        """Stops reading: the consumer is slow. The program then blocks in its writes, as in a shell's pipeline."""
        self._paused = True
        self._channel.pause()
        for pipe in self._pipes:
            pipe.pause()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._channel.resume()
            self._resume_pipes()

    def close(self) -> None:
        """Closes all descriptors. Does not kill."""
        self._guest.unsubscribe("kernel_exited", self.id)
        self._guest.unsubscribe("over_memory", self.id)
        self.exit = self.exit or KernelExit()
        if self._inspection is not None:
            self._inspection.ended("kernel was stopped")
        if self._assistant is not None:
            self._assistant.close()
        for future in self._branching.values():
            if not future.done():
                future.set_exception(errors.Unavailable(f"the {self.exit} before it was copied"))
        self._channel.close()
        for pipe in self._pipes:
            pipe.close()

    def _resume_pipes(self) -> None:
        if not self._paused:
            for pipe in self._pipes:
                pipe.resume()

    def _may_read(self, index: int) -> bool:
        if self.execution is not None and not self.execution.started:
            # "started" was sent before the program wrote anything: this output belongs to the run that it names.
            more = self._channel.pump()
            if more and self.execution is not None and not self.execution.started:
                return False  # called again at once, after all that waits for the loop
        if self._streams[index].held is not None:
            self._pipes[index].pause()
            return False
        return True

    def _on_text(self, stream: Stream, data: bytes) -> None:
        if self.execution is not None and self.execution.started:
            self.execution.on_output(stream, data)
        elif self._idle_room > 0:
            self._idle.append((stream, data[: self._idle_room]))
            self._idle_room -= len(data)

    def _on_frame(self, header: Header, body: bytes, fds: list[int]) -> None:
        close_all(fds)
        what = header.get("ev")
        if what == "ready":
            if not self._ready.done():
                self._next_count = next_count_field(header)
                self._ready.set_result(None)
        elif what in ("branched", "refused", "collected"):
            self._on_branch(header)
        elif what == "inspected":
            if self._inspection is not None:
                self._inspection.told(header, body)
        else:
            self._on_execution_frame(header, body)

    def _on_execution_frame(self, header: Header, body: bytes) -> None:
        """A frame of an execution, delivered after the output that was written before it."""
        mark = header.get("mark")
        ours = self.execution is not None and header.get("run") == self.execution.id
        ended = ours and header.get("ev") == "ended"
        if ours and "mark" in header:
            self._read_to_mark(mark)
        elif type(mark) is int:
            for stream in self._streams:
                stream.skip_mark(mark)  # of no execution: nothing is read for it, and nothing waits for it
        if ours and self.execution is not None:
            if ended:
                self._next_count = next_count_field(header)  # before the next one, which its end lets in
            self.execution.on_frame(header, body)
        if ended or type(mark) is int:
            self._release_streams(ended=ended)

    def _on_branch(self, header: Header) -> None:
        name, pid = str(header.get("branch")), header.get("pid")
        future = self._branching.get(name)
        if header.get("ev") == "collected":
            self.on_collected.get(name, _ignore_collected)(header)
        elif future is None or future.done():
            return
        elif header.get("ev") == "refused":
            future.set_exception(errors.NotCopyable(clean_text(str(header.get("message")), ERROR_BYTES)))
        elif type(pid) is int:
            future.set_result(pid)
        else:
            raise wire.WireError("the pid of a copy is no number")

    def _read_to_mark(self, mark: object) -> None:
        for pipe, stream in zip(self._pipes, self._streams, strict=True):
            if type(mark) is not int:
                stream.flush()
                continue
            # The mark was written before its frame: it is found within the capacity of the pipe.
            if not stream.release(mark):
                room = pipe.capacity_bytes
                while room > 0 and (got := pipe.read_now()) and not stream.release(mark):
                    room -= got
            stream.skip_mark(mark)

    def _release_streams(self, *, ended: bool) -> None:
        for stream in self._streams:
            stream.go_on()
            if ended:
                stream.let_go()
        self._resume_pipes()

    def _on_over_memory(self, header: Header) -> None:
        self._over_memory = True

    def exited(self, header: Header, rounds: int = EXIT_ROUNDS) -> None:
        """Handles its end, as described by the header. Harmless when it is known."""
        if self.exit is not None:
            return
        if self._channel.pump() and rounds:  # it may have said "ended" just before
            self._loop.call_soon(self.exited, header, rounds - 1)
            return
        self._drain_output()
        status = header.get("status")
        exit = KernelExit(
            status=status if type(status) is int and 0 <= status < 1 << 16 else 0,
            cpu_seconds=number_field(header, "cpu"),
            memory_peak_bytes=int(number_field(header, "rss")),
            over_memory=self._over_memory,
        )
        self._finish_exit(exit)

    def _drain_output(self) -> None:
        for pipe, stream in zip(self._pipes, self._streams, strict=True):
            room = pipe.capacity_bytes
            stream.let_go()
            while room > 0 and (got := pipe.read_now()):
                stream.let_go()
                room -= got
            stream.flush()

    def _finish_exit(self, exit: KernelExit) -> None:
        self.exit = exit
        if not self._ready.done():
            self._ready.set_exception(kernel_start_error(exit, self._idle_stderr()))
            self._ready.exception()  # retrieved even if no caller waits for it
        if self._inspection is not None:
            self._inspection.ended(str(exit))
        execution, self.execution = self.execution, None
        self.close()
        if execution is not None:
            execution.on_kernel_exit(exit)
        if self.on_exit is not None:
            self.on_exit(self, execution is not None and not execution.left)

    def _idle_stderr(self) -> str:
        """The stderr that was written while nothing executed."""
        said = b"".join(data for stream, data in self._idle if stream == "stderr")
        return said[:ERROR_BYTES].decode("utf-8", "replace").strip()

    def _on_channel_closed(self, why: str) -> None:
        if self.exit is None and self._guest.alive:
            # It ends as well, or it shut us out and must not go on unseen.
            self.time.call_later(CLOSED_GRACE_SECONDS, self._kill_if_running)

    def _kill_if_running(self) -> None:
        if self.exit is None:
            self.kill()
            self.time.call_later(CLOSED_GRACE_SECONDS, self._presume_dead)

    def _presume_dead(self) -> None:
        """No exit was reported: a first kernel is the zygote's child, and the zygote may be gone."""
        if self.exit is None and self._guest.alive:
            self.exited({"status": signal.SIGKILL.value})


def _ignore_collected(_header: Header) -> None:
    """Ignores the exit status of a copy without a watch."""


async def start_kernel(
    guest: InitClient,
    id: str,
    *,
    language: str = "python",
    user: str,
    cwd: str | None,
    env: dict[str, str],
    memory_bytes: int | None = None,
) -> KernelClient:
    """Starts a kernel of that language and waits until it is ready. Raises as that does, or init's error.

    `memory_bytes`: the sandbox's limit, for interpreters that bound themselves.
    """
    wires = make_kernel_wires()
    how: dict[str, Any] = {"language": language, "user": user, "cwd": cwd, "env": env, "memory_bytes": memory_bytes}
    try:
        await guest.request(
            "kernel_start", warm=language == "python", wires=wires.theirs, kernel=id, token=wires.token, **how
        )
    except BaseException:
        close_all(wires.ours)
        # A caller that is cancelled here does not know whether init has started it already.
        guest.tell("kernel_signal", kernel=id, signal=int(signal.SIGKILL), group=True)
        raise
    return await _wait_until_ready(KernelClient(guest, id, wires.token, wires.ours))


async def take_first_kernel(guest: InitClient, first: FirstKernel) -> KernelClient:
    """The kernel that a new cell starts by itself, once it is ready. Raises as `wait_ready` does."""
    return await _wait_until_ready(KernelClient(guest, FIRST_KERNEL, first.token, first.fds))


async def _wait_until_ready(kernel: KernelClient) -> KernelClient:
    try:
        await kernel.wait_ready()
    except BaseException:
        kernel.kill()
        kernel.close()
        raise
    return kernel
