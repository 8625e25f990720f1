"""Watches: what they say fits into frames, however much happens at once."""

from __future__ import annotations

import os

from cloche.guest import wire
from cloche.guest.identity import Identities
from cloche.guest.processes import Defaults
from cloche.guest.watches import Watches


def test_many_changes_with_long_paths_are_several_frames(tmp_path):
    top = str(tmp_path)
    while len(top) < 3700:
        top += "/" + "d" * 200
        os.mkdir(top)
    ready, frames = [], []
    watches = Watches(Identities(True, b""), Defaults(), lambda fd, events, read: ready.append(read), frames.append)
    watches.verbs()["watch_start"]({"path": top, "watch": "w"}, b"")
    for number in range(2000):
        os.close(os.open(f"{top}/{number}", os.O_CREAT | os.O_WRONLY))
    ready[0]()
    assert sum(len(frame["changes"]) for frame in frames) > 1200
    assert all(len(wire.encode(frame)) < wire.MAX_HEADER for frame in frames)
