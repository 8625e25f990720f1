"""Views of a run: its events as text and images for people, or as JSON for programs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import select
import termios
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from cloche.events import AnyEvent, Cleared, Display, Ended, Input, Output, Raised, Run, RunFold
from cloche.mime_types import EXTENSIONS

# Images in a terminal that can show them: the protocols of kitty and of iTerm2.

DrawImage = Callable[[Mapping[str, Any]], str | None]
"""Makes of a MIME bundle what shows its image in the terminal; None if it has no image that this terminal can show."""

CHUNK_CHARACTERS = 4096  # kitty's limit per escape sequence
_KONSOLE_WITH_KITTY = 220400


def choose_drawer(environ: Mapping[str, str]) -> DrawImage | None:
    """The function that draws images in the terminal of this environment; None if it is not known to show any."""
    term = environ.get("TERM", "")
    if environ.get("TMUX") or re.match(r"(tmux|screen)", term):
        return None  # they ignore unknown sequences
    if _speaks_kitty(term, environ):
        return draw_kitty
    program = environ.get("TERM_PROGRAM", "")
    if program in ("iTerm.app", "WezTerm") or environ.get("LC_TERMINAL") == "iTerm2":
        return draw_iterm
    return None


def _speaks_kitty(term: str, environ: Mapping[str, str]) -> bool:
    konsole = environ.get("KONSOLE_VERSION", "")
    return (
        term in ("xterm-kitty", "xterm-ghostty")
        or bool(environ.get("KITTY_WINDOW_ID"))
        or (konsole.isdigit() and int(konsole) >= _KONSOLE_WITH_KITTY)
    )


def draw_kitty(bundle: Mapping[str, Any]) -> str | None:
    """Draws PNG only. `q=2`: the terminal must not reply, since the reply would not be read."""
    png = bundle.get("image/png")
    if not isinstance(png, bytes):
        return None
    chunks = list(_split_chunks(base64.b64encode(png).decode()))
    parts = []
    for at, chunk in enumerate(chunks):
        control = "a=T,f=100,q=2," if at == 0 else ""
        parts.append(f"\x1b_G{control}m={int(at + 1 < len(chunks))};{chunk}\x1b\\")
    return "".join(parts) + "\n"


def draw_iterm(bundle: Mapping[str, Any]) -> str | None:
    for mime in ("image/png", "image/jpeg", "image/gif"):
        content = bundle.get(mime)
        if isinstance(content, bytes):
            data = base64.b64encode(content).decode()
            return f"\x1b]1337;File=inline=1;size={len(content)}:{data}\x07\n"
    return None


def _split_chunks(text: str) -> Iterator[str]:
    for at in range(0, max(len(text), 1), CHUNK_CHARACTERS):
        yield text[at : at + CHUNK_CHARACTERS]


STDOUT, STDERR = 1, 2
_FALLBACKS = ("text/plain", "text/markdown", "text/latex", "text/html", "image/svg+xml")

SaveImages = Callable[[Display], bool]
"""Saves a display's images. False if it has none."""


class EventView(Protocol):
    def show(self, event: AnyEvent) -> None: ...


def write_all(fd: int, text: str | bytes) -> None:
    """Writes all of it at once, unbuffered; the descriptor may be slow or non-blocking."""
    rest = memoryview(text.encode("utf-8", "backslashreplace") if isinstance(text, str) else text)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            select.select([], [fd], [])


def print_message(text: str) -> None:
    """Prints a message of ours on stderr. Names from a sandbox cannot steer the terminal through it."""
    write_all(
        STDERR,
        "cloche: " + "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text) + "\n",
    )


class TerminalView:
    """For people: output as it comes, the last expression's value, images where the terminal can, tracebacks."""

    def __init__(self, save: SaveImages | None = None):
        self._save = save
        self._terminal = os.isatty(STDOUT)
        self._draw: DrawImage | None = choose_drawer(os.environ) if self._terminal else None
        self._raised: Raised | None = None
        self.unseen = 0  # images that were neither shown nor saved

    def show(self, event: AnyEvent) -> None:
        match event:
            case Output():
                write_all(STDOUT if event.stream == "stdout" else STDERR, event.text)
            case Display():
                self._show_display(event)
            case Input():
                write_all(STDOUT, event.prompt)
            case Cleared() if self._terminal:
                write_all(STDOUT, "\r\x1b[2K")
            case Raised():
                self._raised = event
            case Ended():
                self._show_end(event)

    def _show_display(self, event: Display) -> None:
        saved = self._save is not None and self._save(event)
        drawn = self._draw(event.data) if self._draw else None
        if drawn is not None:
            write_all(STDOUT, drawn)
            return
        if not saved and has_image(event.data):
            self.unseen += 1
        if event.main or not saved:
            write_all(STDOUT, bundle_text(event.data) + "\n")

    def _show_end(self, event: Ended) -> None:
        raised, self._raised = self._raised, None
        if raised is not None:
            write_all(STDERR, _format_traceback(raised, event.exit_code))


