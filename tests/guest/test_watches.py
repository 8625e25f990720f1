"""Watches: what they say fits into frames, however much happens at once."""

from __future__ import annotations

import os

from cloche.guest import wire
from cloche.guest.files.watch import WatchHandlers
from cloche.guest.init.defaults import Defaults
from cloche.guest.init.identity import Identities


def test_many_changes_with_long_paths_are_several_frames(tmp_path):
    top = str(tmp_path)
    while len(top) < 3700:
        top += "/" + "d" * 200
        os.mkdir(top)
    ready, frames = [], []
    watches = WatchHandlers(
        Identities(True, b""), Defaults(), lambda fd, events, read: ready.append(read), frames.append
    )
    watches.verb_handlers()["watch_start"]({"path": top, "watch": "w"}, b"")
    for number in range(2000):
        os.close(os.open(f"{top}/{number}", os.O_CREAT | os.O_WRONLY))
    ready[0]()
    assert sum(len(frame["changes"]) for frame in frames) > 1200
    assert all(len(wire.encode_frame(frame)) < wire.MAX_HEADER for frame in frames)


def test_directories_that_come_and_go_leave_nothing(tmp_path):
    ready, frames = [], []
    watches = WatchHandlers(
        Identities(True, b""), Defaults(), lambda fd, events, read: ready.append(read), frames.append
    )
    watches.verb_handlers()["watch_start"]({"path": str(tmp_path), "watch": "w", "recursive": True}, b"")
    for number in range(10):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "file").touch()
        ready[0]()
        (directory / "file").unlink()
        directory.rmdir()
        ready[0]()
    changes = [tuple(change) for frame in frames for change in frame["changes"]]
    for number in range(10):
        path = f"{tmp_path}/{number}"
        assert {("created", path), ("created", f"{path}/file"), ("removed", path)} <= set(changes)
    assert len(watches._directories) == 1


def test_when_the_kernel_drops_events_every_watch_is_told(tmp_path):
    frames = []
    watches = WatchHandlers(Identities(True, b""), Defaults(), lambda fd, events, read: None, frames.append)
    verbs = watches.verb_handlers()
    for name in ("busy", "calm"):
        (tmp_path / name).mkdir()
        verbs["watch_start"]({"path": f"{tmp_path}/{name}", "watch": name}, b"")
    with open("/proc/sys/fs/inotify/max_queued_events") as file:
        most = int(file.read())
    for number in range(most + 10):
        os.close(os.open(f"{tmp_path}/busy/{number}", os.O_CREAT | os.O_WRONLY))
    verbs["watch_collect"]({}, b"")
    assert sorted(frame["watch"] for frame in frames if frame.get("missed")) == ["busy", "calm"]
    assert sum(len(frame["changes"]) for frame in frames) == most
    frames.clear()
    (tmp_path / "calm" / "f").touch()
    verbs["watch_collect"]({}, b"")
    assert [frame["watch"] for frame in frames] == ["calm"] and not frames[0].get("missed")


def test_each_watch_hears_of_a_directory_by_its_own_name(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    frames = []
    watches = WatchHandlers(Identities(True, b""), Defaults(), lambda fd, events, read: None, frames.append)
    verbs = watches.verb_handlers()
    for name in ("real", "link"):
        verbs["watch_start"]({"path": f"{tmp_path}/{name}", "watch": name}, b"")
    (tmp_path / "real" / "f").touch()
    verbs["watch_collect"]({}, b"")
    seen = {frame["watch"]: frame["changes"][0] for frame in frames}
    assert seen == {name: ["created", f"{tmp_path}/{name}/f"] for name in ("real", "link")}
