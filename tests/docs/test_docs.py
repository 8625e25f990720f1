"""The docs are true: what they name exists, what they list is complete, and their examples run."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

import cloche
from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.native import NativeApi
from cloche.bench.rows import PACKAGE_ROWS, ROWS, SERVER_ROWS
from cloche.cli import COMMANDS, GLOBAL_OPTIONS, main
from cloche.config import CONFIG_KEYS, Config, load_config, parse_bytes
from cloche.model import Limits, Principal, Template
from cloche.templates import recipe

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "src/cloche"
PAGES = [REPOSITORY / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((REPOSITORY / "docs").rglob("*.md"))
SPECIFICATION = REPOSITORY / "docs/SPECIFICATION.md"
LIBRARY = REPOSITORY / "docs/library.md"
CLI = REPOSITORY / "docs/cli.md"
NATIVE = REPOSITORY / "docs/dialects/native.md"
NETWORK = REPOSITORY / "docs/network.md"
ARCHITECTURE = REPOSITORY / "docs/architecture.md"
CODE_PAGES = [REPOSITORY / "CONTRIBUTING.md", ARCHITECTURE, *sorted((REPOSITORY / "docs/design").glob("*.md"))]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def text_of(page: Path) -> str:
    return page.read_text("utf-8")


def page_id(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def test_the_design_lists_every_module_of_the_proxy():
    listed = set(re.findall(r"[a-z0-9_/]+\.py", text_of(REPOSITORY / "docs/design/network.md")))
    assert {f"egress/{path.name}" for path in (PACKAGE / "egress").glob("*.py")} <= listed


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)


def rows(page: Path) -> Iterator[list[str]]:
    """The cells of every row of every table."""
    for line in text_of(page).splitlines():
        if line.startswith("| "):
            yield [cell.strip() for cell in line.strip("| ").split(" | ")]


def section(page: Path, title: str) -> str:
    return re.split(r"^## ", text_of(page).partition(f"\n## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def anchors_of(page: Path) -> set[str]:
    """The headings of a page as GitHub makes anchors of them."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def exists_exactly(path: str) -> bool:
    return (REPOSITORY / path).exists() or (PACKAGE / path).exists()


def names_of(file: Path) -> set[str]:
    """The functions of a module, and `Class.method` for methods."""
    tree = ast.parse(file.read_text("utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    methods = {f"{each.name}.{node.name}" for each in classes for node in each.body if isinstance(node, FUNCTIONS)}
    return methods | {node.name for node in tree.body if isinstance(node, FUNCTIONS)}


@functools.cache
def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, FUNCTIONS)}


# --- what is named exists


def test_no_page_or_message_installs_the_project_of_another_owner():
    """The project `cloche` of PyPI is not this one."""
    texts = [*PAGES, *PACKAGE.rglob("*.py")]
    named = re.compile(r"""(?:pip3? install|uv add|uvx|uv tool (?:install|run))(?: -\S+)* ["']?cloche\b""")
    assert [page_id(page) for page in texts if named.search(text_of(page))] == []


def test_every_test_named_in_the_specification_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text_of(SPECIFICATION))
    assert len(named) > 50
    assert [f"{file}::{name}" for file, name in named if name not in functions_of(REPOSITORY / file)] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_path_named_exists(page: Path):
    """Whole paths of the repository, or of the package, in prose and in listings.

    A path that begins with a slash is in a sandbox or on a host; links have a test of their own.
    """
    text = re.sub(r"\]\([^)]*\)", "]", text_of(page))
    files = re.findall(r"(?<![\w./~*{}$<>:-])((?:[\w.-]+/)+[\w.-]+\.(?:py|toml|md|js|css))(?![\w/])", text)
    directories = re.findall(r"`((?:[a-z][\w-]*/)+)`", text)
    named = [path for path in (*files, *directories) if not path.startswith("./")]
    assert [path for path in named if not exists_exactly(path)] == []


@pytest.mark.parametrize("page", CODE_PAGES, ids=page_id)
def test_a_module_is_named_by_its_whole_path(page: Path):
    """On pages about the code, `pool.py` would be a module beside `errors.py`: that of the engine has directories."""
    names = re.findall(r"(?<![\w./*-])([\w-]+\.py)(?![\w/])", text_of(page))
    assert [name for name in names if not exists_exactly(name)] == []


