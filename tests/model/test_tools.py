"""By which names code calls tools, and what is read off the functions that they are."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest

from cloche import errors
from cloche.model import ToolDefinition, ToolLanguage, tool_identifier, tools_by_identifier
from cloche.sdk.tools import function_schema


@pytest.mark.parametrize(
    ("name", "python", "bash"),
    [
        ("get_weather", "get_weather", "get_weather"),
        ("get-weather", "get_weather", "get_weather"),
        ("Get Weather", "Get_Weather", "Get_Weather"),
        ("weather.get", "weatherget", "weather_get"),
        ("search (web)", "search_web", "search_web"),
        ("naïve", "nave", "nave"),
        ("2fa", "_2fa", "_2fa"),
        ("class", "class_tool", "class"),
        ("None", "None_tool", "None"),
        ("print", "print", "print"),
        ("if", "if_tool", "if_tool"),
        ("done", "done", "done_tool"),
        ("read", "read", "read_tool"),
        ("export", "export", "export_tool"),
        ("--x", "__x", "__x"),
        ("__call__", "__call___tool", "__call__"),
        ("_ptc_call", "_ptc_call", "_ptc_call_tool"),
        ("_cloche_call", "_cloche_call", "_cloche_call_tool"),
        ("ToolExecutionError", "ToolExecutionError_tool", "ToolExecutionError"),
    ],
)
def test_names_become_identifiers_by_the_rules_that_clients_tell_their_models(name: str, python: str, bash: str):
    assert (tool_identifier(name, "python"), tool_identifier(name, "bash")) == (python, bash)


@pytest.mark.parametrize("name", ["", "!?", "日本"])
def test_a_name_of_which_nothing_is_left_is_refused(name: str):
    with pytest.raises(errors.InvalidRequest, match="letters or digits"):
        tool_identifier(name)


@pytest.mark.parametrize(
    ("language", "names"), [("python", ("a.b", "ab")), ("bash", ("a.b", "a-b")), ("python", ("x", "x"))]
)
def test_two_tools_of_one_identifier_are_refused_by_both_names(language: ToolLanguage, names: tuple[str, str]):
    with pytest.raises(errors.InvalidRequest) as refused:
        tools_by_identifier([ToolDefinition(name=name) for name in names], language)
    assert all(repr(name) in str(refused.value) for name in names)


@pytest.mark.parametrize("name", ["a\0b", "x" * 257])
def test_names_are_bounded(name: str):
    with pytest.raises(errors.InvalidRequest, match="name of at most 256 characters"):
        tools_by_identifier([ToolDefinition(name=name)])


@dataclasses.dataclass
class Point:
    x: int
    y: int


def search(query: str, limit: int = 10, *, kind: Literal["a", "b"] = "a", near: Point | None = None, **more: Any): ...


def test_a_schema_is_read_off_a_function():
    schema = function_schema("search", search)
    assert schema["required"] == ["query"] and schema["additionalProperties"] is True
    assert schema["properties"]["query"] == {"type": "string"}
    assert schema["properties"]["limit"] == {"type": "integer", "default": 10}
    assert schema["properties"]["kind"] == {"enum": ["a", "b"], "default": "a"}
    assert "Point" in schema["$defs"]


def test_inexpressible_annotations_are_allowed():
    def strange(a, b: NoSuchName, c: type(len) = None): ...  # type: ignore[name-defined,valid-type]  # noqa: F821

    assert function_schema("strange", strange)["properties"] == {"a": {}, "b": {}, "c": {}}
    with pytest.raises(errors.InvalidRequest, match="an argument without a name"):
        function_schema("len", len)
