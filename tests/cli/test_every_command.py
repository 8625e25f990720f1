"""Claims about all commands, which are taken from click's own tree: a new command is among them by itself."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from tests.conftest import REPOSITORY, serving

from cloche.cli import GLOBAL_OPTIONS, main

OURS = 125


def command_tree(
    command: click.Command = main, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if path:
        yield path, command
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            found = command.get_command(ctx, name)
            assert found is not None
            yield from command_tree(found, (*path, name))


TREE = dict(command_tree())


def cloche(*args: str) -> Result:
    return CliRunner().invoke(main, args)


# --- global options


@pytest.mark.parametrize("path", TREE, ids=" ".join)
def test_global_options_are_options_of_every_command(path: tuple[str, ...]):
    own = [param for param in TREE[path].params if param not in GLOBAL_OPTIONS]
    assert [param for param in GLOBAL_OPTIONS if TREE[path].params.count(param) != 1] == []
    assert not {opt for param in own for opt in param.opts} & {opt for param in GLOBAL_OPTIONS for opt in param.opts}
    assert not {param.name for param in own} & {param.name for param in GLOBAL_OPTIONS}


def test_global_options_work_after_the_command(tmp_path: Path):
    (tmp_path / "own.toml").write_text("[pool]\nready = 7\n")
    said = cloche("config", "--json", "--data-dir", str(tmp_path), "--config", str(tmp_path / "own.toml"))
    found = json.loads(said.stdout)
    assert found["data_dir"] == {"value": str(tmp_path), "origin": "flag --data-dir"}
    assert found["pool.ready"]["value"] == 7
    assert str(tmp_path) in cloche("key", "list", "--config", str(tmp_path / "none.toml")).stderr


def test_the_last_of_an_option_given_twice_counts():
    said = cloche("--data-dir", "/one", "--backend", "plain-unsafe", "config", "--data-dir", "/two", "--json")
    found = json.loads(said.stdout)
    assert found["data_dir"]["value"] == "/two" and found["backend"]["value"] == "plain-unsafe"
    for args in (
        ["--data-dir", "/one", "audit", "--data-dir", "/two", "verify"],
        ["audit", "verify", "--data-dir", "/two"],
    ):
        assert "there is no data directory /two" in cloche(*args).stderr


def test_a_server_says_where_its_data_is(bare_dir: str):
    with serving(bare_dir) as server:
        assert server.said == f"data directory {bare_dir} (environment variable CLOCHE_DATA_DIR)\n"


def test_make_serve_uses_the_data_directory_of_the_command():
    recipe = subprocess.run(["make", "-n", "serve"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert recipe.splitlines()[-1].strip() == "exec .venv/bin/cloche serve"
