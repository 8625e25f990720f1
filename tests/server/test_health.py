"""Health is red when executions fail, not only when the process is dead; counts are right and tell of nobody."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import httpx2
from e2b_code_interpreter import Sandbox
from tests.conftest import serving, wait_until

from cloche.engine.operations.health import Health
from cloche.engine.operations.metrics import EngineCounters


def kill_nurseries(server_pid: int) -> None:
    for task in Path(f"/proc/{server_pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            os.kill(child, signal.SIGKILL)


def test_health_follows_the_outcome_of_executions(own_data_dir):
    """The template's packages are taken away, so that no nursery starts any more, and come back."""
    (env,) = own_data_dir.glob("templates/python/*/env")
    with serving(own_data_dir, env={"CLOCHE_SERVER_CANARY_SECONDS": "1", "CLOCHE_POOL_READY": "0"}) as server:

        def health() -> httpx2.Response:
            return httpx2.get(f"{server.url}/health")

        assert health().json()["status"] == "ok"
        assert httpx2.get(f"{server.url}/ready").status_code == 200

        packages = env.readlink()
        env.unlink()
        kill_nurseries(server.process.pid)
        wait_until(lambda: health().status_code == 503)
        assert re.fullmatch("[a-z_ ]+", health().json()["why"])
        assert "cloche_healthy 0.0" in httpx2.get(f"{server.url}/metrics").text

        env.symlink_to(packages)
        wait_until(lambda: health().status_code == 200)
        box = Sandbox.create(**server.e2b)
        assert box.run_code("6*7").text == "42"
        box.kill()


async def test_an_unexpected_error_is_a_failure_and_the_watch_continues():
    class Broken:
        """In place of an engine: it cannot be made to fail like that."""

        counters = EngineCounters()
        asked = 0

        async def create(self, spec):
            self.asked += 1
            raise OSError("too many open files")

    engine = Broken()
    health = Health(engine, every_seconds=0.01)
    watching = asyncio.create_task(health.watch())
    async with asyncio.timeout(30):
        while engine.asked < 3:
            await asyncio.sleep(0.01)
    assert health.verdict.why == "internal_error"
    watching.cancel()


def counted(url: str) -> dict[str, float]:
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_sandboxes_executions_and_requests_are_counted(own_data_dir):
    with serving(own_data_dir) as server:
        assert counted(server.url)["cloche_sandboxes_created_total"] == 0  # canaries do not count
        box = Sandbox.create(metadata={"tenant": "never-shown"}, **server.e2b)
        assert counted(server.url)["cloche_sandboxes"] == 1
        for code in ("1", "2", "1/0"):
            box.run_code(code)
        box.kill()
        text = httpx2.get(f"{server.url}/metrics").text
        now = counted(server.url)
        assert now["cloche_sandboxes"] == 0
        assert now["cloche_sandboxes_created_total"] == 1
        assert now['cloche_sandboxes_ended_total{state="killed"}'] == 1
        assert now['cloche_executions_total{outcome="ok"}'] == 2
        assert now['cloche_executions_total{outcome="raised"}'] == 1
        assert now["cloche_execution_seconds_count"] == now['cloche_execution_seconds_bucket{le="+Inf"}'] == 3
        assert now['cloche_requests_total{dialect="e2b",status="201"}'] == 1
        assert now['cloche_request_seconds_count{dialect="e2b"}'] >= 5
        assert "never-shown" not in text and box.sandbox_id not in text and "local" not in text
