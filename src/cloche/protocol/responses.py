"""Messages of the server: responses, events, runs and errors, with their encoding and decoding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from cloche import errors
from cloche.events import (
    AnyEvent,
    Cleared,
    DisplayMessage,
    Ended,
    Event,
    Exited,
    Input,
    NumberedEvent,
    Output,
    ProcessEvent,
    Raised,
    Result,
    Run,
    Started,
    ToolsCalled,
    Truncated,
    Wrote,
    binary_mimes,
    decode_binary,
    to_display,
)
from cloche.events import decode_json as decode_json
from cloche.events import encode_event as encode_event
from cloche.events import encode_json as encode_json
from cloche.model import Limits, Struct, Variable
from cloche.network_policy import NetworkEntry, NetworkRule
from cloche.notebook import Cell


class AcceptedMessage(Event, tag="accepted"):
    """The server's first message: the execution will begin at `start`."""

    execution: str


class AttachedMessage(Event, tag="attached"):
    """The server's first message about a process."""

    id: str
    pid: int


class WatchingMessage(Event, tag="watching"):
    """The first message of a watch: changes are reported from now on."""


class ChangeMessage(Event, tag="change"):
    kind: str
    path: str


class ErrorInfo(Struct):
    """An error of Cloche. `code` does not change between versions."""

    code: str
    message: str
    request_id: str = ""
    retry_after_seconds: float | msgspec.UnsetType = msgspec.UNSET  # when to ask again, where that is known


class ErrorMessage(Event, tag="error"):
    """The last message after an error of Cloche."""

    error: ErrorInfo


class ErrorResponse(Struct):
    """The body of every error response."""

    error: ErrorInfo


# --- what is answered


class ContextInfo(Struct):
    id: str
    language: str
    cwd: str


class ProcessStartedResponse(Struct):
    id: str
    pid: int


class ExistsResponse(Struct):
    exists: bool


class CreatedResponse(Struct):
    created: bool


class InterruptedResponse(Struct):
    interrupted: bool


class SecretInfo(Struct):
    """A secret, without its value."""

    domain: str
    header: str | None = None
    name: str | None = None


class NetworkInfo(Struct):
    """The network policy of a sandbox."""

    allow: list[str]
    deny: list[str]
    rules: list[NetworkRule]
    secrets: list[SecretInfo]


class NetworkLogResponse(Struct):
    """A sandbox's network log, the oldest first; `dropped` older entries made room for these."""

    entries: list[NetworkEntry]
    dropped: int = 0


class VariablesInfo(Struct):
    """The variables of a context; `more` others are left out."""

    variables: list[Variable]
    more: int = 0


class HistoryInfo(Struct):
    """Executed cells, with outputs in notebook format; `dropped` older cells made room for these."""

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


class AboutResponse(Struct):
    """Facts about the server itself."""

    version: str
    languages: list[str]
    max_lifetime_seconds: float
    max_upload_bytes: int
    default_limits: Limits
    maximum_limits: Limits


class LogMessage(Event, tag="logged"):
    """An event of the server's own log; never a program's output."""

    at: float
    level: str
    event: str
    fields: dict[str, Any] = {}


# --- writing and reading


class ResultMessage(Result, frozen=True, kw_only=True):
    """A Result; `binary` names which fields, and which MIME types of `extra`, are base64."""

    binary: list[str] = []


class RunMessage(Run, frozen=True, kw_only=True):
    text: str | None = None
    results: list[ResultMessage]  # type: ignore[assignment]


EventMessage = (
    Started
    | Output
    | DisplayMessage
    | Cleared
    | Raised
    | Input
    | ToolsCalled
    | Wrote
    | Truncated
    | Ended
    | Exited
    | AcceptedMessage
    | AttachedMessage
    | WatchingMessage
    | ChangeMessage
    | LogMessage
    | ErrorMessage
)
_MAX_NUMBER_DIGITS = 18  # of an event's number
_BYTES_FIELDS = ("png", "jpeg", "pdf")


def decode_event(
    raw: bytes | str,
) -> AnyEvent | ProcessEvent | AcceptedMessage | AttachedMessage | WatchingMessage | ChangeMessage | LogMessage:
    """Decodes an event. Raises the error that an `ErrorMessage` carries, and Unavailable for an invalid event."""
    try:
        event: Any = decode_json(raw, EventMessage)
        if isinstance(event, DisplayMessage):
            return to_display(event)
    except (ValueError, msgspec.MsgspecError) as error:
        raise unexpected_answer_error(error) from None
    if isinstance(event, ErrorMessage):
        raise to_exception(event.error)
    return event  # type: ignore[no-any-return]


