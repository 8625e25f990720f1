"""Networks from the command line: `cloche run` and `shell` with and without a server, `serve`, `logs`, `doctor`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.conftest import RunningServer, serving, with_template
from tests.network.neighbour import Neighbour, living_next_door

import cloche
from cloche.cli import main
from cloche.cli.network_options import NetworkOptions, to_network_policy
from cloche.config import Config, load_config
from cloche.engine.operations import doctor
from cloche.model import Template

CLOCHE = str(Path(sys.executable).with_name("cloche"))
PATIENCE_SECONDS = 90

Done = subprocess.CompletedProcess[str]
Call = Callable[..., Done]


@pytest.fixture(scope="module")
def there() -> Iterator[Neighbour]:
    with living_next_door() as neighbour:
        yield neighbour


@pytest.fixture(scope="module")
def place(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(tmp_path_factory.mktemp("cli") / "data", template)


@pytest.fixture(scope="module")
def running(place: Path, there: Neighbour) -> Iterator[RunningServer]:
    """Its operator lets sandboxes reach one name, by the options of `cloche serve`."""
    env = there.variables()
    allow = ("--allow", there.at("*.test"), "--allow", f"api.test:{there.tls_port}")
    with serving(place, *allow, "--deny", "other.test", env=env) as server:
        yield server


@pytest.fixture
def call(place: Path, there: Neighbour, tmp_path: Path) -> Call:
    """`cloche` in the server's data directory, and in an empty directory."""

    def call(*words: str, **env: str) -> Done:
        given = {**os.environ, **there.variables(), "CLOCHE_DATA_DIR": str(place), **env}
        return subprocess.run(
            [CLOCHE, *words], env=given, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )

    return call


