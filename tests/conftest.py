"""What all tests share."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from cloche import errors
from cloche.config import Config
from cloche.engine.principal import set_current_principal
from cloche.isolation import ids
from cloche.linux import cgroups
from cloche.model import Template
from cloche.sdk import embedded
from cloche.templates import Catalogue, catalogue, ensure_template

REPOSITORY = Path(__file__).parent.parent
DATA_DIR = os.environ.get("CLOCHE_DATA_DIR") or str(REPOSITORY / ".data")

# A run starts hundreds of processes. Where the environment forbids to keep bytecode (images of containers often do),
# each of them compiles all that it imports: that was a third of the whole time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell that starts pytest in the background has it ignore SIGINT; commands that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

BUILD = (
    "import sys; from cloche.templates import Catalogue, ensure_template; "
    "ensure_template(Catalogue(sys.argv[1]), 'python')"
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Several workers begin with files that need no template, while it is built: in a new checkout that takes a minute.

    Every worker is given one stretch of the list, and the list must be the same for all of them.
    """
    worker = getattr(config, "workerinput", None)
    needing = {item.path for item in items if "template" in getattr(item, "fixturenames", ())}
    if worker is None or not needing:
        return
    if worker["workerid"] == "gw0":
        # If it fails, the fixture below tries again, and says why.
        config.add_cleanup(subprocess.Popen([sys.executable, "-c", BUILD, DATA_DIR], stderr=subprocess.DEVNULL).wait)
    workers = worker["workercount"]
    kinds = [[item for item in items if (item.path in needing) is needs] for needs in (False, True)]
    items[:] = [item for stretch in range(workers) for kind in kinds for item in part(kind, stretch, workers)]


def part(items: list[pytest.Item], number: int, parts: int) -> list[pytest.Item]:
    """That one of so many parts of nearly the same length, in the order of the whole."""
    return items[len(items) * number // parts : len(items) * (number + 1) // parts]


@pytest.fixture(scope="session", autouse=True)
def _no_settings_of_the_developer():
    """The developer's own variables must not decide what a test sees."""
    own = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(("CLOCHE_", "CODEAPI_"))}
    yield
    os.environ.update(own)


@pytest.fixture(autouse=True)
def _acts_for_no_key():
    """A principal that a test leaves must not act in the next test of its worker: each test's context is a copy of one.

    `Gatekeeper.admit` in a test that is no coroutine leaves one: canaries then waited for slots as its owner.
    """
    set_current_principal(None)
    yield
    set_current_principal(None)


@pytest.fixture(scope="session")
def data_dir() -> str:
    """A data directory that outlives the run, so that the built-in template is built once and not per run."""
    return DATA_DIR


@pytest.fixture(scope="session")
def single() -> bool:
    """Whether `user` and `root` are one identity on this host: then nothing is promised between them."""
    return ids.find_mapping().single


@pytest.fixture(scope="session")
def memory_is_enforced() -> bool:
    """Without a cgroup for it, init ends what uses too much, or the process's own limit on data is met first."""
    return "memory" not in cgroups.probe_cgroups().missing


@pytest.fixture(scope="session")
def template(data_dir: str) -> Template:
    """The built-in template `python`."""
    return ensure_template(Catalogue(data_dir), "python")


