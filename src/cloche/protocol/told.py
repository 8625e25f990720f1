"""What the server says: answers, events, runs and errors, and how all of it is written and read."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from cloche import errors
from cloche.engine.process import Exited, ProcessEvent
from cloche.events import (
    AnyEvent,
    Bundle,
    Cleared,
    Display,
    Ended,
    Event,
    Input,
    Output,
    Raised,
    Result,
    Run,
    Started,
    ToolsCalled,
    Truncated,
    Wrote,
)
from cloche.model import Limits, Struct
from cloche.network_policy import NetworkEntry, NetworkRule

T = TypeVar("T")


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


def encode(value: object) -> bytes:
    """JSON. A program's lone surrogates pass as escapes."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        plain = json.loads(json.dumps(msgspec.to_builtins(value)), parse_constant=_no_value)
        return json.dumps(plain, separators=(",", ":")).encode()


def decode(raw: bytes | str, kind: type[T] | Any, max_values: int | None = None) -> T:
    """Raises msgspec.ValidationError for what is not such a message, and ValueError for what is no JSON.

    With `max_values`, also for one that only the slow parser takes and that could have more values in it.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Counted before it is parsed, in strings too: what is small as text can take seconds and a GiB as objects.
        if max_values is not None and _values_in(raw) > max_values:
            raise ValueError(f"it needs care (a lone surrogate?), and has over {max_values} values") from None
        try:
            return msgspec.convert(json.loads(raw, parse_constant=_refuse_constant), kind)  # this one knows surrogates
        except RecursionError:
            raise ValueError("it is nested too deeply") from None


def _values_in(raw: bytes | str) -> int:
    """How many values it can have at most, roughly."""
    if isinstance(raw, str):
        return sum(map(raw.count, ("[", "{", ",")))
    return sum(map(raw.count, (b"[", b"{", b",")))


def _no_value(constant: str) -> None:
    """JSON has no NaN and no infinity: null, as the fast writer has it."""


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"there is no {constant} in JSON")


class ToldDisplay(Event, tag="display"):
    """A Display whose values named in `binary` are base64."""

    data: Bundle
    main: bool = False
    id: str | None = None
    update: bool = False
    binary: list[str] = []


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
_BYTES_FIELDS = ("png", "jpeg", "pdf")


def encode_event(event: Event) -> bytes:
    """One event as JSON."""
    if not isinstance(event, Display):
        return encode(event)
    told = ToldDisplay(
        data=event.data, main=event.main, id=event.id, update=event.update, binary=_binary_in(event.data)
    )
    return encode(told)


def decode_event(raw: bytes | str) -> AnyEvent | ProcessEvent | Accepted | Attached | Watching | Change | Logged:
    """The event. Raises the error that a `Failed` tells of, and Unavailable for what is no event."""
    try:
        event: Any = decode(raw, ToldEvent)
        if isinstance(event, ToldDisplay):
            data = _with_bytes(event.data, event.binary)
            return Display(data=data, main=event.main, id=event.id, update=event.update)
    except (ValueError, msgspec.MsgspecError) as error:
        raise not_ours(error) from None
    if isinstance(event, Failed):
        raise error_of(event.error)
    return event  # type: ignore[no-any-return]


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
        searched = max(len(self._buffer) - 1, 0)
        self._buffer += chunk
        if self._buffer.find(b"\n\n", searched) < 0:  # a large one comes in many chunks
            return
        *whole, self._buffer = self._buffer.split(b"\n\n")
        for block in whole:
            if (event := event_in(bytes(block))) is not None:
                yield event


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
    return Fault(code=error.code, message=str(error), request_id=request_id)


def error_of(fault: Fault) -> errors.ClocheError:
    """The same exception that the library raises where it does the work itself."""
    return _BY_CODE.get(fault.code, errors.ClocheError)(fault.message)


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


def _binary_in(bundle: Bundle) -> list[str]:
    return [mime for mime, value in bundle.items() if isinstance(value, bytes)]


def _with_bytes(bundle: Bundle, binary: Iterable[str]) -> Bundle:
    return {**bundle, **{mime: _unbase64(bundle.get(mime)) for mime in binary}}


def _unbase64(value: object) -> bytes:
    try:
        return base64.b64decode(value, validate=True)  # type: ignore[arg-type]
    except (binascii.Error, TypeError, ValueError):
        raise ValueError("a value that is said to be base64 is not") from None


def _told_result(result: Result) -> dict[str, object]:
    fields = {name: value for name, value in msgspec.structs.asdict(result).items() if value is not None}
    binary = [name for name in _BYTES_FIELDS if name in fields] + _binary_in(result.extra)
    return {**fields, "binary": binary} if binary else fields


def _result(told: ToldResult) -> Result:
    fields = msgspec.structs.asdict(told)
    binary = [mime for mime in fields.pop("binary") if mime not in _BYTES_FIELDS]
    return Result(**{**fields, "extra": _with_bytes(told.extra, binary)})