def _parse_numbered_event(block: bytes) -> NumberedEvent | None:
    """Parses a server-sent event with a number as its id; None for a comment."""
    event = parse_event(block)
    ids = [line[4:] for line in block.split(b"\n") if line.startswith(b"id: ")]
    if event is None:
        return None
    if not isinstance(event, AnyEvent) or not ids or not ids[0].isdigit() or len(ids[0]) > _MAX_NUMBER_DIGITS:
        raise unexpected_answer_error("an event of a run without its number")
    return NumberedEvent(int(ids[0]), event)


def parse_event(block: bytes) -> Event | None:
    """Parses one server-sent event; None for a comment. Raises as `decode_event` does."""
    data = [line[6:] for line in block.split(b"\n") if line.startswith(b"data: ")]
    return decode_event(b"\n".join(data)) if data else None


class EventStreamParser:
    """Splits a stream of server-sent events."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Returns the events that are complete now. Raises as `decode_event` does."""
        return (event for block in self._complete_blocks(chunk) if (event := parse_event(block)) is not None)

    def feed_numbered(self, chunk: bytes) -> Iterator[NumberedEvent]:
        """Returns the complete events of a run, with their numbers."""
        return (event for block in self._complete_blocks(chunk) if (event := _parse_numbered_event(block)) is not None)

    def _complete_blocks(self, chunk: bytes) -> Iterator[bytes]:
        searched = max(len(self._buffer) - 1, 0)
        self._buffer += chunk
        if self._buffer.find(b"\n\n", searched) < 0:  # a large one comes in many chunks
            return
        *whole, self._buffer = self._buffer.split(b"\n\n")
        yield from map(bytes, whole)


def encode_run(run: Run) -> bytes:
    """A Run as JSON: results have only their own formats; `text` is added for clients that read nothing else."""
    results = [_encode_result(each) for each in run.results]
    return encode_json({"text": run.text, **msgspec.structs.asdict(run), "results": results})


def decode_run(raw: bytes) -> Run:
    """Decodes a Run. Raises Unavailable for anything else."""
    try:
        told: RunMessage = decode_json(raw, RunMessage)
        fields = msgspec.structs.asdict(told)
        del fields["text"]
        return Run(**{**fields, "results": [_decode_result(each) for each in told.results]})
    except (ValueError, msgspec.MsgspecError) as error:
        raise unexpected_answer_error(error) from None


def unexpected_answer_error(why: object) -> errors.Unavailable:
    """The error for a response that no Cloche server gives."""
    return errors.Unavailable(f"the server sent what this version does not understand ({why}): is it Cloche?")


def to_error_info(error: errors.ClocheError, request_id: str = "") -> ErrorInfo:
    seconds = error.retry_after_seconds
    return ErrorInfo(
        code=error.code,
        message=str(error),
        request_id=request_id,
        retry_after_seconds=msgspec.UNSET if seconds is None else seconds,
    )


def to_exception(fault: ErrorInfo) -> errors.ClocheError:
    """The same exception that the library raises where it does the work itself."""
    error = _ERROR_BY_CODE.get(fault.code, errors.ClocheError)(fault.message)
    if fault.retry_after_seconds is not msgspec.UNSET:
        error.retry_after_seconds = fault.retry_after_seconds
    return error


def exception_from_response(body: bytes, status: int) -> errors.ClocheError:
    """The exception for an error response with that status."""
    try:
        failure: ErrorResponse = decode_json(body, ErrorResponse)
    except (ValueError, msgspec.MsgspecError):
        return unexpected_answer_error(f"HTTP status {status}")
    return to_exception(failure.error)


_ERROR_BY_CODE: dict[str, type[errors.ClocheError]] = {
    each.code: each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.ClocheError)
}


def _encode_result(result: Result) -> dict[str, object]:
    fields = {name: value for name, value in msgspec.structs.asdict(result).items() if value is not None}
    binary = [name for name in _BYTES_FIELDS if name in fields] + binary_mimes(result.extra)
    return {**fields, "binary": binary} if binary else fields


def _decode_result(told: ResultMessage) -> Result:
    fields = msgspec.structs.asdict(told)
    binary = [mime for mime in fields.pop("binary") if mime not in _BYTES_FIELDS]
    return Result(**{**fields, "extra": decode_binary(told.extra, binary)})
