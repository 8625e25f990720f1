"""Variable inspection: a kernel's list of its variables, treated as hostile input, bounded and checked."""

from __future__ import annotations

import asyncio
import secrets

import msgspec

from cloche import errors
from cloche.engine.sandboxes.init_client import InitClient
from cloche.isolation.channel import Header, clean_text
from cloche.model import Variable, Variables

INSPECTION_SECONDS = 5.0
MAX_VARIABLES = 1000
MAX_INSPECTION_BYTES = 1 << 20
MAX_VARIABLE_NAME = 200
MAX_PREVIEW = 200
MAX_COLUMNS = 50
MAX_DIMENSIONS = 64
_decoder = msgspec.json.Decoder(list[Variable])


class VariableInspection:
    """One request for variables. `told` takes the kernel's answer, `ended` its end."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self._answered: asyncio.Future[Variables] = asyncio.get_running_loop().create_future()

    async def answer(self, guest: InitClient) -> Variables:
        """Raises as `parse_variables` does, Unavailable where no answer comes, or Gone."""
        try:
            async with guest.time.timeout(INSPECTION_SECONDS):
                return await guest.wait(self._answered)
        except TimeoutError:
            busy = "something of the program keeps its kernel busy between executions"
            raise errors.Unavailable(f"no word of the variables within {INSPECTION_SECONDS:g} s: {busy}") from None

    def told(self, header: Header, body: bytes) -> None:
        """Ignores an answer to another request, for example to an earlier one that came too late."""
        if header.get("ask") != self.id or self._answered.done():
            return
        try:
            self._answered.set_result(parse_variables(header, body))
        except errors.ClocheError as error:
            self._answered.set_exception(error)

    def ended(self, why: str) -> None:
        if not self._answered.done():
            self._answered.set_exception(errors.Unavailable(f"the {why} while it was asked for its variables"))
            self._answered.exception()  # retrieved even if no caller waits for it


def parse_variables(header: Header, body: bytes) -> Variables:
    """Raises Unavailable with the kernel's reason for not answering, or ProtocolViolation."""
    if (problem := header.get("problem")) is not None:
        raise errors.Unavailable(f"a kernel says of its variables that {clean_text(str(problem), 500)}")
    more = header.get("more")
    if len(body) > MAX_INSPECTION_BYTES or type(more) is not int or not 0 <= more < 2**53:
        raise errors.ProtocolViolation("a kernel told too much of its variables, or not how many more there are")
    try:
        found = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise errors.ProtocolViolation("a kernel described its variables badly") from None
    kept = found[:MAX_VARIABLES]
    return Variables(map(_bound_variable, kept), more + len(found) - len(kept))


def _bound_variable(told: Variable) -> Variable:
    """The same within bounds: a kernel that a program has taken over sends anything."""
    return Variable(
        name=clean_text(told.name, MAX_VARIABLE_NAME),
        kind=told.kind,
        type=clean_text(told.type, MAX_VARIABLE_NAME),
        shape=None if told.shape is None else tuple(map(_bound_size, told.shape[:MAX_DIMENSIONS])),
        length=None if told.length is None else _bound_size(told.length),
        dtype=None if told.dtype is None else clean_text(told.dtype, MAX_VARIABLE_NAME),
        columns=None
        if told.columns is None
        else tuple(clean_text(each, MAX_VARIABLE_NAME) for each in told.columns[:MAX_COLUMNS]),
        size_bytes=None if told.size_bytes is None else _bound_size(told.size_bytes),
        preview=clean_text(told.preview, MAX_PREVIEW),
    )


def _bound_size(told: int) -> int:
    return min(max(told, 0), 2**53)
