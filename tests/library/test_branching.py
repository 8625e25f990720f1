"""Checkpoints and forks of contexts through the library: embedded, and over a server."""

from __future__ import annotations

import pytest

import cloche
from cloche import errors

pytestmark = pytest.mark.usefixtures("library")


def test_a_context_goes_back_and_is_copied():
    with cloche.Sandbox() as box:
        context = box.contexts.get()
        context.run("x = [1]")
        mark = context.checkpoint()
        context.run("x.append(2)")
        first, second = context.fork(2)
        context.rollback(mark)
        first.run("x.append('first')")
        assert [each.run("x").text for each in (context, first, second)] == ["[1]", "[1, 2, 'first']", "[1, 2]"]
        assert context.checkpoints() == [mark] and first.checkpoints() == []
        assert {first.id, second.id} < {each.id for each in box.contexts.list()}
        assert box.run("x", context=second).text == "[1, 2]"
        context.rollback(mark.id)
        context.forget(mark)
        with pytest.raises(errors.CheckpointNotFound, match=mark.id):
            context.rollback(mark)
        with pytest.raises(errors.CheckpointNotFound, match="belongs to its own context"):
            first.forget(mark)


def test_uncopyable_state_is_refused_by_name():
    with cloche.Sandbox() as box:
        context = box.contexts.get()
        context.run("import socket; sock = socket.socket()")
        with pytest.raises(errors.NotCopyable, match="socket"):
            context.fork()
        with pytest.raises(errors.InvalidRequest, match="once or more"):
            context.fork(0)
        with pytest.raises(errors.InvalidRequest, match="64 contexts"):
            context.fork(64)
        with pytest.raises(errors.InvalidRequest, match="expected a checkpoint"):
            context.rollback(None)  # type: ignore[arg-type]
        context.run("sock.close()")
        assert context.fork()[0].run("1 + 1").text == "2"


async def test_the_same_with_await():
    async with cloche.AsyncSandbox() as box:
        context = await box.contexts.get()
        await context.run("x = 1")
        mark = await context.checkpoint()
        (fork,) = await context.fork()
        await fork.run("x = 3")
        await context.run("x = 2")
        await context.rollback(mark)
        assert [(await each.run("x")).text for each in (context, fork)] == ["1", "3"]
        assert await context.checkpoints() == [mark]
        await context.forget(mark)
        assert await context.checkpoints() == []
