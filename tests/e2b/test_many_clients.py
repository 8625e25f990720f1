"""Fifty clients at once: no error, and nothing left over."""

from __future__ import annotations

import asyncio
import hashlib

import httpx
import pytest
from e2b_code_interpreter import AsyncSandbox

CLIENTS = 50
CELLS = 20
FILE_BYTES = 5_000_000


async def one_client(number: int, e2b: dict[str, str]) -> None:
    box = await AsyncSandbox.create(timeout=300, metadata={"client": "many"}, **e2b)
    try:
        await box.run_code(f"total = {number}")
        for cell in range(1, CELLS):
            execution = await box.run_code("total += 1; total")
            assert execution.text == str(number + cell), execution
        content = hashlib.sha256(str(number).encode()).digest() * (FILE_BYTES // 32)
        await box.files.write("/home/user/data.bin", content)
        assert bytes(await box.files.read("/home/user/data.bin", format="bytes")) == content
    finally:
        assert await box.kill()


@pytest.mark.long
async def test_fifty_clients_at_once_get_their_own_results(server):
    await asyncio.gather(*(one_client(number, server.e2b) for number in range(CLIENTS)))
    async with httpx.AsyncClient() as client:
        headers = {"X-API-Key": server.key}
        left = (await client.get(f"{server.url}/e2b/v2/sandboxes", headers=headers)).json()
    assert [each for each in left if each["metadata"].get("client") == "many"] == []
