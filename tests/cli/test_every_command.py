"""Claims about all commands, which are taken from click's own tree: a new command is among them by itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
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
    command = ["make", "--no-print-directory", "-n", "serve"]  # else a `make test` around it has it name its directory
    recipe = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert recipe.splitlines()[-1].strip() == "exec .venv/bin/cloche serve"


# --- help


def test_help_groups_the_commands_in_lines_of_a_terminal():
    said = cloche("--help").stdout
    groups = re.findall(r"^(\w[\w ]*):$", said, re.MULTILINE)
    assert groups == ["Options", "Run code", "Serve", "Sandboxes", "Tenants", "Host"]
    wrapped = [line for line in said.partition("Run code:")[2].splitlines() if line.startswith("   ") or len(line) > 80]
    assert wrapped == []


# --- a data directory that cannot be used

# Runs in a process of its own, so that a fork per command is cheap and safe, and so that it can give up rights of root.
WALK = """
import json, os, signal, sys, tempfile
from cloche.cli import COMMANDS, main
from cloche.linux.capabilities import DAC_OVERRIDE, DAC_READ_SEARCH, capability_mask
from cloche.linux.mounts import MS_PRIVATE, MS_REC
from cloche.linux.syscalls import drop_bounding, last_capability, mount, set_capabilities, unshare

kind, place, calls = json.loads(sys.argv[1])
if kind == "full":
    unshare(0x00020000)
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("none", place, "tmpfs", 0, "size=64k")
    with open(f"{place}/ballast", "wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(4096))
        except OSError:
            pass
elif os.geteuid() == 0:  # modes of files hold for root, too
    held = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("CapPrm:"))
    keep = int(held, 16) & ~capability_mask(DAC_OVERRIDE, DAC_READ_SEARCH)
    drop_bounding(keep, last_capability())
    set_capabilities(keep)
for name in COMMANDS:
    main.get_command(None, name)
for args in calls:
    said = [tempfile.TemporaryFile() for _ in range(2)]
    child = os.fork()
    if not child:
        signal.alarm(60)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for fd, file in enumerate(said, 1):
            os.dup2(file.fileno(), fd)
        main([*args, "--data-dir", place])
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([args, status, *(os.pread(file.fileno(), 1 << 20, 0).decode() for file in said)]))
"""

VALUES = {
    "serve": ["--port", "0"],
    "chat": ["--message", "hi"],
    "bench": ["--quick", "--no-peer"],
    "completion": ["bash"],
    "doctor": ["--deep"],
    "kernel install": ["--prefix", "."],
    "kernel remove": ["--prefix", "word"],
    "quota set": ["alice", "--sandboxes", "1"],
    "quota reset": ["alice"],
    "owner erase": ["alice", "--yes"],
    "snapshot": ["save"],
    "template build": ["python"],
}
"""Arguments where a word for each required one does not do."""


def call_of(path: tuple[str, ...], file: Path) -> list[str]:
    required = [param for param in TREE[path].params if isinstance(param, click.Argument) and param.required]
    words = [str(file) if isinstance(param.type, click.Path) and param.type.exists else "word" for param in required]
    return [*path, *VALUES.get(" ".join(path), words)]


def is_run(command: click.Command) -> bool:
    return not isinstance(command, click.Group) or command.invoke_without_command


@pytest.mark.parametrize(
    "kind",
    [
        "not made",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("not read", "not written", "full", "a file")),
    ],
)
def test_an_unusable_data_directory_is_one_line_with_a_remedy(kind: str, tmp_path: Path):
    if kind == "full" and os.geteuid() != 0:
        pytest.skip("to mount a small file system takes root")
    place = tmp_path / "data"
    place.mkdir()
    (tmp_path / "file").write_bytes(b"x")
    if kind == "not written":
        assert cloche("key", "add", "--data-dir", str(place)).exit_code == 0
    place.chmod({"not read": 0o000, "not written": 0o555}.get(kind, 0o755))
    if kind == "not made":
        place = Path("/proc/x")
    if kind == "a file":
        place = tmp_path / "file"
    calls = [call_of(path, tmp_path / "file") for path, command in TREE.items() if is_run(command)]
    walk = subprocess.run(
        [sys.executable, "-c", WALK, json.dumps([kind, str(place), calls])],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    (tmp_path / "data").chmod(0o755)
    found = [json.loads(line) for line in walk.stdout.splitlines()]
    assert len(found) == len(calls)
    wrong = [each for each in found if not tells_the_remedy(str(place), *each)]
    if kind == "not read":  # nothing is known of a template that a command names
        wrong += [each for each in found if each[1] and "'word'" in each[3]]
    for each in wrong:
        print(*each, sep="\n")
    assert [args for args, *_ in wrong] == []


def tells_the_remedy(place: str, args: list[str], status: int, stdout: str, stderr: str) -> bool:
    """Whether a command did its work, or else ended with one line of ours that names the directory and a remedy."""
    *before, last = [line for line in stderr.splitlines() if not line.startswith("building python: ")] or [""]
    if before:
        return False
    if args[0] == "doctor":  # its report is the answer
        return status == 1 and place in stdout and "-> " in stdout and not last
    if status == 0:
        return "cloche: " not in last
    told = place in last and ("--data-dir" in last or "`cloche serve` starts one" in last)
    return status == OURS and last.startswith("cloche: ") and (told or "'word'" in last or args[-1] in last)