class EventLinesView:
    """For programs: each event as a line of JSON, when it comes."""

    def __init__(self, save: SaveImages | None = None):
        self._save = save

    def show(self, event: AnyEvent) -> None:
        if self._save is not None and isinstance(event, Display):
            self._save(event)
        write_all(STDOUT, encode_json(event) + b"\n")


class RunJsonView:
    """For programs: the Run as one JSON object, at its end."""

    def __init__(self, save: SaveImages | None = None):
        self._save = save
        self._folding = RunFold()

    def show(self, event: AnyEvent) -> None:
        if self._save is not None and isinstance(event, Display):
            self._save(event)
        self._folding.feed(event)
        if isinstance(event, Ended):
            write_all(STDOUT, encode_json(_run_fields(self._folding.run())) + b"\n")


def has_image(bundle: Mapping[str, Any]) -> bool:
    return any(mime in bundle for mime in EXTENSIONS)


def bundle_text(bundle: Mapping[str, Any]) -> str:
    """A bundle as text: its plain text, else the nearest thing to it."""
    for mime in _FALLBACKS:
        if isinstance(bundle.get(mime), str):
            return str(bundle[mime])
    return f"<{', '.join(bundle) or 'nothing'}>"


def encode_json(value: object) -> bytes:
    """Encodes JSON; bytes become base64. A program's lone surrogates pass as JSON escapes."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value), separators=(",", ":")).encode()


def _run_fields(run: Run) -> dict[str, object]:
    """A Run with its `text`, and results without the formats that they do not have."""
    results = [
        {name: value for name, value in msgspec.structs.asdict(each).items() if value is not None and value != {}}
        for each in run.results
    ]
    return {"text": run.text, **msgspec.structs.asdict(run), "results": results}


def _format_traceback(raised: Raised, exit_code: int | None) -> str:
    """A traceback; of `sys.exit("message")` the message, of `sys.exit(3)` nothing, as Python does."""
    if exit_code is None:
        return raised.traceback if raised.traceback.endswith("\n") else raised.traceback + "\n"
    number = raised.value.removeprefix("-").isdigit() or raised.value in ("", "None", "True", "False")
    return "" if number else raised.value + "\n"


# Lines of our own stdin, read on demand, without a thread.

READ_BYTES = 64 << 10


class StdinLines:
    """Reads the descriptor itself: data buffered in Python's `sys.stdin` is not seen."""

    def __init__(self, fd: int = 0):
        self._fd = fd
        self._buffer = bytearray()
        self._over = False

    async def next(self, *, secret: bool = False, ask: Callable[[], object] = lambda: None) -> str | None:
        """The next line without its end; None at the end of the input. May be cancelled: nothing is lost.

        `ask` shows the prompt, when all is ready for the answer.
        """
        with _echo_off(self._fd) if secret else contextlib.nullcontext():
            ask()
            while b"\n" not in self._buffer and not self._over:
                await wait_readable(self._fd)
                data = _read_descriptor(self._fd)
                self._over = not data
                self._buffer += data
        return self._take_line()

    def _take_line(self) -> str | None:
        if not self._buffer:
            self._over = False  # a terminal can go on after Ctrl-D
            return None
        line, end, rest = self._buffer.partition(b"\n")
        self._buffer = rest
        return line.decode("utf-8", "replace").removesuffix("\r" if end else "")


def _read_descriptor(fd: int) -> bytes:
    try:
        return os.read(fd, READ_BYTES)
    except OSError:  # closed, or a terminal that hung up
        return b""


async def wait_readable(fd: int) -> None:
    """Waits for input. Returns at once for a regular file and the like: reading it never takes long."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def set_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    try:
        loop.add_reader(fd, set_ready)
    except OSError:
        return
    try:
        await ready
    finally:
        loop.remove_reader(fd)


@contextlib.contextmanager
def _echo_off(fd: int) -> Iterator[None]:
    """For passwords, where `fd` is a terminal."""
    try:
        before = termios.tcgetattr(fd)
    except termios.error:
        yield
        return
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(fd, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        os.write(fd, b"\n")  # the user's own was not echoed
