"""Answers to questions about code and history as contents of Jupyter's replies. Pure."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from cloche.api.jupyter.messages import HistoryRequestContent
from cloche.model import CodeCheck, CodeDescription, Completions
from cloche.notebook import Cell

HISTORY_SESSION = 1  # a kernel has one
MAX_PATTERN = 1000
_TYPES_KEY = "_jupyter_types_experimental"  # where clients look for the kind of each match


def encode_completions(found: Completions) -> dict[str, Any]:
    """Cursors count characters, as Python's strings do."""
    types = [
        {"start": found.start, "end": found.end, "text": match, "type": kind}
        for match, kind in zip(found.matches, found.types, strict=False)
    ]
    return {
        "status": "ok",
        "matches": list(found.matches),
        "cursor_start": found.start,
        "cursor_end": found.end,
        "metadata": {_TYPES_KEY: types} if types else {},
    }


def encode_description(found: CodeDescription) -> dict[str, Any]:
    data = {"text/plain": found.text} if found.found else {}
    return {"status": "ok", "found": found.found, "data": data, "metadata": {}}


def encode_check(found: CodeCheck) -> dict[str, Any]:
    indent = {"indent": " " * found.indent} if found.status == "incomplete" else {}
    return {"status": found.status, **indent}


def select_history(cells: list[Cell], asked: HistoryRequestContent) -> list[Any]:
    """The cells of a history that a client asked for, as (session, number, code or (code, output))."""
    found = [cell for cell in cells if cell.count]
    if asked.hist_access_type == "range":
        found = _select_range(found, asked)
    elif asked.hist_access_type == "search":
        pattern = (asked.pattern or "*")[:MAX_PATTERN]
        found = [cell for cell in found if fnmatchcase(cell.code, pattern)]
        if asked.unique:
            found = list({cell.code: cell for cell in found}.values())
    if asked.hist_access_type != "range" and asked.n is not None:
        found = found[-asked.n :] if asked.n > 0 else []
    return [_encode_cell(cell, output=asked.output) for cell in found]


def _select_range(cells: list[Cell], asked: HistoryRequestContent) -> list[Cell]:
    """Those from `start` up to `stop`; negative numbers count from the next cell's number."""
    if asked.session not in (0, HISTORY_SESSION):
        return []
    following = max((cell.count for cell in cells), default=0) + 1
    start = asked.start if asked.start >= 0 else following + asked.start
    stop = following if asked.stop is None else asked.stop if asked.stop >= 0 else following + asked.stop
    return [cell for cell in cells if start <= cell.count < stop]


def _encode_cell(cell: Cell, *, output: bool) -> Any:
    return [HISTORY_SESSION, cell.count, [cell.code, _value_of(cell)] if output else cell.code]


def _value_of(cell: Cell) -> str | None:
    """The text of the value of its last expression."""
    value = next((each for each in cell.outputs if each["output_type"] == "execute_result"), None)
    return None if value is None else "".join(value["data"].get("text/plain", ()))
