"""What is fetched is fetched once, kept within limits, and shared by sandboxes and by processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path

import httpx2
import pytest
from tests.network.index_server import IndexServer, Told, index_door, index_doors, index_server, sha256, until

from cloche.egress.packages import cache as cache_module
from cloche.egress.packages.cache import FileDigest, PackageCache, file_key
from cloche.egress.packages.replies import LruMemory, NoCacheRoom
from cloche.telemetry import log

WHEEL = "demo-1.0-py3-none-any.whl"
PATH = f"/pypi/files/demo/{WHEEL}"


def kept_files(directory: Path) -> list[Path]:
    return [each for each in directory.rglob("*") if each.is_file()]


async def test_ten_sandboxes_that_want_one_wheel_cause_one_download(index: IndexServer, tmp_path: Path) -> None:
    gate = threading.Event()
    content = os.urandom(500_000)
    stored = index.add_file("demo", WHEEL, content)
    index.told[stored].gate = gate
    async with index_doors(tmp_path, 10, pypi=(index.simple,), npm=index.url) as doors:
        asking = [asyncio.create_task(door.get(PATH)) for door in doors]
        await asyncio.to_thread(until, lambda: index.count(stored) == 1)
        gate.set()
        answers = await asyncio.gather(*asking)
    assert all(answer.content == content for answer in answers)
    assert index.count(stored) == 1
    assert index.count("/simple/demo/") == 1


async def test_a_file_is_read_while_it_arrives(index: IndexServer, tmp_path: Path) -> None:
    gate = threading.Event()
    content = os.urandom(2_000_000)
    index.told[index.add_file("demo", WHEEL, content)].gate = gate
    async with index_door(tmp_path, index) as door, door.stream(PATH) as answer:
        parts = answer.aiter_raw()
        first = await anext(parts)  # though the index holds the second half back
        gate.set()
        rest = [part async for part in parts]
    assert b"".join((first, *rest)) == content


async def test_a_leaving_reader_does_not_end_the_download_of_another(index: IndexServer, tmp_path: Path) -> None:
    gate = threading.Event()
    content = os.urandom(2_000_000)
    stored = index.add_file("demo", WHEEL, content)
    index.told[stored].gate = gate
    async with index_doors(tmp_path, 2, pypi=(index.simple,), npm=index.url) as (leaver, stayer):
        async with leaver.stream(PATH) as left:
            leaving = left.aiter_raw()
            await anext(leaving)
            staying = stayer.stream(PATH)
            parts = (await staying.__aenter__()).aiter_raw()
            first = await anext(parts)
        gate.set()
        assert b"".join([first, *[part async for part in parts]]) == content
        await staying.__aexit__(None, None, None)
    assert index.count(stored) == 1


async def test_a_sandbox_that_ends_leaves_nothing_half_fetched(index: IndexServer, tmp_path: Path) -> None:
    gate = threading.Event()
    stored = index.add_file("demo", WHEEL, os.urandom(2_000_000))
    index.told[stored].gate = gate
    async with index_door(tmp_path, index) as door:
        asking = asyncio.create_task(door.get(PATH))
        await asyncio.to_thread(until, lambda: index.count(stored) == 1)
        await door.door.aclose()
        with pytest.raises(httpx2.TransportError):
            await asking
        assert not list(tmp_path.glob("tmp-*"))
        assert not [task for task in asyncio.all_tasks() if "Files._fetch" in repr(task.get_coro())]
    gate.set()


async def test_a_cached_entry_causes_no_request(index: IndexServer, tmp_path: Path) -> None:
    stored = index.add_file("demo", WHEEL, b"wheel")
    for _ in range(2):  # two servers, one after the other
        async with index_doors(tmp_path, 2, pypi=(index.simple,), npm=index.url) as doors:
            for door in doors:
                assert (await door.get(PATH)).content == b"wheel"
    assert (index.count(stored), index.count("/simple/demo/")) == (1, 1)


async def test_one_file_of_two_indexes_is_kept_once(index: IndexServer, tmp_path: Path) -> None:
    first = index.add_file("demo", WHEEL, b"wheel")
    second = index.add_file("other", "other-1.0-py3-none-any.whl", b"wheel")
    async with index_door(tmp_path, index) as door:
        await door.get(PATH)
        assert (await door.get("/pypi/files/other/other-1.0-py3-none-any.whl")).content == b"wheel"
    assert (index.count(first), index.count(second)) == (1, 0)


async def test_cached_files_are_private_to_this_user(index: IndexServer, tmp_path: Path) -> None:
    index.add_file("demo", WHEEL, b"wheel")
    async with index_door(tmp_path / "packages", index) as door:
        await door.get(PATH)
    modes = {each.stat().st_mode & 0o777 for each in kept_files(tmp_path)}
    assert modes == {0o600}
    assert {each.stat().st_mode & 0o777 for each in (tmp_path / "packages").rglob("*") if each.is_dir()} == {0o700}
    assert not list((tmp_path / "packages").glob("tmp-*"))


async def test_an_old_page_is_asked_for_again_with_its_tag(index: IndexServer, tmp_path: Path) -> None:
    index.add_file("demo", WHEEL, b"wheel")
    index.write_page("demo", etag='"one"')
    async with index_door(tmp_path, index, index_seconds=0) as door:
        for _ in range(3):
            assert (await door.get("/pypi/simple/demo/")).status_code == 200
        index.add_file("demo", "demo-2.0.tar.gz", b"newer")
        assert "demo-2.0" in (await door.get("/pypi/simple/demo/")).text
    tags = [asked.headers.get("if-none-match") for asked in index.asked]
    assert tags == [None, '"one"', '"one"', '"one"']


async def test_an_unreachable_index_is_served_from_the_cache(tmp_path: Path) -> None:
    with index_server() as index:
        index.add_file("demo", WHEEL, b"wheel")
        async with index_door(tmp_path, index, index_seconds=0) as door:
            assert (await door.get(PATH)).content == b"wheel"
            index.close()
            assert (await door.get(PATH)).content == b"wheel"
            assert WHEEL in (await door.get("/pypi/simple/demo/")).text
            assert (await door.get("/pypi/simple/unknown/")).status_code == 502
            said = [entry for entry in log.recent if entry.event == "packages.index_down"]
    assert said and said[-1].fields["host"] == "127.0.0.1"


async def test_a_broken_index_is_served_from_the_cache(index: IndexServer, tmp_path: Path) -> None:
    index.add_file("demo", WHEEL, b"wheel")
    async with index_door(tmp_path, index, index_seconds=0) as door:
        await door.get("/pypi/simple/demo/")
        index.told["/simple/demo/"] = Told(b"oops", status=503)
        assert WHEEL in (await door.get("/pypi/simple/demo/")).text
        index.told["/simple/demo/"] = Told(status=404)
        assert (await door.get("/pypi/simple/demo/")).status_code == 404  # it was taken back


async def test_a_file_without_a_hash_is_kept_as_long_as_a_page(index: IndexServer, tmp_path: Path) -> None:
    stored = index.add_file("demo", WHEEL, b"one", hashes={})
    async with index_door(tmp_path, index) as door:
        assert [(await door.get(PATH)).content for _ in range(2)] == [b"one", b"one"]
    assert index.count(stored) == 1
    index.told[stored].body = b"two"
    async with index_door(tmp_path, index, index_seconds=0) as door:
        assert (await door.get(PATH)).content == b"two"


async def test_least_recently_used_entries_make_room(index: IndexServer, tmp_path: Path) -> None:
    stored = {}
    for number in range(5):
        stored[number] = index.add_file("demo", f"demo-{number}.tar.gz", bytes([number]) * 100_000)
    async with index_door(tmp_path, index, cache_bytes=350_000) as door:
        for number in (0, 1, 2, 0, 3):
            assert len((await door.get(f"/pypi/files/demo/demo-{number}.tar.gz")).content) == 100_000
        assert sum(each.stat().st_size for each in kept_files(tmp_path)) <= 350_000
        await door.get("/pypi/files/demo/demo-0.tar.gz")  # was used just before
        await door.get("/pypi/files/demo/demo-1.tar.gz")  # was not
    assert (index.count(stored[0]), index.count(stored[1])) == (1, 2)


async def test_a_file_that_does_not_fit_is_passed_on_and_not_kept(index: IndexServer, tmp_path: Path) -> None:
    content = os.urandom(700_000)
    stored = index.add_file("demo", WHEEL, content)
    async with index_door(tmp_path, index, cache_bytes=200_000) as door:
        for _ in range(2):
            assert (await door.get(PATH)).content == content
        index.told[stored].body = b"x" + content[1:]
        answer = asyncio.create_task(door.get(PATH))
        with pytest.raises(httpx2.TransportError):
            await answer
    assert all(each.stat().st_size < 200_000 for each in kept_files(tmp_path))


async def test_incoming_files_count_against_the_limit(index: IndexServer, tmp_path: Path) -> None:
    gate, limit_bytes = threading.Event(), 3 << 20
    names = [f"demo-{number}.tar.gz" for number in range(5)]
    for number, name in enumerate(names):
        index.told[index.add_file("demo", name, bytes([number]) * (2 << 20))].gate = gate
    async with index_door(tmp_path, index, cache_bytes=limit_bytes) as door, AsyncExitStack() as stack:
        answers = [await stack.enter_async_context(door.stream(f"/pypi/files/demo/{name}")) for name in names]
        reading = [answer.aiter_raw() for answer in answers]
        first = [await anext(parts) for parts in reading]  # though the index holds the second halves back
        assert sum(each.stat().st_size for each in kept_files(tmp_path)) <= limit_bytes
        gate.set()
        for number, parts in enumerate(reading):
            rest = b"".join([part async for part in parts])
            assert first[number] + rest == bytes([number]) * (2 << 20)
        for name in (names[1], names[1], names[2], names[2]):
            await door.get(f"/pypi/files/demo/{name}")
        assert sum(each.stat().st_size for each in kept_files(tmp_path)) <= limit_bytes
    counts = [index.count(f"/files/{name}") for name in names]
    assert counts == [1, 3, 3, 2, 2]  # asked again where there was no room, and kept when there was


async def test_a_file_of_unknown_length_takes_no_more_than_there_is(index: IndexServer, tmp_path: Path) -> None:
    body = b"200000\r\n" + bytes(2 << 20) + b"\r\n0\r\n\r\n"
    stored = index.add_file("demo", WHEEL, bytes(2 << 20))
    index.told[stored] = Told(body, headers={"transfer-encoding": "chunked"})
    async with index_door(tmp_path, index, cache_bytes=1 << 20) as door:
        answer = await door.get(PATH)
        assert (answer.status_code, "no room" in answer.text) == (502, True)
        assert sum(each.stat().st_size for each in kept_files(tmp_path)) <= 1 << 20
    async with index_door(tmp_path, index, cache_bytes=3 << 20) as door:
        assert len((await door.get(PATH)).content) == 2 << 20


def test_failed_downloads_release_their_space(tmp_path: Path) -> None:
    kept = PackageCache(tmp_path, 1000)
    with kept.room() as room:
        room.take(600)
        with kept.room() as second, pytest.raises(NoCacheRoom):
            second.take(600)
        kept.write("url-x", bytes(500))
        assert kept.read("url-x") is None
    kept.write("url-x", bytes(500))
    assert kept.read("url-x") == bytes(500)
    with kept.room() as room:
        room.take(600)  # and what was kept makes room for what comes
        assert kept.read("url-x") is None


def test_a_directory_that_cannot_be_looked_through_keeps_no_room_for_ever(tmp_path: Path) -> None:
    kept = PackageCache(tmp_path, 1000)
    (tmp_path / "00").symlink_to("x" * 300)  # no name can be that long: whoever follows it gets an error
    for number in range(3):
        kept.write(f"url-{number}", bytes(600))
        assert kept.read(f"url-{number}") == bytes(600)
    with kept.room() as room:
        room.take(1000)


async def test_a_disk_that_is_almost_full_gets_nothing(
    index: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "FREE_BYTES", 1 << 60)
    index.add_file("demo", WHEEL, b"wheel" * 1000)
    async with index_door(tmp_path, index) as door:
        assert (await door.get(PATH)).content == b"wheel" * 1000
    assert kept_files(tmp_path) == []


async def test_a_directory_that_cannot_be_written_costs_speed_only(index: IndexServer, tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file, where a directory should be")
    index.add_file("demo", WHEEL, b"wheel")
    async with index_door(tmp_path / "occupied" / "packages", index) as door:
        assert (await door.get(PATH)).content == b"wheel"


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    kept = PackageCache(tmp_path / "c", 1 << 20)
    key = file_key("http://a/b", FileDigest("sha256", sha256(b"x")))
    assert kept.has_room(1)
    with kept.open_temporary() as (fd, _path):
        os.write(fd, b"half")
        assert kept.read(key) is None
    assert kept_files(tmp_path) == []


def test_another_process_may_remove_an_entry_in_use(tmp_path: Path) -> None:
    """Two that write, read and make room in one directory, each with files of its own and of the other."""
    program = f"""
