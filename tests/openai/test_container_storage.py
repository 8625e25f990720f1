"""What is kept of containers' files stays within its limits, whatever a sandbox says of its files."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloche import errors
from cloche.gateway import attachments, container_files
from cloche.gateway.container_files import ContainerFiles
from cloche.model import MIB, FileInfo
from cloche.store.gateway import GatewayStore


class HostileFiles:
    """Of a sandbox whose agent says one size and sends another, once it is let."""

    def __init__(self, claimed: int, sent: int):
        self.claimed, self.sent = claimed, sent
        self.size_bytes = 2 * MIB  # so that it is copied in the background
        self.let = asyncio.Event()

    async def stat(self, path: str) -> FileInfo:
        info = {"name": "x", "kind": "file", "mode": 0o644, "owner": "user", "group": "user", "modified_at": 1.0}
        return FileInfo(path=path, size_bytes=self.claimed, **info)

    async def exists(self, path: str) -> bool:
        return False

    async def open(self, path: str) -> HostileFiles:
        return self

    async def until_read(self) -> AsyncGenerator[bytes, None]:
        await self.let.wait()
        yield bytes(self.sent)

    def close(self) -> None:
        pass


def container_with(files: HostileFiles) -> Any:
    sandbox = SimpleNamespace(id="i", files=files, spec=SimpleNamespace(owner="me"))
    return SimpleNamespace(id="cntr_i", owner="me", sandbox=sandbox)


@pytest.fixture
async def gateway_store(tmp_path: Path) -> AsyncGenerator[GatewayStore, None]:
    async with GatewayStore(tmp_path, 30) as opened:
        yield opened


async def kept_after_citing(gateway_store: GatewayStore, files: HostileFiles, *paths: str) -> list[int]:
    """The sizes of those that are kept, as they are recorded."""
    kept = ContainerFiles(gateway_store)
    for path in paths:
        await kept.cite(container_with(files), path)
    files.let.set()
    await kept.aclose()
    return [file.bytes for file in await kept.list_kept("me", "i")]


@pytest.mark.parametrize(("claimed", "sent", "kept"), [(1, MIB, []), (-1, 0, []), (5, 5, [5]), (5, 3, [3])])
async def test_a_file_is_kept_if_it_is_no_larger_than_its_sandbox_said(
    gateway_store: GatewayStore, tmp_path: Path, claimed: int, sent: int, kept: list[int]
):
    assert await kept_after_citing(gateway_store, HostileFiles(claimed, sent), "/mnt/data/x") == kept
    blobs = tmp_path / "blobs"
    assert [each.stat().st_size for each in (blobs.iterdir() if blobs.is_dir() else ())] == kept


async def test_copies_in_progress_take_space(gateway_store: GatewayStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(container_files, "MAX_KEPT_BYTES", 10)
    paths = [f"/mnt/data/{number}" for number in range(5)]
    assert await kept_after_citing(gateway_store, HostileFiles(4, 4), *paths) == [4, 4]


async def test_replaced_files_take_no_space(gateway_store: GatewayStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(container_files, "MAX_KEPT_BYTES", 10)
    assert await kept_after_citing(gateway_store, HostileFiles(8, 8), "/mnt/data/x") == [8]
    assert await kept_after_citing(gateway_store, HostileFiles(9, 9), "/mnt/data/x") == [9]


async def test_room_that_a_failed_copy_took_is_free_again(gateway_store: GatewayStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(container_files, "MAX_KEPT_BYTES", 10)
    files, kept = HostileFiles(8, 9), ContainerFiles(gateway_store)
    await kept.cite(container_with(files), "/mnt/data/x")
    files.let.set()
    await kept.aclose()
    files.sent = 8
    await kept.cite(container_with(files), "/mnt/data/y")
    await kept.aclose()
    assert [file.path for file in await kept.list_kept("me", "i")] == ["/mnt/data/y"]


async def test_a_claim_of_nothing_and_a_new_name_do_not_meet(gateway_store: GatewayStore):
    files, container = ContainerFiles(gateway_store), container_with(HostileFiles(1, 1))
    with files.claim(container, ()):
        async with files.reserve_path(container, "a.csv") as path:
            assert path == "/mnt/data/a.csv"
    with files.claim(container, ["/mnt/data/a.csv"]):
        async with files.reserve_path(container, "a.csv") as path:
            assert path == "/mnt/data/a-2.csv"


@pytest.mark.parametrize("size", [0, 5, 3 * MIB, 3 * MIB + 1])
async def test_a_file_in_a_message_is_decoded_whole(gateway_store: GatewayStore, size: int):
    content = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    taken = await attached(gateway_store, "data:text/csv;base64," + base64.b64encode(content).decode())
    assert taken.content == content


@pytest.mark.parametrize("data", ["QQ==" + "QUJD" * MIB, "QUJD" * (MIB // 4 - 1) + "QQ==QUJD", "QUJD" * MIB + "Q", "?"])
async def test_base64_that_ends_before_its_end_is_refused(gateway_store: GatewayStore, data: str):
    with pytest.raises(errors.InvalidRequest):
        await attached(gateway_store, data)


async def attached(gateway_store: GatewayStore, data: str) -> attachments.AttachedFile:
    part = {"type": "input_file", "filename": "a.csv", "file_data": data}
    taken = attachments.Attachments()
    await taken.take(gateway_store.files, "me", (), [{"type": "message", "role": "user", "content": [part]}])
    (only,) = taken.found.values()
    return only