@pytest.fixture(scope="session")
def bare_dir(template: Template, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A data directory for all who start a server or an engine of their own and run plain Python in it.

    Its template imports nothing before the fork, so a nursery is there in a third of the time.
    """
    return str(with_template(tmp_path_factory.mktemp("bare") / "data", template))


class RunningServer(NamedTuple):
    """`cloche serve`, as a user has it: a process of its own, reached over a socket."""

    url: str  # http://127.0.0.1:PORT
    key: str
    process: subprocess.Popen[str]
    said: str = ""  # on stdout, before it was ready

    @property
    def e2b(self) -> dict[str, str]:
        """What E2B's SDKs take as arguments."""
        return {"api_key": self.key, "api_url": f"{self.url}/e2b", "sandbox_url": f"{self.url}/e2b"}


@pytest.fixture(scope="session")
def server(template: Template, data_dir: str) -> Iterator[RunningServer]:
    """A server for all tests of a run. Whoever changes what others see (keys, limits) starts their own."""
    with serving(data_dir) as running:
        yield running


@pytest.fixture(scope="module", params=["embedded", "remote"])
def library(request: pytest.FixtureRequest, bare_dir: str) -> Iterator[str]:
    """What is behind the library in a module's tests: the engine in this process, then a server."""
    if request.param == "embedded":
        with embedding(bare_dir):
            yield request.param
        return
    running: RunningServer = request.getfixturevalue("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLOCHE_URL", running.url)
        patch.setenv("CLOCHE_API_KEY", running.key)
        yield request.param


class CommandLine(NamedTuple):
    """`cloche` in a data directory, with a server there or without."""

    data_dir: str
    alone: bool

    def words(self, *args: str) -> list[str]:
        """The arguments of a call. Without a server, none may be used that happens to run."""
        words = [str(Path(sys.executable).with_name("cloche")), "--data-dir", self.data_dir]
        for word in args:
            words += [word, "--alone"] if self.alone and word in ("run", "shell", "chat") else [word]
        return words


@pytest.fixture(scope="session")
def server_in_place(
    template: Template, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, RunningServer]]:
    """A data directory of its own, and the server that runs in it."""
    place = with_template(tmp_path_factory.mktemp("server") / "data", template, template.imports)
    with serving(place) as running:
        yield place, running


@pytest.fixture(scope="session")
def place_of_server(server_in_place: tuple[Path, RunningServer]) -> str:
    """A data directory in which a server runs."""
    return str(server_in_place[0])


@pytest.fixture(scope="module", params=["alone", "server"])
def command_line(request: pytest.FixtureRequest, bare_dir: str) -> CommandLine:
    """What is behind `cloche run`, `shell` and `chat` in a module's tests: a nursery of its own, then a server."""
    if request.param == "alone":
        return CommandLine(bare_dir, alone=True)
    return CommandLine(request.getfixturevalue("place_of_server"), alone=False)


@contextmanager
def embedding(data_dir: str) -> Iterator[None]:
    """An engine in this process, for the library to use."""
    started = embedded.EmbeddedEngine(Config(data_dir=data_dir))
    try:
        started.open()
    except errors.IsolationUnavailable as error:
        pytest.skip(str(error))
    try:
        with embedded.use_engine(started):
            yield
    finally:
        started.close()


@pytest.fixture
def own_data_dir(template: Template, tmp_path: Path) -> Path:
    """A data directory with the template and nothing else: an own store, own keys, an own secret."""
    return with_template(tmp_path / "data", template)


def with_template(own: Path, template: Template, imports: tuple[str, ...] = ()) -> Path:
    """Makes that a data directory which has the template, of which a nursery imports no more than that."""
    version = own / "templates/python" / template.version
    version.mkdir(parents=True)
    for each in Path(template.root).iterdir():
        if each.is_dir():
            (version / each.name).symlink_to(each)
        else:
            shutil.copy(each, version)
    catalogue.write_template(msgspec.structs.replace(template, imports=imports), version)
    return own


@contextmanager
def serving(
    data_dir: str | Path,
    *options: str,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    command: Path = Path(sys.executable).with_name("cloche"),
) -> Iterator[RunningServer]:
    """A server with these options, until the block is left. `log` receives what it says on stderr."""
    key = "e2b_" + secrets.token_hex(20)
    arguments = [command, "serve", "--port", "0", *options]
    given = {**os.environ, "CLOCHE_DATA_DIR": str(data_dir), "CLOCHE_API_KEY": key, **(env or {})}
    with open(log, "w") if log else nullcontext() as stderr:
        process = subprocess.Popen(arguments, env=given, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        url, said = _wait_until_ready(process)
        yield RunningServer(url, key, process, said)
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_ready(process: subprocess.Popen[str]) -> tuple[str, str]:
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        if line.startswith("ready "):
            return line.split()[1], said
        said += line
    raise AssertionError("the server ended before it was ready")


def wait_until(what: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits for what is certain to happen: time decides only how long a failing test takes."""
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
