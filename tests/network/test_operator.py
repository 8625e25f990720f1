"""Whoever runs the host has the last word: on what clients may ask for, what templates may say, and by which file."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import RunningServer, serving
from tests.network.neighbour import Neighbour, living_next_door

import cloche
from cloche import config, errors
from cloche.model import SandboxSpec, Template
from cloche.network_policy import NetworkPolicy
from cloche.sdk.assembly import assemble

CLOCHE = str(Path(sys.executable).with_name("cloche"))


@pytest.fixture(scope="module")
def there() -> Iterator[Neighbour]:
    with living_next_door() as neighbour:
        yield neighbour


@pytest.fixture(scope="module")
def bounded(data_dir: str, template: Template, there: Neighbour) -> Iterator[dict[str, str]]:
    """A server that allows the names below api.test, and gives one of them to those who ask for nothing."""
    allow, default = (there.at("*.api.test"), there.at("api.test")), (there.at("www.api.test"),)
    with serving(data_dir, env=there.variables(*allow, default=default)) as running:
        yield {"url": running.url, "api_key": running.key}


def test_a_server_allows_nothing_unless_its_operator_does(server: RunningServer):
    to = {"url": server.url, "api_key": server.key}
    with pytest.raises(errors.InvalidRequest, match=r"operator.*network\.allow"):
        cloche.Sandbox(network={"allow": ["pypi.org"]}, **to)
    with cloche.Sandbox(network={"deny": ["*"]}, **to) as box:
        with pytest.raises(errors.InvalidRequest, match=r"network\.allow"):
            box.network.set({"allow": ["*"]})
        assert box.network.policy == NetworkPolicy(deny=("*",))


def test_what_is_outside_of_the_bound_is_refused_by_its_name(bounded: dict[str, str]):
    with pytest.raises(errors.InvalidRequest, match=r"other\.test.*network\.allow"):
        cloche.Sandbox(network={"allow": ["api.test", "other.test"]}, **bounded)
    with cloche.Sandbox(network={}, **bounded) as box, pytest.raises(errors.InvalidRequest, match=r"192\.0\.2\.1"):
        box.network.set({"allow": ["192.0.2.1"]})


def test_what_is_wider_than_the_bound_is_cut_to_it(bounded: dict[str, str], there: Neighbour):
    with cloche.Sandbox(network={"allow": ["*:*"]}, **bounded) as box:
        assert box.run(there.fetch("api.test") + there.fetch("other.test")).stdout == "hellorefused"
        (*_, denied) = box.network.log()
        assert (denied.verdict, denied.host) == ("denied", "other.test")


def test_who_asks_for_nothing_gets_the_default_and_who_wants_nothing_gets_nothing(
    bounded: dict[str, str], there: Neighbour
):
    with cloche.Sandbox(**bounded) as box:
        assert box.run(there.fetch("www.api.test") + there.fetch("api.test")).stdout == "hellorefused"
    with cloche.Sandbox(network=False, **bounded) as box:
        assert box.run(there.fetch("www.api.test")).stdout == "refused"


def test_in_ones_own_process_the_bound_is_what_one_set(data_dir: str):
    assert config.for_oneself(config.Config(data_dir=data_dir)).network.allow == ("*:*",)
    own = config.load(environ={"CLOCHE_DATA_DIR": data_dir, "CLOCHE_NETWORK_ALLOW": "api.test"})
    assert config.for_oneself(own).network.allow == ("api.test",)


# --- without walls there is nothing to open a door in


def test_plain_unsafe_takes_no_policy_that_allows_something(data_dir: str, template: Template):
    policy = NetworkPolicy(allow=("api.test",))

    async def use() -> None:
        settings = config.Config(data_dir=data_dir, backend="plain-unsafe", pool=config.Pool(ready=0))
        async with assemble(config.for_oneself(settings), preload=False) as engine:
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
    "deny": '[network]\ndeny = ["x.test"]\n',
    "default": '[network]\ndefault = ["*"]\n',
    "packages": "[packages]\nenabled = true\n",
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
    found = config.load(environ={})
    with pytest.raises(errors.InvalidConfig, match=r"merely lies.*--config \./cloche\.toml"):
        config.for_oneself(found)
    config.for_oneself(config.load("./cloche.toml", environ={}))


@pytest.mark.parametrize(("key", "text"), ELSEWHERE.items(), ids=ELSEWHERE)
def test_a_found_file_cannot_say_where_names_and_packages_lead(here: Path, key: str, text: str):
    (here / "cloche.toml").write_text(text)
    with pytest.raises(errors.InvalidConfig, match=rf"merely lies.*{key}.*--config"):
        config.load(environ={})
    assert config.load("./cloche.toml", environ={}).origins[key] == "file cloche.toml"


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--alone", "-c", "1"),
        ("shell", "--alone"),
        ("chat", "--alone", "-c", "hello"),
    ],
    ids=lambda words: words[0],
)
def test_the_commands_refuse_such_a_file_and_take_it_by_its_name(here: Path, data_dir: str, template, words):
    (here / "cloche.toml").write_text(WIDER["allow"])
    env = {**os.environ, "CLOCHE_DATA_DIR": data_dir}
    how = {"env": env, "capture_output": True, "text": True, "timeout": 90, "stdin": subprocess.DEVNULL}
    refused = subprocess.run([CLOCHE, *words], **how)
    assert refused.returncode == 125 and "network.allow" in refused.stderr and "--config" in refused.stderr
    assert subprocess.run([CLOCHE, "--config", "./cloche.toml", *words], **how).returncode == 0


def test_the_library_refuses_such_a_file(here: Path, data_dir: str, template):
    (here / "cloche.toml").write_text(WIDER["packages"])
    program = "import cloche\ntry: cloche.Sandbox()\nexcept cloche.errors.InvalidConfig as error: print(error)"
    env = {**os.environ, "CLOCHE_DATA_DIR": data_dir}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=90)
    assert "packages.enabled" in done.stdout and "CLOCHE_CONFIG" in done.stdout, done.stderr
