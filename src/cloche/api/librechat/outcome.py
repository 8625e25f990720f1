"""What came of a program, as LibreChat's clients read it. Pure."""

from __future__ import annotations

import signal

import msgspec

from cloche.api.librechat.replies import MARK, Json, Notes
from cloche.engine.commands.jobs import Kept
from cloche.engine.commands.program import Exited
from cloche.model import Struct, Usage

_CONTINUATIONS = bytes(range(0x80, 0xC0))  # of a letter in UTF-8

TIME, MEMORY, OUTPUT = "Time limit exceeded", "Out of memory", "stdout length exceeded"


class Outcome(Struct):
    """How a program ended, and what it wrote."""

    exited: Exited
    stdout: Kept = Kept()
    stderr: Kept = Kept()
    usage: Usage = Usage()
    notes: tuple[str, ...] = ()


def refused(message: str) -> Outcome:
    """A program that did not run, for a reason that its author can do something about."""
    return Outcome(exited=Exited(exit_code=1), stderr=Kept(head=message.encode("utf-8", "replace") + b"\n"))


def out_of_memory(ended: Outcome) -> Outcome:
    """Of a program of which something was killed for want of memory: a shell says that of its children by a number.

    One that went on and ended well is told of it, as nobody else would tell.
    """
    if ended.exited.outcome != "ok":
        return ended
    if not ended.exited.exit_code:
        return msgspec.structs.replace(ended, notes=(*ended.notes, f"{MEMORY}: a process of the program was killed"))
    return msgspec.structs.replace(ended, exited=msgspec.structs.replace(ended.exited, outcome="out_of_memory"))


def encode(outcome: Outcome, notes: Notes) -> Json:
    """The fields that are about the program itself."""
    exited, usage = outcome.exited, outcome.usage
    status, message = verdict(outcome)
    stderr = text(outcome.stderr, "stderr", notes)
    stdout = text(outcome.stdout, "stdout", notes)
    if message is not None and status != "OL":
        stderr += f"\n{MARK}{message}\n"
    elif exited.outcome == "died":
        notes.add(f"the program was ended: {exited.reason or 'nobody knows why'}")
    for note in outcome.notes:
        notes.add(note)
    return {
        "stdout": stdout,
        "stderr": notes.after(stderr),
        "code": None if exited.signal is not None else exited.exit_code,
        "signal": _signal_name(exited),
        "message": message,
        "status": status,
        "wall_time": round(usage.wall_seconds * 1000),
        "cpu_time": round(usage.cpu_seconds * 1000),
    }


def verdict(outcome: Outcome) -> tuple[str | None, str | None]:
    """`status` and `message`."""
    if outcome.exited.outcome == "timed_out":
        return "TO", TIME
    if outcome.exited.outcome == "out_of_memory":
        return "SG", MEMORY
    if outcome.stdout.dropped_bytes:
        return "OL", OUTPUT
    return None, None


def text(kept: Kept, stream: str, notes: Notes) -> str:
    """What is left of a stream. Where something is missing stands how much, and a note says it, too."""
    if not kept.dropped_bytes:
        return _decoded(kept.head + kept.tail, stream, notes)
    kept = whole_letters(kept)
    notes.add(
        f"{kept.dropped_bytes} bytes of {stream} were left out, in the middle: write what is long to a file in "
        "/mnt/data, and print parts of it"
    )
    gap = f"\n{MARK}{kept.dropped_bytes} bytes were left out here\n"
    return _decoded(kept.head, stream, notes) + gap + _decoded(kept.tail, stream, notes)


def whole_letters(kept: Kept) -> Kept:
    """Without the halves of letters on both sides of what is missing."""
    head = kept.head
    for length in range(1, min(len(head), 3) + 1):  # a letter has four bytes at most, and its first says how many
        if head[-length] >= 0xC0:
            whole = 2 if head[-length] < 0xE0 else 3 if head[-length] < 0xF0 else 4
            head = head[:-length] if length < whole else head
            break
    rest = kept.tail[:3].lstrip(_CONTINUATIONS)
    tail = rest + kept.tail[3:]
    missing = len(kept.head) - len(head) + len(kept.tail) - len(tail)
    return Kept(head=head, tail=tail, dropped_bytes=kept.dropped_bytes + missing)


def _decoded(data: bytes, stream: str, notes: Notes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        pass
    replaced = data.decode(errors="replace")
    count = replaced.count("\ufffd")
    notes.add(
        f"{stream} had bytes that are no UTF-8: {count} times, U+FFFD stands for such. Files keep them as they are"
    )
    return replaced


def _signal_name(exited: Exited) -> str | None:
    if exited.signal is None:
        return None
    try:
        return signal.Signals(exited.signal).name
    except ValueError:
        return f"SIG{exited.signal}"