import sys
sys.path.insert(0, {str(Path(cache_module.__file__).parents[3])!r})
from pathlib import Path
from cloche.egress.packages.cache import PackageCache as Cache
kept = Cache(Path({str(tmp_path)!r}) / "c", 100_000)
for number in range(300):
    kept.write(f"url-{{number % 40}}", bytes(10_000))
    found = kept.read(f"url-{{(number * 7) % 40}}")
    assert found is None or len(found) == 10_000
    kept.make_room()
"""
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert sum(each.stat().st_size for each in kept_files(tmp_path)) <= 100_000


def test_leftovers_of_a_process_are_removed(tmp_path: Path) -> None:
    kept = PackageCache(tmp_path, 1 << 20)
    kept.write("url-x", b"x")
    left, fresh = tmp_path / "tmp-1-a", tmp_path / "tmp-1-b"
    for each in (left, fresh):
        each.write_bytes(b"half of something")
    os.utime(left, (0, time.time() - cache_module.ABANDONED_SECONDS - 1))
    kept.make_room()
    assert (left.exists(), fresh.exists()) == (False, True)


def test_memory_holds_recent_entries_within_its_limit() -> None:
    memory: LruMemory[str] = LruMemory(100)
    for number in range(4):
        memory.put(number, f"value {number}", 30)
        memory.get(0)
    assert [memory.get(number) for number in range(4)] == ["value 0", None, "value 2", "value 3"]
    memory.put(0, "a larger one", 50)
    assert (memory.get(0), memory.get(2), memory.get(3)) == ("a larger one", None, "value 3")
    memory.put(3, "too large", 51)
    assert memory.get(3) is None


async def test_repeated_requests_are_served_from_memory(index: IndexServer, tmp_path: Path) -> None:
    index.add_file("demo", WHEEL, b"wheel")
    index.add_package("demo", "1.0.0", b"tarball")
    paths = ("/pypi/simple/demo/", "/npm/demo")
    async with index_door(tmp_path, index) as door:
        first = [(await door.get(path)).text for path in paths]
        for each in kept_files(tmp_path):
            each.unlink()
        assert [(await door.get(path)).text for path in paths] == first
    assert (index.count("/simple/demo/"), index.count("/demo")) == (1, 1)
