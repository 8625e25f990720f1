"""Arrays and tables of numpy, pandas and polars, read by the rules of `safe_read`.

The library's Python code does not run either: a program may have changed it, and the items of a table may be
objects of the program's.
"""

from __future__ import annotations

# Kinds are told by the identity of types, which mypy does not follow: hence its `ignore`s on values told apart before.
import datetime

# What a program puts in their place later does not count here.
from builtins import any, enumerate, len, list, map, range, repr, str, sum, tuple, type  # noqa: UP029

from cloche.guest.kernel import safe_read

MAX_COLUMNS = 50
MAX_SHOWN = 30
_DEPTH = 4  # an index has an array that has an array
_TIMES = (datetime.datetime, datetime.date, datetime.timedelta)
_DTYPES = {"f": "float", "i": "int", "u": "uint", "c": "complex", "M": "datetime64", "m": "timedelta64"}
_OTHER_DTYPES = {"b": "bool", "O": "object", "U": "str", "S": "bytes", "V": "void", "T": "str"}
_PUBLIC = {
    "pandas.core.frame.DataFrame": "pandas.DataFrame",
    "pandas.core.series.Series": "pandas.Series",
    "pandas.core.indexes.base.Index": "pandas.Index",
    "pandas.core.indexes.range.RangeIndex": "pandas.RangeIndex",
    "pandas.core.indexes.multi.MultiIndex": "pandas.MultiIndex",
    "pandas.core.indexes.datetimes.DatetimeIndex": "pandas.DatetimeIndex",
    "polars.dataframe.frame.DataFrame": "polars.DataFrame",
    "polars.series.series.Series": "polars.Series",
}
_INDEXES = ("pandas.Index", "pandas.RangeIndex", "pandas.MultiIndex", "pandas.DatetimeIndex")


def public_name(kind: type) -> str:
    """The name under which a type is commonly known, independent of the module that defines it."""
    name = safe_read.type_name(kind)
    return _PUBLIC.get(name, name)


def describe_table(value: object, preview) -> dict | None:
    """Shape, data type, columns, size and preview; None for values that are not such arrays or tables.

    `preview(value, room)` shows one item of it.
    """
    name = public_name(type(value))
    if name == "pandas.DataFrame":
        return _describe_frame(value, preview)
    if name == "pandas.Series":
        return _describe_series(value, preview)
    if name in _INDEXES:
        return _describe_index(value, preview)
    if name in ("polars.DataFrame", "polars.Series"):
        return _describe_polars(value)
    kind = _ndarray_class(type(value))
    return None if kind is None else _describe_array(value, kind, preview)


def numpy_scalar(value: object) -> object:
    """A number of numpy's as Python has it; None for anything else."""
    kind = type(value)
    if not safe_read.is_static(kind) or not safe_read.type_name(kind).startswith("numpy."):
        return None
    item = safe_read.find_key(_numpy_generic_dict(kind), "item")
    return None if item is None else item.__get__(value)()  # type: ignore[attr-defined]


def _numpy_generic_dict(kind: type):
    for each in safe_read.class_mro(kind):
        if safe_read.type_name(each) == "numpy.generic":
            return safe_read.class_dict(each)
    return {}


# --- numpy


def _ndarray_class(kind: type) -> type | None:
    """numpy's own class of arrays, if it is among a class's ancestors."""
    for each in safe_read.class_mro(kind):
        if safe_read.is_static(each) and safe_read.type_name(each) == "numpy.ndarray":
            return each
    return None


def _describe_array(value: object, kind: type, preview) -> dict:
    shape, dtype, size = (_array_field(value, kind, name) for name in ("shape", "dtype", "nbytes"))
    told: dict = {"shape": list(shape), "dtype": _dtype_name(dtype), "size_bytes": size}
    if type(value) is kind:
        told["preview"] = _preview_values(value, preview)
    return told


