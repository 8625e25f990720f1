"""The outcome of a program, encoded for LibreChat's clients. Pure."""

from __future__ import annotations

import signal

import msgspec

from cloche.api.dialect import Json
from cloche.api.librechat.replies import NOTE_PREFIX, ProgramNotes
from cloche.engine.commands.jobs import CapturedStream
from cloche.events import Exited
from cloche.model import Struct, Usage

_UTF8_CONTINUATIONS = bytes(range(0x80, 0xC0))  # of a letter in UTF-8

TIME, MEMORY, OUTPUT = "Time limit exceeded", "Out of memory", "stdout length exceeded"


class ProgramOutcome(Struct):
    """How a program ended, and its output."""

    exited: Exited
    stdout: CapturedStream = CapturedStream()
    stderr: CapturedStream = CapturedStream()
    usage: Usage = Usage()
    notes: tuple[str, ...] = ()


def refused_outcome(message: str) -> ProgramOutcome:
    """The outcome of a program that did not run, for a reason that its author can fix."""
    return ProgramOutcome(
        exited=Exited(exit_code=1), stderr=CapturedStream(head=message.encode("utf-8", "replace") + b"\n")
    )


def mark_out_of_memory(ended: ProgramOutcome) -> ProgramOutcome:
    """Marks the outcome of a program that lost a process to the OOM killer: a shell reports only a number.

    A program that went on and ended well gets a note instead: nothing else would report it.
    """
    if ended.exited.outcome != "ok":
        return ended
    if not ended.exited.exit_code:
        return msgspec.structs.replace(ended, notes=(*ended.notes, f"{MEMORY}: a process of the program was killed"))
    return msgspec.structs.replace(ended, exited=msgspec.structs.replace(ended.exited, outcome="out_of_memory"))


def encode_outcome(outcome: ProgramOutcome, notes: ProgramNotes) -> Json:
    """The fields of a reply that describe the program itself."""
    exited, usage = outcome.exited, outcome.usage
    status, message = status_and_message(outcome)
    stderr = stream_text(outcome.stderr, "stderr", notes)
    stdout = stream_text(outcome.stdout, "stdout", notes)
    if message is not None and status != "OL":
        stderr += f"\n{NOTE_PREFIX}{message}\n"
    elif exited.outcome == "died":
        notes.add(f"the program was ended: {exited.reason or 'unknown cause'}")
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


def status_and_message(outcome: ProgramOutcome) -> tuple[str | None, str | None]:
    """The fields `status` and `message`."""
    if outcome.exited.outcome == "timed_out":
        return "TO", TIME
    if outcome.exited.outcome == "out_of_memory":
        return "SG", MEMORY
    if outcome.stdout.dropped_bytes:
        return "OL", OUTPUT
    return None, None


def stream_text(kept: CapturedStream, stream: str, notes: ProgramNotes) -> str:
    """The text kept of a stream. Where a part is missing, the text says how much, and a note repeats it."""
    if not kept.dropped_bytes:
        return _decode_stream(kept.head + kept.tail, stream, notes)
    kept = trim_partial_characters(kept)
    notes.add(
        f"{kept.dropped_bytes} bytes of {stream} were left out, in the middle: write what is long to a file in "
        "/mnt/data, and print parts of it"
    )
    gap = f"\n{NOTE_PREFIX}{kept.dropped_bytes} bytes were left out here\n"
    return _decode_stream(kept.head, stream, notes) + gap + _decode_stream(kept.tail, stream, notes)


def trim_partial_characters(kept: CapturedStream) -> CapturedStream:
    """Removes partial UTF-8 characters on both sides of the gap."""
    head = kept.head
    for length in range(1, min(len(head), 3) + 1):  # a letter has four bytes at most, and its first says how many
        if head[-length] >= 0xC0:
            whole = 2 if head[-length] < 0xE0 else 3 if head[-length] < 0xF0 else 4
            head = head[:-length] if length < whole else head
            break
    rest = kept.tail[:3].lstrip(_UTF8_CONTINUATIONS)
    tail = rest + kept.tail[3:]
    missing = len(kept.head) - len(head) + len(kept.tail) - len(tail)
    return CapturedStream(head=head, tail=tail, dropped_bytes=kept.dropped_bytes + missing)


def _decode_stream(data: bytes, stream: str, notes: ProgramNotes) -> str:
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
