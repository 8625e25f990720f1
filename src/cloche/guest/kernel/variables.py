"""Descriptions of a program's variables, made without running any of the program's code.

No `repr`, `len`, `isinstance`, attribute or comparison of an object, unless its type is known to be C code of
Python or of a library: each of them may be a method of the program's. See `safe_read`. The functions used
here are those from before the program, which may put others into `builtins`.
"""

from __future__ import annotations

# Kinds are told by the identity of types, which mypy does not follow: hence its `ignore`s on values told apart before.
import collections
import datetime
import gc
import re
import sys
import time
import types

# What a program puts in their place later does not count here.
from builtins import dict, frozenset, id, int, iter, len, list, max, range, repr, set, str, tuple, type  # noqa: UP029
from itertools import islice

from cloche.guest import wire
from cloche.guest.kernel import safe_read, variables_tables

MAX_VARIABLES = 1000
MAX_ANSWER_BYTES = 900 << 10  # of the whole answer, within the host's 1 MiB
MAX_SECONDS = 2.0
MAX_PREVIEW = 200
MAX_DEPTH = 4
MAX_ITEMS = 50
MAX_BITS = 512  # of a number whose digits are told

_OWN_NAMES = re.compile(r"In|Out|get_ipython|_+|_i+|_i?\d+|_[dio]h|_exit_code|__\w+__").fullmatch
_getsizeof, _monotonic, _text = sys.getsizeof, time.monotonic, safe_read.safe_text
_gettrace, _settrace, _getprofile, _setprofile = sys.gettrace, sys.settrace, sys.getprofile, sys.setprofile
_collecting, _collect, _do_not_collect = gc.isenabled, gc.enable, gc.disable
_module_dict = types.ModuleType.__dict__["__dict__"].__get__  # type: ignore[index]


class KernelNamespace:
    """A kernel's names. Made before the program runs: names that exist already are not the program's."""

    def __init__(self, names: dict):
        self._names = names
        self._before = dict(names)

    def described(self) -> tuple:
        """(the description of each variable, as JSON; how many more there are)."""
        until, room = _monotonic() + MAX_SECONDS, MAX_ANSWER_BYTES
        told: list = []
        more = 0
        for name, value in list(self._names.items()):
            if not self._is_shown(name, value):
                continue
            if more or len(told) >= MAX_VARIABLES or _monotonic() > until:
                more += 1
                continue
            one = wire.encode_json(describe_variable(name, value))
            room -= len(one) + 1
            if room < 0:
                more += 1
            else:
                told.append(one)
        return b"[" + b",".join(told) + b"]", more

    def _is_shown(self, name, value) -> bool:
        if type(name) is not str or _OWN_NAMES(name):
            return False
        return name not in self._before or self._before[name] is not value


def answer_inspect(namespace: KernelNamespace, ask: object) -> tuple:
    """The frame that answers an `inspect`: header and body. Nothing of the program's runs meanwhile in this thread."""
    tracing, profiling, collecting = _gettrace(), _getprofile(), _collecting()
    if tracing is not None:  # saying so anew has Python look at all its code again
        _settrace(None)
    if profiling is not None:
        _setprofile(None)
    _do_not_collect()  # it would call finalizers, and `gc.callbacks`
    try:
        body, more = namespace.described()
        return {"ev": "inspected", "ask": ask, "more": more}, body
    except Exception as error:  # noqa: BLE001 - the program broke what we stand on: its kernel lives on
        return {
            "ev": "inspected",
            "ask": ask,
            "problem": f"they cannot be told ({safe_read.type_name(type(error))})",
        }, b""
    finally:
        if collecting:
            _collect()
        safe_read.clear_cache()
        if profiling is not None:
            _setprofile(profiling)
        if tracing is not None:
            _settrace(tracing)


def describe_variable(name: str, value: object) -> dict:
    """The description of one variable; fields as `cloche.variables.Variable` has them."""
    kind = type(value)
    told: dict = {
        "name": _text(name),
        "type": variables_tables.public_name(kind),
        "kind": _variable_kind(kind),
        "preview": _type_placeholder(kind),
    }
    try:
        known = variables_tables.describe_table(value, preview_value)
        told.update(_measure_builtin(value) if known is None else known)
        if known is None or "preview" not in known:
            told["preview"] = preview_value(value, MAX_PREVIEW)
    except Exception:  # noqa: BLE001 - a thread changes it meanwhile, or it is vast: the others are told all the same
        pass
    told["preview"] = _shorten_preview(told["preview"])
    return told


def _variable_kind(kind: type) -> str:
    if id(kind) in _FUNCTIONS:
        return "function"
    if safe_read.is_subclass(kind, types.ModuleType):
        return "module"
    return "class" if safe_read.is_subclass(kind, type) else "variable"


def _measure_builtin(value: object) -> dict:
    """Length and size of a built-in value. The size is that of the object itself, without its items."""
    kind = id(type(value))
    if kind not in _BUILTIN:
        return {}
    size = {"size_bytes": _getsizeof(value)}
    return {"length": len(value), **size} if kind in _SIZED else size  # type: ignore[arg-type]


# --- previews


def preview_value(value: object, room: int, depth: int = 0) -> str:
    """A preview of the value of about `room` characters."""
    kind = type(value)
    show = _PREVIEWS.get(id(kind))
    if show is not None:
        return show(value, max(room, 8), depth)  # type: ignore[arg-type]
    if safe_read.is_subclass(kind, type):
        return f"<class '{variables_tables.public_name(value)}'>"  # type: ignore[arg-type]
    if safe_read.is_static(kind) and safe_read.type_name(kind) == "decimal.Decimal":
        return repr(value)
    number = variables_tables.numpy_scalar(value)
    return preview_value(number, room, depth) if id(type(number)) in _NUMBERS else _type_placeholder(kind)