@pytest.fixture
def within(data_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`cloche` in this process, for what ends before there is a sandbox."""
    monkeypatch.chdir(tmp_path)

    def within(*words: str, **env: str) -> Result:
        return CliRunner().invoke(main, words, env={"CLOCHE_DATA_DIR": data_dir, **env})

    return within


@pytest.fixture(params=["alone", "server"])
def run(request, call: Call, running: RunningServer) -> Call:
    more = ("--alone",) if request.param == "alone" else ()
    return lambda *words, **env: call("run", *more, *words, **env)


def test_run_reaches_allowed_hosts(run: Call, there: Neighbour):
    done = run("--allow", there.at("api.test"), "-c", there.fetch("api.test") + there.fetch("www.api.test"))
    assert (done.stdout, done.returncode) == ("hellorefused", 0), done.stderr
    assert run("-c", there.fetch("api.test")).stdout == "refused"


def test_deny_comes_before_allow(run: Call, there: Neighbour):
    options = ("--allow", there.at("*.test"), "--deny", "www.api.test")
    assert run(*options, "-c", there.fetch("api.test") + there.fetch("www.api.test")).stdout == "hellorefused"


def test_a_secret_comes_from_a_variable_or_a_file_and_is_not_seen_inside(run: Call, there: Neighbour, tmp_path: Path):
    (tmp_path / "token").write_text("Bearer hush-of-a-file\n")
    code = (
        "import os, urllib.request\n"
        f"told = urllib.request.urlopen('https://api.test:{there.tls_port}/headers').read().decode()\n"
        "print('authorization' in told, 'hush' in told + str(dict(os.environ)))"
    )
    options = ("--secret", "api.test:Authorization=file:token", "--secret", "api.test:X-Key=env:MY_KEY")
    done = run("--allow", f"api.test:{there.tls_port}", *options, "-c", code, MY_KEY="hush-of-a-variable")
    assert done.stdout == "True False\n", done.stderr
    seen = there.seen[-1]
    assert (seen["authorization"], seen["x-key"]) == ("Bearer hush-of-a-file", "hush-of-a-variable")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--secret", "api.test:Authorization=hush"], "command lines"),
        (["--secret", "hush"], "env:NAME"),
        (["--secret", "api.test:Authorization=env:NOT_THERE"], "NOT_THERE"),
        (["--secret", "api.test:Authorization=file:/nowhere"], "/nowhere"),
        (["--allow", "https://api.test/"], "no scheme"),
    ],
)
def test_a_bad_option_is_said_without_any_value(within: Callable[..., Result], options: list[str], said: str):
    done = within("run", "--alone", "--allow", "api.test", *options, "-c", "1")
    assert done.exit_code == 125 and said in done.stderr and "hush" not in done.stderr


def test_deny_and_secrets_need_an_allow(within: Callable[..., Result]):
    for option in (["--deny", "x.test"], ["--secret", "x.test:A=env:HOME"]):
        done = within("run", "--alone", *option, "-c", "1")
        assert done.exit_code == 125 and "--allow" in done.stderr


def test_a_placeholder_is_a_variables_name():
    ask = NetworkOptions(allow=("api.test",), secrets=("api.test:$TOKEN=env:HOME", "*.api.test:X-Key=env:HOME"))
    policy = to_network_policy(ask)
    assert policy is not None
    assert [(each.domain, each.name, each.header) for each in policy.secrets] == [
        ("api.test", "TOKEN", None),
        ("*.api.test", None, "X-Key"),
    ]


def test_the_flags_of_serve_are_said_where_their_values_are(data_dir: str):
    flags = {"network.allow": ("pypi.org",), "packages.enabled": True}
    loaded = load_config(environ={"CLOCHE_DATA_DIR": data_dir}, flags=flags)
    assert (loaded.network.allow, loaded.packages.enabled) == (("pypi.org",), True)
    assert (loaded.origins["network.allow"], loaded.origins["packages.enabled"]) == ("flag --allow", "flag --packages")


def test_the_servers_operator_bounds_a_run(call: Call, running: RunningServer, there: Neighbour):
    done = call("run", "--allow", "example.com", "-c", "1")
    assert done.returncode == 125 and "operator" in done.stderr and "example.com" in done.stderr
    done = call("run", "--allow", "*:*", "-c", there.fetch("api.test") + there.fetch("other.test"))
    assert done.stdout == "hellorefused"


def test_a_shell_has_the_same_options(call: Call, running: RunningServer, there: Neighbour, place: Path):
    env = {**os.environ, "CLOCHE_DATA_DIR": str(place)}
    words = [CLOCHE, "shell", "--allow", there.at("api.test")]
    cell = f"import urllib.request as u; print(u.urlopen({there.url('api.test')!r}).read())\n"
    done = subprocess.run(words, input=cell, env=env, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert "b'hello'" in done.stdout, done.stderr


def test_running_sandboxes_keep_their_network(within: Callable[..., Result]):
    refused = within("shell", "--allow", "x.test", "i" + "0" * 20)
    assert refused.exit_code == 2 and "fresh sandbox" in refused.stderr


def test_packages_are_ones_own_to_allow_and_a_server_is_not_asked(call: Call, running: RunningServer):
    code = "import os; print('49980' in open('/etc/pip.conf').read() if os.path.exists('/etc/pip.conf') else None)"
    assert call("run", "--packages", "-c", code).stdout == "True\n"
    assert call("run", "-c", code).stdout != "True\n"


def test_logs_show_attempts_of_ended_sandboxes(call: Call, running: RunningServer, there: Neighbour):
    network = {"allow": [there.at("api.test")]}
    with cloche.Sandbox(network=network, url=running.url, api_key=running.key) as box:
        box.run(there.fetch("api.test") + there.fetch("www.api.test"))
        alive = call("logs", "--network", box.id).stdout.splitlines()
        everybody = call("logs", "--network").stdout
    assert [line.split()[1:4] for line in alive] == [
        ["allowed", "http", there.at("api.test")],
        ["denied", "http", there.at("www.api.test")],
    ]
    assert f"{box.id}  allowed" in everybody and "request.ended" not in everybody
    ended = call("logs", "--network", box.id).stdout
    assert there.at("www.api.test") in ended and "denied" in ended


def test_the_log_of_one_that_has_ended_has_every_host_that_it_reached(
    call: Call, running: RunningServer, there: Neighbour
):
    """Also where it spoke to others so often that the server's log did not have a line for each."""
    network = {"allow": [there.at("api.test"), there.at("www.api.test")]}
    with cloche.Sandbox(network=network, url=running.url, api_key=running.key) as box:
        often = f"for _ in range(150): urllib.request.urlopen({there.url('api.test')!r}).read()\n"
        box.run(f"import urllib.request\n{often}{there.fetch('www.api.test')}\n{often}")
    lines = call("logs", "--network", box.id).stdout.splitlines()
    (found,) = [line for line in lines if there.at("www.api.test") in line]
    assert f"{box.id}  allowed" in found
    assert there.at("api.test") in lines[-1] and "more connections" in lines[-1] and "received" in lines[-1]
    shown = [line for line in lines if there.at(" api.test") in line]
    more = sum(int(line.split(" more connections")[0].rsplit("  ", 1)[1]) for line in shown if " more con" in line)
    assert more + len([line for line in shown if " more con" not in line]) == 300


def test_logs_show_open_connections(call: Call, running: RunningServer, there: Neighbour):
    code = (
        "import socket\n"
        "held = socket.create_connection(('127.0.0.1', 49980))\n"
        f"held.sendall(b'CONNECT {there.at('api.test')} HTTP/1.1\\r\\n\\r\\n')\n"
        "print(held.recv(99)[:12])"
    )
    with cloche.Sandbox(network={"allow": [there.at("api.test")]}, url=running.url, api_key=running.key) as box:
        assert box.run(code).stdout == "b'HTTP/1.1 200'\n"
        (line,) = call("logs", "--network", box.id).stdout.splitlines()
        assert line.split()[1:4] == ["open", "connect", there.at("api.test")]
        assert [each.verdict for each in box.network.log()] == ["open"]


def test_doctor_shows_the_rules_in_force(within: Callable[..., Result], data_dir: str):
    indexes = {"CLOCHE_PACKAGES_ENABLED": "1", "CLOCHE_PACKAGES_PYPI": "https://me:hush@index.example.com/x/simple"}
    bound = {"CLOCHE_NETWORK_ALLOW": "pypi.org,*.example.com", "CLOCHE_NETWORK_DENY": "x.example.com"}
    said = within("doctor", **indexes, **bound).output
    assert "pypi.org, *.example.com; never x.example.com" in said
    assert "a client without a policy gets nothing, and one of E2B or OpenSandbox gets all of it" in said
    assert "install from index.example.com (as configured), npm from" in said and "hush" not in said
    checks = {each.name: each for each in doctor.network_checks(Config(data_dir=data_dir))}
    assert {name: each.state for name, each in checks.items()} == dict.fromkeys(
        ("policy", "packages", "secrets"), "enforced"
    )
    assert "nothing but their own loopback" in checks["policy"].detail and checks["packages"].detail.startswith("off")
    plain = Config(data_dir=data_dir, backend="plain-unsafe")
    assert [each.state for each in doctor.network_checks(plain)] == ["missing"]


def test_config_prints_lists_of_the_environment_and_no_password_of_an_index(within: Callable[..., Result]):
    env = {
        "CLOCHE_NETWORK_ALLOW": "pypi.org, *.example.com",
        "CLOCHE_NETWORK_HOSTS": "a.test=127.0.0.1 b.test=127.0.0.2,127.0.0.3",
        "CLOCHE_PACKAGES_PYPI": "https://me:hush@index.example.com/simple",
    }
    printed = json.loads(within("config", "--json", **env).stdout)
    allow = {"value": ["pypi.org", "*.example.com"], "origin": "environment variable CLOCHE_NETWORK_ALLOW"}
    assert printed["network.allow"] == allow
    assert printed["network.hosts"]["value"] == {"a.test": "127.0.0.1", "b.test": "127.0.0.2,127.0.0.3"}
    assert printed["packages.pypi"]["value"] == ["https://***@index.example.com/simple"]


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"CLOCHE_NETWORK_ALLOW": "http://x"}, "no scheme"),
        ({"CLOCHE_NETWORK_DENY": "a.test,b c"}, "network.deny: 'b c' is not"),
        ({"CLOCHE_NETWORK_DEFAULT": "b c"}, "(environment variable CLOCHE_NETWORK_DEFAULT)"),
        ({"CLOCHE_NETWORK_CONNECTIONS": "0"}, "(environment variable CLOCHE_NETWORK_CONNECTIONS)"),
        ({"CLOCHE_NETWORK_HOSTS": "a.test"}, "network.hosts"),
        ({"CLOCHE_NETWORK_INTERNAL": "all"}, "network.internal"),
        ({"CLOCHE_PACKAGES_PYPI": "ftp://me:hush@x/"}, "packages"),
    ],
)
def test_a_bad_setting_is_said(within: Callable[..., Result], env: dict[str, str], said: str):
    done = within("config", **env)
    assert done.exit_code == 125 and said in done.stderr and "hush" not in done.stderr and "$." not in done.stderr


def test_a_string_in_the_place_of_a_list_is_said_with_its_key(within: Callable[..., Result], tmp_path: Path):
    (tmp_path / "cloche.toml").write_text('[network]\ndeny = "pypi.org"\n')
    done = within("config")
    assert done.exit_code == 125 and "network.deny" in done.stderr and "write a list, ['pypi.org']" in done.stderr
