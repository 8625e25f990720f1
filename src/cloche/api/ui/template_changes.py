"""What differs between the recipes of two templates, line by line, as a reader of diffs has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from cloche.templates.comparison import Change

Sign = Literal["+", "-", " "]


class Line(NamedTuple):
    sign: Sign
    text: str


class Changes(NamedTuple):
    key: str  # of template.toml
    lines: list[Line]


def changes_of(change: Change) -> Changes:
    """Of lists, what came and went; of tables, each key that is another one; of all else, before and after."""
    return Changes(change.what, [*_lines(change.before, change.after)])


def _lines(before: Any, after: Any) -> Iterator[Line]:
    if isinstance(before, dict) and isinstance(after, dict):
        yield from _of_tables(before, after)
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple):
        yield from _of_lists(list(before), list(after))
    else:
        yield from (Line("-", _shown(before)), Line("+", _shown(after)))


def _of_tables(before: dict[str, Any], after: dict[str, Any]) -> Iterator[Line]:
    for key in dict.fromkeys((*before, *after)):
        if before.get(key) == after.get(key):
            continue
        for sign, table in (("-", before), ("+", after)):
            if key in table:
                yield Line(sign, f"{key} = {_shown(table[key])}")  # type: ignore[arg-type]  # one of its signs


def _of_lists(before: list[Any], after: list[Any]) -> Iterator[Line]:
    gone, come = [each for each in before if each not in after], [each for each in after if each not in before]
    yield from (Line("-", _shown(each)) for each in gone)
    yield from (Line("+", _shown(each)) for each in come)
    if not gone and not come:
        yield from (Line("-", _shown(before)), Line("+", _shown(after)))  # another order


def _shown(value: Any) -> str:
    return "nothing" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
