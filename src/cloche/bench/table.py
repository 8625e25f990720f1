"""The results as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cloche.bench.rows import Part, Row
from cloche.bench.samples import QUANTILES, Book, Samples

SCALES = {"ms": 1e3, "MB": 1e-6, "/s": 1.0, "MB/s": 1e-6, "×": 1.0, "": 1.0}
_HEAD = ("measure", "unit", "n", "ok", *QUANTILES, "ratio", "bar", "")


def markdown(parts: Iterable[Part], book: Book, facts: Mapping[str, str]) -> str:
    """The facts as a list, then one table. Ratios are of medians."""
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", _line(_HEAD), _line(["---", "---", *["---:"] * 8, "---:", ":---:"])]
    for part in parts:
        lines += [_line(cells(row, book)) for row in part.rows if row.key in book.rows]
    return "\n".join(lines)


def cells(row: Row, book: Book) -> list[str]:
    samples = book[row.key]
    tried = len(samples.values) + len(samples.failures)
    return [
        row.title,
        row.unit,
        str(tried),
        f"{len(samples.values) / tried:.1%}" if samples.failures else "all",
        *_quantiles(samples, SCALES[row.unit]),
        _ratio_cell(row, book),
        _bar_cell(row),
        _verdict(row, book),
    ]


def ratio(row: Row, book: Book) -> float | None:
    """How many times ours the best of the others is; for a limit, how many times the other ours is."""
    others = [book[key].p50 for key in row.against if key in book]
    if not others or row.key not in book:
        return None
    ours, other = book[row.key].p50, min(others)
    above, below = (ours, other) if row.limit else (other, ours)
    # Memory can seem to shrink where others on the host give some back: that says nothing about us.
    return above / below if above > 0 and below > 0 else None


def met(row: Row, book: Book) -> bool | None:
    """Whether the row's bar is met; None where there is none, or nothing to compare with."""
    found = ratio(row, book) if row.against else _median(row, book)
    if found is None or row.bar is None:
        return None
    return found <= row.bar if row.limit else found >= row.bar


def _median(row: Row, book: Book) -> float | None:
    return book[row.key].p50 * SCALES[row.unit] if row.key in book else None


def document(parts: Iterable[Part], book: Book, facts: Mapping[str, str]) -> dict[str, Any]:
    """Everything that was measured, in seconds, bytes and per second."""
    rows = [row for part in parts for row in part.rows if row.key in book.rows]
    return {"facts": dict(facts), "rows": {row.key: _described(row, book, book[row.key]) for row in rows}}


def _described(row: Row, book: Book, samples: Samples) -> dict[str, Any]:
    found = {name: samples.quantile(share) for name, share in QUANTILES.items()} if samples.values else {}
    return {
        "title": row.title,
        **found,
        "ratio": ratio(row, book),
        "bar": row.bar,
        "met": met(row, book),
        "failures": samples.failures,
        "samples": samples.values,
    }


def _quantiles(samples: Samples, scale: float) -> list[str]:
    if not samples.values:
        return ["–"] * len(QUANTILES)
    return [figure(samples.quantile(share) * scale) for share in QUANTILES.values()]


def _ratio_cell(row: Row, book: Book) -> str:
    found = ratio(row, book)
    if found is None:
        return ""
    if row.also is None or row.also not in book:
        return f"{figure(found)}×"
    return f"{figure(found)}× ({figure(book[row.also].p50 / book[row.key].p50)}× lean)"


def _bar_cell(row: Row) -> str:
    if row.bar is None:
        return ""
    unit = "×" if row.against else f" {row.unit}".replace(" /", "/").replace(" ×", "×").rstrip()
    return f"{'≤' if row.limit else '≥'} {row.bar:,g}{unit}"


def _verdict(row: Row, book: Book) -> str:
    found = met(row, book)
    if found is None:
        return "?" if row.bar is not None else ""
    return "✓" if found else "✗"


def figure(value: float) -> str:
    """Three significant digits, no exponent."""
    for digits, least in ((0, 100.0), (1, 10.0), (2, 0.1)):
        if abs(value) >= least:
            return f"{value:,.{digits}f}"
    return f"{value:.3f}"


def _line(words: Iterable[str]) -> str:
    return "| " + " | ".join(words) + " |"
