"""The differences between two versions of templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cloche import errors
from cloche.model import Struct, Template
from cloche.templates import recipe as recipes

_RECIPE_FIELDS = ("name", "python", "packages", "imports", "env", "limits", "network")


class TemplateChange(Struct):
    """One difference between both. A value that one of them does not have is None."""

    what: str  # a package's name, or a key of template.toml
    before: Any
    after: Any


class Difference(Struct):
    before: str  # NAME@VERSION
    after: str
    python: TemplateChange | None  # the interpreter's version
    packages_added: tuple[str, ...]  # "six==1.17.0"
    packages_removed: tuple[str, ...]
    packages_changed: tuple[TemplateChange, ...]
    recipe: tuple[TemplateChange, ...]
    before_bytes: int
    after_bytes: int

    @property
    def same(self) -> bool:
        """Whether sandboxes of both are alike."""
        return not (self.python or self.packages_added or self.packages_removed or self.packages_changed or self.recipe)


def compare_templates(before: Template, after: Template) -> Difference:
    """How `after` differs from `before`. Raises InvalidConfig where a recipe on disk cannot be read."""
    old, new = _package_versions(before), _package_versions(after)
    python = TemplateChange(what="python", before=before.python_version, after=after.python_version)
    return Difference(
        before=before.ref,
        after=after.ref,
        python=python if python.before != python.after else None,
        packages_added=tuple(f"{name}=={new[name]}" for name in sorted(new.keys() - old.keys())),
        packages_removed=tuple(f"{name}=={old[name]}" for name in sorted(old.keys() - new.keys())),
        packages_changed=tuple(_find_changes(old, new, sorted(old.keys() & new.keys()))),
        recipe=tuple(_find_changes(_recipe_fields(before), _recipe_fields(after), _RECIPE_FIELDS)),
        before_bytes=before.size_bytes,
        after_bytes=after.size_bytes,
    )


def _package_versions(template: Template) -> dict[str, str]:
    pairs = (package.partition("==") for package in template.packages)
    return {name: version for name, _, version in pairs}


def _find_changes(old: Mapping[str, Any], new: Mapping[str, Any], names: Any) -> Iterator[TemplateChange]:
    for name in names:
        if old.get(name) != new.get(name):
            yield TemplateChange(what=name, before=old.get(name), after=new.get(name))


def _recipe_fields(template: Template) -> dict[str, Any]:
    file = Path(template.root, "template.toml")
    if not file.exists():
        raise errors.InvalidConfig(f"{template.ref} has no template.toml: build or import it again")
    return {key: msgspec.to_builtins(value) for key, value in msgspec.structs.asdict(recipes.read_recipe(file)).items()}
