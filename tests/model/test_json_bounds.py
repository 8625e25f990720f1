"""The bounds of a JSON text: what breaks one is refused before it is parsed, and anything else is not."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from cloche import json_text
from cloche.json_text import JsonBounds, JsonMeter, TooComplexJson, check_json, parse_json

BOUNDS = JsonBounds(values=1000, depth=20, digits=50, plain_bytes=20_000)
NASTY = '\\",[{}]:' + "1" * 60


def excess_of(content: bytes, step: int = 1 << 20) -> str | None:
    meter = JsonMeter(BOUNDS)
    try:
        for start in range(0, len(content), step):
            meter.feed(content[start : start + step])
    except TooComplexJson as error:
        return error.excess
    return None


@pytest.mark.parametrize(
    ("content", "excess"),
    [
        (b"[" + b"[]," * 1000 + b"1]", "values"),
        (b"{" + b'"a":1,' * 501 + b'"a":1}', "values"),
        (b"[" * 21 + b"]" * 21, "depth"),
        (b'{"\\\\":' + b"[" * 20, "depth"),
        (b'["\\"",' + b"9" * 51 + b"]", "digits"),
        (b"[1" + b" " * 20_000 + b"]", "length"),
        (b'["' + b"\\\\" * 999 + b'",' + b"[" * 20, "depth"),
        (b"[" * 20 + b"]" * 20, None),
        (b"[" + b",".join([b"9" * 50] * 300) + b"]", None),
        (json.dumps([NASTY * 9000, {"a": NASTY}] * 3).encode(), None),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_a_bound_holds_however_the_text_comes(content: bytes, excess: str | None, step: int) -> None:
    assert excess_of(content, step if len(content) < 100_000 else max(step, 4096)) == excess


def test_strings_count_for_nothing_whatever_they_contain() -> None:
    """Random texts of quotes, backslashes and brackets in strings, against the count by a parser."""
    draw = random.Random(4)
    for _ in range(300):
        value = {_draw_text(draw): [_draw_text(draw) for _ in range(draw.randrange(6))] for _ in range(4)}
        content = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode()
        meter = JsonMeter(BOUNDS)
        for at in range(0, len(content), 3):
            meter.feed(content[at : at + 3])
        assert meter._depth == 0 and meter._values == _count_signs(value)


def _draw_text(draw: random.Random) -> str:
    return "".join(draw.choice('\\",[{}]:1é😀\n') for _ in range(draw.randrange(12)))


def _count_signs(value: dict[str, list[str]]) -> int:
    lists = list(value.values())
    return 1 + len(lists) + (len(lists) - 1) + sum(1 + max(0, len(each) - 1) for each in lists)


@pytest.mark.parametrize(
    "value",
    [
        {"image": "data:image/png;base64," + "iVBORw0K" * 4_000_000},
        {"csv": "1,2,3\n" * 3_000_000},
        {"code": 'x = [{"a": ",,,"}]\n' * 100_000},
        [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}] * 9_000,
    ],
    ids=["image", "csv", "code", "conversation"],
)
def test_long_content_within_strings_is_parsed(value: Any) -> None:
    assert parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize("raw", [b"[" * 300, "[" * 300, "[" * 250 + "\ud800"])
def test_a_small_text_has_the_bound_of_depth_too(raw: bytes | str) -> None:
    with pytest.raises(TooComplexJson, match="nested too deeply"):
        check_json(raw)


def test_utf_16_is_not_read_as_json() -> None:
    """Its bytes of quotes are parts of other characters: behind them values could hide."""
    with pytest.raises(UnicodeDecodeError):
        json_text.decode_lenient_utf8(json.dumps(["\u2222"] * 10).encode("utf-16"))
    assert json_text.decode_lenient_utf8(b"\xef\xbb\xbf1") == "1"
