"""`make soak` itself: what it must not forgive, and a short run of it."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from e2b_code_interpreter import AsyncSandbox
from openai import AsyncOpenAI
from tests.conftest import serving, wait_until
from tests.faults.conftest import CALM, new_init

import cloche
from cloche import errors

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
from soak.book import Book, Lost, Wrong, kind_of  # noqa: E402
from soak.census import Census, Memory, Sample  # noqa: E402
from soak.deck import Deck  # noqa: E402
from soak.report import Report, leaks, trend  # noqa: E402
from soak.theirs import OPENSANDBOX  # noqa: E402
from soak.visit import Visit  # noqa: E402

Use = Callable[[], Awaitable[object]]

IDLE = Census(
    processes=12,
    threads=8,
    descriptors=60,
    sockets=20,
    cgroups=25,
    mounts=21,
    network_namespaces=7,
    instances=1,
    server_rss=60 << 20,
    all_pss=190 << 20,
    files=4,
    file_bytes=300,
    rows={"runs": 0, "volumes": 0},
    history_rows=50,
)


def test_a_wrong_answer_is_never_explained_by_a_fault():
    book = Book()
    book.fault("server killed", "gone", "unreachable", "unavailable", "other", "hang")
    book.failed("text", time.monotonic(), Wrong("41"))
    assert [each.operation for each in book.failures] == ["text"]


def test_a_fault_explains_only_failures_that_it_can_cause():
    book = Book()
    fault = book.fault("newest cell killed", "gone", victims=1)
    book.failed("text", time.monotonic(), Lost("died"))
    book.failed("text", time.monotonic(), errors.Unavailable("no"))
    book.failed("text", time.monotonic(), errors.SandboxLost("gone"))
    assert book.caused == {"newest cell killed": 1} and len(book.failures) == 2 and fault.victims == 0


def test_failures_begun_after_a_fault_are_not_explained_by_it():
    book = Book()
    book.fault("zygote killed", "unavailable").over(after_seconds=0)
    book.failed("text", time.monotonic() + 1, errors.NurseryFailed("no"))
    assert len(book.failures) == 1


def test_a_request_told_to_retry_is_counted_and_no_failure():
    book = Book()
    book.failed("text", time.monotonic(), errors.Busy("later", retry_after_seconds=1))
    assert book.refused == {"text": 1} and not book.failures


async def _ours(visit: Visit) -> Use:
    box = await cloche.AsyncSandbox(**visit.server)
    return lambda: box.run("1")


async def _e2b(visit: Visit) -> Use:
    box = await AsyncSandbox.create(**visit.e2b)
    return lambda: box.run_code("1")


async def _openai(visit: Visit) -> Use:
    client = AsyncOpenAI(base_url=f"{visit.url}/v1", api_key=visit.key, max_retries=0)
    made = await client.containers.create(name="x")
    return lambda: client.containers.files.create(made.id, file=("a", b"a"))


async def _opensandbox(visit: Visit) -> Use:
    client = visit.http("/opensandbox/v1", "OPEN-SANDBOX-API-KEY")
    made = (await client.post("/sandboxes", json=OPENSANDBOX)).raise_for_status().json()
    door = (await client.get(f"/sandboxes/{made['id']}/endpoints/44772")).raise_for_status().json()
    asked = {"url": f"http://{door['endpoint']}/code", "headers": door["headers"], "json": {"code": "1"}}

    async def use() -> None:
        (await client.post(**asked)).raise_for_status()

    return use


@pytest.mark.parametrize("make", [_ours, _e2b, _openai, _opensandbox])
async def test_a_sandbox_that_was_lost_is_gone_in_the_words_of_every_client(own_data_dir: Path, make):
    with serving(own_data_dir, env={**CALM, "CLOCHE_POOL_READY": "0"}) as server:
        with new_init(server) as found:
            use = await make(Visit(server.url, server.key, random.Random()))
        found[0].send(signal.SIGKILL)
        wait_until(lambda: not found[0].alive)
        with pytest.raises(Exception) as raised:
            await use()
    assert kind_of(raised.value) == "gone", raised.value


@pytest.mark.parametrize("name", [each for each in Census._fields if each not in ("rows", "history_rows")])
def test_more_of_anything_is_a_leak(name: str):
    more = IDLE._replace(**{name: getattr(IDLE, name) + (100 << 20)})
    assert leaks(IDLE, IDLE, 1) == [] and len(leaks(IDLE, more, 1)) == 1


def test_a_row_that_is_left_is_a_leak_and_fails_the_run():
    left = IDLE._replace(rows={**IDLE.rows, "runs": 1})
    report = Report(Book(), IDLE, left, [], "Soak")
    assert not report.passed and "rows of runs: 0 → 1" in report.markdown()
    assert Report(Book(), IDLE, IDLE, [], "Soak").passed


def test_memory_that_grows_is_told_from_memory_that_goes_up_and_down():
    def samples(growth: int) -> list[Sample]:
        return [Sample(2.0 * n, 1, Memory((100 << 20) + growth * n + (n % 7 << 20), 0)) for n in range(300)]

    flat, growing = trend(samples(0)), trend(samples(200 << 10))
    assert flat is not None and not flat.leaks
    assert growing is not None and growing.leaks
    assert trend(samples(0)[:10]) is None


def test_every_kind_comes_up_before_any_comes_up_again():
    deck = Deck({"a": 1, "b": 2}, random.Random(1))
    assert sorted(deck.draw() for _ in range(3)) == sorted(deck.draw() for _ in range(3)) == ["a", "b", "b"]


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_short_soak_passes(data_dir: str, template: object, tmp_path: Path):
    report = tmp_path / "soak.md"
    how = ["--minutes", "0.5", "--clients", "4", "--kills", "1", "--data-dir", data_dir, "--report", str(report)]
    ran = subprocess.run([sys.executable, "-m", "soak", *how], cwd=TOOLS, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "**Passed**" in report.read_text()
