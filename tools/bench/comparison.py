"""The comparison of Cloche with its peers, as Markdown, as JSON and as a picture: a small chart per measure."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.load_measurements import LIVE_COUNTS
from bench.peer_runs import PEERS, PeerMeasurements

from cloche.bench.rows import UNIT_SCALES, format_figure
from cloche.bench.samples import SampleBook

OWN_TITLE = "Cloche, over HTTP"


class ComparedRow(NamedTuple):
    """`ours` is our row, `theirs` the key of the peers' drivers. `more`: whether more is better."""

    title: str
    unit: str
    ours: str
    theirs: str
    more: bool = False


COMPARED_ROWS = (
    ComparedRow("create to `1+1`", "ms", "http_one_pool", "one"),
    ComparedRow("create to a DataFrame", "ms", "http_frame", "frame"),
    ComparedRow("create to the first PNG", "ms", "http_png", "png"),
    ComparedRow("warm `1+1`", "ms", "http_warm", "warm"),
    ComparedRow("executions, 1 client", "/s", "http_executions_1", "executions_1", more=True),
    ComparedRow("executions, 8 clients", "/s", "http_executions_8", "executions_8", more=True),
    ComparedRow("executions, 64 clients", "/s", "http_executions_64", "executions_64", more=True),
    ComparedRow("create, use, destroy, 8 clients", "/s", "http_cycles_8", "cycles_8", more=True),
    ComparedRow("memory, after `1+1`", "MB", "used_memory", "memory"),
    ComparedRow("10 MB of output", "MB/s", "http_stream", "stream", more=True),
    ComparedRow("upload of 100 MB", "MB/s", "http_file_write", "file_write", more=True),
    ComparedRow("download of 100 MB", "MB/s", "http_file_read", "file_read", more=True),
)


def comparison_markdown(book: SampleBook, peers: PeerMeasurements) -> str:
    """Medians; in brackets the ratio to ours. Then the peers that were not measured, with the reason."""
    shown = [peer for peer in PEERS if peer.key not in peers.absent]
    names = [f"{peer.title} {peers.versions.get(peer.key, '')}".strip() for peer in shown]
    lines = [
        _table_line(["median", "unit", OWN_TITLE, *names]),
        _table_line(["---", "---", *["---:"] * (len(shown) + 1)]),
    ]
    for each in COMPARED_ROWS:
        cells = [_peer_cell(each, book, f"{peer.key}_{each.theirs}") for peer in shown]
        lines.append(_table_line([each.title, each.unit, _own_cell(each, book), *cells]))
    for peer in PEERS:
        if peer.key in peers.absent:
            lines += ["", f"- {peer.title}: not measured: {peers.absent[peer.key]}"]
    return "\n".join(lines)


def comparison_document(book: SampleBook, peers: PeerMeasurements) -> dict[str, Any]:
    """Every sample of the peers."""
    return {
        peer.key: {
            "title": peer.title,
            "version": peers.versions.get(peer.key, ""),
            "not measured": peers.absent.get(peer.key),
            "rows": _peer_samples(book, f"{peer.key}_"),
        }
        for peer in PEERS
    }


def peer_medians(each: ComparedRow, book: SampleBook, peers: PeerMeasurements) -> Mapping[str, float]:
    """Medians by title, in the row's unit; only those that exist."""
    keys = {OWN_TITLE: each.ours} | {
        peer.title: f"{peer.key}_{each.theirs}" for peer in PEERS if peer.key not in peers.absent
    }
    return {
        title: book[key].p50 * UNIT_SCALES[each.unit]
        for title, key in keys.items()
        if key in book and book[key].p50 > 0
    }


def _peer_samples(book: SampleBook, start: str) -> dict[str, Any]:
    return {
        f"{start}{each.theirs}": {"samples": found.values, "failures": found.failures}
        for each in COMPARED_ROWS
        if (found := book.rows.get(f"{start}{each.theirs}")) is not None
    }


def _own_cell(each: ComparedRow, book: SampleBook) -> str:
    return format_figure(book[each.ours].p50 * UNIT_SCALES[each.unit]) if each.ours in book else "–"


def _peer_cell(each: ComparedRow, book: SampleBook, key: str) -> str:
    if key not in book:
        return "failed" if key in book.rows else "–"
    value = book[key].p50
    return format_figure(value * UNIT_SCALES[each.unit]) + (
        _times_better(each, book[each.ours].p50, value) if each.ours in book else ""
    )


def _times_better(each: ComparedRow, ours: float, theirs: float) -> str:
    """The ratio in brackets; nothing where memory seemed to shrink, which is noise."""
    above, below = (ours, theirs) if each.more else (theirs, ours)
    return f" ({format_figure(above / below)}×)" if above > 0 and below > 0 else ""


def _table_line(words: list[str]) -> str:
    return "| " + " | ".join(words) + " |"


# --- The comparison as a picture: one small chart per measure, on logarithmic scales.

CHART_COLUMNS = 3
OWN_COLOUR, PEER_COLOUR = "#0b6e4f", "#b8b8b8"
GROWTH_TITLES = {"grown_first": "create to 1+1", "grown_warm": "warm 1+1"}


def is_matplotlib_missing() -> bool:
    return importlib.util.find_spec("matplotlib") is None


def draw_comparison(file: Path, book: SampleBook, peers: PeerMeasurements) -> None:
    """Draws SVG or PNG, by the file's name. Only measured rows are drawn."""
    from matplotlib.figure import Figure

    charts = [(each, found) for each in COMPARED_ROWS if len(found := peer_medians(each, book, peers)) > 1]
    rows = -(-(len(charts) + 1) // CHART_COLUMNS)
    picture: Any = Figure(figsize=(5 * CHART_COLUMNS, 2.6 * rows), layout="constrained")
    places = picture.subplots(rows, CHART_COLUMNS, squeeze=False).flat
    for place, (each, found) in zip(places, charts, strict=False):
        _draw_bars(place, each, found)
    _draw_growth(places[len(charts)], book)
    for place in list(places)[len(charts) + 1 :]:
        place.set_axis_off()
    picture.savefig(file)


def _draw_bars(place: Any, each: ComparedRow, found: Any) -> None:
    titles = list(found)[::-1]
    colours = [OWN_COLOUR if title == OWN_TITLE else PEER_COLOUR for title in titles]
    drawn = place.barh(titles, [found[title] for title in titles], color=colours)
    place.bar_label(drawn, [format_figure(found[title]) for title in titles], padding=3, fontsize=7)
    place.set_xscale("log")
    place.set_xlim(min(found.values()) / 3, max(found.values()) * 5)
    place.minorticks_off()
    place.tick_params(labelsize=7)
    better = "more is better" if each.more else "less is better"
    place.set_title(f"{each.title.replace('`', '')}, {each.unit} ({better})", fontsize=9)


def _draw_growth(place: Any, book: SampleBook) -> None:
    if not any(f"{start}_{count}" in book for start in GROWTH_TITLES for count in LIVE_COUNTS):
        place.set_axis_off()
        return
    for start, title in GROWTH_TITLES.items():
        live = [count for count in LIVE_COUNTS if f"{start}_{count}" in book]
        place.plot(live, [book[f"{start}_{count}"].p50 * 1e3 for count in live], marker="o", label=title)
    place.set_xscale("log")
    place.set_ylim(bottom=0)
    place.tick_params(labelsize=7)
    place.set_title("Cloche: ms with so many sandboxes live", fontsize=9)
    place.legend(fontsize=7)
