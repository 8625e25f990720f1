"""The host's end of a kernel's assistant: questions about code that do not wait for the running cell.

See ASSISTANT in `cloche.guest.wire`. The kernel's answers are hostile input, bounded and checked.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from typing import TypeVar

import msgspec

from cloche import errors
from cloche.engine.sandboxes.init_client import InitClient
from cloche.isolation.channel import Header, HostChannel, clean_text, close_all
from cloche.model import CodeCheck, CodeDescription, Completions

ANSWER_SECONDS = 5.0
MAX_ANSWER_BYTES = 1 << 20
MAX_MATCHES = 1000
MAX_MATCH = 1000
MAX_DESCRIPTION = 100_000
MAX_INDENT = 1000
MAX_QUESTION_BYTES = 1 << 20
MAX_OPEN_QUESTIONS = 64  # of one kernel

T = TypeVar("T", Completions, CodeDescription, CodeCheck)


class KernelAssistant:
    """One socket to the assistant of a kernel. `attend` gives the kernel its end."""

    def __init__(self, guest: InitClient, attend: Callable[[int], None]):
        self._guest = guest
        self._open: dict[str, asyncio.Future[bytes]] = {}
        ours, theirs = socket.socketpair()
        self._channel = HostChannel(ours, self._on_frame, self._on_closed, max_body=MAX_ANSWER_BYTES, max_fds=0)
        try:
            attend(theirs.fileno())
        finally:
            theirs.close()

    @property
    def closed(self) -> bool:
        return self._channel.closed

    def close(self) -> None:
        self._channel.close()

    async def complete(self, code: str, cursor: int) -> Completions:
        return bound_completions(await self._ask("complete", code, Completions, cursor=cursor), code)

    async def describe(self, code: str, cursor: int, *, detail: bool) -> CodeDescription:
        found = await self._ask("describe", code, CodeDescription, cursor=cursor, detail=detail)
        return CodeDescription(found=found.found, text=clean_text(found.text, MAX_DESCRIPTION))

    async def check(self, code: str) -> CodeCheck:
        found = await self._ask("check", code, CodeCheck)
        return CodeCheck(status=found.status, indent=min(max(found.indent, 0), MAX_INDENT))

    async def _ask(self, verb: str, code: str, kind: type[T], **fields: object) -> T:
        """Raises InvalidRequest for too much code, Unavailable without an answer, ProtocolViolation, or Gone."""
        body = code.encode("utf-8", "surrogatepass")
        if len(body) > MAX_QUESTION_BYTES:
            raise errors.InvalidRequest(f"code of {len(body)} bytes is over the limit of {MAX_QUESTION_BYTES}")
        if len(self._open) >= MAX_OPEN_QUESTIONS:
            raise errors.Unavailable(f"{MAX_OPEN_QUESTIONS} questions about code wait for this kernel's answer")
        id = secrets.token_hex(8)
        answer = self._open[id] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send({"do": verb, "ask": id, **fields}, body)
            async with self._guest.time.timeout(ANSWER_SECONDS):
                return decode_answer(await self._guest.wait(answer), kind)
        except TimeoutError:
            raise errors.Unavailable(f"the kernel has not answered within {ANSWER_SECONDS:g} s: it is busy") from None
        finally:
            del self._open[id]

    def _on_frame(self, header: Header, body: bytes, fds: list[int]) -> None:
        close_all(fds)
        answer = self._open.get(str(header.get("ask")))
        if answer is None or answer.done():
            return
        if (problem := header.get("problem")) is not None:
            answer.set_exception(errors.Unavailable(f"the kernel cannot tell: {clean_text(str(problem), 100)}"))
        else:
            answer.set_result(body)

    def _on_closed(self, why: str) -> None:
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(errors.Unavailable("the kernel has stopped answering questions: ask again"))
                answer.exception()  # retrieved even if no caller waits for it


def decode_answer(body: bytes, kind: type[T]) -> T:
    """Raises ProtocolViolation."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise errors.ProtocolViolation("a kernel answered a question about code badly") from None


def bound_completions(told: Completions, code: str) -> Completions:
    """The same within bounds: a kernel that a program has taken over sends anything."""
    start = min(max(told.start, 0), len(code))
    return Completions(
        start=start,
        end=min(max(told.end, start), len(code)),
        matches=tuple(clean_text(each, MAX_MATCH) for each in told.matches[:MAX_MATCHES]),
        types=tuple(clean_text(each, MAX_MATCH) for each in told.types[:MAX_MATCHES]),
    )
