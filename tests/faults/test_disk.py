"""A disk without room for the store, images, uploads, the audit trail, logs: each says so, and what runs goes on."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from tests.conftest import RunningServer, serving, wait_until, with_template
from tests.faults.conftest import CALM, Neighbour

import cloche
from cloche.model import Template

MIB = 1 << 20
Full = Callable[[RunningServer], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def no_room(place: Path, _: RunningServer) -> Iterator[None]:
    """The file system of the data directory has not a byte left."""
    filler = place / "filler"
    with open(filler, "wb", buffering=0) as file:
        for size in (MIB, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def no_growth(server: RunningServer) -> Iterator[None]:
    """The server may not make any file longer."""
    soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(params=["no room", "no growth"])
def small(request, template: Template, tmp_path: Path) -> Iterator[tuple[Path, Full]]:
    """A data directory, and how to leave it without room."""
    place = tmp_path / "disk"
    place.mkdir()
    if request.param == "no growth" and os.geteuid() == 0:
        pytest.skip("root has the other, which says the same of a disk that is full")
    if request.param == "no growth":
        yield with_template(place / "data", template), no_growth
        return
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "none", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("nothing can be mounted here")
    try:
        yield with_template(place / "data", template), lambda server: no_room(place, server)
    finally:
        subprocess.run(["umount", str(place)], check=True)


def upload(server: RunningServer, size: int) -> httpx2.Response:
    """A file that is kept on the server's disk."""
    files = {"file": ("data.bin", b"x" * size), "purpose": (None, "user_data")}
    return httpx2.post(f"{server.url}/v1/files", headers={"x-api-key": server.key}, files=files, timeout=60)


def librechat(server: RunningServer, size: int) -> httpx2.Response:
    files = {"file": ("data.bin", b"x" * size), "entity_id": (None, "a")}
    return httpx2.post(f"{server.url}/librechat/v1/upload", headers={"x-api-key": server.key}, files=files, timeout=60)


def new_key(server: RunningServer) -> httpx2.Response:
    asked = {"owner": "somebody", "role": "user", "name": "test"}
    return httpx2.post(f"{server.url}/admin/keys", headers={"x-api-key": server.key}, json=asked, timeout=60)


@pytest.mark.long
def test_a_full_disk_is_reported_to_its_requests_and_harms_no_other(small: tuple[Path, Full]):
    place, full = small
    with serving(place, env={**CALM, "CLOCHE_POOL_READY": "0"}) as server:
        mine = {"url": server.url, "api_key": server.key}
        neighbour = Neighbour(server)
        box, killed = cloche.Sandbox(**mine), cloche.Sandbox(**mine)
        box.run("kept = 41")
        box.files.write("/mnt/data/large", os.urandom(4 * MIB))
        assert upload(server, MIB).status_code == 200
        assert librechat(server, MIB).status_code == 200
        with full(server):
            for keeping in (upload, librechat):
                answer = keeping(server, 4 * MIB)
                assert answer.status_code == 503 and "full" in answer.text, answer.text
            assert new_key(server).status_code == 503
            for lasting in (box.pause, box.snapshot):
                with pytest.raises(cloche.errors.Unavailable, match="full"):
                    lasting()
            assert box.run("kept + 1").text == "42"
            killed.close()
            with cloche.Sandbox(**mine) as new:
                assert new.run("6 * 7").text == "42"
            assert httpx2.get(f"{server.url}/health", timeout=30).status_code == 200
            neighbour.assert_unharmed()
        wait_until(lambda: new_key(server).status_code == 201)
        assert upload(server, MIB).status_code == 200
        box.pause()
        box.resume()
        assert box.run("kept + 1").text == "42"
        box.close()
        neighbour.assert_unharmed()
        neighbour.close()
    with serving(place, env=CALM) as server, pytest.raises(cloche.errors.SandboxKilled):
        cloche.Sandbox.connect(killed.id, url=server.url, api_key=server.key)
    assert not list(place.rglob(".draft*"))


@pytest.mark.long
def test_logs_that_cannot_be_written_are_lost_and_nothing_else(place: Path):
    with serving(place, env={**CALM, "CLOCHE_POOL_READY": "0"}, log=Path("/dev/full")) as server:
        with cloche.Sandbox(url=server.url, api_key=server.key) as box:
            assert box.run("6 * 7").text == "42"
        assert (
            "sandbox.ended"
            in httpx2.get(f"{server.url}/api/v1/logs", headers={"x-api-key": server.key}, timeout=30).text
        )
