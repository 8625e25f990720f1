"""What the server says: answers, events, runs and errors, and how all of it is written and read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from cloche import errors
from cloche.engine.commands.process import Exited, ProcessEvent
from cloche.event_json import ToldDisplay, binary_in, display_of, with_bytes
from cloche.event_json import decode as decode
from cloche.event_json import encode as encode
from cloche.event_json import encode_event as encode_event
from cloche.events import (
    AnyEvent,
    Cleared,
    Ended,
    Event,
    Input,
    Numbered,
    Output,
    Raised,
    Result,
    Run,
    Started,
    ToolsCalled,
    Truncated,
    Wrote,
)
from cloche.model import Limits, Struct, Variable
from cloche.network_policy import NetworkEntry, NetworkRule
from cloche.notebook import Cell


class Accepted(Event, tag="accepted"):
    """The first word of the server: the execution will begin at `start`."""

    execution: str


class Attached(Event, tag="attached"):
    """The first word of the server about a process."""

    id: str
    pid: int


class Watching(Event, tag="watching"):
    """The first word of a watch: changes are seen from now on."""


class Change(Event, tag="change"):
    kind: str
    path: str


class Fault(Struct):
    """What went wrong on our side. `code` does not change between versions."""

    code: str
    message: str
    request_id: str = ""
    retry_after_seconds: float | msgspec.UnsetType = msgspec.UNSET  # when to ask again, where that is known


class Failed(Event, tag="error"):
    """The last word where something of ours went wrong."""

    error: Fault


class Failure(Struct):
    """The body of every answer that is an error."""

    error: Fault


# --- what is answered


class ContextInfo(Struct):
    id: str
    language: str
    cwd: str


class ProcessStarted(Struct):
    id: str
    pid: int


class Exists(Struct):
    exists: bool


class Made(Struct):
    created: bool


class Interrupted(Struct):
    interrupted: bool


class SecretInfo(Struct):
    """A secret, without its value."""

    domain: str
    header: str | None = None
    name: str | None = None


class NetworkInfo(Struct):
    """What a sandbox may reach."""

    allow: list[str]
    deny: list[str]
    rules: list[NetworkRule]
    secrets: list[SecretInfo]


class NetworkLogged(Struct):
    """A sandbox's network log, the oldest first; `dropped` older entries made room for these."""

    entries: list[NetworkEntry]
    dropped: int = 0


class VariablesInfo(Struct):
    """What a context's names are bound to; `more` others are left out."""

    variables: list[Variable]
    more: int = 0


class HistoryInfo(Struct):
    """What ran, with outputs as a notebook has them; `dropped` older cells made room for these."""

    cells: list[Cell]
    dropped: int = 0


class TemplateInfo(Struct):
    name: str
    version: str
    python_version: str
    packages: list[str]
    limits: Limits
    created_at: float
    size_bytes: int
    network: NetworkInfo | None = None  # what its sandboxes may reach that ask for nothing


class About(Struct):
    """The server itself."""

    version: str
    languages: list[str]
    max_lifetime_seconds: float
    max_upload_bytes: int
    default_limits: Limits
    maximum_limits: Limits


class Logged(Event, tag="logged"):
    """Something that the server says about itself; never a program's output."""

    at: float
    level: str
    event: str
    fields: dict[str, Any] = {}


# --- writing and reading


class ToldResult(Result, frozen=True, kw_only=True):
    """A Result; `binary` names which fields, and which MIME types of `extra`, are base64."""

    binary: list[str] = []


class ToldRun(Run, frozen=True, kw_only=True):
    text: str | None = None
    results: list[ToldResult]  # type: ignore[assignment]


ToldEvent = (
    Started
    | Output
    | ToldDisplay
    | Cleared
    | Raised
    | Input
    | ToolsCalled
    | Wrote
    | Truncated
    | Ended
    | Exited
    | Accepted
    | Attached
    | Watching
    | Change
    | Logged
    | Failed
)
_MOST_DIGITS = 18  # of an event's number
_BYTES_FIELDS = ("png", "jpeg", "pdf")


