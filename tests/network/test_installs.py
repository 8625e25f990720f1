"""`pip install`, `uv pip install` and `npm install` in sandboxes without a network, of packages of the real indexes.

What is installed is the sandbox's own, comes before what its template has, and is there in the next cell.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import embedding, with_template

import cloche
from cloche.bench.lab import SampleCounts
from cloche.bench.measurements import InstallLab, measure_installs
from cloche.bench.rows import PACKAGE_PARTS, PACKAGE_ROWS, results_markdown
from cloche.config import Config
from cloche.config.sections import PackagesConfig
from cloche.model import Template
from cloche.sdk import embedded

USER_SITE = "/home/user/.local/lib/python3*/site-packages"
# What a program would do with a directory on the path of a process that is not its own.
PLANTED = "import os; open('/tmp/seen', 'a').write(f'{os.getpid()} {os.getuid()}\\n')\n"


def _is_reachable(host: str) -> bool:
    try:
        socket.create_connection((host, 443), 5).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def place(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with the template, and no package in its cache."""
    return with_template(tmp_path_factory.mktemp("installs") / "data", template, ("matplotlib",))


@pytest.fixture(scope="module")
def index(place: Path) -> Iterator[None]:
    """A host that has package indexes for its sandboxes, and no network."""
    for host in ("pypi.org", "registry.npmjs.org"):
        if not _is_reachable(host):
            pytest.skip(f"{host} cannot be reached from here")
    host = embedded.EmbeddedEngine(
        Config(data_dir=str(place), packages=PackagesConfig(enabled=True, deny=("forbidden-*",)))
    )
    host.open()
    try:
        with embedded.use_engine(host):
            yield
    finally:
        host.close()


@pytest.fixture
def box(index: None) -> Iterator[cloche.Sandbox]:
    with cloche.Sandbox() as box:
        yield box


def ok(box: cloche.Sandbox, command: str, **options: str) -> str:
    """What that command says, which must not fail."""
    done = box.commands.run(command, **options)  # type: ignore[arg-type]
    assert done.exit_code == 0, done
    return str(done.stdout)


def kept(place: Path) -> set[str]:
    """The files of packages that the host has."""
    return {path.name for path in (place / "cache").rglob("sha*-*")}


def test_packages_installed_in_a_cell_are_there_in_the_next(box: cloche.Sandbox) -> None:
    assert box.run("import mdurl").error is not None
    ran = box.run("!pip install mdurl")
    assert "Successfully installed mdurl" in ran.stdout, ran
    assert box.run("import mdurl; mdurl.__file__").text.startswith("'/home/user/.local/lib/")
    ran = box.run("%pip install iniconfig")
    assert "Successfully installed iniconfig" in ran.stdout, ran
    assert box.run("import iniconfig").error is None
    assert "iniconfig" in ok(box, "python -m pip list --user")


def test_uv_installs_and_fetches_nothing_that_the_template_has(box: cloche.Sandbox) -> None:
    done = box.commands.run("uv pip install mdurl python-dateutil")
    assert done.exit_code == 0 and "+ mdurl" in done.stderr and "+ python-dateutil" not in done.stderr, done
    assert box.run("import mdurl").error is None
    assert [line for line in ok(box, f"ls {USER_SITE}").split() if not line.startswith("mdurl")] == []
    assert "numpy" in ok(box, "uv pip list") and "mdurl" in ok(box, "pip list")
    ok(box, "uv pip uninstall mdurl && uv pip check && uv pip tree")
    assert ok(box, f"ls {USER_SITE}") == ""


@pytest.mark.long
def test_npm_installs_locally_and_globally(box: cloche.Sandbox) -> None:
    ok(box, "npm install left-pad && npm install -g semver")
    context = box.contexts.create(language="javascript")
    assert context.run("require('left-pad')('x', 3)").text == "'  x'"
    assert ok(box, "semver 1.2.3 -i minor").strip() == "1.3.0"


@pytest.mark.long
def test_a_second_sandbox_installs_from_the_cache_of_the_host(index: None, place: Path) -> None:
    found = [kept(place)]
    for _ in range(2):
        with cloche.Sandbox() as box:
            ok(box, "pip install pluggy && npm install is-odd")
        found.append(kept(place))
    assert len(found[1]) > len(found[0]) + 1 and found[2] == found[1], found


