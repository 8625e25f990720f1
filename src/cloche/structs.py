"""The base class of our values."""

from __future__ import annotations

from typing import dataclass_transform

import msgspec


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))  # for mypy
class Struct(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Base of our values: immutable, keyword-only."""
