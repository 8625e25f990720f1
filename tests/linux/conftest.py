"""Walls cannot be taken down again, so each is tried in a child of its own."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest


class ChildDied(Exception):
    """The child ended without an answer; `signal` is what killed it, or 0."""

    def __init__(self, status: int) -> None:
        self.signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        super().__init__(f"the child died with wait status {status}")


def in_child(function: Callable[[], Any]) -> Any:
    """What `function` returns, or raises as an OSError, in a forked child. Raises ChildDied if it does neither."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _answer(function, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        raw = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not raw:
        raise ChildDied(status)
    answer = pickle.loads(raw)
    if isinstance(answer, OSError):
        raise answer
    return answer


def _answer(function: Callable[[], Any], writing: int) -> None:
    status = 1
    try:
        try:
            answer = function()
        except OSError as error:
            answer = error
        os.write(writing, pickle.dumps(answer))
        status = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(status)


@pytest.fixture(name="in_child")
def _in_child() -> Callable[[Callable[[], Any]], Any]:
    return in_child


@pytest.fixture(name="ChildDied")
def _child_died() -> type[ChildDied]:
    return ChildDied