def _type_placeholder(kind: type) -> str:
    return f"<{variables_tables.public_name(kind)}>"


def _shorten_preview(text: str) -> str:
    return text if len(text) <= MAX_PREVIEW else text[: MAX_PREVIEW - 1] + "…"


def _preview_repr(value, room: int, depth: int) -> str:
    return repr(value)


def _preview_int(value: int, room: int, depth: int) -> str:
    bits = int.bit_length(value)
    return repr(value) if bits <= MAX_BITS else f"<int of {bits} bits>"


def _preview_str(value: str, room: int, depth: int) -> str:
    return repr(value) if len(value) <= room else repr(value[:room]) + "…"


def _preview_bytes(value, room: int, depth: int) -> str:
    return repr(value) if len(value) <= room // 2 else repr(value[: room // 2]) + "…"


def _preview_memoryview(value: memoryview, room: int, depth: int) -> str:
    return "<memoryview>"


def _make_sequence_preview(opening: str, closing: str):
    def show(value, room: int, depth: int) -> str:
        return opening + _preview_items(iter(value), len(value), room, depth) + closing

    return show


def _preview_tuple(value: tuple, room: int, depth: int) -> str:
    items = _preview_items(iter(value), len(value), room, depth)
    return f"({items},)" if len(value) == 1 else f"({items})"


def _preview_set(value, room: int, depth: int) -> str:
    items = _preview_items(iter(value), len(value), room, depth)
    braces = "{" + items + "}" if len(value) else ""
    return braces or "set()" if type(value) is set else f"frozenset({braces})"


def _preview_items(values, count: int, room: int, depth: int) -> str:
    if depth >= MAX_DEPTH and count:
        return "…"
    shown: list = []
    for each in islice(values, MAX_ITEMS):
        if room <= 0:
            break
        shown.append(preview_value(each, room, depth + 1))
        room -= len(shown[-1]) + 2
    return ", ".join(shown) + (", …" if len(shown) < count else "")


def _preview_dict(value, room: int, depth: int) -> str:
    if depth >= MAX_DEPTH and dict.__len__(value):
        return "{…}"
    shown: list = []
    for key, one in islice(dict.items(value), MAX_ITEMS):
        if room <= 0:
            break
        left = preview_value(key, room, depth + 1)
        shown.append(f"{left}: {preview_value(one, room - len(left), depth + 1)}")
        room -= len(shown[-1]) + 2
    return "{" + ", ".join(shown) + (", …" if len(shown) < dict.__len__(value) else "") + "}"


def _preview_datetime(value, room: int, depth: int) -> str:
    """The preview of a time without a time zone, or with one of `datetime.timezone`.

    Any other zone may be an object of the program's, with methods that would run.
    """
    zone = value.tzinfo
    return repr(value) if zone is None or type(zone) is datetime.timezone else _type_placeholder(type(value))


def _preview_function(value, room: int, depth: int) -> str:
    code = value.__code__
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return f"<function {_text(value.__name__)}({', '.join(named)})>"


def _preview_builtin(value, room: int, depth: int) -> str:
    return f"<function {_text(value.__name__)}>"


def _preview_module(value, room: int, depth: int) -> str:
    names = _module_dict(value)
    name = safe_read.find_key(names, "__name__") if type(names) is dict else None
    return f"<module {_text(name)!r}>" if safe_read.is_subclass(type(name), str) else "<module>"  # type: ignore[arg-type]


_FUNCTIONS = {
    id(each)
    for each in (
        types.FunctionType,
        types.BuiltinFunctionType,
        types.MethodType,
        types.MethodWrapperType,
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
        types.ClassMethodDescriptorType,
    )
}
_SIZED_TYPES = (
    str, bytes, bytearray, list, tuple, set, frozenset, dict, range,
    collections.OrderedDict, collections.defaultdict, collections.deque,
)  # fmt: skip
_SIZED = {id(each) for each in _SIZED_TYPES}
_BUILTIN_TYPES = (
    *_SIZED_TYPES, int, float, complex, bool, type(None),
    datetime.datetime, datetime.date, datetime.time, datetime.timedelta,
)  # fmt: skip
_BUILTIN = {id(each) for each in _BUILTIN_TYPES}
_NUMBERS = {
    id(each) for each in (int, float, complex, bool, str, bytes, datetime.datetime, datetime.date, datetime.timedelta)
}
_PREVIEWS = {
    id(kind): show
    for kinds, show in (
        ((float, complex, bool, type(None), type(...), type(NotImplemented), range), _preview_repr),
        ((datetime.date, datetime.timedelta, datetime.timezone), _preview_repr),
        ((datetime.datetime, datetime.time), _preview_datetime),
        ((int,), _preview_int),
        ((str,), _preview_str),
        ((bytes, bytearray), _preview_bytes),
        ((memoryview,), _preview_memoryview),
        ((list,), _make_sequence_preview("[", "]")),
        ((collections.deque,), _make_sequence_preview("deque([", "])")),
        ((tuple,), _preview_tuple),
        ((set, frozenset), _preview_set),
        ((dict, collections.OrderedDict, collections.defaultdict), _preview_dict),
        ((types.FunctionType,), _preview_function),
        ((types.BuiltinFunctionType,), _preview_builtin),
        ((types.ModuleType,), _preview_module),
    )
    for kind in kinds
}