def _array_field(array: object, kind: type, name: str):
    """A field as numpy's own class has it; a derived class may define another."""
    return safe_read.class_dict(kind)[name].__get__(array)


def _dtype_name(dtype: object) -> str:
    letter, size = safe_read.stored_attribute(dtype, "kind"), safe_read.stored_attribute(dtype, "itemsize")
    if type(letter) is not str or type(size) is not int:
        return safe_read.type_name(type(dtype))
    if letter in _DTYPES:
        return f"{_DTYPES[letter]}{'' if letter in 'Mm' else size * 8}"
    return _OTHER_DTYPES.get(letter, letter)


def _preview_values(array, preview, mask=None) -> str:
    """The first values, row by row; `mask` says which of them are missing."""
    missing = [] if mask is None else mask.flat[:MAX_SHOWN].tolist()
    texts: list = []
    room = 150
    for at, each in enumerate(_first_values(array, MAX_SHOWN)):
        texts.append("<NA>" if at < len(missing) and missing[at] is True else _show_value(each, preview, room))
        room -= len(texts[-1]) + 2
        if room <= 0:
            break
    return "[" + ", ".join(texts) + (", …" if len(texts) < array.size else "") + "]"


def _first_values(array, count: int) -> list:
    """The first values as Python objects: nanoseconds, which Python lacks, would be bare numbers."""
    first, letter = array.flat[:count], safe_read.stored_attribute(array.dtype, "kind")
    return (first.astype(f"{letter}8[us]") if letter in ("M", "m") else first).tolist()


def _show_value(value: object, preview, room: int) -> str:
    if type(value) is float:
        return f"{value:.6g}"
    return str(value) if any(type(value) is each for each in _TIMES) else preview(value, room)


# --- pandas


def _describe_frame(value: object, preview) -> dict | None:
    columns, rows = _table_axes(value, 2)
    if columns is None:
        return None
    names = _index_labels(columns, preview)
    shape = [_index_length(rows), _index_length(columns)]
    told: dict = (
        {"size_bytes": _table_bytes(value)} if None in shape else {"shape": shape, "size_bytes": _table_bytes(value)}
    )
    return {**told, "columns": names, "preview": ", ".join(names)}


def _describe_series(value: object, preview) -> dict | None:
    (rows,) = _table_axes(value, 1)
    arrays = _table_arrays(value)
    if rows is None:
        return None
    length = _index_length(rows)
    told: dict = {} if length is None else {"shape": [length]}
    if len(arrays) == 1:
        return {**told, **_describe_data(arrays[0], preview), "size_bytes": _table_bytes(value)}
    return {**told, "size_bytes": _table_bytes(value)}


def _describe_data(array: object, preview) -> dict:
    inner = _inner_ndarray(array)
    if inner is None or _is_categorical(array):
        return {"dtype": safe_read.type_name(type(array))}
    mask = safe_read.stored_attribute(array, "_mask")
    mask = mask if type(mask) is type(inner) else None
    return {"dtype": _dtype_name(inner.dtype), "preview": _preview_values(inner, preview, mask)}  # type: ignore[attr-defined]


def _is_categorical(array: object) -> bool:
    """Its array of numpy's has numbers that stand for the values."""
    return safe_read.type_name(type(array)).endswith("Categorical")


def _describe_index(value: object, preview) -> dict:
    length = _index_length(value)
    told: dict = {} if length is None else {"shape": [length]}
    return {**told, "size_bytes": _index_bytes(value), "preview": "[" + ", ".join(_index_labels(value, preview)) + "]"}


def _table_axes(value: object, count: int) -> tuple:
    """The indexes of a table, those of its columns first; None for each where it is not as it should be."""
    axes = safe_read.stored_attribute(safe_read.stored_attribute(value, "_mgr"), "axes")
    return tuple(axes) if type(axes) is list and len(axes) == count else (None,) * count


