"""What two versions of a template differ in, in lines for people."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cloche.model import MIB
from cloche.templates import Difference


def in_lines(found: Difference) -> Iterator[str]:
    """One line for each thing that differs: + is new, - is gone, ~ is another."""
    yield f"{found.before} -> {found.after}"
    if found.same:
        yield "  no difference"
    if found.python is not None:
        yield f"  ~ Python {found.python.before} -> {found.python.after}"
    yield from (f"  + {package}" for package in found.packages_added)
    yield from (f"  - {package}" for package in found.packages_removed)
    yield from (f"  ~ {each.what} {each.before} -> {each.after}" for each in found.packages_changed)
    for change in found.recipe:
        yield f"  ~ template.toml: {change.what} = {_said(change.before)} -> {_said(change.after)}"
    yield f"  {_size(found.before_bytes)} -> {_size(found.after_bytes)}"


def in_brief(found: Difference) -> str:
    """One line: how many of each, and how much larger."""
    counts = {
        "added": len(found.packages_added),
        "removed": len(found.packages_removed),
        "changed": len(found.packages_changed),
    }
    said = [f"{count} {verb}" for verb, count in counts.items() if count]
    said += [f"Python {found.python.before} -> {found.python.after}"] if found.python else []
    said += [f"template.toml: {', '.join(each.what for each in found.recipe)}"] if found.recipe else []
    grown = (found.after_bytes - found.before_bytes) / MIB
    return f"{', '.join(said) or 'no difference'}, {grown:+.0f} MiB"


def _said(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _size(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.0f} MiB"
