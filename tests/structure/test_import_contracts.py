"""No module of the package escapes the import contracts of pyproject.toml. `make check` checks the contracts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "src/cloche"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
CONTRACTS: list[dict[str, Any]] = PROJECT["tool"]["importlinter"]["contracts"]
IMPORT_NAMES = {"pyjwt": "jwt"}  # of packages whose module has another name


def contract(start: str) -> dict[str, Any]:
    return next(each for each in CONTRACTS if each["name"].startswith(start))


def module_names(package: Path) -> set[str]:
    files = {path.stem for path in package.glob("*.py")} - {"__init__"}
    return files | {path.parent.name for path in package.glob("*/__init__.py")}


def in_layers(layers: list[str]) -> set[str]:
    return {name.strip("() ") for layer in layers for name in re.split(r"[|:]", layer)}


@pytest.mark.parametrize(
    "found", [each for each in CONTRACTS if each["type"] == "layers"], ids=lambda each: each["name"]
)
def test_every_module_is_in_a_layer(found: dict[str, Any]):
    (container,) = found["containers"]
    assert found["exhaustive"]
    assert in_layers(found["layers"]) == module_names(REPOSITORY / "src" / container.replace(".", "/"))


def test_every_module_of_the_host_knows_the_guest_by_its_wire_only():
    assert set(contract("The host knows")["source_modules"]) == {
        f"cloche.{name}" for name in module_names(PACKAGE) - {"guest"}
    }


def test_guest_code_imports_none_of_our_dependencies():
    names = [re.split(r"[\[<>=]", each)[0] for each in PROJECT["project"]["dependencies"]]
    modules = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}
    assert set(contract("Code that runs inside")["forbidden_modules"]) == modules


def test_every_part_of_the_library_is_of_the_client_or_of_the_engine():
    """So that a new part of the library is not left out of the contract by mistake."""
    engine = {"cloche.sdk.assembly", "cloche.sdk.embedded", "cloche.sdk.local"}
    client = set(contract("A client of a server")["source_modules"]) - {"cloche.protocol"}
    assert client | engine == {f"cloche.sdk.{name}" for name in module_names(PACKAGE / "sdk")}
