"""Files that come at once: together they take no more room than there is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from cloche.api.librechat import files as arriving_module
from cloche.api.librechat.files import IncomingUploads, UploadReservation
from cloche.api.librechat.identity import LibreChatCaller
from cloche.api.librechat.replies import LibreChatRefusal, new_code_id
from cloche.store import librechat
from cloche.store.gateway import GatewayStore
from cloche.store.librechat import CodeFileContent, FileSpace, new_code_file

ANN, BOB = LibreChatCaller(owner="o", tenant="t", user="ann"), LibreChatCaller(owner="o", tenant="t", user="bob")
KEY = LibreChatCaller(owner="o")
PIECE = b"x" * 100


@pytest.fixture
async def gateway_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[GatewayStore, None]:
    monkeypatch.setattr(librechat, "MAX_OWNER_BYTES", 1000)
    monkeypatch.setattr(librechat, "MAX_USER_BYTES", 600)
    monkeypatch.setattr(arriving_module, "UPLOAD_CHECK_BYTES", len(PIECE))
    async with GatewayStore(tmp_path, 30) as opened:
        yield opened


async def pieces(count: int) -> AsyncGenerator[bytes, None]:
    for _ in range(count):
        yield PIECE


async def put(
    gateway_store: GatewayStore, room: UploadReservation, chunks: AsyncGenerator[bytes, None]
) -> CodeFileContent:
    with room.file():
        return await gateway_store.code_files.put_content(new_code_id(), room.taking(chunks), 10_000)


def written(tmp_path: Path) -> int:
    return sum(each.stat().st_size for each in (tmp_path / "blobs").iterdir())


async def test_uploads_in_progress_reserve_space(gateway_store: GatewayStore, tmp_path: Path):
    arriving = IncomingUploads(gateway_store.code_files)
    rooms = [arriving.new_reservation(KEY) for _ in range(10)]
    coming = await asyncio.gather(*(put(gateway_store, room, pieces(6)) for room in rooms), return_exceptions=True)
    assert sum(isinstance(each, LibreChatRefusal) for each in coming) >= 9  # there is room for one
    assert written(tmp_path) <= 1000
    for room in rooms:
        room.release()
    assert not arriving._bytes and not arriving._count


async def test_a_users_room_is_part_of_the_owners(gateway_store: GatewayStore):
    arriving = IncomingUploads(gateway_store.code_files)
    ann, bob = arriving.new_reservation(ANN), arriving.new_reservation(BOB)
    content = await put(gateway_store, ann, pieces(6))
    with pytest.raises(LibreChatRefusal) as error:
        await put(gateway_store, ann, pieces(1))
    assert (error.value.status, error.value.body["error"]) == (413, "storage_limit_exceeded")
    await put(gateway_store, bob, pieces(4))
    with pytest.raises(LibreChatRefusal):
        await put(gateway_store, bob, pieces(1))  # the owner has no more
    ann.release()
    await put(gateway_store, bob, pieces(2))  # what failed is counted no longer, nor what was dropped
    bob.release()
    assert not arriving._bytes and content.bytes == 600


async def test_stored_uploads_are_counted_once(gateway_store: GatewayStore):
    arriving = IncomingUploads(gateway_store.code_files)
    for _ in range(2):
        room = arriving.new_reservation(KEY)
        content = await put(gateway_store, room, pieces(5))
        await room.check()
        space = FileSpace(owner="o")
        file = new_code_file(content, space, session=new_code_id(), user="", name="a", content_type="text/plain")
        await gateway_store.code_files.add([file])
        room.release()
    with pytest.raises(LibreChatRefusal):
        await put(gateway_store, arriving.new_reservation(KEY), pieces(1))