def test_the_layers_of_the_contributing_page_are_those_of_the_contract():
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    (layers,) = [each["layers"] for each in contracts if each["name"] == "Imports point down only"]
    shown = section(REPOSITORY / "CONTRIBUTING.md", "Layout").partition("Imports point down only:\n\n")[2]
    assert [layer.strip() for layer in shown.partition("\n\n")[0].split("→")] == layers


def test_every_function_of_the_walks_exists():
    walks = [row for row in rows(ARCHITECTURE) if len(row) == 3 and re.match(r"`[\w/]+\.py`", row[1])]
    assert len(walks) > 20
    for _, modules, functions in walks:
        known = {name for module in re.findall(r"`([\w/]+\.py)`", modules) for name in names_of(PACKAGE / module)}
        assert set(re.findall(r"`([\w.]+)`", functions)) <= known


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_leads_somewhere(page: Path):
    targets = re.findall(r"\]\(([^)#]+)", text_of(page))
    assert [each for each in targets if "://" not in each and not (page.parent / each).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_anchor_is_a_heading(page: Path):
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text_of(page))
    ours = [((page.parent / file) if file else page, anchor) for file, anchor in links if "://" not in file]
    assert [f"{file}#{anchor}" for file, anchor in ours if anchor not in anchors_of(file)] == []


# --- what is listed is complete


def test_every_error_is_listed_with_its_code():
    listed = {row[0].strip("`"): row[1].strip("`") for row in rows(LIBRARY) if len(row) > 1}
    found = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.ClocheError)]
    codes = {each.__name__: each.code for each in found if each is not errors.ClocheError}
    assert {name: listed.get(name) for name in codes} == codes


def test_the_default_limits_are_the_documented_ones():
    listed = {row[0].strip("`"): row[1] for row in rows(LIBRARY) if row[0].strip("`") in Limits.__struct_fields__}
    assert {name: parse_bytes(value) for name, value in listed.items()} == {
        name: getattr(Limits(), name) for name in Limits.__struct_fields__
    }


@pytest.mark.parametrize(
    "kind", [cloche.Run, cloche.Result, cloche.Limits, cloche.Usage], ids=lambda kind: kind.__name__
)
def test_every_field_of_a_run_is_documented(kind: type):
    words = set(re.findall(r"`(\w+)", text_of(LIBRARY)))
    assert [name for name in kind.__struct_fields__ if name not in words] == []


def test_help_lists_the_commands_that_are_documented_and_no_other():
    documented = re.findall(r"^## cloche (\w+)$", text_of(CLI), re.MULTILINE)
    said = subprocess.run([cloche_command(), "--help"], capture_output=True, text=True, check=True).stdout
    listed = re.findall(r"^  ([a-z]+) ", said, re.MULTILINE)
    assert sorted(documented) == sorted(listed) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_documented(name: str):
    command = main.get_command(click.Context(main), name)
    assert command is not None
    subcommands = command.commands.values() if isinstance(command, click.Group) else ()
    params = [param for each in (command, *subcommands) for param in each.params if param not in GLOBAL_OPTIONS]
    options = {opt for param in params for opt in param.opts}
    described = section(CLI, f"cloche {name}")
    assert [option for option in options if option.startswith("-") and option not in described] == []


def test_every_global_option_is_documented():
    described = text_of(CLI).partition("\n## ")[0]
    assert [opt for param in GLOBAL_OPTIONS for opt in param.opts if f"`{opt}" not in described] == []


def test_every_key_of_the_configuration_is_documented():
    patterns = [row[0].strip("`") for row in rows(CLI)]
    known = [key for key in CONFIG_KEYS if key in patterns or f"{key.rpartition('.')[0]}.*" in patterns]
    assert known == list(CONFIG_KEYS)


