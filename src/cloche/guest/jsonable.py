"""Lists and dicts as JSON, beside their text, for runs that ask for it."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import uuid
from typing import Any

MAX_DEPTH = 200


class Json(bytes):
    """A value that is JSON already."""


def encoded(value: Any) -> Json | None:
    """A list or dict with what numpy and the standard library put into them. None for anything that has no JSON form:
    its text says more than a guess would."""
    try:
        return Json(_dumped(value))
    except (TypeError, RuntimeError):  # nested too deeply, or changed by a thread meanwhile
        return None
    except ValueError:  # NaN, an infinity, or a circle
        pass
    try:
        return Json(_dumped(_finite(value, 0)))
    except (TypeError, ValueError, RuntimeError):
        return None


def _dumped(value: Any) -> bytes:
    return json.dumps(value, default=known, allow_nan=False, separators=(",", ":")).encode()


def known(value: Any) -> Any:
    """What JSON itself does not know. Raises TypeError for what we do not either."""
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


def _finite(value: Any, depth: int) -> Any:
    """The same with null for numbers that JSON cannot hold."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _finite(one, depth + 1) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one, depth + 1) for one in value]
    return value if value is None or isinstance(value, (str, int)) else _finite(known(value), depth + 1)
