"""Calls in a call. Some models now and then ask for several functions by one that nobody offered them: `parallel`, with
`{"tool_uses": [{"recipient_name": "functions.python", "parameters": {..}}, ..]}`. It is taken apart here, before anyone
is shown it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from cloche.gateway.happenings import Closed, Delta, Finished, Happening, Opened
from cloche.gateway.items import Item, new_item_id

WRAPPERS = frozenset({"parallel", "multi_tool_use.parallel"})
MAX_CALLS = 100


class Unwrapped:
    """Feed it what a leg says; it says the same, with several calls in the place of one."""

    def __init__(self, tools: Iterable[Item]):
        self._offered = {tool.get("name") for tool in tools}
        self._numbers: dict[int, int] = {}  # of items, as they came -> as they are said
        self._count = 0
        self._held: set[int] = set()

    def of(self, happening: Happening) -> Iterator[Happening]:
        match happening:
            case Finished():
                yield happening
            case Opened() if self._is_wrapper(happening.item):
                self._held.add(happening.index)
            case Closed() if happening.index in self._held:
                self._held.discard(happening.index)
                yield from self._unwrap(happening.item)
            case Opened():
                self._numbers[happening.index] = self._new()
                yield self._renumbered(happening)
            case _ if happening.index not in self._held:
                yield self._renumbered(happening)

    def _is_wrapper(self, item: Item) -> bool:
        name = item.get("name")
        return item.get("type") == "function_call" and name in WRAPPERS and name not in self._offered

    def _unwrap(self, item: Item) -> Iterator[Happening]:
        calls = _calls_in(item.get("arguments"), self._offered)
        for name, arguments in calls:
            # The ids are the upstream's for a call that is not there any more.
            yield from self._call({**item, "id": new_item_id("function_call"), "name": name, "arguments": arguments})
        if not calls:
            yield from self._call(item)

    def _call(self, item: Item) -> Iterator[Happening]:
        index = self._new()
        yield Opened(index=index, item={**item, "arguments": "", "status": "in_progress"})
        yield Delta(index=index, kind="arguments", text=item["arguments"])
        yield Closed(index=index, item=item)

    def _renumbered(self, happening: Any) -> Happening:
        number = self._numbers[happening.index]
        same: Happening = happening if number == happening.index else replace(happening, index=number)
        return same

    def _new(self) -> int:
        self._count += 1
        return self._count - 1


def _calls_in(arguments: Any, offered: set[Any]) -> list[tuple[str, str]]:
    """Names and arguments of the calls; none unless all of them are of functions that were offered."""
    try:
        uses = json.loads(arguments)["tool_uses"]
        calls = [(str(use["recipient_name"]).removeprefix("functions."), use["parameters"]) for use in uses]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    if len(calls) > MAX_CALLS or not all(name in offered for name, _ in calls):
        return []
    return [(name, given if isinstance(given, str) else json.dumps(given)) for name, given in calls]