@pytest.mark.long
def test_root_and_user_install_to_one_place(box: cloche.Sandbox, single: bool) -> None:
    bash = box.contexts.create(language="bash")
    ok(box, "pip install mdurl && npm install -g left-pad && python -c 'import mdurl'", user="root")
    assert box.run("import mdurl").error is None
    assert bash.run("pip install iniconfig && pip uninstall -y mdurl iniconfig").error is None
    if not single:
        assert ok(box, "find /home/user/.local -user root") == ""
    ok(box, "uv pip install mdurl", user="root")
    ok(box, "uv pip uninstall mdurl")


@pytest.mark.long
def test_another_version_comes_before_that_of_the_template(box: cloche.Sandbox) -> None:
    version = "python -c 'import importlib.metadata as m; print(m.version(\"tabulate\"))'"
    own = ok(box, version).strip()
    for installer in ("pip", "uv pip"):
        ok(box, f"{installer} install tabulate==0.8.10")
        assert ok(box, version).strip() == "0.8.10"
        assert box.run("import importlib, tabulate; importlib.reload(tabulate).__version__").text == "'0.8.10'"
        ok(box, f"{installer} uninstall tabulate" + (" -y" if installer == "pip" else ""))
        assert ok(box, version).strip() == own
    ok(box, f"uv pip install --reinstall tabulate=={own}")
    assert "tabulate/__init__.py" in ok(box, f"cat {USER_SITE}/tabulate-*/RECORD")


@pytest.mark.long
def test_another_version_of_an_imported_package_is_there_after_a_restart(box: cloche.Sandbox) -> None:
    where = "import cycler; cycler.__file__"
    own = box.run(where).text
    ran = box.run("!pip install -q cycler==0.11.0")
    assert "cycler is imported here already: restart this context" in ran.stderr, ran
    assert box.run(where).text == own
    box.contexts.restart(box.contexts.list()[0])
    assert box.run(where).text.startswith("'/home/user/.local/")
    ran = box.run("import matplotlib.pyplot as plt; plt.plot([1, 2]); print(1)")
    assert ran.stdout == "1\n" and [each for each in ran.results if each.png], ran
    assert box.run("1/0").error is not None and box.run("_ = 5; _ + 1").text == "6"


@pytest.mark.long
def test_environments_made_inside_are_their_own(box: cloche.Sandbox) -> None:
    ok(box, "python -m venv --without-pip /tmp/one && uv pip install --python /tmp/one mdurl && uv venv /tmp/two/.venv")
    ok(box, "uv pip install iniconfig", cwd="/tmp/two")
    assert "/tmp/one/" in ok(box, "/tmp/one/bin/python -c 'import mdurl; print(mdurl.__file__)'")
    assert "/tmp/two/" in ok(box, "/tmp/two/.venv/bin/python -c 'import iniconfig; print(iniconfig.__file__)'")
    for python in ("python", "/tmp/one/bin/python"):
        assert box.commands.run(f"{python} -c 'import iniconfig'").exit_code != 0
    assert box.commands.run("/tmp/two/.venv/bin/python -c 'import numpy'").exit_code != 0


def test_a_package_that_is_being_written_is_found_where_it_lies(box: cloche.Sandbox) -> None:
    box.files.write("/home/user/own/pyproject.toml", b'[project]\nname = "own"\nversion = "1"\n')
    box.files.write("/home/user/own/own.py", b"answer = 42\n")
    ran = box.run("!uv pip install -q -e /home/user/own")
    assert box.run("import own; own.answer").text == "42", ran


def test_installed_packages_count_against_the_space_of_the_sandbox(index: None) -> None:
    with cloche.Sandbox(limits={"space_bytes": 1 << 20}) as box:
        done = box.commands.run("pip install rich")
        assert done.exit_code != 0 and "No space left on device" in done.stderr + done.stdout, done
        assert box.run("1 + 1").text == "2"


@pytest.mark.long
def test_no_process_but_a_programs_own_looks_where_programs_install(box: cloche.Sandbox, single: bool) -> None:
    site = ok(box, "python -m site --user-site").strip()
    planted = {"planted.pth": "import planted\n"}
    planted |= dict.fromkeys(("planted.py", "secrets.py", "usercustomize.py", "cloche.py"), PLANTED)
    for name, text in planted.items():
        box.files.write(f"{site}/{name}", text.encode())
    box.contexts.create()
    box.files.list("/mnt/data")
    ok(box, "true", user="root")
    ok(box, "python -c 1")
    seen = [line.split() for line in box.files.read("/tmp/seen").decode().splitlines()]
    assert seen and not [pid for pid, uid in seen if pid == "1" or (uid != "1000" and not single)], seen
    ran = box.run("import os; open('/proc/1/cmdline').read().split('\\0')")
    assert "-I" in ran.text  # isolated: no user's directory, no variable of the environment


