"""Inputs that were right once: with something else somewhere in them, cut, doubled, or not themselves at all."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from cloche import errors

T = TypeVar("T")

MANY = int(os.environ.get("FUZZ_EXAMPLES", "120"))
EXAMPLES = pytest.mark.parametrize(
    "examples", [pytest.param(8, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.long)]
)
LONGEST_ERROR = 8 << 10  # characters: whoever sends nonsense does not choose how much is said of it
_RAW = '"\x1araw"'
_NASTY = [
    "null",
    "true",
    "0",
    "-1",
    "-0.0",
    "0.1",
    "9007199254740993",
    "18446744073709551616",
    "1" + "0" * 400,
    "1" + "0" * 5000,
    "1e309",
    "1e-400",
    "NaN",
    "Infinity",
    '""',
    '" "',
    '"\\u0000"',
    '"\\ud800"',
    '"\\udc00\\ud800"',
    '"nan"',
    '"inf"',
    '"-1"',
    '"1e400"',
    '"١"',
    '"../../etc/passwd"',
    '"/"',
    '"' + "x" * 70_000 + '"',
    "[]",
    "{}",
    "[[]]",
    '[{"type": "x"}]',
    '{"": null}',
    "[" * 3000 + "]" * 3000,
    '{"a":' * 3000 + "1" + "}" * 3000,
    "[" + "0," * 5000 + "0]",
    '{"a": 1, "a": 2}',
]


class Claim(NamedTuple):
    """`decode` returns, or raises ClocheError, whatever it is given."""

    name: str
    decode: Callable[[Any], object]
    inputs: SearchStrategy[Any]


def holds(check: Callable[[T], object], inputs: SearchStrategy[T], examples: int) -> None:
    """Time never decides: pytest's own limit is the bound for what takes for ever."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize="FUZZ_EXAMPLES" not in os.environ,
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs)
    def held(value: T) -> None:
        check(value)

    held()


def only_our_errors(decode: Callable[[Any], object], value: Any) -> None:
    try:
        decode(value)
    except errors.ClocheError as error:
        assert len(str(error)) <= LONGEST_ERROR, "the error is as long as the nonsense"


def bodies(*right: Any) -> SearchStrategy[bytes]:
    """JSON like these, and bytes like that JSON."""
    return st.sampled_from(right).flatmap(_body_like) | st.binary(max_size=60)


def texts(*right: str) -> SearchStrategy[str]:
    alphabet = st.characters(codec="utf-8") | st.sampled_from("\0\n\r\t \"'[]{}=,;:/\\.-_%")
    return st.sampled_from(right).flatmap(_text_like) | st.text(alphabet, max_size=40)


def streams(*right: bytes) -> SearchStrategy[list[bytes]]:
    """Bytes like these, in pieces."""
    return st.sampled_from(right).flatmap(_bytes_like).flatmap(_in_pieces)


@st.composite
def _body_like(draw: DrawFn, right: Any) -> bytes:
    changed = copy.deepcopy(right)
    for _ in range(draw(st.integers(0, 3))):
        changed = draw(_changed(changed))
    body = json.dumps(changed)
    while _RAW.replace("\x1a", "\\u001a") in body:
        body = body.replace(_RAW.replace("\x1a", "\\u001a"), draw(st.sampled_from(_NASTY)), 1)
    return draw(_bytes_like(body.encode())) if draw(st.integers(0, 4)) == 0 else body.encode()


@st.composite
def _changed(draw: DrawFn, value: Any) -> Any:
    places = list(_places(value))
    if not places or draw(st.integers(0, 20)) == 0:
        return json.loads(_RAW, strict=False)
    holder, key = draw(st.sampled_from(places))
    action = draw(st.integers(0, 5))
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, dict):
        holder[draw(st.text(max_size=6))] = json.loads(_RAW, strict=False)
    elif action == 2 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[key] = json.loads(_RAW, strict=False)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(items):
        yield value, key
        yield from _places(each)


@st.composite
def _bytes_like(draw: DrawFn, right: bytes) -> bytes:
    content = bytearray(right)
    for _ in range(draw(st.integers(0, 4))):
        at, length = draw(st.integers(0, len(content))), draw(st.integers(0, 8))
        action = draw(st.integers(0, 3))
        if action == 0:
            content[at : at + length] = draw(st.binary(max_size=8))
        elif action == 1:
            del content[at:]
        elif action == 2:
            content[at:at] = content[at : at + length * 8]
        elif content:
            content[min(at, len(content) - 1)] ^= 1 << draw(st.integers(0, 7))
    return bytes(content)


@st.composite
def _text_like(draw: DrawFn, right: str) -> str:
    changed = draw(_bytes_like(right.encode()))
    return changed.decode("utf-8", draw(st.sampled_from(["replace", "ignore"])))


@st.composite
def _in_pieces(draw: DrawFn, content: bytes) -> list[bytes]:
    cuts = sorted(draw(st.lists(st.integers(0, len(content)), max_size=4)))
    return [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
