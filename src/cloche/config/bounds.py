"""Bounds of numbers in the configuration: declared with `msgspec.Meta`, described in one place.

A leaf of this package, since every module of it declares bounds. msgspec checks them where a value is converted,
`Section` where a section is constructed in Python, which msgspec does not check.
"""

from __future__ import annotations

import functools
import sys
from typing import Annotated, Any, get_args, get_origin

import msgspec

from cloche import errors
from cloche.model import KIB, MIB
from cloche.structs import Struct

FINITE = sys.float_info.max
SECTION_KEYS: dict[type[msgspec.Struct], str] = {}  # the key of each section in the configuration; see `Config`

NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
PositiveInt = Annotated[int, msgspec.Meta(gt=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0, le=FINITE)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0, le=FINITE)]
KibOrMore = Annotated[int, msgspec.Meta(ge=KIB)]
MibOrMore = Annotated[int, msgspec.Meta(ge=MIB)]


class Section(Struct):
    """Base of a section. Raises InvalidRequest for a number beyond the bounds of its field."""

    def __post_init__(self) -> None:
        for name, meta in _section_bounds(type(self)):
            value = getattr(self, name)
            if not _is_within(value, meta):
                section = SECTION_KEYS.get(type(self), type(self).__name__)
                raise errors.InvalidRequest(describe_violation(f"{section}.{name}", value, meta))


@functools.cache
def _section_bounds(section: type[Section]) -> tuple[tuple[str, msgspec.Meta], ...]:
    found = ((field.name, find_bounds(field.type)) for field in list_fields(section))
    return tuple((name, meta) for name, meta in found if meta)


@functools.cache  # msgspec evaluates the annotations again each time
def list_fields(struct: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(struct)


def find_bounds(kind: Any) -> msgspec.Meta | None:
    """The bounds in a field's type."""
    return get_args(kind)[1] if get_origin(kind) is Annotated else None


def _is_within(value: float, meta: msgspec.Meta) -> bool:
    """Whether a number is within the bounds; NaN is not."""
    return (
        (meta.gt is None or value > meta.gt)
        and (meta.ge is None or value >= meta.ge)
        and (meta.le is None or value <= meta.le)
    )


def describe_violation(key: str, value: float, meta: msgspec.Meta) -> str:
    return f"{key} must be {_describe_bounds(meta)}, not {value}"


def _describe_bounds(meta: msgspec.Meta) -> str:
    if meta.description:
        return meta.description
    if meta.gt == 0:
        return "a positive number"
    if meta.ge is not None and meta.le is not None and meta.le < FINITE:
        return f"between {meta.ge} and {meta.le}"
    return f"{_describe_size(meta.ge)} or more"


def _describe_size(size: float | None) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size and size % unit == 0:
            return f"{size // unit} {name}"
    return str(size)
