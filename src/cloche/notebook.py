"""Executed cells as a Jupyter notebook (nbformat 4.5). Pure."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from cloche.events import Bundle, Display, Ended, Raised
from cloche.languages import LANGUAGES
from cloche.model import Outcome, html_table_row
from cloche.structs import Struct

NOTEBOOK_MIME = "application/x-ipynb+json"
NotebookOutput = dict[str, Any]

_LINE_CHARACTERS = 80
_JSON_MIME = re.compile(r"application/(.*\+)?json")  # what the format allows values of any type for


class Cell(Struct):
    """One execution. `outputs` are as a notebook has them, or empty with `outputs_dropped` where they made room."""

    id: str
    context: str
    language: str
    count: int
    code: str
    started_at: float
    seconds: float | None = None  # None while it runs
    outcome: Outcome | None = None
    reason: str | None = None
    outputs: list[NotebookOutput] = []
    outputs_dropped: bool = False


class History(list[Cell]):
    """Cells in the order in which they ran. `dropped`: how many older ones made room for these."""

    def __init__(self, cells: Iterable[Cell] = (), dropped: int = 0):
        super().__init__(cells)
        self.dropped = dropped

    def __repr__(self) -> str:
        lines = [f"[{each.count}] {_format_outcome(each)}: {_first_line(each.code)}" for each in self]
        return "\n".join([*self._dropped_note(), *lines]) or "nothing has run"

    def _repr_html_(self) -> str:
        """For notebooks. All text is untrusted, so everything is escaped."""
        rows = [html_table_row("th", ("count", "context", "outcome", "seconds", "code"))]
        for each in self:
            seconds = "" if each.seconds is None else f"{each.seconds:.3g}"
            rows.append(
                html_table_row(
                    "td", (each.count, each.context, each.outcome or "running", seconds, _first_line(each.code))
                )
            )
        return f"{''.join(self._dropped_note())}<table>{''.join(rows)}</table>"

    def _dropped_note(self) -> list[str]:
        return [f"({self.dropped} older cells made room)"] if self.dropped else []


def _format_outcome(cell: Cell) -> str:
    return "running" if cell.outcome is None else f"{cell.outcome} in {cell.seconds or 0:.3g} s"


def _first_line(code: str) -> str:
    first, *more = code.strip().splitlines() or [""]
    line = "".join(each if each.isprintable() else "�" for each in first)
    return line[:_LINE_CHARACTERS] + ("…" if more or len(line) > _LINE_CHARACTERS else "")


def build_notebook(cells: Iterable[Cell], language: str = "python", dropped: int = 0) -> dict[str, Any]:
    """Builds the notebook of those cells. It is valid for every output of a program."""
    known = LANGUAGES[language]
    made = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {
            "kernelspec": {"name": known.kernel_name, "display_name": known.kernel_title, "language": language},
            "language_info": {
                "name": language,
                "codemirror_mode": known.codemirror_mode,
                "file_extension": f".{known.extensions[0]}",
                "mimetype": known.mime,
            },
        },
        "cells": [*_dropped_cells_note(dropped), *map(_format_cell, cells)],
    }
    cleaned: dict[str, Any] = _remove_surrogates(made)
    return cleaned


def encode_notebook(made: dict[str, Any]) -> bytes:
    """Encodes the notebook as a file. Numbers that JSON lacks (NaN) become null."""
    return msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n"


def _dropped_cells_note(dropped: int) -> list[dict[str, Any]]:
    if not dropped:
        return []
    text = f"*{dropped} earlier cells are not here: what is kept of a sandbox's history is bounded.*"
    return [{"cell_type": "markdown", "id": "dropped", "metadata": {}, "source": [text]}]


def _format_cell(cell: Cell) -> dict[str, Any]:
    about: dict[str, Any] = {"outcome": cell.outcome}
    if cell.reason:
        about["reason"] = cell.reason
    return {
        "cell_type": "code",
        "id": cell.id,
        "metadata": {"cloche": about, "execution": _execution_times(cell)},
        "execution_count": cell.count or None,
        "source": split_lines(cell.code),
        "outputs": [_dropped_output(), *cell.outputs] if cell.outputs_dropped else cell.outputs,
    }


def _execution_times(cell: Cell) -> dict[str, str]:
    """The timestamps in the form that Jupyter itself records."""
    times = {"iopub.status.busy": _format_time(cell.started_at)}
    if cell.seconds is not None:
        times["iopub.status.idle"] = _format_time(cell.started_at + cell.seconds)
    return times


def _format_time(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at % 1 * 1e6):06d}Z"


def _dropped_output() -> NotebookOutput:
    return stream_output("stderr", "[cloche] the outputs of this cell made room for later ones\n")


# --- outputs


def stream_output(name: str, text: str) -> NotebookOutput:
    return {"output_type": "stream", "name": name, "text": split_lines(text)}


def display_output(event: Display, count: int) -> NotebookOutput:
    """The output for a display, or for the value of the cell's last expression."""
    data = _encode_bundle(event.data)
    if event.main:
        return {"output_type": "execute_result", "execution_count": count or None, "data": data, "metadata": {}}
    return {"output_type": "display_data", "data": data, "metadata": {}}


def error_output(event: Raised) -> NotebookOutput:
    lines = event.traceback.split("\n")
    return {
        "output_type": "error",
        "ename": event.name,
        "evalue": event.value,
        "traceback": lines[:-1] if lines[-1] == "" else lines,
    }


def stopped_output(ended: Ended) -> NotebookOutput:
    """The output for a cell that was stopped without raising an exception."""
    reason = ended.reason or ended.outcome
    return {"output_type": "error", "ename": ended.outcome, "evalue": reason, "traceback": [reason]}


def split_lines(text: str) -> list[str]:
    """Splits a text as Jupyter does: each line keeps its line end, so that they can be joined again."""
    return text.splitlines(keepends=True)


def _encode_bundle(data: Bundle) -> dict[str, Any]:
    return {mime: _encode_value(mime, value) for mime, value in data.items()}


def _encode_value(mime: str, value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if _JSON_MIME.fullmatch(mime):
        return value
    return split_lines(value if isinstance(value, str) else json.dumps(value))


def _remove_surrogates(value: Any) -> Any:
    """The same without lone surrogates, which readers of notebooks reject."""
    try:
        msgspec.json.encode(value)
        return value
    except UnicodeEncodeError:
        return _replace_surrogates(value)


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_replace_surrogates(key): _replace_surrogates(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_replace_surrogates(one) for one in value]
    return value
