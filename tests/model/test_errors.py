"""The outline of errors in the docstring of `cloche.errors` is the tree of classes."""

from __future__ import annotations

import inspect
import re
from typing import NamedTuple

from cloche import errors

BRANCH = re.compile(r"^ {4}((?:│   |    )*)(├── |└── )?(\w+) +(\w+)", re.MULTILINE)


class Outlined(NamedTuple):
    depth: int
    name: str
    code: str


def outline() -> list[Outlined]:
    """The lines of the outline. The first one, of the base, has the heading of the codes where its code would be."""
    _, *found = BRANCH.findall(errors.__doc__ or "")
    return [Outlined(len(indent) // 4 + 1, name, code) for indent, _, name, code in found]


def tree(base: type[errors.ClocheError], depth: int = 1) -> list[Outlined]:
    """The classes below `base`, in the order of the file, each followed by those below it."""
    ours = [each for each in vars(errors).values() if inspect.isclass(each) and base in each.__bases__]
    return [line for each in ours for line in (Outlined(depth, each.__name__, each.code), *tree(each, depth + 1))]


def test_every_error_is_in_the_outline_at_its_place():
    assert outline() == tree(errors.ClocheError)


def test_every_error_has_a_code_of_its_own():
    codes = [line.code for line in tree(errors.ClocheError)]
    assert len(codes) == len(set(codes))
