"""Items that an upstream sends at once come one after the other."""

from __future__ import annotations

from itertools import groupby

from cloche.gateway.events import AnswerFinished, ItemClosed, ItemDelta, ItemOpened
from cloche.gateway.turn import ItemSequencer

ITEMS = 5000


async def interleaved(count):
    """All open at first, all grow, and those in the middle are whole before the first is."""
    for index in range(count):
        yield ItemOpened(index=index, item={})
    for index in range(count):
        yield ItemDelta(index=index, kind="text", text="x")
    for index in reversed(range(count)):
        yield ItemClosed(index=index, item={})
    yield AnswerFinished()


async def test_thousands_that_are_sent_at_once_come_in_a_row():
    told = [each async for each in ItemSequencer(interleaved(ITEMS))]
    assert isinstance(told.pop(), AnswerFinished)
    grouped = [(index, [type(each) for each in group]) for index, group in groupby(told, key=lambda each: each.index)]
    assert grouped == [(index, [ItemOpened, ItemDelta, ItemClosed]) for index in range(ITEMS)]


async def test_they_can_be_drained_first():
    source = ItemSequencer(interleaved(ITEMS))
    assert isinstance(await source.drain(), AnswerFinished)
    assert len([each async for each in source]) == 3 * ITEMS + 1