def test_the_nurserys_settings_for_uv_cannot_be_changed_inside(box: cloche.Sandbox) -> None:
    assert "interpreter-" in ok(box, "find /opt/cloche/warm -name '*.msgpack'")
    for user in ("user", "root"):
        done = box.commands.run("touch /opt/cloche/warm/x; rm -r /opt/cloche/warm/*", user=user)
        assert "Read-only file system" in done.stderr, done


@pytest.mark.long
def test_installations_are_measured(index: None, place: Path) -> None:
    with InstallLab(Config(data_dir=str(place)), SampleCounts(installs=1)) as lab:
        measure_installs(lab, ["uv"])
    assert {key: samples.failures for key, samples in lab.book.rows.items() if samples.failures} == {}
    assert set(lab.book.rows) == {"uv_first", "uv_second"} < set(PACKAGE_ROWS)
    assert {key for row in PACKAGE_ROWS.values() for key in row.against} <= set(PACKAGE_ROWS)
    assert "from the host's cache" in results_markdown(PACKAGE_PARTS, lab.book, {})


PYPI = "pypi.org and files.pythonhosted.org"
INSTALLERS = {
    "pip install mdurl": PYPI,
    "uv pip install mdurl": PYPI,
    "uvx ruff": PYPI,
    "npm install left-pad": "registry.npmjs.org",
}


@pytest.mark.long
def test_installers_name_the_needed_rule_and_do_not_retry_for_long(bare_dir: str) -> None:
    with embedding(bare_dir), cloche.Sandbox(network={"allow": ["example.invalid"]}) as box:
        for command, hosts in INSTALLERS.items():
            done = box.commands.run(command)
            assert done.exit_code != 0 and f"does not allow {hosts}, so nothing" in done.stderr, done
            assert done.stderr.count("Retrying") <= 1 and "2 retries" not in done.stderr
        tried = Counter((each.host, each.verdict) for each in box.network.log())
        assert set(tried) == {(host, "denied") for host in f"{PYPI} and registry.npmjs.org".split(" and ")}
        assert "Cloche" not in box.commands.run("pip install --no-index mdurl").stderr


def test_uv_forwards_signals_and_the_status_of_its_program(bare_dir: str) -> None:
    with embedding(bare_dir), cloche.Sandbox() as box:
        for status in (7, 2):  # of which the second is uv's own, too, where it cannot fetch something
            done = box.commands.run(f"uv run --no-project sh -c 'exit {status}'")
            assert (done.exit_code, "Cloche" in done.stderr) == (status, False)
        box.files.write(
            "/tmp/program.sh", b"trap 'echo asked to end; exit 3' TERM; echo up; while :; do sleep 0.05; done\n"
        )
        done = box.commands.run(
            "uv run --no-project sh /tmp/program.sh > /tmp/said & until grep -q up /tmp/said; do sleep 0.05; done; "
            "kill $!; wait $!; echo $?; cat /tmp/said"
        )
        assert done.stdout.split("\n")[:3] == ["3", "up", "asked to end"], done
        done = box.commands.run(  # who opens a pipe to write waits for who reads it: by then uv runs
            "mkfifo /tmp/wanted; nohup uv pip install -r /tmp/wanted & exec 3> /tmp/wanted; "
            "kill -HUP $!; exec 3>&-; wait $!"
        )
        assert done.exit_code == 0, done


@pytest.mark.parametrize("installer", ["pip", "uv pip", "npm"])
def test_a_refusal_by_the_operator_is_explained(box: cloche.Sandbox, installer: str) -> None:
    done = box.commands.run(f"{installer} install forbidden-thing")
    assert done.exit_code != 0 and "does not allow the package forbidden-thing" in done.stderr, done
    done = box.commands.run(f"{installer} install no-such-thing-{'x' * 60}")
    assert done.exit_code != 0 and "does not allow" not in done.stderr, done


@pytest.mark.long
def test_without_an_index_installers_give_up_at_once_and_say_why(bare_dir: str) -> None:
    with embedding(bare_dir), cloche.Sandbox() as box:
        for command in INSTALLERS:
            done = box.commands.run(command)
            assert done.exit_code != 0 and "no network and no package index" in done.stderr, done
            assert f"a network policy with {INSTALLERS[command]}." in done.stderr
            assert "Retrying" not in done.stderr and "retries" not in done.stderr
        assert "no network" not in box.commands.run("pip install numpy").stderr  # it is there
