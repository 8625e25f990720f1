"""Sandboxes for tests of E2B's SDKs."""

from __future__ import annotations

import pytest
import pytest_asyncio
from e2b_code_interpreter import AsyncSandbox, Sandbox


@pytest.fixture
def box(server):
    """A sandbox as the Python SDK makes one."""
    made = Sandbox.create(**server.e2b)
    yield made
    made.kill()


@pytest_asyncio.fixture
async def async_box(server):
    made = await AsyncSandbox.create(**server.e2b)
    yield made
    await made.kill()
