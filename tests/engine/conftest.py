"""Engines for tests: one per backend and test session, since a nursery takes a second or two to start."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from tests.conftest import with_template

from cloche import errors
from cloche.config import Config, PoolConfig
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import SandboxSpec, Template
from cloche.sdk.assembly import assemble_engine

BACKENDS = ["plain-unsafe", "namespaces", "gvisor"]
# What a backend does itself, with kernels of their own: by `make test-all` only, and where there is a runsc.
ON_OWN_KERNELS = {
    "test_commands.py",
    "test_executions.py",
    "test_files.py",
    "test_images.py",
    "test_jobs.py",
    "test_pauses.py",
    "test_tool_calls.py",
}
# With kernels of their own, not as with the host's.
UNLIKE_OWN_KERNELS = {
    "test_files_and_trees_move_between_the_places_of_a_sandbox": "gVisor's files in memory do not tell their holes",
}
RUNSC = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "cloche-tests", "gvisor")

# What these claim is done by kernels and init inside, or by parts of the engine that know of no backend. `make test`
# has them with walls only; what a backend itself does (sandboxes, commands, files, endings, pauses) it has with each.
INSIDE = {
    "test_admission.py",
    "test_assistance.py",
    "test_bounds.py",
    "test_branching.py",
    "test_branching_hostile.py",
    "test_clocks_while_paused.py",
    "test_detached_runs.py",
    "test_executions.py",
    "test_inspection.py",
    "test_languages.py",
    "test_languages_java.py",
    "test_languages_r.py",
    "test_quotas.py",
    "test_retention.py",
    "test_tool_calls.py",
    "test_tool_server.py",
    "test_tool_waiting.py",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in list(items):
        given = getattr(item, "callspec", None)
        backend = given.params.get("config") if given is not None else None
        if backend == "gvisor" and item.path.name not in ON_OWN_KERNELS:
            items.remove(item)
        elif backend == "gvisor" or (item.path.name in INSIDE and backend == "plain-unsafe"):
            item.add_marker(pytest.mark.long)
        unlike = UNLIKE_OWN_KERNELS.get(getattr(item, "originalname", ""))
        if backend == "gvisor" and unlike is not None:
            item.add_marker(pytest.mark.skip(reason=unlike))


@pytest.fixture(scope="session", params=BACKENDS)
def config(request: pytest.FixtureRequest, data_dir: str, template: Template) -> Config:
    if request.param == "gvisor" and shutil.which("runsc") is None:
        os.environ["PATH"] += f":{RUNSC}"
    return Config(data_dir=data_dir, backend=request.param, pool=PoolConfig(ready=2))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(config: Config) -> AsyncIterator[Engine]:
    async with open_engine(config) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session")
async def box(engine: Engine) -> AsyncIterator[Sandbox]:
    sandbox = await engine.create(SandboxSpec())
    yield sandbox
    await sandbox.kill()


@pytest.fixture(scope="session")
def own_config(config: Config, template: Template, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The same with a data directory of its own, whose nurseries import nothing beforehand."""
    data_dir = with_template(tmp_path_factory.mktemp("own") / "data", template)
    return msgspec.structs.replace(config, data_dir=str(data_dir))


def open_engine(config: Config) -> Engine:
    try:
        return assemble_engine(config)
    except errors.IsolationUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def opening():
    return open_engine
