"""What a program's names are bound to, told without running any of the program's code.

No `repr`, `len`, `isinstance`, attribute or comparison of an object whose type is not known to be C code of Python's or
a library's own: each of them may be a method of the program's. See `bare`. The functions that are used are those that
were there before the program, which may put others into `builtins`.
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
MAX_BYTES = 900 << 10  # of the whole answer, within the host's 1 MiB
MAX_SECONDS = 2.0
MAX_PREVIEW = 200
MAX_DEPTH = 4
MAX_ITEMS = 50
MAX_BITS = 512  # of a number whose digits are told

_OWN_NAMES = re.compile(r"In|Out|get_ipython|_+|_i+|_i?\d+|_[dio]h|_exit_code|__\w+__").fullmatch
_getsizeof, _monotonic, _text = sys.getsizeof, time.monotonic, safe_read.text_of
_gettrace, _settrace, _getprofile, _setprofile = sys.gettrace, sys.settrace, sys.getprofile, sys.setprofile
_collecting, _collect, _do_not_collect = gc.isenabled, gc.enable, gc.disable
_module_dict = types.ModuleType.__dict__["__dict__"].__get__  # type: ignore[index]


class Namespace:
    """A kernel's names. Made before the program runs: what is there already is not the program's."""

    def __init__(self, names: dict):
        self._names = names
        self._before = dict(names)

    def described(self) -> tuple:
        """(what is told of each, as JSON; how many more there are)."""
        until, room = _monotonic() + MAX_SECONDS, MAX_BYTES
        told: list = []
        more = 0
        for name, value in list(self._names.items()):
            if not self._is_shown(name, value):
                continue
            if more or len(told) >= MAX_VARIABLES or _monotonic() > until:
                more += 1
                continue
            one = wire.encode_json(describe(name, value))
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


def answer(namespace: Namespace, ask: object) -> tuple:
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
        safe_read.forget()
        if profiling is not None:
            _setprofile(profiling)
        if tracing is not None:
            _settrace(tracing)


def describe(name: str, value: object) -> dict:
    """What is told of one name; fields as `cloche.model.Variable` has them."""
    kind = type(value)
    told: dict = {
        "name": _text(name),
        "type": variables_tables.public_name(kind),
        "kind": _kind(kind),
        "preview": _opaque(kind),
    }
    try:
        known = variables_tables.describe(value, preview)
        told.update(_measured(value) if known is None else known)
        if known is None or "preview" not in known:
            told["preview"] = preview(value, MAX_PREVIEW)
    except Exception:  # noqa: BLE001 - a thread changes it meanwhile, or it is vast: the others are told all the same
        pass
    told["preview"] = _shortened(told["preview"])
    return told


def _kind(kind: type) -> str:
    if id(kind) in _FUNCTIONS:
        return "function"
    if safe_read.inherits(kind, types.ModuleType):
        return "module"
    return "class" if safe_read.inherits(kind, type) else "variable"


def _measured(value: object) -> dict:
    """Length and size of what is Python's own. The size is that of the thing itself, without what is in it."""
    kind = id(type(value))
    if kind not in _BUILTIN:
        return {}
    size = {"size_bytes": _getsizeof(value)}
    return {"length": len(value), **size} if kind in _SIZED else size  # type: ignore[arg-type]


# --- previews


def preview(value: object, room: int, depth: int = 0) -> str:
    """About `room` characters of what it is."""
    kind = type(value)
    show = _PREVIEWS.get(id(kind))
    if show is not None:
        return show(value, max(room, 8), depth)  # type: ignore[arg-type]
    if safe_read.inherits(kind, type):
        return f"<class '{variables_tables.public_name(value)}'>"  # type: ignore[arg-type]
    if safe_read.is_static(kind) and safe_read.type_name(kind) == "decimal.Decimal":
        return repr(value)
    number = variables_tables.scalar(value)
    return preview(number, room, depth) if id(type(number)) in _NUMBERS else _opaque(kind)


