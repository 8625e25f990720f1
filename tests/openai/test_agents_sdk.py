"""The OpenAI Agents SDK: its own client for E2B's sandboxes with its defaults, and its model calls.

It has an environment of its own, which `make test` makes: it pins older clients of E2B.
"""

from __future__ import annotations

import json
import os
import subprocess
from urllib.parse import urlsplit

import pytest
from tests.conftest import REPOSITORY, RunningServer
from tests.openai.upstream import Function, ScriptedUpstream, Text

PYTHON = REPOSITORY / ".venv-agents" / "bin" / "python"
PROGRAM = REPOSITORY / "tests" / "agents_sdk" / "sandboxes.py"
COMMAND = "echo $((6 * 7)) > answer; cat answer; pwd"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="the SDK has an environment of its own: make agents-env")


@pytest.fixture(scope="module")
def model(upstream: ScriptedUpstream) -> str:
    return upstream.play("resp", [Function("exec_command", {"cmd": COMMAND})], [Text("It is 42.")])


@pytest.fixture(scope="module")
def said(gateway_server: RunningServer, model: str, tmp_path_factory: pytest.TempPathFactory) -> dict:
    url, key = gateway_server.url, gateway_server.key
    place = {"E2B_API_KEY": key, "E2B_API_URL": f"{url}/e2b", "E2B_SANDBOX_URL": f"{url}/e2b"}
    own = {**place, "OPENAI_API_KEY": key, "OPENAI_BASE_URL": f"{url}/v1"}
    command = [str(PYTHON), str(PROGRAM), model, str(tmp_path_factory.mktemp("snapshots"))]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_its_sessions_work_below_workspace_as_the_user(said: dict):
    assert [each["said"] for each in said["sessions"]] == ["/workspace\nuser\ngiven user\n"] * 4


def test_a_resumed_session_has_the_files_of_the_one_before(said: dict):
    assert [each["kept"] for each in said["sessions"]] == ["made"] * 4


def test_exposed_ports_are_at_this_server(said: dict, gateway_server: RunningServer):
    for host, port, tls in (each["port"] for each in said["sessions"]):
        assert host.startswith("8000-i") and host.endswith(".localhost")
        assert (port, tls) == (urlsplit(gateway_server.url).port, False)


def test_its_sandbox_agent_runs_commands_of_the_model(said: dict, upstream: ScriptedUpstream, model: str):
    assert said["agent"] == "It is 42."
    assert upstream.asked(model)[1].outputs[0].endswith("Output:\n42\n/workspace\n")


def test_echo_has_a_name_without_a_slash(said: dict):
    """A slash ends the name of a provider there: `cloche/echo` is refused with "Unknown prefix"."""
    assert said["echo"] == "42"