def test_every_limit_of_networks_is_documented_with_its_default():
    listed = {row[0].strip("`"): row[1] for row in rows(NETWORK) if len(row) == 3 and row[0].startswith("`")}
    defaults = Config(data_dir="/nowhere")
    known = {
        f"{part}.{name}": value
        for part, values in (("network", defaults.network), ("packages", defaults.packages))
        for name, value in msgspec.structs.asdict(values).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    assert {key: parse_bytes(listed[key]) if key in listed else None for key in known} == known


def test_the_settings_of_networks_in_the_docs_can_be_loaded(tmp_path: Path):
    examples = blocks(NETWORK, "toml")
    assert len(examples) >= 2
    for example in examples:
        (tmp_path / "cloche.toml").write_text(example)
        assert load_config(tmp_path / "cloche.toml", {}).network.allow


def test_the_bars_of_the_benchmark_are_those_of_the_specification():
    bars = re.findall(r"^\| `(\w+)` \|.*\| ([≥≤]) ([\d.]+)× \|$", text_of(SPECIFICATION), re.MULTILINE)
    known = (*ROWS.values(), *SERVER_ROWS.values(), *PACKAGE_ROWS.values())
    wanted = {(row.key, "≤" if row.limit else "≥", row.bar) for row in known if row.bar is not None}
    assert {(key, sign, float(bar)) for key, sign, bar in bars} == wanted


def test_every_path_of_our_own_protocol_is_documented():
    """By its last word: the page writes paths in short."""
    app = NativeApi(None, Gatekeeper(None, Principal(owner="x")), Config(data_dir="/nowhere"))  # type: ignore[arg-type]
    words = {[part for part in route.path.split("/") if "{" not in part][-1] for route in app.routes}  # type: ignore[attr-defined]
    assert [word for word in sorted(words) if f"/{word}" not in text_of(NATIVE)] == []


# --- examples work


def cloche_command() -> str:
    return str(Path(sys.executable).parent / "cloche")


def examples() -> list[tuple[Path, int]]:
    return [
        (page, number)
        for page in (REPOSITORY / "README.md", LIBRARY, REPOSITORY / "docs/state.md")
        for number in range(len(blocks(page, "python")))
    ]


@pytest.mark.parametrize(("page", "number"), examples(), ids=lambda value: getattr(value, "name", value))
def test_a_python_example_runs(library: str, page: Path, number: int):
    with cloche.Sandbox() as box:
        names = {"box": box}
        exec(compile(blocks(page, "python")[number], f"{page.name}[{number}]", "exec"), names)
    assert names["box"] is not None, "an example may use the sandbox, and not take it away"


def test_the_first_command_of_the_readme_prints_42(template: Template, data_dir: str):
    line = next(
        line for block in blocks(REPOSITORY / "README.md", "sh") for line in block.splitlines() if "6*7" in line
    )
    program, *arguments = shlex.split(line)
    assert program == ".venv/bin/cloche"
    ran = subprocess.run([cloche_command(), "--data-dir", data_dir, *arguments], capture_output=True, text=True)
    if "isolation" in ran.stderr:
        pytest.skip(ran.stderr)
    assert (ran.stdout, ran.returncode) == ("42\n", 0)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_command_shown_exists(page: Path):
    lines = [line.partition("#")[0] for block in blocks(page, "sh") for line in block.splitlines()]
    shown = [match[1] for line in lines for match in re.finditer(r"(?:^|[/| ])cloche (\w+)", line)]
    targets = [match[1] for line in lines if (match := re.match(r"make ([\w-]+)", line))]
    makefile = (REPOSITORY / "Makefile").read_text("utf-8")
    assert [name for name in shown if name not in COMMANDS] == []
    assert [name for name in targets if f"\n{name}:" not in makefile] == []


def test_the_template_of_the_docs_is_a_recipe():
    (example,) = blocks(REPOSITORY / "docs/templates.md", "toml")
    assert recipe.parse_recipe(example).name == "geo"


def test_every_key_of_a_template_is_documented():
    words = {row[0].strip("`[]") for row in rows(REPOSITORY / "docs/templates.md")}
    assert [key for key in recipe.Recipe.__struct_fields__ if key not in words] == []


def test_the_configuration_of_the_docs_can_be_loaded(tmp_path: Path):
    (example,) = blocks(CLI, "toml")
    (tmp_path / "cloche.toml").write_text(example)
    assert load_config(tmp_path / "cloche.toml", {}).pool.ready == 8
