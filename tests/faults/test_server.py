"""The server itself, killed or told to stop while many use it: what was promised is kept, and nothing else is left."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from tests.conftest import RunningServer, serving, wait_until, with_template
from tests.faults.conftest import CALM, Part, parts
from tests.faults.test_host_death import leftovers

import cloche
from cloche.model import Template

pytestmark = [pytest.mark.long, pytest.mark.alone]

WORKERS = 4


class Load:
    """Clients that do a bit of everything until the server is gone, and what they were promised."""

    def __init__(self, server: RunningServer):
        self._server = server
        self._mine = {"url": server.url, "api_key": server.key}
        self._stop = threading.Event()
        self.made: list[str] = []  # ids of sandboxes
        self.snapshots: dict[str, str] = {}  # id -> the word that is in it
        self.files: dict[str, bytes] = {}
        self.paused: dict[str, str] = {}
        self.told: list[BaseException] = []
        self.rounds = 0
        self._threads = [threading.Thread(target=self._work, args=(each,), daemon=True) for each in range(WORKERS)]
        for thread in self._threads:
            thread.start()

    def _work(self, number: int) -> None:
        while not self._stop.is_set():
            try:
                self._round(f"{number}-{self.rounds}")
            except (cloche.errors.ClocheError, httpx2.HTTPError) as error:
                self.told.append(error)
                return
            self.rounds += 1

    def _round(self, word: str) -> None:
        box = cloche.Sandbox(**self._mine)
        self.made.append(box.id)
        run = box.run(f"open('word', 'w').write({word!r}); 6 * 7")
        if run.outcome != "ok":
            raise cloche.errors.Unavailable(f"{run.outcome} {run.reason}")
        content = os.urandom(100_000)
        self.files[self._upload(content)] = content
        self.snapshots[box.snapshot().id] = word
        if self.rounds % 3:
            box.close()
        else:
            box.pause()
            self.paused[box.id] = word

    def _upload(self, content: bytes) -> str:
        files = {"file": ("data.bin", content), "purpose": (None, "user_data")}
        headers = {"x-api-key": self._server.key}
        return str(httpx2.post(f"{self._server.url}/v1/files", headers=headers, files=files).json()["id"])

    def join(self) -> None:
        """Nobody waits for an answer that cannot come."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a client got no answer"


@contextlib.contextmanager
def loaded(place: Path, rounds: int) -> Iterator[tuple[RunningServer, Load]]:
    with serving(place, env={**CALM, "CLOCHE_POOL_READY": "1"}) as server:
        load = Load(server)
        wait_until(lambda: load.rounds >= rounds or bool(load.told))
        assert not load.told, load.told
        yield server, load


def assert_gone(left: set[Part]) -> None:
    wait_until(lambda: not any(part.alive for part in left), 30)


def assert_kept(place: Path, load: Load) -> None:
    """What clients were told is there is there, in a server that is started again."""
    with serving(place, env=CALM) as server:
        mine = {"url": server.url, "api_key": server.key}
        for id, word in list(load.snapshots.items())[-4:]:
            with cloche.Sandbox(template=id, **mine) as box:
                assert box.run("open('word').read()").text == repr(word)
        for id, word in list(load.paused.items())[-4:]:
            with cloche.Sandbox.connect(id, **mine) as box:
                assert box.run("open('word').read()").text == repr(word)
        with httpx2.Client(base_url=server.url, headers={"x-api-key": server.key}, timeout=60) as client:
            for id, content in list(load.files.items())[-10:]:
                assert client.get(f"/v1/files/{id}/content").content == content
        for id in set(load.made[-10:]) - set(load.paused):
            # Lost, killed, or too young to be on record; or it was paused, and its client had not heard of it yet.
            over = contextlib.suppress(cloche.errors.Gone, cloche.errors.SandboxNotFound)
            with over, cloche.Sandbox.connect(id, **mine) as box:
                assert box.run("open('word').read()").outcome == "ok"
        assert not leftovers(str(place))
    assert not [path for path in place.rglob(".draft*") if path.parent.name != "blobs"]  # where they have an hour


def own_place(template: Template, tmp_path: Path) -> Path:
    return with_template(tmp_path / "data", template)


def test_a_server_killed_under_load_keeps_its_promises(template: Template, tmp_path: Path):
    place = own_place(template, tmp_path)
    with loaded(place, 6) as (server, load):
        left = parts(server)
        server.process.kill()
        server.process.wait()
        load.join()
    assert_kept(place, load)
    assert_gone(left)  # not before: programs of paused sandboxes, held by a freezer of v1, wait for the next start


def test_a_server_stopped_under_load_stops_and_tells_every_client(template: Template, tmp_path: Path):
    place = own_place(template, tmp_path)
    with loaded(place, 6) as (server, load):
        left = parts(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(40) == 0
        load.join()
        assert len(load.told) == WORKERS
        assert_gone(left)
        assert not list((place / "run").iterdir())
    assert_kept(place, load)
