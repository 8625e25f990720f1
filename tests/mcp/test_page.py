"""What docs/dialects/mcp.md says is there, and its configurations are JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec

from cloche.config import Config
from cloche.mcp import server, tools

PAGE = (Path(__file__).parents[2] / "docs/dialects/mcp.md").read_text("utf-8")


def test_the_page_names_every_tool_and_prompt():
    named = set(re.findall(r"`(\w+)`", PAGE))
    assert set(tools.TOOLS_BY_NAME) | {each["name"] for each in server.PROMPTS} <= named


def test_the_configurations_are_json_and_name_a_server():
    found = [json.loads(each) for each in re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]
    assert len(found) == 4
    assert all("cloche" in (each.get("mcpServers") or each["servers"]) for each in found)


def test_the_bounds_are_those_of_the_configuration():
    for name, value in msgspec.structs.asdict(Config(data_dir="/nowhere").mcp).items():
        assert f"`mcp.{name}`" in PAGE and (not value or f"`mcp.{name}` ({value:g})" in PAGE)
