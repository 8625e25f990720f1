"""How many values a JSON text has, as far as anybody must know."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cloche.json_text import count_json_values


@pytest.mark.parametrize(
    "text",
    [
        "1,[{" * 3_000,
        'x = ["a", "b"]\n' * 1_000,
        '"\\"\\\\"' * 3_000,
        "\\" * 3_000 + '",' * 3_000,
        '\\",{' * 400_000,  # over more than one of the steps that it is looked at in
    ],
)
def test_a_text_with_any_content_is_one_value(text: str) -> None:
    content = json.dumps({"code": text, "tools": []}).encode()
    assert count_json_values(content, 1000) <= 3
    assert count_json_values(content[:-20], 1000) <= 3  # without an end, too


@pytest.mark.parametrize("value", [1, [], {}, "", "a", ",", "\\", '\\"', '"', {"a": "\\"}])
def test_many_values_are_seen(value: Any) -> None:
    content = json.dumps([value] * 5000).encode()
    assert count_json_values(content, 1000) > 1000


def test_names_are_no_values() -> None:
    content = json.dumps({f"{number},": ",,," for number in range(900)}).encode()
    assert count_json_values(content, 1000) == 900
