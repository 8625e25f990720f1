"""Sessions whose sandbox somebody has paused by another dialect. LibreChat has no way to resume it."""

from __future__ import annotations

import secrets

import httpx2
import pytest
from tests.conftest import RunningServer
from tests.librechat.programs import run

import cloche


@pytest.mark.parametrize("memory", [True, False])
def test_a_session_goes_on_in_its_paused_sandbox(
    client: httpx2.Client, librechat_server: RunningServer, memory: bool
) -> None:
    hint, where = (
        f"v2:conversation:{secrets.token_hex(16)}",
        {
            "url": librechat_server.url,
            "api_key": librechat_server.key,
        },
    )
    before = {each.id for each in cloche.Sandbox.list(**where)}
    run(client, "bash", "echo kept > a; echo also > ~/b", runtime_session_hint=hint)
    (made,) = [each.id for each in cloche.Sandbox.list(**where) if each.id not in before]
    box = cloche.Sandbox.connect(made, **where)
    box.pause(memory=memory)
    again = run(client, "bash", "cat a ~/b", runtime_session_hint=hint)
    assert (again["stdout"], again["runtime_status"]) == ("kept\nalso\n", "reused")
    assert box.info().state == "running" and box.info().id == made
    box.kill()
