"""SIGKILL of the nursery, of an init, of a kernel or of a cell that waits: at rest, and in the middle of everything.

To be sure that it is the middle, a process is stopped first: what is asked of it then has begun, and cannot end.
"""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from openai import BadRequestError, OpenAI
from tests.conftest import serving, wait_until
from tests.faults.conftest import CALM, Neighbour, cradles, in_background, inits, kernel_of, new_init, zygotes
from tests.faults.test_store import locked

import cloche

BIG = b"x" * (32 << 20)


OF_INIT: dict[str, Callable[[cloche.Sandbox], object]] = {
    "upload": lambda box: box.files.write("/mnt/data/big", BIG),
    "download": lambda box: box.files.read("/mnt/data/there"),
    "list": lambda box: box.files.list("/mnt/data"),
    "command": lambda box: box.commands.run("true"),
    "context": lambda box: box.contexts.create(),
    "pause": lambda box: box.pause(),
    "snapshot": lambda box: box.snapshot(),
    "fork": lambda box: box.fork(),
    "branch": lambda box: box.contexts.list()[0].fork(),
}
OF_KERNEL: dict[str, Callable[[cloche.Sandbox], object]] = {
    "execution": lambda box: box.run("1"),
    "inspection": lambda box: box.variables(),
    "branch": lambda box: box.contexts.list()[0].fork(),
    "checkpoint": lambda box: box.contexts.list()[0].checkpoint(),
}


def assert_works(mine: dict[str, str]) -> None:
    with cloche.Sandbox(**mine) as other:
        assert other.run("6 * 7").text == "42"


def assert_unanswered(asked: Future[object]) -> None:
    with pytest.raises(TimeoutError):
        asked.result(0.05)


@pytest.mark.parametrize("moment", OF_INIT)
def test_an_init_killed_in_the_middle_of(running, mine, neighbour: Neighbour, moment: str):
    """Its sandbox is lost, and whoever waits is told so at once."""
    with new_init(running) as found:
        box = cloche.Sandbox(**mine)
    box.files.write("/mnt/data/there", b"there")
    found[0].send(signal.SIGSTOP)
    asked = in_background(lambda: OF_INIT[moment](box))
    assert_unanswered(asked)
    found[0].send(signal.SIGKILL)
    with pytest.raises(cloche.errors.SandboxLost):
        asked.result(60)
    with pytest.raises(cloche.errors.SandboxLost):
        box.run("1")
    neighbour.assert_unharmed()
    assert_works(mine)


def test_an_init_killed_at_rest_and_while_code_runs(running, mine, neighbour: Neighbour):
    with new_init(running) as found:
        box = cloche.Sandbox(**mine)
    begun = threading.Event()
    running_code = in_background(
        lambda: box.run("print(1)\nimport time\ntime.sleep(600)", on_event=lambda _: begun.set())
    )
    assert begun.wait(60)
    found[0].send(signal.SIGKILL)
    run = running_code.result(60)
    assert run.outcome == "died" and "lost" in (run.reason or "")
    with new_init(running) as found:
        idle = cloche.Sandbox(**mine)
    found[0].send(signal.SIGKILL)
    wait_until(lambda: not found[0].alive)
    with pytest.raises(cloche.errors.SandboxLost):
        idle.files.list("/mnt/data")
    neighbour.assert_unharmed()


def test_an_init_killed_before_an_upload_to_a_container_is_kept(running, place: Path):
    """What is told to be uploaded can be read after the container's end. What could not be kept is not told so."""
    openai = OpenAI(base_url=f"{running.url}/v1", api_key=running.key, max_retries=0)
    with new_init(running) as found:
        id = openai.containers.create(name="x").id
    box = cloche.Sandbox.connect(id.removeprefix("cntr_"), url=running.url, api_key=running.key)
    with locked(place / "store.sqlite3"):  # what is known of the file is written after the file, and before its copy
        uploading = in_background(lambda: openai.containers.files.create(id, file=("a.txt", b"a")))
        wait_until(lambda: box.files.exists("/mnt/data/a.txt"))
        found[0].send(signal.SIGKILL)
        wait_until(lambda: not found[0].alive)
        assert not uploading.done()
    with pytest.raises(BadRequestError, match="expired"):
        uploading.result(60)
    with contextlib.closing(sqlite3.connect(place / "store.sqlite3")) as db:
        assert db.execute("SELECT COUNT(*) FROM container_files WHERE sandbox = ?", [box.id]).fetchone() == (0,)


