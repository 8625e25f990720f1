"""What is different between two versions of templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cloche import errors
from cloche.model import Struct, Template
from cloche.templates import recipe as recipes

_OF_A_RECIPE = ("name", "python", "packages", "imports", "env", "limits", "network")


class Change(Struct):
    """One thing that both have, and in which they differ. What one of them does not have is None."""

    what: str  # a package's name, or a key of template.toml
    before: Any
    after: Any


class Difference(Struct):
    before: str  # NAME@VERSION
    after: str
    python: Change | None  # the interpreter's version
    packages_added: tuple[str, ...]  # "six==1.17.0"
    packages_removed: tuple[str, ...]
    packages_changed: tuple[Change, ...]
    recipe: tuple[Change, ...]
    before_bytes: int
    after_bytes: int

    @property
    def same(self) -> bool:
        """Whether sandboxes of both are alike."""
        return not (self.python or self.packages_added or self.packages_removed or self.packages_changed or self.recipe)


def difference(before: Template, after: Template) -> Difference:
    """How `after` differs from `before`. Raises InvalidConfig where a recipe on disk cannot be read."""
    old, new = _pins(before), _pins(after)
    python = Change(what="python", before=before.python_version, after=after.python_version)
    return Difference(
        before=before.ref,
        after=after.ref,
        python=python if python.before != python.after else None,
        packages_added=tuple(f"{name}=={new[name]}" for name in sorted(new.keys() - old.keys())),
        packages_removed=tuple(f"{name}=={old[name]}" for name in sorted(old.keys() - new.keys())),
        packages_changed=tuple(_changes(old, new, sorted(old.keys() & new.keys()))),
        recipe=tuple(_changes(_recipe(before), _recipe(after), _OF_A_RECIPE)),
        before_bytes=before.size_bytes,
        after_bytes=after.size_bytes,
    )


def _pins(template: Template) -> dict[str, str]:
    pairs = (package.partition("==") for package in template.packages)
    return {name: version for name, _, version in pairs}


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], names: Any) -> Iterator[Change]:
    for name in names:
        if old.get(name) != new.get(name):
            yield Change(what=name, before=old.get(name), after=new.get(name))


def _recipe(template: Template) -> dict[str, Any]:
    file = Path(template.root, "template.toml")
    if not file.exists():
        raise errors.InvalidConfig(f"{template.ref} has no template.toml: build or import it again")
    return {key: msgspec.to_builtins(value) for key, value in msgspec.structs.asdict(recipes.read(file)).items()}
