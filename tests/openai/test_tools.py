"""Which tools a model is shown in each leg of a turn, and what it must choose."""

from __future__ import annotations

from typing import Any

import pytest

from cloche.gateway.request import CodeTool, TurnRequest
from cloche.gateway.tools import choose_python_name, is_hosted, is_mistaken_python_name, select_tools, waits_for_client

WEATHER = {"type": "function", "name": "weather", "parameters": {}}
SEARCH = {"type": "web_search"}
MCP = {"type": "mcp", "server_label": "wiki", "server_url": "https://example.test"}
PYTHON = {"type": "function", "name": "python"}


def shown(
    tools: list[dict[str, Any]], choice: Any = "auto", *, code: bool = True, **leg: bool
) -> tuple[list[str], Any]:
    """Names of the tools, and the choice."""
    asked = TurnRequest(model="m", items=[], code=CodeTool() if code else None, tools=tools, tool_choice=choice)
    given = {"first": True, "may_run": True, "may_host": True, **leg}
    found, chosen = select_tools(asked, choose_python_name(tools), has_code=code, notes=[], **given)
    return [tool.get("name") or tool["type"] for tool in found], chosen


def test_the_code_interpreter_is_shown_as_a_function_after_the_other_tools():
    assert shown([WEATHER, SEARCH]) == (["weather", "web_search", "python"], "auto")


def test_without_the_tool_nothing_is_added():
    assert shown([WEATHER], code=False) == (["weather"], "auto")
    assert shown([], code=False) == ([], "auto")


def test_the_functions_name_is_one_that_the_client_does_not_use():
    assert shown([{"type": "function", "name": "python"}])[0] == ["python", "python_interpreter"]
    assert choose_python_name([{"name": "python"}, {"name": "python_interpreter"}]) == "python_interpreter_"


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_plain_choices_are_passed_on_in_the_first_leg(choice: str):
    assert shown([], choice)[1] == choice


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "code_interpreter"}, {"type": "function", "name": "weather"}, {"type": "web_search"}],
)
def test_a_forced_tool_is_forced_in_the_first_model_call_only(choice: Any):
    expected = PYTHON if choice == {"type": "code_interpreter"} else choice
    assert shown([WEATHER, SEARCH], choice)[1] == expected
    assert shown([WEATHER, SEARCH], choice, first=False)[1] == "auto"


def test_none_stays_none():
    assert shown([WEATHER], "none", first=False)[1] == "none"


def test_allowed_tools_name_the_function_and_are_not_required_later():
    tools = [{"type": "code_interpreter"}, {"type": "function", "name": "weather"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": tools}
    allowed = [PYTHON, {"type": "function", "name": "weather"}]
    assert shown([WEATHER], choice)[1] == {**choice, "tools": allowed}
    assert shown([WEATHER], choice, first=False)[1] == {**choice, "mode": "auto", "tools": allowed}


def test_when_no_code_may_run_any_more_the_model_is_not_shown_it():
    assert shown([WEATHER], "required", first=False, may_run=False) == (["weather"], "auto")


def test_a_model_with_no_other_tool_keeps_it_and_must_not_choose_it():
    assert shown([], first=False, may_run=False) == (["python"], "none")


def test_allowed_tools_lose_hidden_tools():
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "code_interpreter"}, {"type": "web_search"}]}
    tools, chosen = shown([SEARCH], choice, first=False, may_run=False)
    assert tools == ["web_search"] and chosen == {**choice, "tools": [{"type": "web_search"}]}
    only_code = {**choice, "tools": [{"type": "code_interpreter"}]}
    assert shown([SEARCH], only_code, first=False, may_run=False) == (["web_search"], "none")


def test_an_allowed_server_of_tools_is_known_by_its_label():
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "wiki"}]}
    assert shown([MCP], choice)[1] == choice
    other = {**choice, "tools": [{"type": "mcp", "server_label": "other"}]}
    assert shown([MCP], other)[1] == "none"


def test_when_all_tool_calls_are_used_up_only_the_clients_tools_are_left():
    assert shown([WEATHER, SEARCH, MCP], first=False, may_run=False, may_host=False) == (["weather"], "auto")
    assert shown([SEARCH], first=False, may_run=False, may_host=False) == (["python"], "none")


def test_hosted_calls_are_those_without_a_local_answer():
    assert is_hosted({"type": "web_search_call"}) and is_hosted({"type": "mcp_call"})
    assert not is_hosted({"type": "function_call"}) and not is_hosted({"type": "message"})
    search = {"type": "tool_search_call"}
    assert is_hosted({**search, "execution": "server"}) and waits_for_client({**search, "execution": "client"})


def test_a_name_that_models_confuse_with_the_function_is_the_clients_if_it_has_it():
    assert is_mistaken_python_name("code_interpreter", [WEATHER])
    assert not is_mistaken_python_name("code_interpreter", [{"type": "function", "name": "code_interpreter"}])
    assert not is_mistaken_python_name("weather", []) and not is_mistaken_python_name(None, [])


def test_allowed_tools_are_looked_up_and_not_compared_with_each_other():
    """Two lists of a client's, both long."""
    tools = [{"type": "function", "name": f"f{n}"} for n in range(20_000)]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [*tools[::-1], {"type": "function", "name": "other"}]}
    _, choice = shown(tools, allowed)
    assert choice["tools"] == tools[::-1]


def test_an_allowed_tool_that_leaves_a_name_out_means_all_of_its_type():
    other = {"type": "mcp", "server_label": "other"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}, other]}
    assert shown([MCP, SEARCH], allowed)[1]["tools"] == [{"type": "mcp"}]
    allowed["tools"] = [{"type": "mcp", "server_label": "wiki", "name": "read"}]
    assert shown([MCP], allowed)[1] == "none"