def decode_event(raw: bytes | str) -> AnyEvent | ProcessEvent | Accepted | Attached | Watching | Change | Logged:
    """The event. Raises the error that a `Failed` tells of, and Unavailable for what is no event."""
    try:
        event: Any = decode(raw, ToldEvent)
        if isinstance(event, ToldDisplay):
            return display_of(event)
    except (ValueError, msgspec.MsgspecError) as error:
        raise not_ours(error) from None
    if isinstance(event, Failed):
        raise error_of(event.error)
    return event  # type: ignore[no-any-return]


def _numbered_in(block: bytes) -> Numbered | None:
    """The same of an event that has a number as its id."""
    event = event_in(block)
    ids = [line[4:] for line in block.split(b"\n") if line.startswith(b"id: ")]
    if event is None:
        return None
    if not isinstance(event, AnyEvent) or not ids or not ids[0].isdigit() or len(ids[0]) > _MOST_DIGITS:
        raise not_ours("an event of a run without its number")
    return Numbered(int(ids[0]), event)


def event_in(block: bytes) -> Event | None:
    """What one server-sent event tells; None for a comment. Raises as `decode_event` does."""
    data = [line[6:] for line in block.split(b"\n") if line.startswith(b"data: ")]
    return decode_event(b"\n".join(data)) if data else None


class EventsIn:
    """Splits a stream of server-sent events."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Those that are whole now. Raises as `decode_event` does."""
        return (event for block in self._whole(chunk) if (event := event_in(block)) is not None)

    def feed_numbered(self, chunk: bytes) -> Iterator[Numbered]:
        """The same of a run's, with their numbers."""
        return (event for block in self._whole(chunk) if (event := _numbered_in(block)) is not None)

    def _whole(self, chunk: bytes) -> Iterator[bytes]:
        searched = max(len(self._buffer) - 1, 0)
        self._buffer += chunk
        if self._buffer.find(b"\n\n", searched) < 0:  # a large one comes in many chunks
            return
        *whole, self._buffer = self._buffer.split(b"\n\n")
        yield from map(bytes, whole)


def encode_run(run: Run) -> bytes:
    """A Run as JSON: results have the formats that they have, and `text` is there for whoever reads only that."""
    results = [_told_result(each) for each in run.results]
    return encode({"text": run.text, **msgspec.structs.asdict(run), "results": results})


def decode_run(raw: bytes) -> Run:
    """Raises Unavailable for what is no Run."""
    try:
        told: ToldRun = decode(raw, ToldRun)
        fields = msgspec.structs.asdict(told)
        del fields["text"]
        return Run(**{**fields, "results": [_result(each) for each in told.results]})
    except (ValueError, msgspec.MsgspecError) as error:
        raise not_ours(error) from None


def not_ours(why: object) -> errors.Unavailable:
    """For an answer that no Cloche server gives."""
    return errors.Unavailable(f"the server sent what this version does not understand ({why}): is it Cloche?")


def fault_of(error: errors.ClocheError, request_id: str = "") -> Fault:
    seconds = error.retry_after_seconds
    return Fault(
        code=error.code,
        message=str(error),
        request_id=request_id,
        retry_after_seconds=msgspec.UNSET if seconds is None else seconds,
    )


def error_of(fault: Fault) -> errors.ClocheError:
    """The same exception that the library raises where it does the work itself."""
    error = _BY_CODE.get(fault.code, errors.ClocheError)(fault.message)
    if fault.retry_after_seconds is not msgspec.UNSET:
        error.retry_after_seconds = fault.retry_after_seconds
    return error


def error_in(body: bytes, status: int) -> errors.ClocheError:
    """The error that an answer with such a status tells of."""
    try:
        failure: Failure = decode(body, Failure)
    except (ValueError, msgspec.MsgspecError):
        return not_ours(f"HTTP status {status}")
    return error_of(failure.error)


_BY_CODE: dict[str, type[errors.ClocheError]] = {
    each.code: each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.ClocheError)
}


def _told_result(result: Result) -> dict[str, object]:
    fields = {name: value for name, value in msgspec.structs.asdict(result).items() if value is not None}
    binary = [name for name in _BYTES_FIELDS if name in fields] + binary_in(result.extra)
    return {**fields, "binary": binary} if binary else fields


def _result(told: ToldResult) -> Result:
    fields = msgspec.structs.asdict(told)
    binary = [mime for mime in fields.pop("binary") if mime not in _BYTES_FIELDS]
    return Result(**{**fields, "extra": with_bytes(told.extra, binary)})
