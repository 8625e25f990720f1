"""The data of a DataFrame, as JSON values."""

from __future__ import annotations

import datetime
from typing import Any

from cloche.guest import notices

MIME = "application/vnd.cloche.data+json"
MAX_ROWS = 5_000
MAX_VALUES = 100_000
MAX_WHOLE_VALUES = 1_000_000

whole = [False]  # whether this run's frames are given whole or not at all


def columns(frame: Any) -> dict | None:
    """`{column: [values]}` as `to_dict(orient="list")` gives it, times as ISO 8601 strings.

    Of a big frame only the first rows: at most MAX_ROWS, and no more than MAX_VALUES values in all. Where `whole`, all
    rows, or None and a line on stderr for a frame of more than MAX_WHOLE_VALUES values.
    """
    if whole[0] and frame.size > MAX_WHOLE_VALUES:
        notices.tell(f"the data of a DataFrame of {frame.size} values was left out: {MAX_WHOLE_VALUES} are possible")
        return None
    rows = min(MAX_ROWS, MAX_VALUES // max(1, len(frame.columns)))
    if len(frame) > rows and not whole[0]:
        frame = frame.iloc[:rows]
    names = [str(name) for name in frame.columns]
    return {name: [_plain(value) for value in frame.iloc[:, at].tolist()] for at, name in enumerate(names)}


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind is float:
        return value if value - value == 0 else None  # NaN and infinities are no JSON
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return None if value != value else value.isoformat()
    return _rare(value)


def _rare(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return _plain(value.item()) if not hasattr(value.item(), "item") else str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    text = str(value)
    return None if text in ("<NA>", "NaT") else text
