"""What a context's names are bound to, as it is told without running a cell."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Literal

from cloche.structs import Struct

VariableKind = Literal["variable", "function", "class", "module"]


class Variable(Struct, kw_only=True):
    """One name. What is not known without running a program's own code is left out."""

    name: str
    kind: VariableKind = "variable"
    type: str  # `int`, `numpy.ndarray`, `pandas.DataFrame`, `__main__.Point`
    shape: tuple[int, ...] | None = None  # of arrays and frames
    length: int | None = None  # of what has one
    dtype: str | None = None
    columns: tuple[str, ...] | None = None  # of frames, the first ones
    size_bytes: int | None = None  # shallow: a list's own, without what is in it; an array's with its data
    preview: str = ""


class Variables(list[Variable]):
    """A context's names, in the order in which they were made. `more`: how many others there are."""

    def __init__(self, variables: Iterable[Variable] = (), more: int = 0):
        super().__init__(variables)
        self.more = more

    def __repr__(self) -> str:
        lines = [f"{each.name}: {each.type}{_measure(each)} = {each.preview}" for each in self]
        return "\n".join([*lines, *self._note()]) or "there are no variables"

    def _note(self) -> list[str]:
        return [f"({self.more} more)"] if self.more else []

    def _repr_html_(self) -> str:
        """For notebooks. All of it is a program's own words, so everything is escaped."""
        rows = [row("th", ("name", "type", "shape", "bytes", "preview"))]
        for each in self:
            size = "" if each.size_bytes is None else each.size_bytes
            rows.append(row("td", (each.name, each.type, _measure(each), size, each.preview)))
        return f"<table>{''.join(rows)}</table>{''.join(map(html.escape, self._note()))}"


def _measure(variable: Variable) -> str:
    if variable.shape is not None:
        return f"({', '.join(map(str, variable.shape))})"
    return "" if variable.length is None else f"[{variable.length}]"


def row(cell: str, values: Iterable[object]) -> str:
    """A row of a table, escaped."""
    return "<tr>" + "".join(f"<{cell}>{html.escape(str(each))}</{cell}>" for each in values) + "</tr>"
