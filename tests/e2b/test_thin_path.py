"""The Python SDK of E2B against a server, from creation to the end."""

from __future__ import annotations

from e2b_code_interpreter import Sandbox


def test_a_sandbox_is_made_runs_code_and_is_killed(server):
    box = Sandbox.create(**server.e2b)
    try:
        assert box.run_code("x = 20 + 1; x * 2").text == "42"
        assert box.run_code("print(x)").logs.stdout == ["21\n"]
    finally:
        assert box.kill()
