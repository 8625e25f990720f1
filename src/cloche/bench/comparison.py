"""Ourselves beside the peers: what was measured of all, as Markdown, JSON and for the plot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cloche.bench.peer_runs import PEERS, Peers
from cloche.bench.samples import Book
from cloche.bench.table import SCALES, figure

OURS = "Cloche, over HTTP"


class Compared(NamedTuple):
    """`ours` is our row, `theirs` what the peers' drivers call it. `more`: whether more is better."""

    title: str
    unit: str
    ours: str
    theirs: str
    more: bool = False


COMPARED = (
    Compared("create to `1+1`", "ms", "http_one_pool", "one"),
    Compared("create to a DataFrame", "ms", "http_frame", "frame"),
    Compared("create to the first PNG", "ms", "http_png", "png"),
    Compared("warm `1+1`", "ms", "http_warm", "warm"),
    Compared("executions, 1 client", "/s", "http_executions_1", "executions_1", more=True),
    Compared("executions, 8 clients", "/s", "http_executions_8", "executions_8", more=True),
    Compared("executions, 64 clients", "/s", "http_executions_64", "executions_64", more=True),
    Compared("create, use, destroy, 8 clients", "/s", "http_cycles_8", "cycles_8", more=True),
    Compared("memory, after `1+1`", "MB", "used_memory", "memory"),
    Compared("10 MB of output", "MB/s", "http_stream", "stream", more=True),
    Compared("upload of 100 MB", "MB/s", "http_file_write", "file_write", more=True),
    Compared("download of 100 MB", "MB/s", "http_file_read", "file_read", more=True),
)


def markdown(book: Book, peers: Peers) -> str:
    """Medians; in brackets how many times better ours is. Then who was not measured, and why."""
    shown = [peer for peer in PEERS if peer.key not in peers.absent]
    names = [f"{peer.title} {peers.versions.get(peer.key, '')}".strip() for peer in shown]
    lines = [_line(["median", "unit", OURS, *names]), _line(["---", "---", *["---:"] * (len(shown) + 1)])]
    for each in COMPARED:
        cells = [_cell(each, book, f"{peer.key}_{each.theirs}") for peer in shown]
        lines.append(_line([each.title, each.unit, _own(each, book), *cells]))
    for peer in PEERS:
        if peer.key in peers.absent:
            lines += ["", f"- {peer.title}: not measured: {peers.absent[peer.key]}"]
    return "\n".join(lines)


def document(book: Book, peers: Peers) -> dict[str, Any]:
    """Every sample of the peers."""
    return {
        peer.key: {
            "title": peer.title,
            "version": peers.versions.get(peer.key, ""),
            "not measured": peers.absent.get(peer.key),
            "rows": _samples(book, f"{peer.key}_"),
        }
        for peer in PEERS
    }


def medians(each: Compared, book: Book, peers: Peers) -> Mapping[str, float]:
    """By title, in the row's unit; of those that have one."""
    keys = {OURS: each.ours} | {
        peer.title: f"{peer.key}_{each.theirs}" for peer in PEERS if peer.key not in peers.absent
    }
    return {
        title: book[key].p50 * SCALES[each.unit] for title, key in keys.items() if key in book and book[key].p50 > 0
    }


def _samples(book: Book, start: str) -> dict[str, Any]:
    return {
        f"{start}{each.theirs}": {"samples": found.values, "failures": found.failures}
        for each in COMPARED
        if (found := book.rows.get(f"{start}{each.theirs}")) is not None
    }


def _own(each: Compared, book: Book) -> str:
    return figure(book[each.ours].p50 * SCALES[each.unit]) if each.ours in book else "–"


def _cell(each: Compared, book: Book, key: str) -> str:
    if key not in book:
        return "failed" if key in book.rows else "–"
    value = book[key].p50
    return figure(value * SCALES[each.unit]) + (_times(each, book[each.ours].p50, value) if each.ours in book else "")


def _times(each: Compared, ours: float, theirs: float) -> str:
    """In brackets; nothing where memory seemed to shrink, which says nothing about anybody."""
    above, below = (ours, theirs) if each.more else (theirs, ours)
    return f" ({figure(above / below)}×)" if above > 0 and below > 0 else ""


def _line(words: list[str]) -> str:
    return "| " + " | ".join(words) + " |"
