"""Watching directories through E2B's SDK, both ways: a stream, and a watcher that is asked."""

from __future__ import annotations

import asyncio

import httpx2
import pytest
from e2b import FileNotFoundException, FilesystemEventType, FileType
from e2b.exceptions import InvalidArgumentException, RateLimitException, SandboxException
from starlette.requests import Request

from cloche.api.e2b.filesystem import EnvdWatchRequest, FilesystemService
from cloche.api.e2b.registry import E2bSandbox, E2bTokens
from cloche.config import Config, PoolConfig
from cloche.model import SandboxSpec
from cloche.sdk.assembly import assemble_engine

KINDS = FilesystemEventType


@pytest.mark.parametrize("size", [3, 5_000_000])
def test_a_new_file_is_created_changed_and_written_and_nothing_else(box, size):
    box.files.make_dir("d")
    watch = box.files.watch_dir("d")
    box.files.write("d/file", b"x" * size)
    seen = [(event.type, event.name) for event in watch.get_new_events()]
    assert seen == [(KINDS.CREATE, "file"), (KINDS.CHMOD, "file"), (KINDS.WRITE, "file")]
    assert watch.get_new_events() == []


def test_an_answer_to_a_watcher_has_all_that_was_done_before_the_question(box):
    box.files.make_dir("d")
    watch = box.files.watch_dir("d")
    box.run_code("open('d/a', 'w').write('x')\nimport os; os.rename('d/a', 'd/b'); os.remove('d/b')")
    seen = [(event.type, event.name) for event in watch.get_new_events()]
    assert seen == [
        (KINDS.CREATE, "a"),
        (KINDS.WRITE, "a"),
        (KINDS.RENAME, "a"),
        (KINDS.CREATE, "b"),
        (KINDS.REMOVE, "b"),
    ]
    watch.stop()
    with pytest.raises(SandboxException):
        watch.get_new_events()


def test_files_that_appear_with_a_directory_are_reported(box):
    box.files.make_dir("d")
    watch = box.files.watch_dir("d", recursive=True)
    box.files.write("d/new/deep/file", "x")
    created = [event.name for event in watch.get_new_events() if event.type is KINDS.CREATE]
    assert created == ["new", "new/deep", "new/deep/file"]
    box.files.write("d/new/deep/file", "xy")
    assert (KINDS.WRITE, "new/deep/file") in [(event.type, event.name) for event in watch.get_new_events()]
    box.files.rename("d/new", "d/other")
    watch.get_new_events()
    box.files.write("d/other/deep/file", "xyz")
    assert {event.name for event in watch.get_new_events()} == {"other/deep/file"}


def test_events_of_existing_files_carry_their_entry(box):
    box.files.make_dir("d")
    watch = box.files.watch_dir("d", include_entry=True)
    box.files.write("d/file", "12345")
    box.files.write("d/gone", "1")
    box.files.remove("d/gone")
    events = watch.get_new_events()
    entry = next(event.entry for event in events if (event.type, event.name) == (KINDS.WRITE, "file"))
    assert (entry.path, entry.size, entry.type) == ("/home/user/d/file", 5, FileType.FILE)
    assert all(event.entry is None for event in events if event.name == "gone")


def test_missed_events_are_announced_and_the_rest_is_reported(box):
    box.files.make_dir("d")
    watch = box.files.watch_dir("d")
    box.run_code("for number in range(6000): open(f'd/{number}', 'w').write('x')")  # two changes each, and 10,000 wait
    with pytest.raises(SandboxException, match="more has changed"):
        watch.get_new_events()
    assert len(watch.get_new_events()) == 10_000
    box.files.write("d/after", "x")
    assert {event.name for event in watch.get_new_events()} == {"after"}


def test_one_directory_is_watched_under_two_names(box):
    box.files.make_dir("d")
    box.run_code("import os; os.symlink('d', 'link')")
    watches = [box.files.watch_dir(name) for name in ("d", "link")]
    box.files.write("d/file", "x")
    assert [{event.name for event in watch.get_new_events()} for watch in watches] == [{"file"}, {"file"}]


def test_unwatchable_paths_are_refused(box):
    box.files.write("file", "x")
    with pytest.raises(FileNotFoundException):
        box.files.watch_dir("none")
    with pytest.raises(InvalidArgumentException):
        box.files.watch_dir("file")


async def test_a_stream_tells_of_changes_until_it_is_stopped(async_box):
    seen: asyncio.Queue = asyncio.Queue()
    await async_box.files.make_dir("d")
    watch = await async_box.files.watch_dir("d", on_event=seen.put_nowait, recursive=True, include_entry=True)
    await async_box.files.write("d/a/file", "12345")
    while (event := await asyncio.wait_for(seen.get(), 20)).name != "a/file":
        pass
    assert event.entry.path == "/home/user/d/a/file"
    await watch.stop()
    await async_box.files.write("d/later", "x")
    assert await async_box.files.exists("d/later")


async def test_streams_and_watchers_count_together(server, async_box):
    stream = await async_box.files.watch_dir(".", on_event=print, timeout=0)
    url = f"{server.url}/e2b/filesystem.Filesystem/"
    headers = {
        "E2b-Sandbox-Id": async_box.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": async_box._envd_access_token,
    }
    async with httpx2.AsyncClient(base_url=url, headers=headers) as client:
        for _ in range(63):
            assert (await client.post("CreateWatcher", json={"path": "."})).status_code == 200
        refused = await client.post("CreateWatcher", json={"path": "."})
        assert (refused.status_code, refused.json()["code"]) == (429, "resource_exhausted")
        with pytest.raises(RateLimitException, match="64 watches"):
            await async_box.files.watch_dir(".", on_event=print)
        await stream.stop()
        while (await client.post("CreateWatcher", json={"path": "."})).status_code != 200:
            await asyncio.sleep(0.05)


async def test_watchers_are_forgotten_with_their_sandbox(bare_dir):
    async with assemble_engine(Config(data_dir=bare_dir, pool=PoolConfig(ready=0))) as engine:
        box, files = await engine.create(SandboxSpec()), FilesystemService()
        state = {"e2b_sandbox": E2bSandbox(box.info, E2bTokens(b"secret"), box.handle, sealed=False)}
        request = Request({"type": "http", "headers": [], "state": state})
        await files.create_watcher(request, EnvdWatchRequest(path="/tmp"))
        assert list(files._watchers) == [box]
        await box.kill()
        await asyncio.gather(*files._until_end)
        assert not files._watchers


async def test_a_stream_of_a_missing_directory_fails_at_once(async_box):
    with pytest.raises(FileNotFoundException):
        await async_box.files.watch_dir("none", on_event=print)


async def test_a_watch_ends_with_its_sandbox(async_box):
    ended = asyncio.Event()
    await async_box.files.watch_dir(".", on_event=print, on_exit=lambda _error: ended.set(), timeout=0)
    await async_box.kill()
    assert await asyncio.wait_for(ended.wait(), 20)