def _table_arrays(value: object) -> list:
    """The arrays that hold the data, of numpy or of an extension."""
    blocks = safe_read.stored_attribute(safe_read.stored_attribute(value, "_mgr"), "blocks")
    return [safe_read.stored_attribute(each, "values") for each in blocks] if type(blocks) is tuple else []


def _table_bytes(value: object) -> int:
    axes = safe_read.stored_attribute(safe_read.stored_attribute(value, "_mgr"), "axes")
    indexes = axes if type(axes) is list else []
    return sum(map(_array_bytes, _table_arrays(value))) + sum(map(_index_bytes, indexes))


def _array_bytes(array: object, depth: int = 0) -> int:
    kind = _ndarray_class(type(array))
    if kind is not None:
        return _array_field(array, kind, "nbytes")
    if depth >= _DEPTH or array is None:
        return 0
    return sum(
        _array_bytes(safe_read.stored_attribute(array, name), depth + 1) for name in ("_ndarray", "_data", "_mask")
    )


def _index_bytes(index: object) -> int:
    codes = safe_read.stored_attribute(index, "_codes")
    if codes is not None and safe_read.is_subclass(type(codes), list):
        return sum(map(_array_bytes, list.__iter__(codes)))  # type: ignore[arg-type]
    return _array_bytes(safe_read.stored_attribute(index, "_data"))


def _inner_ndarray(array: object, depth: int = 0) -> object:
    """The numpy array inside an array of an extension."""
    kind = _ndarray_class(type(array))
    if kind is not None or array is None or depth >= _DEPTH:
        return array if type(array) is kind else None
    data = safe_read.stored_attribute(array, "_ndarray")
    return _inner_ndarray(safe_read.stored_attribute(array, "_data") if data is None else data, depth + 1)


def _index_length(index: object) -> int | None:
    numbers, codes = safe_read.stored_attribute(index, "_range"), safe_read.stored_attribute(index, "_codes")
    if type(numbers) is range:
        return len(numbers)
    if codes is not None and safe_read.is_subclass(type(codes), list) and list.__len__(codes):  # type: ignore[arg-type]
        codes = list.__getitem__(codes, 0)  # type: ignore[call-overload]
        kind = _ndarray_class(type(codes))
        return None if kind is None else _array_field(codes, kind, "size")
    data = _inner_ndarray(safe_read.stored_attribute(index, "_data"))
    return None if data is None else data.shape[0]  # type: ignore[attr-defined]


def _index_labels(index: object, preview) -> list:
    """The first ones of an index, as far as they are names or numbers."""
    numbers = safe_read.stored_attribute(index, "_range")
    if type(numbers) is range:
        return [repr(each) for each in numbers[:MAX_COLUMNS]]
    stored = safe_read.stored_attribute(index, "_data")
    data = _inner_ndarray(stored)
    if data is None or _is_categorical(stored):
        return []
    return [
        safe_read.safe_text(each) if type(each) is str else _show_value(each, preview, 40)
        for each in _first_values(data, MAX_COLUMNS)
    ]


# --- polars: below its Python classes are some of its own, in Rust


def _describe_polars(value: object) -> dict | None:
    frame, series = safe_read.stored_attribute(value, "_df"), safe_read.stored_attribute(value, "_s")
    inner = series if frame is None else frame
    if safe_read.type_name(type(inner)).rpartition(".")[2] not in ("PyDataFrame", "PySeries"):
        return None
    length, shape = safe_read.call_method(inner, "len"), safe_read.call_method(inner, "shape")
    size, columns = safe_read.call_method(inner, "estimated_size"), safe_read.call_method(inner, "columns")
    told: dict = {"size_bytes": size} if type(size) is int else {}
    if type(length) is int or type(shape) is tuple:
        told["shape"] = [length] if type(length) is int else list(shape)  # type: ignore[call-overload]
    if type(columns) is not list:
        return told
    names = [safe_read.safe_text(each) for each in columns[:MAX_COLUMNS] if type(each) is str]
    return {**told, "columns": names, "preview": ", ".join(names)}
