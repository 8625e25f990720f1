"""Tracebacks as Python prints them, of the user's frames only."""

from __future__ import annotations

import os
import traceback
from typing import Any

import IPython

CELL_PREFIX = "Cell In["
MAX_TRACEBACK_BYTES = 1 << 20
_HIDDEN = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,  # the guest package
    os.path.dirname(IPython.__file__) + os.sep,
    "<decorator-gen",
    "<frozen runpy>",
    "<tool ",  # see `tools`
)


def render_traceback(error: BaseException) -> str:
    """The traceback of `error` in plain text, bounded to MAX_BYTES. Never raises."""
    try:
        text = _custom_traceback(error) or _standard_traceback(error)
    except BaseException as failure:  # noqa: BLE001 - an exception's own __str__ may do anything
        text = f"{type(error).__name__}: <its traceback could not be made: {type(failure).__name__}>\n"
    return _bound_text(text)


def error_text(error: BaseException) -> str:
    """str(error), bounded. Never raises, even if its __str__ does."""
    try:
        text = str(error)
    except BaseException as failure:  # noqa: BLE001 - as above
        text = f"<its text could not be made: {type(failure).__name__}>"
    return text if len(text) <= 65536 else text[:65536] + "..."


def _custom_traceback(error: BaseException) -> str | None:
    render_own = getattr(type(error), "_render_traceback_", None)
    if render_own is None:
        return None
    lines = render_own(error)
    return "\n".join(lines) if isinstance(lines, list) else None


def _standard_traceback(error: BaseException) -> str:
    if type(error).__name__ == "UsageError":
        return f"UsageError: {error}\n"
    report = traceback.TracebackException(type(error), error, _skip_own_frames(error.__traceback__), compact=True)
    _hide_frames(report, set())
    return "".join(report.format())


def _skip_own_frames(tb: Any) -> Any:
    """`tb` without the frames above the user's cell. They are ours; a deep recursion's cost is not paid for them."""
    start = tb
    while start is not None and not start.tb_frame.f_code.co_filename.startswith(CELL_PREFIX):
        start = start.tb_next
    return start or tb


def _hide_frames(report: Any, seen: set) -> None:
    if report is None or id(report) in seen:
        return
    seen.add(id(report))
    shown = [frame for frame in report.stack if not frame.filename.startswith(_HIDDEN)]
    report.stack[:] = shown
    for other in (report.__cause__, report.__context__, *(getattr(report, "exceptions", None) or ())):
        _hide_frames(other, seen)


def _bound_text(text: str) -> str:
    if len(text) <= MAX_TRACEBACK_BYTES // 4:
        return text
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= MAX_TRACEBACK_BYTES:
        return text
    half = MAX_TRACEBACK_BYTES // 2 - 32
    return data[:half].decode("utf-8", "ignore") + "\n[...]\n" + data[-half:].decode("utf-8", "ignore")