def _opaque(kind: type) -> str:
    return f"<{variables_tables.public_name(kind)}>"


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_PREVIEW else text[: MAX_PREVIEW - 1] + "…"


def _plain(value, room: int, depth: int) -> str:
    return repr(value)


def _int(value: int, room: int, depth: int) -> str:
    bits = int.bit_length(value)
    return repr(value) if bits <= MAX_BITS else f"<int of {bits} bits>"


def _str(value: str, room: int, depth: int) -> str:
    return repr(value) if len(value) <= room else repr(value[:room]) + "…"


def _bytes(value, room: int, depth: int) -> str:
    return repr(value) if len(value) <= room // 2 else repr(value[: room // 2]) + "…"


def _memoryview(value: memoryview, room: int, depth: int) -> str:
    return "<memoryview>"


def _sequence(opening: str, closing: str):
    def show(value, room: int, depth: int) -> str:
        return opening + _items(iter(value), len(value), room, depth) + closing

    return show


def _tuple(value: tuple, room: int, depth: int) -> str:
    items = _items(iter(value), len(value), room, depth)
    return f"({items},)" if len(value) == 1 else f"({items})"


def _set(value, room: int, depth: int) -> str:
    items = _items(iter(value), len(value), room, depth)
    braces = "{" + items + "}" if len(value) else ""
    return braces or "set()" if type(value) is set else f"frozenset({braces})"


def _items(values, count: int, room: int, depth: int) -> str:
    if depth >= MAX_DEPTH and count:
        return "…"
    shown: list = []
    for each in islice(values, MAX_ITEMS):
        if room <= 0:
            break
        shown.append(preview(each, room, depth + 1))
        room -= len(shown[-1]) + 2
    return ", ".join(shown) + (", …" if len(shown) < count else "")


def _dict(value, room: int, depth: int) -> str:
    if depth >= MAX_DEPTH and dict.__len__(value):
        return "{…}"
    shown: list = []
    for key, one in islice(dict.items(value), MAX_ITEMS):
        if room <= 0:
            break
        left = preview(key, room, depth + 1)
        shown.append(f"{left}: {preview(one, room - len(left), depth + 1)}")
        room -= len(shown[-1]) + 2
    return "{" + ", ".join(shown) + (", …" if len(shown) < dict.__len__(value) else "") + "}"


def _moment(value, room: int, depth: int) -> str:
    """A time zone may be an object of the program's, whose methods would be asked."""
    zone = value.tzinfo
    return repr(value) if zone is None or type(zone) is datetime.timezone else _opaque(type(value))


def _function(value, room: int, depth: int) -> str:
    code = value.__code__
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return f"<function {_text(value.__name__)}({', '.join(named)})>"


def _builtin_function(value, room: int, depth: int) -> str:
    return f"<function {_text(value.__name__)}>"


def _module(value, room: int, depth: int) -> str:
    names = _module_dict(value)
    name = safe_read.found_in(names, "__name__") if type(names) is dict else None
    return f"<module {_text(name)!r}>" if safe_read.inherits(type(name), str) else "<module>"  # type: ignore[arg-type]


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
        ((float, complex, bool, type(None), type(...), type(NotImplemented), range), _plain),
        ((datetime.date, datetime.timedelta, datetime.timezone), _plain),
        ((datetime.datetime, datetime.time), _moment),
        ((int,), _int),
        ((str,), _str),
        ((bytes, bytearray), _bytes),
        ((memoryview,), _memoryview),
        ((list,), _sequence("[", "]")),
        ((collections.deque,), _sequence("deque([", "])")),
        ((tuple,), _tuple),
        ((set, frozenset), _set),
        ((dict, collections.OrderedDict, collections.defaultdict), _dict),
        ((types.FunctionType,), _function),
        ((types.BuiltinFunctionType,), _builtin_function),
        ((types.ModuleType,), _module),
    )
    for kind in kinds
}
