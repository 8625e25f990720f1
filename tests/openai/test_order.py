"""Items that an upstream sends at once come one after the other."""

from __future__ import annotations

from itertools import groupby

from cloche.gateway.events import Closed, Delta, Finished, Opened
from cloche.gateway.turn import InOrder

ITEMS = 5000


async def interleaved(count):
    """All open at first, all grow, and those in the middle are whole before the first is."""
    for index in range(count):
        yield Opened(index=index, item={})
    for index in range(count):
        yield Delta(index=index, kind="text", text="x")
    for index in reversed(range(count)):
        yield Closed(index=index, item={})
    yield Finished()


async def test_thousands_that_are_sent_at_once_come_in_a_row():
    told = [each async for each in InOrder(interleaved(ITEMS))]
    assert isinstance(told.pop(), Finished)
    grouped = [(index, [type(each) for each in group]) for index, group in groupby(told, key=lambda each: each.index)]
    assert grouped == [(index, [Opened, Delta, Closed]) for index in range(ITEMS)]


async def test_they_can_be_drained_first():
    source = InOrder(interleaved(ITEMS))
    assert isinstance(await source.drain(), Finished)
    assert len([each async for each in source]) == 3 * ITEMS + 1
