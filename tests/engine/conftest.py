"""Engines for tests: one per backend and test session, since a nursery takes a second or two to start."""

from __future__ import annotations

from collections.abc import AsyncIterator

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

BACKENDS = ["plain-unsafe", "namespaces"]

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
    "test_quotas.py",
    "test_retention.py",
    "test_tool_calls.py",
    "test_tool_server.py",
    "test_tool_waiting.py",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        given = getattr(item, "callspec", None)
        if item.path.name in INSIDE and given is not None and given.params.get("config") == "plain-unsafe":
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session", params=BACKENDS)
def config(request: pytest.FixtureRequest, data_dir: str, template: Template) -> Config:
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
