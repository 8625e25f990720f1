"""Display output of cells: values become MIME bundles, which `display_writer` sends."""

from __future__ import annotations

import builtins
import dataclasses
import datetime
import enum
import json
import uuid
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.formatters import BaseFormatter, DisplayFormatter, JSONFormatter
from traitlets import ObjectName, Unicode

from cloche.guest.kernel import figures, notices, pil_images
from cloche.guest.kernel.display_writer import EncodedJson

# The data of a DataFrame, as JSON values.

DATA_MIME = "application/vnd.cloche.data+json"
MAX_DATAFRAME_ROWS = 5_000
MAX_DATAFRAME_VALUES = 100_000
MAX_WHOLE_DATAFRAME_VALUES = 1_000_000

send_whole = [False]  # whether this run's frames are given whole or not at all


def frame_columns(frame: Any) -> dict | None:
    """`{column: [values]}` as `to_dict(orient="list")` gives it, times as ISO 8601 strings.

    Of a big frame only the first rows: at most MAX_DATAFRAME_ROWS, and no more than MAX_DATAFRAME_VALUES values
    in all. Where `send_whole`, all rows, or None and a line on stderr for a frame of more than
    MAX_WHOLE_DATAFRAME_VALUES values.
    """
    if send_whole[0] and frame.size > MAX_WHOLE_DATAFRAME_VALUES:
        notices.print_notice(
            f"the data of a DataFrame of {frame.size} values was left out: {MAX_WHOLE_DATAFRAME_VALUES} are possible"
        )
        return None
    rows = min(MAX_DATAFRAME_ROWS, MAX_DATAFRAME_VALUES // max(1, len(frame.columns)))
    if len(frame) > rows and not send_whole[0]:
        frame = frame.iloc[:rows]
    names = [str(name) for name in frame.columns]
    return {name: [_plain_value(value) for value in frame.iloc[:, at].tolist()] for at, name in enumerate(names)}


def _plain_value(value: Any) -> Any:
    kind = type(value)
    if kind is float:
        return value if value - value == 0 else None  # NaN and infinities are no JSON
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return None if value != value else value.isoformat()
    return _uncommon_value(value)


def _uncommon_value(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return _plain_value(value.item()) if not hasattr(value.item(), "item") else str(value)
    if isinstance(value, (list, tuple)):
        return [_plain_value(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _plain_value(one) for key, one in value.items()}
    text = str(value)
    return None if text in ("<NA>", "NaT") else text


# Lists and dicts as JSON, beside their text, for runs that ask for it.

MAX_JSON_DEPTH = 200


def encode_collection(value: Any) -> EncodedJson | None:
    """A list or dict as JSON, with values of numpy and the standard library. None for anything that has no JSON
    form: its text says more than a guess would.
    """
    try:
        return EncodedJson(_dump_json(value))
    except (TypeError, RuntimeError):  # nested too deeply, or changed by a thread meanwhile
        return None
    except ValueError:  # NaN, an infinity, or a circle
        pass
    try:
        return EncodedJson(_dump_json(_replace_nonfinite(value, 0)))
    except (TypeError, ValueError, RuntimeError):
        return None


def _dump_json(value: Any) -> bytes:
    return json.dumps(value, default=to_jsonable, allow_nan=False, separators=(",", ":")).encode()


def to_jsonable(value: Any) -> Any:
    """A JSON form of a value that JSON itself lacks. Raises TypeError for other types."""
    if hasattr(value, "tolist") and type(value).__module__ == "numpy":
        return value.tolist()
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _replace_nonfinite(value: Any, depth: int) -> Any:
    """The same with null for numbers that JSON cannot hold."""
    if depth > MAX_JSON_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _replace_nonfinite(one, depth + 1) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_nonfinite(one, depth + 1) for one in value]
    return (
        value if value is None or isinstance(value, (str, int)) else _replace_nonfinite(to_jsonable(value), depth + 1)
    )


OUT_ENTRIES = 1000

ABRIDGED_LENGTH = 1000  # IPython's own

_BUILTIN = frozenset({int, float, bool, str, bytes, complex, list, tuple, dict, set, frozenset, range})
_AS_REPR = frozenset({int, bool, str})


class DataFormatter(BaseFormatter):
    format_type = Unicode(DATA_MIME)
    print_method = ObjectName("_repr_cloche_data_")
    _return_type = (dict,)


class ChartFormatter(BaseFormatter):
    format_type = Unicode(figures.CHART_MIME)
    print_method = ObjectName("_repr_cloche_chart_")
    _return_type = (dict,)


class ListsFormatter(JSONFormatter):
    """application/json also of lists and dicts, for runs that ask for it."""

    lists = False

    def __call__(self, obj: Any) -> Any:
        made = encode_collection(obj) if self.lists and isinstance(obj, (list, dict)) else None
        return super().__call__(obj) if made is None else made


class CellFormatter(DisplayFormatter):
    """IPython's, with our two MIME types, and a short way for values that can only be text."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        data, chart = DataFormatter(parent=self), ChartFormatter(parent=self)
        for module in ("pandas", "pandas.core.frame"):
            data.for_type_by_name(module, "DataFrame", frame_columns)
        chart.for_type_by_name("matplotlib.figure", "Figure", figures.extract_chart)
        self.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", figures.figure_png)
        self._json = ListsFormatter(parent=self)
        self.formatters.update({DATA_MIME: data, figures.CHART_MIME: chart, "application/json": self._json})
        self._asked: list = []
        self._plain = self.formatters["text/plain"]
        self._printers = [one.type_printers for one in self.formatters.values() if one is not self._plain]
        self._plain_defaults = {kind: self._plain.type_printers.get(kind) for kind in _AS_REPR}

    def show(self, asked: list) -> None:
        """Sets the outputs that this run shows in addition to those of a notebook: see `cloche.model.Showing`."""
        if asked != self._asked:
            self._asked = asked
            self._json.lists = "json" in asked
            self._plain.max_seq_length = 0 if "whole_text" in asked else ABRIDGED_LENGTH
            send_whole[0] = "whole_data" in asked
            pil_images.show_saved[0] = "saved_images" in asked

    def format(self, obj: Any, include: Any = None, exclude: Any = None) -> tuple:
        kind = type(obj)
        if kind in _BUILTIN and not include and not exclude and not self._has_printer(kind):
            if kind in _AS_REPR and self._plain.type_printers.get(kind) is self._plain_defaults[kind]:
                try:
                    return {"text/plain": repr(obj)}, {}
                except ValueError:  # an int of very many digits: said by IPython's way
                    pass
            text = self._plain(obj)
            bundle = {} if text is None else {"text/plain": text}
            if self._json.lists and (kind is list or kind is dict):
                bundle.update(_json_part(obj))
            return bundle, {}
        return super().format(obj, include=include, exclude=exclude)

    def _has_printer(self, kind: type) -> bool:
        for printers in self._printers:
            if kind in printers:
                return True
        return len(self.formatters) != len(self._printers) + 1


def _json_part(value: Any) -> dict:
    made = encode_collection(value)
    return {} if made is None else {"application/json": made}


class CellDisplayHook(DisplayHook):
    """`sys.displayhook`: the value of a cell's last expression."""

    exec_result: Any = None  # no trait: it is read in every cell

    def __call__(self, result: Any = None) -> None:
        shell = self.shell
        if result is None or shell.silenced:
            return
        bundle, _metadata = shell.display_formatter.format(result)
        self.update_history(shell, result)
        self.fill_exec_result(result)
        if bundle:
            shell.screen.show(bundle, main=True, wait=shell.final)

    def update_history(self, shell: Any, result: Any) -> None:
        """Fills `_`, `__`, `___`, `_N` and `Out`, which keep the last OUT_ENTRIES values."""
        ns = shell.user_ns
        out = shell.history_manager.output_hist
        if result is out:
            return
        own = self._, self.__, self.___  # type: ignore[has-type]  # IPython's class sets them, without types
        theirs = ns.get("_", own[0]) is not own[0] or ns.get("__", own[1]) is not own[1]
        theirs = theirs or ns.get("___", own[2]) is not own[2]
        self.___, self.__ = self.__, self._  # type: ignore[has-type]
        self._ = result
        if not theirs and "_" not in builtins.__dict__:
            ns["_"], ns["__"], ns["___"] = self._, self.__, self.___
        count = shell.execution_count - 1  # `prompt_count` means another number in IPython 8
        ns[f"_{count}"] = out[count] = result
        if len(out) > OUT_ENTRIES:
            oldest = next(iter(out))
            del out[oldest]
            ns.pop(f"_{oldest}", None)

    def flush(self) -> None:
        out = self.shell.history_manager.output_hist
        for count in out:
            self.shell.user_ns.pop(f"_{count}", None)
        out.clear()
        self._, self.__, self.___ = "", "", ""
        self.shell.user_ns.update({"_": "", "__": "", "___": ""})


class CellPublisher(DisplayPublisher):
    """`display()`, its updates, and `clear_output()`."""

    def _setup_execution_tracking(self) -> None:
        """Does nothing: the kernel keeps no copy of displayed data."""

    def publish(
        self, data: Any, metadata: Any = None, *args: Any, transient: Any = None, update: bool = False, **kwargs: Any
    ) -> None:
        self._validate_data(data, metadata)
        name = (transient or {}).get("display_id")
        self.shell.screen.show(data, id=None if name is None else str(name), update=update)

    def clear_output(self, wait: bool = False) -> None:
        self.shell.screen.clear(bool(wait))
