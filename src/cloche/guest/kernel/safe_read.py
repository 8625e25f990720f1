"""Reads of an object that run no code of the program: none of its methods, properties or metaclasses.

Types are told apart by identity, attributes are read from dictionaries and by descriptors that are C code,
and dictionaries are iterated, since a lookup compares keys, which may be a program's own.
"""

from __future__ import annotations

import types

# What a program puts in their place later does not count here.
from builtins import any, dict, id, next, slice, str, type  # noqa: UP029
from itertools import islice

MAX_NAME = 200
MAX_KEYS = 10_000  # of a dictionary that is gone through
_HEAP_TYPE = 1 << 9  # made at run time; others are C code's own, and nobody can change them, as those
_IMMUTABLE_TYPE = 1 << 8  # of C code's that are made at run time and have this

# Of any class, whatever its metaclass does
class_dict = type.__dict__["__dict__"].__get__
class_mro = type.__dict__["__mro__"].__get__
_class_name = type.__dict__["__qualname__"].__get__
_class_module = type.__dict__["__module__"].__get__
_class_flags = type.__dict__["__flags__"].__get__
_known: dict = {}  # (a class's id, a name): what it has there
_getset_get = types.GetSetDescriptorType.__get__
_member_get = types.MemberDescriptorType.__get__
_method_call = types.MethodDescriptorType.__call__


def type_name(kind: type) -> str:
    """`int`, `numpy.ndarray`, `__main__.Point`."""
    module, name = _class_module(kind), safe_text(_class_name(kind))
    module = safe_text(module) if is_subclass(type(module), str) else "?"
    return (name if module == "builtins" else f"{module}.{name}")[:MAX_NAME]


def is_static(kind: type) -> bool:
    """Whether it is C code's own, and as it was made."""
    flags = _class_flags(kind)
    return not flags & _HEAP_TYPE or bool(flags & _IMMUTABLE_TYPE)


def is_subclass(kind: type, base: type) -> bool:
    """`issubclass`, which a metaclass cannot answer."""
    return any(each is base for each in class_mro(kind))


def safe_text(text: str) -> str:
    """An exact, short string that can be encoded, of one that may be of a subclass."""
    return str.__getitem__(text, slice(0, MAX_NAME)).encode("utf-8", "backslashreplace").decode()


def find_key(names, wanted: str) -> object:
    """`names.get(wanted)`, without a comparison with keys that are a program's own."""
    for key, value in islice(names.items(), MAX_KEYS):
        if type(key) is str and key == wanted:
            return value
    return None


def stored_attribute(value: object, name: str) -> object:
    """An attribute as it is stored: in a slot, a field of C code's, or the object's own dictionary. None without."""
    descriptor = _find_in_class(type(value), name)
    if type(descriptor) is types.GetSetDescriptorType:
        return _get_quietly(_getset_get, descriptor, value)
    if type(descriptor) is types.MemberDescriptorType:
        return _get_quietly(_member_get, descriptor, value)
    names = _instance_dict(value)
    return None if names is None else find_key(names, name)


def call_method(value: object, name: str) -> object:
    """The result of a method without arguments, if it is implemented in C; else None."""
    method = _find_in_class(type(value), name)
    return _method_call(method, value) if type(method) is types.MethodDescriptorType else None


def _instance_dict(value: object) -> dict | None:
    descriptor = _find_in_class(type(value), "__dict__")
    names = _getset_get(descriptor, value) if type(descriptor) is types.GetSetDescriptorType else None
    return names if type(names) is dict else None


def _find_in_class(kind: type, name: str) -> object:
    """The attribute of that name of a class or one of its ancestors."""
    known = _known.get((id(kind), name), _known)
    if known is _known:
        found = (find_key(class_dict(each), name) for each in class_mro(kind))
        known = _known[id(kind), name] = next((each for each in found if each is not None), None)
    return known


def clear_cache() -> None:
    """Clears the cache of class lookups.

    Call it when the classes are no longer held and may be replaced by others.
    """
    _known.clear()


def _get_quietly(get, descriptor: object, value: object) -> object:
    try:
        return get(descriptor, value)
    except (AttributeError, TypeError):  # a slot that is empty; a descriptor of another class
        return None
