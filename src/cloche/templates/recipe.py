"""The recipe of a template, a `template.toml`:

name = "geo"
python = "3.12"                 # or ">=3.11", ">=3.10,<3.13", "3.12.1"; see pythons.choose_interpreter: the
packages = ["shapely>=2"]       # newest that fits is not always taken
imports = ["shapely"]           # imported before the fork
[env]
TZ = "UTC"
[limits]
memory_bytes = 4294967296
[network]                       # the default network policy of its sandboxes
allow = ["*.example.com"]
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from cloche import errors
from cloche.model import Limits, Struct, check_environment
from cloche.network_policy import NetworkPolicy, NetworkRule

BUILT_IN_TEMPLATES = ("python",)
_NETWORK_KEYS = ("allow", "deny", "rules")

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
# A name, extras, version clauses and a marker, as in PEP 508. No URL (the lock must not depend on a host), no option.
_PACKAGE = re.compile(r"[A-Za-z0-9]([\w.-]*\w)?(\[[\w.,\s-]+\])?\s*(\(?[<>=!~][^;@#]*\)?)?(;[^@#]*)?", re.ASCII)
_PYTHON = re.compile(r"(==|>=|<=|<|>|!=)?\s*3(\.\d+){0,2}(\.\*)?")


class Recipe(Struct, forbid_unknown_fields=True):
    """A validated template.toml."""

    name: str
    python: str = ">=3.11"
    packages: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    env: dict[str, str] = {}
    limits: Limits = Limits()
    network: NetworkPolicy | None = None


def parse_recipe(text: str, origin: str = "template.toml") -> Recipe:
    """The recipe in `text`. Raises InvalidConfig that names `origin`, the key and the error."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise errors.InvalidConfig(f"{origin} is not TOML: {error}") from None
    _check_keys(origin, table)
    try:
        recipe = msgspec.convert(table, Recipe)
    except (msgspec.ValidationError, errors.InvalidRequest) as error:
        raise errors.InvalidConfig(f"{origin}: {error}") from None
    check_recipe(origin, recipe)
    return recipe


def read_recipe(path: Path) -> Recipe:
    """The recipe in that file. Raises InvalidConfig."""
    try:
        return parse_recipe(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise errors.InvalidConfig(f"cannot read {path}: {error}") from None


def built_in_recipe(name: str) -> Recipe:
    """The recipe of a built-in template. Raises TemplateNotFound."""
    if name not in BUILT_IN_TEMPLATES:
        raise errors.TemplateNotFound(
            f"there is no built-in template {name!r}: there is {', '.join(BUILT_IN_TEMPLATES)}"
        )
    return parse_recipe(
        resources.files("cloche.templates").joinpath(f"{name}.toml").read_text("utf-8"), f"built-in {name}.toml"
    )


def canonical_text(recipe: Recipe) -> str:
    """The same text for every way to write the same recipe. The version is a digest of it."""
    lines = [f"name = {_toml_string(recipe.name)}", f"python = {_toml_string(recipe.python)}"]
    lines += [f"packages = {_toml_strings(sorted(set(recipe.packages)))}", f"imports = {_toml_strings(recipe.imports)}"]
    lines += ["", "[env]", *(f"{_toml_string(key)} = {_toml_string(recipe.env[key])}" for key in sorted(recipe.env))]
    limits = msgspec.structs.asdict(recipe.limits)
    lines += ["", "[limits]", *(f"{key} = {value}" for key, value in limits.items())]
    if recipe.network is not None:  # a recipe without one keeps the version that it had before there were any
        lines += ["", "[network]", *_network_lines(recipe.network)]
    return "\n".join(lines) + "\n"


def _network_lines(policy: NetworkPolicy) -> Iterable[str]:
    for key, patterns in (("allow", policy.allow), ("deny", policy.deny)):
        yield f"{key} = {_toml_strings(sorted(set(patterns)))}"
    rules = (f"{{action = {_toml_string(each.action)}, host = {_toml_string(each.host)}}}" for each in policy.rules)
    yield f"rules = [{', '.join(rules)}]"


def _toml_string(value: str) -> str:
    # JSON strings are TOML basic strings, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_strings(values: Iterable[str]) -> str:
    return "[" + ", ".join(_toml_string(value) for value in values) + "]"


def _check_keys(origin: str, table: dict[str, Any]) -> None:
    _check_table(origin, "", table, Recipe.__struct_fields__)
    if isinstance(limits := table.get("limits"), dict):
        _check_table(origin, "limits.", limits, Limits.__struct_fields__)
    if isinstance(network := table.get("network"), dict):
        _check_network(origin, network)


def _check_network(origin: str, network: dict[str, Any]) -> None:
    if "secrets" in network:
        raise errors.InvalidConfig(f"{origin}: a template has no secrets: give them when a sandbox is made")
    _check_table(origin, "network.", network, _NETWORK_KEYS)
    for rule in network.get("rules", ()):
        if isinstance(rule, dict):
            _check_table(origin, "network.rules.", rule, NetworkRule.__struct_fields__)


def _check_table(origin: str, prefix: str, table: dict[str, Any], known: tuple[str, ...]) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.5)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(known)}"
            raise errors.InvalidConfig(f"{origin}: unknown key {prefix}{key}; {hint}")


def is_template_name(text: str) -> bool:
    """Whether a template can have that name."""
    return _NAME.fullmatch(text) is not None


def check_recipe(origin: str, recipe: Recipe) -> None:
    """Raises InvalidConfig that names `origin`, the key and the error."""
    if not is_template_name(recipe.name):
        raise errors.InvalidConfig(
            f"{origin}: name {recipe.name!r} must be lower-case letters, digits, '.', '_' or '-'"
        )
    for clause in recipe.python.split(","):
        if not _PYTHON.fullmatch(clause.strip()):
            raise errors.InvalidConfig(f'{origin}: python {recipe.python!r} must be like "3.12" or ">=3.11,<3.14"')
    for package in recipe.packages:
        if not _PACKAGE.fullmatch(package.strip()) or "\n" in package:
            advice = 'use a name and versions, like "shapely>=2"; URLs, paths and options are not possible'
            raise errors.InvalidConfig(f"{origin}: {package!r} is not a package requirement: {advice}")
    for module in recipe.imports:
        if not _MODULE.fullmatch(module):
            raise errors.InvalidConfig(f'{origin}: import {module!r} must be a module\'s name, like "numpy.linalg"')
    _check_env(origin, recipe.env)


def _check_env(origin: str, env: dict[str, str]) -> None:
    try:
        check_environment(env)
    except errors.InvalidRequest as error:
        raise errors.InvalidConfig(f"{origin}: {error}") from None
