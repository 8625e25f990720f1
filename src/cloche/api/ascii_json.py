"""JSON for clients that split lines wherever Unicode has one, or decode bytes chunk by chunk: ASCII, and finite."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def ascii_json(value: Any) -> bytes:
    """One line. A number that JSON has no word for, as a guest may send, is null."""
    try:
        return json.dumps(value, allow_nan=False).encode()
    except ValueError:  # NaN, which JavaScript cannot read
        return json.dumps(_finite(value)).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list) else value
