"""Whoever runs the host has the last word: on what clients may ask for, what templates may say, and by which file."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from tests.conftest import RunningServer, serving
from tests.network.neighbour import Neighbour, living_next_door

import cloche
from cloche import config, errors
from cloche.model import SandboxSpec
from cloche.network_policy import NetworkPolicy, first_disallowed_pattern
from cloche.sdk.assembly import assemble_engine

CLOCHE = str(Path(sys.executable).with_name("cloche"))


@pytest.fixture(scope="module")
def there() -> Iterator[Neighbour]:
    with living_next_door() as neighbour:
        yield neighbour


@pytest.fixture(scope="module")
def bounded(bare_dir: str, there: Neighbour) -> Iterator[dict[str, str]]:
    """A server that allows the names below api.test, and gives one of them to those who ask for nothing."""
    allow, default = (there.at("*.api.test"), there.at("api.test")), (there.at("www.api.test"),)
    with serving(bare_dir, env=there.variables(*allow, default=default)) as running:
        yield {"url": running.url, "api_key": running.key}


def test_a_server_allows_nothing_unless_its_operator_does(server: RunningServer):
    to = {"url": server.url, "api_key": server.key}
    with pytest.raises(errors.InvalidRequest, match=r"operator.*network\.allow"):
        cloche.Sandbox(network={"allow": ["pypi.org"]}, **to)
    with cloche.Sandbox(network={"deny": ["*"]}, **to) as box:
        with pytest.raises(errors.InvalidRequest, match=r"network\.allow"):
            box.network.set({"allow": ["*"]})
        assert box.network.policy == NetworkPolicy(deny=("*",))


def test_hosts_outside_the_bound_are_refused_by_name(bounded: dict[str, str], there: Neighbour):
    with pytest.raises(errors.InvalidRequest, match=r"other\.test.*network\.allow"):
        cloche.Sandbox(network={"allow": [there.at("api.test"), there.at("other.test")]}, **bounded)
    with pytest.raises(errors.InvalidRequest, match=r"api\.test.*80 and 443"):
        cloche.Sandbox(network={"allow": ["api.test"]}, **bounded)
    with cloche.Sandbox(network={}, **bounded) as box, pytest.raises(errors.InvalidRequest, match=r"192\.0\.2\.1"):
        box.network.set({"allow": ["192.0.2.1"]})


@pytest.mark.parametrize(
    ("allow", "deny", "asked", "is_outside"),
    [
        (["a.test"], [], "a.test", False),
        (["a.test"], [], "a.test:443", False),
        (["a.test"], [], "a.test:8443", True),
        (["a.test:8443"], [], "a.test", True),
        (["a.test:8000-8100"], [], "*:8100-9000", False),
        (["*"], ["a.test"], "a.test", True),
        (["*"], ["*.test"], "a.test:80", True),
        (["*"], ["*.test"], "*.a.test", True),
        (["*"], ["a.test"], "*.test", False),
        (["a.test"], ["a.test"], "*", True),
        (["*:*"], ["a.test:443"], "a.test", False),
        (["*:*"], ["a.test:443", "a.test:1-100"], "a.test", True),
        (["*:*"], ["*:25"], "a.test:25", True),
        (["*:*"], ["*:25"], "a.test:20-30", False),
        (["*"], ["10.0.0.0/8"], "10.1.0.0/16", True),
        (["*"], ["10.1.0.0/16"], "10.0.0.0/8", False),
        (["2001:db8::/32"], [], "10.0.0.0/8", True),
    ],
)
def test_ports_and_denials_of_the_bound_count_too(allow: list[str], deny: list[str], asked: str, is_outside: bool):
    bound = NetworkPolicy(allow=tuple(allow), deny=tuple(deny))
    assert first_disallowed_pattern(NetworkPolicy(allow=(asked,)), bound) == (asked if is_outside else None)


def test_wider_rules_are_cut_to_the_bound(bounded: dict[str, str], there: Neighbour):
    with cloche.Sandbox(network={"allow": ["*:*"]}, **bounded) as box:
        assert box.run(there.fetch("api.test") + there.fetch("other.test")).stdout == "hellorefused"
        (*_, denied) = box.network.log()
        assert (denied.verdict, denied.host) == ("denied", "other.test")


def test_no_request_gets_the_default_and_an_empty_one_gets_nothing(bounded: dict[str, str], there: Neighbour):
    with cloche.Sandbox(**bounded) as box:
        assert box.run(there.fetch("www.api.test") + there.fetch("api.test")).stdout == "hellorefused"
    with cloche.Sandbox(network=False, **bounded) as box:
        assert box.run(there.fetch("www.api.test")).stdout == "refused"


def test_network_modules_are_loaded_with_the_first_network(bare_dir: str):
    program = (
        "import sys, cloche\n"
        "import cloche.api.system\n"
        "with cloche.Sandbox() as box: box.run('1')\n"
        "print([name for name in sys.modules if name.startswith('cloche.egress')])"
    )
    env = {**os.environ, "CLOCHE_DATA_DIR": bare_dir}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=90)
    assert done.stdout == "[]\n", done.stderr


def test_metrics_count_proxied_traffic(bounded: dict[str, str], there: Neighbour):
    with cloche.Sandbox(network={"allow": [there.at("api.test")]}, **bounded) as box:
        box.run(there.fetch("api.test") + there.fetch("other.test"))
    told = httpx2.get(f"{bounded['url']}/metrics", trust_env=False).text
    counts = dict(line.rsplit(" ", 1) for line in told.splitlines() if line.startswith("cloche_network_"))
    assert float(counts['cloche_network_connections_total{protocol="http",verdict="allowed"}']) >= 1
    assert float(counts['cloche_network_connections_total{protocol="http",verdict="denied"}']) >= 1
    assert float(counts['cloche_network_bytes_total{direction="received"}']) >= len("hello")
    assert counts["cloche_network_open"] == "0.0"


def test_in_process_the_bound_is_the_configured_one(data_dir: str):
    assert config.for_embedded_use(config.Config(data_dir=data_dir)).network.allow == ("*:*",)
    own = config.load_config(environ={"CLOCHE_DATA_DIR": data_dir, "CLOCHE_NETWORK_ALLOW": "api.test"})
    assert config.for_embedded_use(own).network.allow == ("api.test",)


# --- without walls there is nothing to open a door in


def test_plain_unsafe_takes_no_policy_that_allows_something(bare_dir: str):
    policy = NetworkPolicy(allow=("api.test",))

    async def use() -> None:
        settings = config.Config(data_dir=bare_dir, backend="plain-unsafe", pool=config.PoolConfig(ready=0))
        async with assemble_engine(config.for_embedded_use(settings), preload=False) as engine:
            with pytest.raises(errors.InvalidRequest, match="no walls"):
                await engine.create(SandboxSpec(network=policy))
            sandbox = await engine.create(SandboxSpec(network=NetworkPolicy()))
            with pytest.raises(errors.InvalidRequest, match="no walls"):
                await engine.networks.replace(sandbox, policy)
            assert not sandbox.network.is_open

    asyncio.run(use())


# --- a file that nobody named


WIDER = {
    "allow": '[network]\nallow = ["*"]\n',
    "default": '[network]\ndefault = ["*"]\n',
    "packages": "[packages]\nenabled = true\n",
    "names": '[packages]\nallow = ["*"]\n',
}
ELSEWHERE = {
    "network.internal": '[network]\ninternal = ["10.0.0.0/8"]\n',
    "network.hosts": '[network.hosts]\n"pypi.org" = "203.0.113.7"\n',
    "packages.pypi": '[packages]\npypi = ["https://evil.example/simple"]\n',
    "packages.npm": '[packages]\nnpm = "https://evil.example/"\n',
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", WIDER.values(), ids=WIDER)
def test_a_found_file_is_heard_by_serve_but_not_where_one_is_ones_own_operator(here: Path, text: str):
    (here / "cloche.toml").write_text(text)
    found = config.load_config(environ={})
    with pytest.raises(errors.InvalidConfig, match=r"merely lies.*--config \./cloche\.toml"):
        config.for_embedded_use(found)
    config.for_embedded_use(config.load_config("./cloche.toml", environ={}))


def test_a_found_file_can_deny_and_limit(here: Path):
    (here / "cloche.toml").write_text(
        '[network]\ndeny = ["x.test"]\nconnections = 3\n[packages]\ndeny = ["left-pad"]\nfile_bytes = "1MiB"\n'
    )
    own = config.for_embedded_use(config.load_config(environ={}))
    assert (own.network.allow, own.network.deny, own.network.connections) == (("*:*",), ("x.test",), 3)
    assert (own.packages.deny, own.packages.file_bytes) == (("left-pad",), 1 << 20)


@pytest.mark.parametrize(("key", "text"), ELSEWHERE.items(), ids=ELSEWHERE)
def test_a_found_file_cannot_say_where_names_and_packages_lead(here: Path, key: str, text: str):
    (here / "cloche.toml").write_text(text)
    with pytest.raises(errors.InvalidConfig, match=rf"merely lies.*{key}.*--config"):
        config.load_config(environ={})
    assert config.load_config("./cloche.toml", environ={}).origins[key] == "file cloche.toml"


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--alone", "-c", "1"),
        ("shell", "--alone"),
        ("chat", "--alone", "-c", "hello"),
    ],
    ids=lambda words: words[0],
)
def test_the_commands_refuse_such_a_file_and_take_it_by_its_name(here: Path, bare_dir: str, words):
    (here / "cloche.toml").write_text(WIDER["allow"])
    env = {**os.environ, "CLOCHE_DATA_DIR": bare_dir}
    how = {"env": env, "capture_output": True, "text": True, "timeout": 90, "stdin": subprocess.DEVNULL}
    refused = subprocess.run([CLOCHE, *words], **how)
    assert refused.returncode == 125 and "network.allow" in refused.stderr and "--config" in refused.stderr
    assert subprocess.run([CLOCHE, "--config", "./cloche.toml", *words], **how).returncode == 0


def test_the_library_refuses_such_a_file(here: Path, bare_dir: str):
    (here / "cloche.toml").write_text(WIDER["packages"])
    program = "import cloche\ntry: cloche.Sandbox()\nexcept cloche.errors.InvalidConfig as error: print(error)"
    env = {**os.environ, "CLOCHE_DATA_DIR": bare_dir}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=90)
    assert "packages.enabled" in done.stdout and "CLOCHE_CONFIG" in done.stdout, done.stderr
