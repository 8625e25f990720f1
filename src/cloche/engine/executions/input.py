"""Where the answers to a program's `input()` come from."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator

from cloche import errors
from cloche.events import Input
from cloche.model import check_line

Answer = Callable[[str], str | Awaitable[str]]
InputSource = str | Iterable[str] | Answer | bool | None
"""None: `input()` is an error. A string: its lines, one per call. An iterable of strings: one per call. A callable: it
is given the prompt. True: the caller watches for Input events and calls `Execution.answer`."""


NO_MORE_ANSWERS = "input() was called more often than answers were given"


def failed_answer(error: BaseException) -> str:
    """What a program is told whose caller's answer failed."""
    return f"the caller's answer to input() failed: {error!r}"


class Answers:
    """Gives the next answer."""

    def __init__(self, source: str | Iterable[str] | Answer):
        if callable(source):
            self._ask: Answer | None = source
        else:
            self._ask = None
            lines = source.splitlines() if isinstance(source, str) else source
            if isinstance(lines, (list, tuple)):  # what is known now need not wait to be refused
                for line in lines:
                    check_line(line)
            self._lines: Iterator[str] = iter(lines)

    async def next(self, event: Input) -> str:
        """The answer to that question. Raises StopAsyncIteration when there are no more."""
        if self._ask is None:
            line = next(self._lines, None)
            if line is None:
                raise StopAsyncIteration
            return _line(line)
        answer = await asyncio.to_thread(self._ask, event.prompt)
        return _line(await answer if inspect.isawaitable(answer) else answer)


def answers_of(source: InputSource) -> Answers | None:
    """Raises InvalidRequest if `source` cannot give answers. None where the caller answers, or nobody does."""
    if source is None or isinstance(source, bool):
        return None
    if isinstance(source, str) or callable(source) or isinstance(source, Iterable):
        return Answers(source)
    raise errors.InvalidRequest(f"input must be a string, strings or a callable, not {type(source).__name__}")


def _line(answer: str) -> str:
    check_line(answer)
    return answer.removesuffix("\n")
