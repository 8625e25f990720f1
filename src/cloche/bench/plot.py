"""The comparison as a picture: one small chart per measure, on logarithmic scales."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from cloche.bench import comparison, crowds
from cloche.bench.comparison import COMPARED_ROWS, OWN_TITLE
from cloche.bench.peer_runs import PeerMeasurements
from cloche.bench.samples import SampleBook
from cloche.bench.table import format_figure

CHART_COLUMNS = 3
OWN_COLOUR, PEER_COLOUR = "#0b6e4f", "#b8b8b8"
GROWTH_TITLES = {"grown_first": "create to 1+1", "grown_warm": "warm 1+1"}


def is_matplotlib_missing() -> bool:
    return importlib.util.find_spec("matplotlib") is None


def draw_comparison(file: Path, book: SampleBook, peers: PeerMeasurements) -> None:
    """Draws SVG or PNG, by the file's name. Only measured rows are drawn."""
    from matplotlib.figure import Figure

    charts = [(each, found) for each in COMPARED_ROWS if len(found := comparison.peer_medians(each, book, peers)) > 1]
    rows = -(-(len(charts) + 1) // CHART_COLUMNS)
    picture: Any = Figure(figsize=(5 * CHART_COLUMNS, 2.6 * rows), layout="constrained")
    places = picture.subplots(rows, CHART_COLUMNS, squeeze=False).flat
    for place, (each, found) in zip(places, charts, strict=False):
        _draw_bars(place, each, found)
    _draw_growth(places[len(charts)], book)
    for place in list(places)[len(charts) + 1 :]:
        place.set_axis_off()
    picture.savefig(file)


def _draw_bars(place: Any, each: comparison.ComparedRow, found: Any) -> None:
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
    if not any(f"{start}_{count}" in book for start in GROWTH_TITLES for count in crowds.LIVE_COUNTS):
        place.set_axis_off()
        return
    for start, title in GROWTH_TITLES.items():
        live = [count for count in crowds.LIVE_COUNTS if f"{start}_{count}" in book]
        place.plot(live, [book[f"{start}_{count}"].p50 * 1e3 for count in live], marker="o", label=title)
    place.set_xscale("log")
    place.set_ylim(bottom=0)
    place.tick_params(labelsize=7)
    place.set_title("Cloche: ms with so many sandboxes live", fontsize=9)
    place.legend(fontsize=7)