@pytest.mark.parametrize("moment", OF_KERNEL)
def test_a_kernel_killed_in_the_middle_of(running, mine, neighbour: Neighbour, moment: str):
    """It costs the context its variables, and nothing else: the next execution has a new kernel, and the files."""
    with cloche.Sandbox(**mine) as box:
        box.files.write("/mnt/data/there", b"there")
        kernel = kernel_of(running, box)
        kernel.send(signal.SIGSTOP)
        asked = in_background(lambda: OF_KERNEL[moment](box))
        assert_unanswered(asked)
        kernel.send(signal.SIGKILL)
        if moment == "execution":
            assert asked.result(60).outcome == "died"
        else:
            with pytest.raises(cloche.errors.Unavailable):
                asked.result(60)
        assert box.run("open('there').read(), 6 * 7").text == "('there', 42)"
    neighbour.assert_unharmed()


@pytest.mark.parametrize("memory", [True, False], ids=["with memory", "without"])
def test_a_kernel_killed_while_its_sandbox_is_paused(running, mine, neighbour: Neighbour, memory: bool):
    """Also there it is no more than a context without variables."""
    with cloche.Sandbox(**mine) as box:
        box.files.write("/mnt/data/there", b"there")
        kernel = kernel_of(running, box)
        box.pause(memory=memory)
        if memory:
            kernel.send(signal.SIGKILL)
        box.resume()
        wait_until(lambda: not kernel.alive)
        wait_until(lambda: box.run("open('there').read()").text == "'there'")
    neighbour.assert_unharmed()


@pytest.mark.parametrize("which", [zygotes, cradles])
def test_a_nursery_killed_at_rest_and_in_the_middle_of_a_creation(running, mine, neighbour: Neighbour, which):
    """Sandboxes live on without it. Whoever has one made meanwhile gets it from the next nursery, a little later."""
    with cloche.Sandbox(**mine) as before:
        before.run("kept = 1")
        (zygote,) = which(running)
        zygote.send(signal.SIGKILL)
        wait_until(lambda: not zygote.alive)
        assert_works(mine)
        with cloche.Sandbox(**mine) as after:
            (second,) = which(running) - {zygote}
            second.send(signal.SIGSTOP)
            creations = [in_background(lambda: cloche.Sandbox(**mine)) for _ in range(3)]
            for each in creations if which is zygotes else ():  # a cradle's last embryo is in the zygote's hands
                assert_unanswered(each)
            second.send(signal.SIGKILL)
            for each in creations:
                with each.result(60) as made:
                    assert made.run("6 * 7").text == "42"
            assert after.run("6 * 7").text == "42"
        assert before.run("kept").text == "1"
        assert before.contexts.create().run("2").text == "2"
    neighbour.assert_unharmed()


@pytest.mark.long
def test_cells_of_the_pool_killed_one_by_one_and_all_at_once(place):
    """Who asks next gets one that lives. That the dead may not have been noticed: `engine/test_sandboxes.py`.

    To die takes milliseconds, on a busy host tens of them. Until then nobody can tell such a cell from one that lives:
    whoever is given it has a sandbox whose init is killed, as above, and is told so.
    """
    with serving(place, env={**CALM, "CLOCHE_POOL_READY": "3"}) as server:
        mine = {"url": server.url, "api_key": server.key}
        wait_until(lambda: len(inits(server)) >= 3)
        for count in (1, 3):
            waiting = list(inits(server))[:count]
            for cell in waiting:
                cell.send(signal.SIGKILL)
            wait_until(lambda gone=waiting: not any(cell.alive for cell in gone))
            made = [cloche.Sandbox(**mine) for _ in range(3)]
            assert [box.run("6 * 7").text for box in made] == ["42"] * 3
            for box in made:
                box.close()
            wait_until(lambda: len(inits(server)) >= 3)
