"""The results as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cloche.bench.rows import BenchPart, BenchRow
from cloche.bench.samples import QUANTILES, SampleBook, Samples

UNIT_SCALES = {"ms": 1e3, "MB": 1e-6, "/s": 1.0, "MB/s": 1e-6, "×": 1.0, "": 1.0}
_TABLE_HEAD = ("measure", "unit", "n", "ok", *QUANTILES, "ratio", "bar", "")


def results_markdown(parts: Iterable[BenchPart], book: SampleBook, facts: Mapping[str, str]) -> str:
    """The facts as a list, then one table. Ratios are of medians."""
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", _table_line(_TABLE_HEAD), _table_line(["---", "---", *["---:"] * 8, "---:", ":---:"])]
    for part in parts:
        lines += [_table_line(row_cells(row, book)) for row in part.rows if row.key in book.rows]
    return "\n".join(lines)


def row_cells(row: BenchRow, book: SampleBook) -> list[str]:
    samples = book[row.key]
    tried = len(samples.values) + len(samples.failures)
    return [
        row.title,
        row.unit,
        str(tried),
        f"{len(samples.values) / tried:.1%}" if samples.failures else "all",
        *_quantile_cells(samples, UNIT_SCALES[row.unit]),
        _ratio_cell(row, book),
        _bar_cell(row),
        _verdict_cell(row, book),
    ]


def row_ratio(row: BenchRow, book: SampleBook) -> float | None:
    """The ratio of the best other median to ours; for a limit, of ours to the other."""
    others = [book[key].p50 for key in row.against if key in book]
    if not others or row.key not in book:
        return None
    ours, other = book[row.key].p50, min(others)
    above, below = (ours, other) if row.limit else (other, ours)
    # Memory can seem to shrink where others on the host give some back: that says nothing about us.
    return above / below if above > 0 and below > 0 else None


def is_bar_met(row: BenchRow, book: SampleBook) -> bool | None:
    """Whether the row's bar is met; None where there is none, or nothing to compare with."""
    found = row_ratio(row, book) if row.against else _row_median(row, book)
    if found is None or row.bar is None:
        return None
    return found <= row.bar if row.limit else found >= row.bar


def _row_median(row: BenchRow, book: SampleBook) -> float | None:
    return book[row.key].p50 * UNIT_SCALES[row.unit] if row.key in book else None


def results_document(parts: Iterable[BenchPart], book: SampleBook, facts: Mapping[str, str]) -> dict[str, Any]:
    """All measurements, in seconds, bytes and per second."""
    rows = [row for part in parts for row in part.rows if row.key in book.rows]
    return {"facts": dict(facts), "rows": {row.key: _describe_row(row, book, book[row.key]) for row in rows}}


def _describe_row(row: BenchRow, book: SampleBook, samples: Samples) -> dict[str, Any]:
    found = {name: samples.quantile(share) for name, share in QUANTILES.items()} if samples.values else {}
    return {
        "title": row.title,
        **found,
        "ratio": row_ratio(row, book),
        "bar": row.bar,
        "met": is_bar_met(row, book),
        "failures": samples.failures,
        "samples": samples.values,
    }


def _quantile_cells(samples: Samples, scale: float) -> list[str]:
    if not samples.values:
        return ["–"] * len(QUANTILES)
    return [format_figure(samples.quantile(share) * scale) for share in QUANTILES.values()]


def _ratio_cell(row: BenchRow, book: SampleBook) -> str:
    found = row_ratio(row, book)
    if found is None:
        return ""
    if row.also is None or row.also not in book:
        return f"{format_figure(found)}×"
    return f"{format_figure(found)}× ({format_figure(book[row.also].p50 / book[row.key].p50)}× lean)"


def _bar_cell(row: BenchRow) -> str:
    if row.bar is None:
        return ""
    unit = "×" if row.against else f" {row.unit}".replace(" /", "/").replace(" ×", "×").rstrip()
    return f"{'≤' if row.limit else '≥'} {row.bar:,g}{unit}"


def _verdict_cell(row: BenchRow, book: SampleBook) -> str:
    found = is_bar_met(row, book)
    if found is None:
        return "?" if row.bar is not None else ""
    return "✓" if found else "✗"


def format_figure(value: float) -> str:
    """Three significant digits, no exponent."""
    for digits, least in ((0, 100.0), (1, 10.0), (2, 0.1)):
        if abs(value) >= least:
            return f"{value:,.{digits}f}"
    return f"{value:.3f}"


def _table_line(words: Iterable[str]) -> str:
    return "| " + " | ".join(words) + " |"
