"""Sources of answers to a program's `input()`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator

from cloche import errors
from cloche.events import Input
from cloche.model import check_input_line

AnswerCallback = Callable[[str], str | Awaitable[str]]
InputSource = str | Iterable[str] | AnswerCallback | bool | None
"""None: `input()` is an error. A string: its lines, one per call. An iterable of strings: one per call. A callable: it
is given the prompt. True: the caller watches for Input events and calls `Execution.answer`."""


NO_MORE_ANSWERS = "input() was called more often than answers were given"


def answer_failure_message(error: BaseException) -> str:
    """The message for a program whose caller failed to answer."""
    return f"the caller's answer to input() failed: {error!r}"


class InputAnswers:
    """Returns one answer per call of `input()`."""

    def __init__(self, source: str | Iterable[str] | AnswerCallback):
        if callable(source):
            self._ask: AnswerCallback | None = source
        else:
            self._ask = None
            lines = source.splitlines() if isinstance(source, str) else source
            if isinstance(lines, (list, tuple)):  # what is known now need not wait to be refused
                for line in lines:
                    check_input_line(line)
            self._lines: Iterator[str] = iter(lines)

    async def next(self, event: Input) -> str:
        """The answer to that question. Raises StopAsyncIteration when there are no more."""
        if self._ask is None:
            line = next(self._lines, None)
            if line is None:
                raise StopAsyncIteration
            return _check_answer_line(line)
        answer = await asyncio.to_thread(self._ask, event.prompt)
        return _check_answer_line(await answer if inspect.isawaitable(answer) else answer)


def make_input_answers(source: InputSource) -> InputAnswers | None:
    """Raises InvalidRequest if `source` cannot give answers. None where the caller answers, or no answers come."""
    if source is None or isinstance(source, bool):
        return None
    if isinstance(source, str) or callable(source) or isinstance(source, Iterable):
        return InputAnswers(source)
    raise errors.InvalidRequest(f"input must be a string, strings or a callable, not {type(source).__name__}")


def _check_answer_line(answer: str) -> str:
    check_input_line(answer)
    return answer.removesuffix("\n")
