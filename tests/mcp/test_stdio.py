"""`cloche mcp`: whose stdout is the protocol's, and which leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import wait_until
from tests.mcp.conftest import CLOCHE, VERSION, House, over_stdio, words

HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "a", "version": "1"}},
}


def started(house: House, *options: str) -> subprocess.Popen[bytes]:
    command = [CLOCHE, "--data-dir", str(house.place), "mcp", *options]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def say(process: subprocess.Popen[bytes], message: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()


def heard(process: subprocess.Popen[bytes]) -> dict[str, object]:
    assert process.stdout is not None
    found: dict[str, object] = json.loads(process.stdout.readline())
    return found


def begin(process: subprocess.Popen[bytes]) -> None:
    """Until it has a sandbox."""
    say(process, HELLO)
    assert heard(process)["id"] == 1
    say(process, {"jsonrpc": "2.0", "method": "notifications/initialized"})
    code = {"name": "run_code", "arguments": {"code": "1+1"}}
    say(process, {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": code})
    assert '"text": "2"' in json.dumps(heard(process))


def test_a_client_that_vanishes_leaves_no_sandbox(house: House):
    """Whether it closes our stdin, ends us, or kills us."""
    before = house.sandboxes()
    closing, ended, killed = all_three = [started(house) for _ in range(3)]
    for each in all_three:
        begin(each)
    assert len(house.sandboxes() - before) == 3
    assert closing.stdin is not None
    closing.stdin.close()
    assert closing.wait(30) == 0
    ended.send_signal(signal.SIGTERM)
    assert ended.wait(30) == 128 + signal.SIGTERM
    killed.kill()
    killed.wait(30)
    wait_until(lambda: not house.sandboxes() - before)


def test_a_malformed_message_does_not_end_the_session(house: House):
    process = started(house)
    assert process.stdin is not None
    process.stdin.write(b"no JSON\n\xff\xfe\n")
    say(process, HELLO)
    answers = [heard(process)]
    while answers[-1].get("id") != 1:
        answers.append(heard(process))
    assert "result" in answers[-1]
    process.stdin.close()
    assert process.wait(30) == 0
    assert process.stdout is not None and process.stdout.read() == b""


async def test_it_uses_the_server_that_its_environment_names(house: House, tmp_path: Path):
    """In a data directory of its own, where none runs."""
    elsewhere = House(house.server, tmp_path)
    env = {"CLOCHE_URL": house.server.url, "CLOCHE_API_KEY": house.server.key}
    async with over_stdio(elsewhere, "--tools", "sandbox_info,run_code", env=env)() as client:
        info = await client.call_tool("sandbox_info", {})
        assert info.structured_content["sandbox"] in house.sandboxes()
        assert {each.name for each in (await client.list_tools()).tools} == {"sandbox_info", "run_code"}


@pytest.mark.long
async def test_a_server_that_is_not_there_is_named_in_the_answer(tmp_path: Path, house: House):
    elsewhere = House(house.server, tmp_path)
    async with over_stdio(elsewhere, "--url", "http://127.0.0.1:9", "--key", "e2b_none")() as client:
        failed = await client.call_tool("run_code", {"code": "1"})
        assert failed.is_error and "http://127.0.0.1:9" in words(failed)


def test_without_the_extra_it_names_the_package_to_install(tmp_path: Path):
    program = "import sys; sys.modules['mcp'] = None; from cloche.cli import main; main()"
    hidden = (
        "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'mcp' else f(n, *a); "
    )
    done = subprocess.run(
        [sys.executable, "-c", hidden + program, "--data-dir", str(tmp_path), "mcp"], capture_output=True, text=True
    )
    assert done.returncode == 125
    assert 'pip install "mcp>=2"' in done.stderr and not done.stdout


def test_no_other_module_imports_it():
    program = "import sys, cloche, cloche.app, cloche.cli.serve, cloche.cli.mcp; print('mcp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ})
    assert done.stdout == "False\n", done.stderr


async def test_an_agent_beside_a_server_has_no_rights_of_its_operator(house: House):
    """It came by the control socket, where whoever runs the server may see everything."""
    key = house.new_owner("somebody")
    theirs = house.ask("POST", "/api/v1/sandboxes", {}, key=key)["id"]
    kept = house.ask("POST", f"/api/v1/sandboxes/{theirs}/snapshots", {}, key=key)["id"]
    async with over_stdio(house)() as client:
        for tool, asked in (("use_sandbox", {"sandbox": theirs}), ("remove_snapshot", {"snapshot": kept})):
            answer = await client.call_tool(tool, asked)
            assert answer.is_error
            assert "not_found" in words(answer)
        assert words(await client.call_tool("run_code", {"code": "6 * 7"})) == "42"
    house.ask("DELETE", f"/api/v1/sandboxes/{theirs}", key=key)
